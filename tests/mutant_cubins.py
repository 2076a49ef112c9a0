"""Cubins as a hostile writer could make them: those that records say, and damage to their headers and tables.

Knows nothing of archives.
"""

from __future__ import annotations

import random
import struct
from typing import Any, NamedTuple

from aot.compile.cubin import CubinKernel

from .made_up_kernel import PROGBITS, SYMTAB, cubin, cubin_of

NUMBERS = [0, 1, 2, 8, 24, 64, 255, 1 << 16, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 63, (1 << 64) - 1]
_HEADER = struct.Struct("<HHIQQQIHHHHHH")  # of the file, after 16 bytes that identify it
_SECTION = struct.Struct("<IIQQQQIIQQ")
_TYPE, _OFFSET, _SIZE = 1, 4, 5  # of the numbers of a section header


def of_record(record: Any, payload: bytes) -> bytes:
    """A cubin with the first hundred kernels that a record says, or some other where it says none that could be."""
    try:
        return cubin_of(_kernels(record), payload)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, struct.error):
        return cubin(payload=payload)


def _kernels(record: Any) -> list[CubinKernel]:
    sizes: dict[int, tuple[int, ...]] = {}
    for launch in record["program"]["launches"]:
        sizes[launch["kernel"]] = tuple(parameter["size"] for parameter in launch["parameters"])
    found = []
    for number, kernel in enumerate(record["kernels"][:100]):
        if not 0 <= kernel["shared_bytes"] <= 1 << 20 or len(kernel["symbol"]) > 10_000:
            raise ValueError
        numbers = kernel["registers"], kernel["shared_bytes"], kernel["local_bytes"]
        found.append(CubinKernel(kernel["symbol"], *numbers, sizes.get(number, ())))
    return found


class Section(NamedTuple):
    """Where a section header stands in a cubin, and its numbers."""

    at: int
    numbers: tuple[int, ...]

    @property
    def content(self) -> range:
        return range(self.numbers[_OFFSET], self.numbers[_OFFSET] + self.numbers[_SIZE])


def sections_of(data: bytes) -> list[Section]:
    """The sections of a sound cubin."""
    offset, count = struct.unpack_from("<Q", data, 0x28)[0], struct.unpack_from("<H", data, 0x3C)[0]
    return [Section(at, _SECTION.unpack_from(data, at)) for at in range(offset, offset + 64 * count, 64)]


def damaged(rng: random.Random, data: bytes) -> bytes:
    """A sound cubin with some bytes or numbers changed, tables that repeat, or the end cut off."""
    out, sections = bytearray(data), sections_of(data)
    for _ in range(rng.choice([1, 1, 2, 5])):
        how, section = rng.randrange(6), rng.choice(sections)
        if how == 0:
            for _ in range(rng.choice([1, 2, 10])):
                out[rng.randrange(len(out))] = rng.choice([0, 1, 64, 255, rng.randrange(256)])
        elif how == 1:
            _change_number(rng, out, 16, _HEADER)
        elif how == 2:
            _change_number(rng, out, section.at, _SECTION)
        elif how == 3:
            table = rng.choice([s for s in sections if s.numbers[_TYPE] == SYMTAB] or sections).content
            at = rng.choice(table[::24] or [0])
            out[at : at + 24] = rng.choice([bytes(24), rng.randbytes(24), out[table.start + 24 : table.start + 48]])
        elif how == 4:
            _repeat(rng, out, rng.choice([s for s in sections if s.numbers[_TYPE] in (PROGBITS, SYMTAB)]))
        elif rng.random() < 0.2:
            return bytes(out[: rng.randrange(len(out) + 1)])
    return bytes(out)


def _change_number(rng: random.Random, out: bytearray, at: int, of: struct.Struct) -> None:
    """Change one of the numbers that stand there, such that it still has room."""
    numbers = list(of.unpack_from(out, at))
    which = rng.randrange(len(numbers))
    numbers[which] = rng.choice([*NUMBERS, *numbers, numbers[which] + 1, abs(numbers[which] - 1), len(out)])
    try:
        of.pack_into(out, at, *numbers)
    except struct.error:
        numbers[which] = 0xFFFF
        of.pack_into(out, at, *numbers)


def _repeat(rng: random.Random, out: bytearray, section: Section) -> None:
    """Give a section its content, or a part of that, many times."""
    content = out[section.content.start : section.content.stop]
    unit = content[rng.choice([0, 24]) :][: rng.choice([4, 12, 24, len(content)])]
    more = content + unit * rng.choice([1, 2, 100, 2000])
    if len(more) > 1 << 20:
        return
    numbers = list(section.numbers)
    numbers[_OFFSET], numbers[_SIZE] = len(out), len(more)
    out += more
    _SECTION.pack_into(out, section.at, *numbers)
