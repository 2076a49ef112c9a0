"""What a cubin says of its kernels: symbols, registers, memory, and the layout of their parameters.

A cubin is a 64-bit little-endian ELF file. Reads only sections of fixed meaning; knows nothing of code or launches.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from runtime.errors import AotError

# Attributes of the .nv.info sections, as `cuobjdump -elf` names them.
_FORMAT_SIZED = 4
_REGCOUNT, _FRAME_SIZE, _PARAM_INFO = 0x2F, 0x11, 0x17
_SECTION, _SYMBOL, _ATTRIBUTE = struct.Struct("<IIQQQQIIQQ"), struct.Struct("<IBBHQQ"), struct.Struct("<BBH")
# Of all that is read of a cubin. Far above what compilers write: one of a CuTe DSL function has 25 sections, 18 symbols
# and 5 KB of attributes.
_MAX_BYTES = 2 << 20


class CubinError(AotError):
    """A cubin that cannot be read."""


@dataclass(frozen=True)
class CubinKernel:
    """One kernel: registers a thread, static shared memory and stack frame in bytes, and its parameters' sizes.

    A frame that is not empty means that registers were spilled or an array went to local memory.
    """

    symbol: str
    registers: int
    shared_bytes: int
    local_bytes: int
    parameter_sizes: tuple[int, ...]


class _Parts:
    """Hands out parts of a cubin, of so many bytes in all, as in a hostile one they overlap and repeat."""

    def __init__(self, cubin: bytes) -> None:
        self._cubin, self._limit = cubin, min(2 * len(cubin), _MAX_BYTES)
        self._left = self._limit

    def take(self, start: int, size: int) -> bytes:
        """So many bytes."""
        self._left -= size
        if self._left < 0:
            raise CubinError(f"its headers, symbols, names and attributes take more than {self._limit} bytes")
        return self._cubin[start : start + size]

    def text(self, table: range, offset: int) -> str:
        """The text in this part of the cubin that ends with a zero byte."""
        start = table.start + offset
        end = self._cubin.find(b"\0", start, table.stop)
        if end < 0:
            raise CubinError("a name in it has no end")
        return self.take(start, end - start).decode()


def _attributes(section: bytes) -> Iterator[tuple[int, bytes]]:
    """The (attribute, payload) pairs of a .nv.info section."""
    at = 0
    while at < len(section):
        form, attribute, size = _ATTRIBUTE.unpack_from(section, at)
        at += 4
        if form == _FORMAT_SIZED:
            yield attribute, section[at : at + size]
            at += size


def kernels(cubin: bytes) -> dict[str, CubinKernel]:
    """The kernels of a cubin by symbol.

    Raises:
        CubinError: the bytes are no cubin.
    """
    try:
        return _read(cubin)
    except (struct.error, ValueError, IndexError, KeyError, OverflowError) as e:
        raise CubinError(f"not a cubin that can be read: {e}") from e


def _require(cubin: bytes, ends: list[int]) -> None:
    if max(ends) > len(cubin):
        raise CubinError(f"it is cut short: it has {len(cubin)} bytes of {max(ends)}")


def _read(cubin: bytes) -> dict[str, CubinKernel]:
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise CubinError("not a 64-bit little-endian ELF file")
    header_offset = struct.unpack_from("<Q", cubin, 0x28)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    program_offset, program_sizes = struct.unpack_from("<Q", cubin, 0x20)[0], struct.unpack_from("<HH", cubin, 0x36)
    _require(cubin, [program_offset + math.prod(program_sizes), header_offset + entry_size * count])
    parts = _Parts(cubin)
    parts.take(header_offset, _SECTION.size * count)
    headers = [_SECTION.unpack_from(cubin, header_offset + entry_size * i) for i in range(count)]
    _require(cubin, [0, *(h[4] + h[5] for h in headers if h[1] != 8)])
    # Of a section header: 0 name, 1 type (8 holds no bytes), 4 offset, 5 size, 6 link.
    where = [range(h[4], h[4] + h[5]) if h[1] != 8 else range(0) for h in headers]
    names = [parts.text(where[names_index], h[0]) for h in headers]
    sections = dict(zip(names, where, strict=True))
    sizes = {name: h[5] for name, h in zip(names, headers, strict=True)}
    table, strings = sections[".symtab"], where[headers[names.index(".symtab")][6]]
    rows = _SYMBOL.iter_unpack(parts.take(table.start, len(table)))
    symbols = [(parts.text(strings, name), info & 15) for name, info, *_ in rows]

    def attributes(name: str) -> Iterator[tuple[int, bytes]]:
        section = sections.get(name, range(0))
        return _attributes(parts.take(section.start, len(section)))

    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    for attribute, payload in attributes(".nv.info"):
        if attribute in (_REGCOUNT, _FRAME_SIZE):
            index, value = struct.unpack("<II", payload)
            (registers if attribute == _REGCOUNT else frames)[symbols[index][0]] = value
    found: dict[str, CubinKernel] = {}
    for symbol, kind in symbols:
        if kind != 2 or f".nv.info.{symbol}" not in sections:  # 2 is a function
            continue
        if symbol in found:
            raise CubinError(f"it has two functions {symbol}")
        parameters: dict[int, int] = {}
        for attribute, payload in attributes(f".nv.info.{symbol}"):
            if attribute == _PARAM_INFO:
                _, ordinal, _, word = struct.unpack("<IHHI", payload)
                parameters[ordinal] = word >> 18
        found[symbol] = CubinKernel(
            symbol,
            registers[symbol],
            sizes.get(f".nv.shared.{symbol}", 0),
            frames.get(symbol, 0),
            tuple(parameters[i] for i in range(len(parameters))),
        )
    if not found:
        raise CubinError("it holds no kernel")
    return found
