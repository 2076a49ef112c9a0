"""What bombs are made of: a sound archive of which one thing is changed, and bombs by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import zstandard

from tests import mutants
from tests.fuzz_archive import Parts, assemble, disassemble, encode_index
from tests.recording_driver import entry, gemm_record, signature, table

FIRST = 5  # values that the program of `gemm_record` takes; its nodes follow
MEGABYTE = 1 << 20
_ZSTD = zstandard.ZstdCompressor(level=3)

Bomb = Callable[[], tuple[bytes, mutants.Content]]


class Bombs(dict[str, Bomb]):
    """Bombs by the names of the functions that make them."""

    def add(self, make: Bomb) -> Bomb:
        self[make.__name__] = make
        return make


def archive(
    *records: dict[str, Any] | bytes, tables: dict[str, Any] | None = None, cubin: dict[str, bytes] | None = None
) -> tuple[bytes, mutants.Content]:
    """An archive of these records, with a gemm entry for the first if it is one; and what it holds."""
    objects = [{"name": f"raw{i}", "target": "sm_90a"} if isinstance(r, bytes) else r for i, r in enumerate(records)]
    names = [record["name"] for record in objects]
    held: dict[str, Any] = {"gemm": table([])} | (tables or {})
    if tables is None:
        held["gemm"] = table([entry(signature(512, 512), [(None, names[0])])])
    binaries = [(cubin or {}).get(n) or mutants.cubin(r, n) for r, n in zip(objects, names, strict=True)]
    functions = []
    for record, name, binary in sorted(zip(records, names, binaries, strict=True), key=lambda each: each[1]):
        digest = hashlib.sha256(binary).hexdigest()
        data = record if isinstance(record, bytes) else dumped(record | {"cubin": digest})
        functions.append(("sm_90a", name, data.replace(b"@cubin@", digest.encode()), binary))
    tables_held = {name: obj if isinstance(obj, bytes) else dumped(obj) for name, obj in held.items()}
    blobs = {
        "records": [data for _, _, data, _ in functions],
        "sm_9x": list(dict.fromkeys(binary for *_, binary in functions)),
        "tables": [tables_held[name] for name in sorted(tables_held)],
    }
    parts = mutants.parts_of(functions, sorted(tables_held), blobs, _ZSTD)
    data = assemble(parts, stored=_ZSTD.compress(encode_index(parts)))
    content = mutants.Content(objects, names, binaries, {n: {} if isinstance(o, bytes) else o for n, o in held.items()})
    return data, content


def dumped(obj: Any) -> bytes:
    return json.dumps(obj, sort_keys=True, separators=(",", ":")).encode()


def bomb_record(**changed: Any) -> dict[str, Any]:
    return gemm_record("bomb") | changed


def with_program(change: Callable[[dict[str, Any]], None]) -> tuple[bytes, mutants.Content]:
    """A GEMM whose program was changed."""
    record = gemm_record("bomb")
    change(record["program"])
    return archive(record)


def with_field(field: str, text: bytes) -> tuple[bytes, mutants.Content]:
    """A GEMM of whose record the field is this text."""
    return archive(dumped(bomb_record(name="raw0", cubin="@cubin@", **{field: "@text@"})).replace(b'"@text@"', text))


def index(parts: Callable[[Parts], Parts], head: bytes | None = None) -> tuple[bytes, mutants.Content]:
    """A sound archive but for its index."""
    data, content = archive(gemm_record("bomb"))
    changed = parts(disassemble(data))
    raw = encode_index(changed)
    if head is not None:
        raw = head + b"\n" + raw.split(b"\n", 1)[1]
    return assemble(changed, raw=raw, stored=_ZSTD.compress(raw)), content


def count(program: dict[str, Any]) -> int:
    return FIRST + len(program["nodes"])


def use(program: dict[str, Any], value: int) -> None:
    """Let the grid be a value of 32 bits, so that evaluating it cannot be left out."""
    program["launches"][0]["grid"][2] = value
