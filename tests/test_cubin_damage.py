"""Cubins that are damaged, or made to cost much: all of them are a CubinError, or are read."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from aot.compile import cubin
from runtime.container.archive import Archive

from .made_up_kernel import PROGBITS, STRTAB, SYMTAB, Sections, cubin_of, elf
from .made_up_kernel import cubin as made_up
from .mutant_cubins import damaged, sections_of

PADDING = bytes(64)  # an attribute of no payload, sixteen times
FUNCTION = struct.pack("<IBBHQQ", 1, 2, 0, 0, 0, 0)  # the symbol whose name is the first of the strings


@pytest.fixture
def real(archive: Path) -> bytes:
    """A cubin of the builder's."""
    with Archive.open(archive) as opened:
        return opened.cubin(next(iter(opened.functions)))


def made(rows: bytes, attributes: bytes = b"", name: bytes = b"") -> bytes:
    """A cubin with a kernel of these attributes, whose symbol table has these rows; `name` is its second string."""
    sections: Sections = {
        "": (0, b"", 0),
        ".strtab": (STRTAB, b"\0rows\0" + name + b"\0", 0),
        ".symtab": (SYMTAB, bytes(24) + rows, 1),
        ".nv.info": (PROGBITS, struct.pack("<BBHII", 4, 0x2F, 8, 1, 32), 0),
        ".nv.info.rows": (PROGBITS, attributes, 0),
    }
    return elf(sections)


def read(monkeypatch: pytest.MonkeyPatch, data: bytes) -> tuple[int, str]:
    """How many bytes of a cubin are read, and the error that this ends with."""
    taken = []

    class Counting(cubin._Parts):
        def take(self, start: int, size: int) -> bytes:
            part = super().take(start, size)
            taken.append(size)
            return part

    monkeypatch.setattr(cubin, "_Parts", Counting)
    try:
        cubin.kernels(data)
    except cubin.CubinError as error:
        return sum(taken), str(error)
    return sum(taken), ""


@pytest.mark.parametrize("seed", range(3))
def test_damaged_cubin_is_a_cubin_error_or_is_read(real: bytes, seed: int) -> None:
    rng, fine = random.Random(seed), 0
    for data in [real, made_up()] * 500:
        try:
            cubin.kernels(damaged(rng, data))
            fine += 1
        except cubin.CubinError:
            continue
    assert 200 < fine < 800


def test_whole_cubin_takes_a_fraction_of_what_may_be_read(real: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, error = read(monkeypatch, real)
    assert not error
    assert 0 < taken < min(len(real), cubin._MAX_BYTES // 10)


def test_section_headers_beyond_what_an_offset_can_be_are_a_cubin_error(real: bytes) -> None:
    out = bytearray(real)
    struct.pack_into("<Q", out, 0x28, (1 << 64) - 1)
    with pytest.raises(cubin.CubinError, match="cut short"):
        cubin.kernels(bytes(out))


def test_two_functions_of_one_name_are_a_cubin_error() -> None:
    """Each would be read with the attributes of that name, however many of them there are."""
    assert list(cubin.kernels(made(FUNCTION, PADDING))) == ["rows"]
    with pytest.raises(cubin.CubinError, match="it has two functions rows"):
        cubin.kernels(made(FUNCTION * 2, PADDING))


def test_more_symbols_than_a_kernel_has_are_a_cubin_error() -> None:
    with pytest.raises(cubin.CubinError, match="take more than 2097152 bytes"):
        cubin.kernels(made(bytes(24) * 90_000))


def test_more_attributes_than_a_kernel_has_are_a_cubin_error() -> None:
    with pytest.raises(cubin.CubinError, match="take more than 2097152 bytes"):
        cubin.kernels(made(FUNCTION, PADDING * 40_000))


def test_sections_that_are_one_part_of_the_file_are_read_no_more_than_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten functions, whose attributes are the same bytes."""
    kernels = [cubin.CubinKernel(f"k{i}", 32, 0, 0, (8,) * 1000 if i == 0 else ()) for i in range(10)]
    data = bytearray(cubin_of(kernels))
    _, first, *others, _ = (s.at for s in sections_of(bytes(data)) if s.numbers[1] == PROGBITS)
    for at in others:
        data[at + 24 : at + 40] = data[first + 24 : first + 40]
    taken, error = read(monkeypatch, bytes(data))
    assert error == f"its headers, symbols, names and attributes take more than {2 * len(data)} bytes"
    assert taken <= 2 * len(data)


@pytest.mark.parametrize("length", [200, 255, 256, 300, 100_000])
def test_names_of_no_more_than_twice_a_cubins_bytes_are_read(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows may share a name; one that takes more than is left is not read at all."""
    data = made(struct.pack("<IBBHQQ", 6, 0, 0, 0, 0, 0) * 20, name=b"x" * length)
    taken, error = read(monkeypatch, data)
    assert error == f"its headers, symbols, names and attributes take more than {2 * len(data)} bytes"
    assert 2 * len(data) - length <= taken <= 2 * len(data)


def test_a_name_that_does_not_end_in_its_table_is_a_cubin_error() -> None:
    data = made(FUNCTION)
    with pytest.raises(cubin.CubinError, match="a name in it has no end"):
        cubin.kernels(data.replace(b"\0rows\0\0", b"\0rowsxy"))


def test_what_is_wrong_with_a_cubin_keeps_no_view_of_it() -> None:
    """Views that end in a cycle are told of on standard error when it is collected."""
    parts = cubin._Parts(bytes(100))
    assert type(parts.take(0, 10)) is bytes
