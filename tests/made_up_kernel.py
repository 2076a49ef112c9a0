"""A record and a cubin that fit together, for tests that need a kernel and no compiler."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

from .samples import record

_REGCOUNT, _SIZED = 0x2F, 4


def cubin(symbol: str = "rows", payload: bytes = b"") -> bytes:
    """An ELF file that says of itself what a cubin with the kernel `symbol` does; `payload` is its last section."""
    strings = b"\0" + symbol.encode() + b"\0"
    sections = {
        "": (0, b"", 0),
        ".strtab": (3, strings, 0),
        ".symtab": (2, bytes(24) + struct.pack("<IBBHQQ", 1, 2, 0, 0, 0, 0), 1),
        ".nv.info": (1, struct.pack("<BBHII", _SIZED, _REGCOUNT, 8, 1, 32), 0),
        f".nv.info.{symbol}": (1, b"", 0),
        ".payload": (1, payload, 0),
    }
    names = b"".join(name.encode() + b"\0" for name in [*sections, ".shstrtab"])
    sections[".shstrtab"] = 3, names, 0
    headers, body = [], b""
    for name, (kind, content, link) in sections.items():
        at = 0 if name == "" else names.index(b"\0" + name.encode() + b"\0") + 1
        headers.append(struct.pack("<IIQQQQIIQQ", at, kind, 0, 0, 64 + len(body), len(content), link, 0, 1, 0))
        body += content
    identity = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    sizes = 64, 0, 0, 64, len(headers), len(headers) - 1
    header = identity + struct.pack("<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, 64 + len(body), 0, *sizes)
    return header + body + b"".join(headers)


def kernel(name: str, target: str, family: str, payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
    """The record and the cubin of a function of this name."""
    binary = cubin(payload=payload)
    said = {"name": name, "target": target, "family": family, "cubin": hashlib.sha256(binary).hexdigest()}
    return record() | said, binary
