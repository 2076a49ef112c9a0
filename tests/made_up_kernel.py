"""Records and cubins that fit together, for tests that need a kernel and no compiler."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

from aot.compile.cubin import CubinKernel

from .samples import record

PROGBITS, SYMTAB, STRTAB, NOBITS = 1, 2, 3, 8
_REGCOUNT, _FRAME_SIZE, _PARAM_INFO, _SIZED = 0x2F, 0x11, 0x17, 4

Sections = dict[str, tuple[int, bytes, int]]  # by name, the type, the content and the section that it links to


def elf(sections: Sections) -> bytes:
    """A cubin of these sections and one of their names, in this order. A section of type NOBITS holds no bytes."""
    names = b"".join(name.encode() + b"\0" for name in [*sections, ".shstrtab"])
    headers, body = [], b""
    for name, (kind, content, link) in [*sections.items(), (".shstrtab", (STRTAB, names, 0))]:
        at = 0 if name == "" else names.index(b"\0" + name.encode() + b"\0") + 1
        headers.append(struct.pack("<IIQQQQIIQQ", at, kind, 0, 0, 64 + len(body), len(content), link, 0, 1, 0))
        body += content if kind != NOBITS else b""
    identity = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    sizes = 64, 0, 0, 64, len(headers), len(headers) - 1
    header = identity + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(body), 0, *sizes)
    return header + body + b"".join(headers)


def cubin_of(kernels: Sequence[CubinKernel], payload: bytes = b"") -> bytes:
    """A cubin that says of itself what one with these kernels does; `payload` is its last section but the names."""
    strings, symbols, info, sections = b"\0", bytes(24), b"", Sections()
    for number, kernel in enumerate(kernels, 1):
        symbols += struct.pack("<IBBHQQ", len(strings), 2, 0, 0, 0, 0)
        strings += kernel.symbol.encode() + b"\0"
        for attribute, value in ((_REGCOUNT, kernel.registers), (_FRAME_SIZE, kernel.local_bytes)):
            info += struct.pack("<BBHII", _SIZED, attribute, 8, number, value)
        offsets = [sum(kernel.parameter_sizes[:i]) for i in range(len(kernel.parameter_sizes))]
        parameters = [
            struct.pack("<BBHIHHI", _SIZED, _PARAM_INFO, 12, 0, i, offset, size << 18)
            for i, (offset, size) in enumerate(zip(offsets, kernel.parameter_sizes, strict=True))
        ]
        sections[f".nv.info.{kernel.symbol}"] = PROGBITS, b"".join(parameters), 0
        sections[f".nv.shared.{kernel.symbol}"] = NOBITS, bytes(kernel.shared_bytes), 0
    first: Sections = {
        "": (0, b"", 0),
        ".strtab": (STRTAB, strings, 0),
        ".symtab": (SYMTAB, symbols, 1),
        ".nv.info": (PROGBITS, info, 0),
    }
    return elf(first | sections | {".payload": (PROGBITS, payload, 0)})


def cubin(symbol: str = "rows", payload: bytes = b"") -> bytes:
    """A cubin with a kernel of 32 registers and no parameters."""
    return cubin_of([CubinKernel(symbol, 32, 0, 0, ())], payload)


def kernel(name: str, target: str, family: str, payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
    """The record and the cubin of a function of this name."""
    binary = cubin(payload=payload)
    said = {"name": name, "target": target, "family": family, "cubin": hashlib.sha256(binary).hexdigest()}
    return record() | said, binary
