"""Cubins that are damaged, or made to cost much: all of them are a CubinError, or are read."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from aot import cubin
from runtime.archive import Archive

NUMBERS = [0, 1, 8, 255, 1 << 16, 1 << 31, (1 << 32) - 1]


@pytest.fixture
def real(archive: Path) -> bytes:
    """A cubin of the builder's."""
    with Archive.open(archive) as opened:
        return opened.cubin(next(iter(opened.functions)))


def damaged(rng: random.Random, data: bytes) -> bytes:
    """Some bytes changed, some fields of the header or of section headers, or the end cut off."""
    out = bytearray(data)
    headers = struct.unpack_from("<Q", data, 0x28)[0]
    for _ in range(rng.choice([1, 1, 2, 5, 30])):
        how = rng.randrange(8)
        if how < 3:
            out[rng.randrange(len(out))] = rng.randrange(256)
        elif how < 5:
            at = min(headers + 4 * rng.randrange(16 * 25), len(out) - 4)
            struct.pack_into("<I", out, at, rng.choice(NUMBERS))
        elif how < 7:
            out[rng.randrange(0x40)] = rng.choice([0, 1, 64, 128, 255])
        elif rng.random() < 0.2:
            del out[rng.randrange(0x40, len(out) + 1) :]
            headers = 0
        if len(out) < 0x40 + 4:
            break
    return bytes(out)


def test_damaged_cubin_is_a_cubin_error_or_is_read(real: bytes) -> None:
    rng, read = random.Random(0), 0
    for _ in range(3000):
        try:
            cubin.kernels(damaged(rng, real))
            read += 1
        except cubin.CubinError:
            continue
    assert 500 < read < 2800


def test_section_headers_beyond_what_an_offset_can_be_are_a_cubin_error(real: bytes) -> None:
    out = bytearray(real)
    struct.pack_into("<Q", out, 0x28, (1 << 64) - 1)
    with pytest.raises(cubin.CubinError, match="not a cubin that can be read"):
        cubin.kernels(bytes(out))


def test_more_symbols_than_a_kernel_has_are_a_cubin_error() -> None:
    names = b"\0.symtab\0"
    symbols = bytes(24 * (cubin._MAX_SYMBOLS + 1))
    sections = [(0, 3, 64, len(names), 0), (1, 2, 64 + len(names), len(symbols), 0)]
    header = bytearray(b"\x7fELF\x02\x01" + bytes(58))
    struct.pack_into("<Q", header, 0x28, 64 + len(names) + len(symbols))
    struct.pack_into("<HHH", header, 0x3A, 64, len(sections), 0)
    rows = [
        struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, at, size, link, 0, 1, 0) for name, kind, at, size, link in sections
    ]
    with pytest.raises(cubin.CubinError, match="it has 65537 symbols, the limit is 65536"):
        cubin.kernels(bytes(header) + names + symbols + b"".join(rows))
