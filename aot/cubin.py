"""What a cubin says of its kernels: symbols, registers, memory, and the layout of their parameters.

A cubin is a 64-bit little-endian ELF file. Reads only sections of fixed meaning; knows nothing of code or launches.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from runtime.errors import AotError

# Attributes of the .nv.info sections, as `cuobjdump -elf` names them.
_FORMAT_SIZED = 4
_REGCOUNT, _FRAME_SIZE, _PARAM_INFO = 0x2F, 0x11, 0x17
# Far above what compilers write: a cubin of one CuTe DSL function has 25 sections, 18 symbols and 5 KB of attributes.
_MAX_SYMBOLS, _MAX_NAMES_BYTES, _MAX_ATTRIBUTES_BYTES = 1 << 16, 8 << 20, 1 << 20


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


class _Texts:
    """Reads texts that end with a zero byte, of so many bytes in all: tables may overlap, and hold one long text."""

    def __init__(self) -> None:
        self._left = _MAX_NAMES_BYTES

    def read(self, table: memoryview, offset: int) -> str:
        head = bytes(table[offset : offset + 256])
        if b"\0" not in head:
            head = bytes(table[offset : offset + self._left])
        text = head[: head.index(b"\0")]
        self._left -= len(text)
        return text.decode()


def _attributes(section: memoryview) -> list[tuple[int, bytes]]:
    """The (attribute, payload) pairs of a .nv.info section."""
    found, at = [], 0
    while at < len(section):
        form, attribute, size = struct.unpack_from("<BBH", section, at)
        at += 4
        if form == _FORMAT_SIZED:
            found.append((attribute, bytes(section[at : at + size])))
            at += size
    return found


def kernels(cubin: bytes) -> dict[str, CubinKernel]:
    """The kernels of a cubin by symbol.

    Raises:
        CubinError: the bytes are no cubin.
    """
    try:
        return _read(cubin)
    except (struct.error, ValueError, IndexError, KeyError, OverflowError) as e:
        raise CubinError(f"not a cubin that can be read: {e}") from e


def _read(cubin: bytes) -> dict[str, CubinKernel]:
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise CubinError("not a 64-bit little-endian ELF file")
    header_offset = struct.unpack_from("<Q", cubin, 0x28)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, header_offset + i * entry_size) for i in range(count)]
    program_offset, program_sizes = struct.unpack_from("<Q", cubin, 0x20)[0], struct.unpack_from("<HH", cubin, 0x36)
    ends = [program_offset + math.prod(program_sizes), *(h[4] + h[5] for h in headers if h[1] != 8)]
    if max(ends) > len(cubin):
        raise CubinError(f"it is cut short: it has {len(cubin)} bytes of {max(ends)}")
    # Of a section header: 0 name, 1 type (8 holds no bytes), 4 offset, 5 size, 6 link.
    view, texts = memoryview(cubin), _Texts()
    content = [view[h[4] : h[4] + h[5]] if h[1] != 8 else view[:0] for h in headers]
    names = [texts.read(content[names_index], h[0]) for h in headers]
    sections = dict(zip(names, content, strict=True))
    sizes = {name: h[5] for name, h in zip(names, headers, strict=True)}
    symbols = []
    strings, table = content[headers[names.index(".symtab")][6]], sections[".symtab"]
    if len(table) > 24 * _MAX_SYMBOLS:
        raise CubinError(f"it has {len(table) // 24} symbols, the limit is {_MAX_SYMBOLS}")
    if sum(len(of) for name, of in sections.items() if name.startswith(".nv.info")) > _MAX_ATTRIBUTES_BYTES:
        raise CubinError(f"its attributes take more than {_MAX_ATTRIBUTES_BYTES} bytes")
    for at in range(0, len(table), 24):
        name, info, _, _, _, _ = struct.unpack_from("<IBBHQQ", table, at)
        symbols.append((texts.read(strings, name), info & 15))
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    for attribute, payload in _attributes(sections.get(".nv.info", view[:0])):
        if attribute in (_REGCOUNT, _FRAME_SIZE):
            index, value = struct.unpack("<II", payload)
            (registers if attribute == _REGCOUNT else frames)[symbols[index][0]] = value
    found = {}
    for symbol, kind in symbols:
        if kind != 2 or f".nv.info.{symbol}" not in sections:  # 2 is a function
            continue
        parameters: dict[int, int] = {}
        for attribute, payload in _attributes(sections[f".nv.info.{symbol}"]):
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
