"""Mutate valid archives; only ArchiveError may escape the reader, and what it does return must be what was put in.

    python tests/fuzz_archive.py [--seconds 60] [--seed 0]

Half of the mutations sign their work: every digest on the way to the damage is computed again, so that the checks
behind the digests are reached too. `disassemble` and `assemble` are written from docs/format.md and share no code
with the reader or the writer.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aot.pack.write import Package
from runtime.container.archive import Archive
from runtime.errors import ArchiveError


@dataclass(frozen=True)
class Parts:
    """An archive taken apart: the head of its index, its names and columns, and its blocks as stored."""

    head: Any
    names: list[str]
    lengths: list[int]
    cubins: list[int]
    block_digests: list[bytes]
    blob_digests: list[bytes]
    blocks: list[bytes]

    def blobs_of(self, number: int) -> slice:
        """Where the blobs of block `number` are in the columns."""
        counts = [row["blobs"] for row in self.head["blocks"]]
        return slice(sum(counts[:number]), sum(counts[: number + 1]))

    def documents_of(self, number: int) -> list[bytes]:
        """The blobs of block `number`."""
        raw = io.BytesIO(zstandard.decompress(self.blocks[number]))
        return [raw.read(length) for length in self.lengths[self.blobs_of(number)]]


def disassemble(data: bytes) -> Parts:
    offset, length = struct.unpack_from("<QQ", data, 16)
    head, names, columns = zstandard.decompress(data[offset : offset + length]).split(b"\n", 2)
    obj, file, rest = json.loads(head), io.BytesIO(data[64:]), io.BytesIO(columns)
    blobs, functions = sum(row["blobs"] for row in obj["blocks"]), sum(obj["functions"].values())
    return Parts(
        obj,
        names.decode().split(),
        list(struct.unpack(f"<{blobs}I", rest.read(4 * blobs))),
        list(struct.unpack(f"<{functions}I", rest.read(4 * functions))),
        [rest.read(32) for _ in obj["blocks"]],
        [rest.read(32) for _ in range(blobs)],
        [file.read(row["length"]) for row in obj["blocks"]],
    )


def encode(obj: Any) -> bytes:
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def encode_index(parts: Parts) -> bytes:
    numbers = parts.lengths + parts.cubins
    columns = [struct.pack(f"<{len(numbers)}I", *numbers), *parts.block_digests, *parts.blob_digests]
    return b"\n".join([encode(parts.head), " ".join(parts.names).encode(), b"".join(columns)])


def assemble(parts: Parts, **changes: Any) -> bytes:
    """Put an archive together, its digest right; `changes` overrides the index or fields of the header."""
    raw = changes.pop("raw", None)
    raw = encode_index(parts) if raw is None else raw
    stored = changes.pop("stored", None)
    stored = zstandard.compress(raw) if stored is None else stored
    fields = {
        "magic": b"CUTEAOT\0",
        "version": 1,
        "raw_length": len(raw),
        "offset": 64 + sum(map(len, parts.blocks)),
        "length": len(stored),
        "digest": hashlib.sha256(stored).digest(),
    }
    return struct.pack("<8sIIQQ32s", *(fields | changes).values()) + b"".join(parts.blocks) + stored


def sign_blocks(parts: Parts) -> Parts:
    """Make the index agree with the lengths and digests of the blocks as they are now."""
    rows = [row | {"length": len(block)} for row, block in zip(parts.head["blocks"], parts.blocks, strict=True)]
    digests = [hashlib.sha256(block).digest() for block in parts.blocks]
    return replace(parts, head=parts.head | {"blocks": rows}, block_digests=digests)


def replace_documents(parts: Parts, number: int, documents: list[bytes]) -> Parts:
    """Give block `number` other blobs, as many as before, and sign them all the way up."""
    where, copy = parts.blobs_of(number), replace(parts, lengths=parts.lengths[:], blob_digests=parts.blob_digests[:])
    copy.lengths[where] = map(len, documents)
    copy.blob_digests[where] = (hashlib.sha256(document).digest() for document in documents)
    blocks = parts.blocks[:]
    blocks[number] = zstandard.compress(b"".join(documents))
    return sign_blocks(replace(copy, blocks=blocks))


@dataclass(frozen=True)
class Sample:
    """A valid archive and what it holds."""

    data: bytes
    records: dict[str, bytes]
    cubins: dict[str, bytes]
    tables: dict[str, Any]


def make_sample(rng: random.Random, folder: Path, functions: int = 6) -> Sample:
    package = Package()
    cubins = {}
    for number in range(functions):
        target = rng.choice(["sm_90a", "sm_100a", "sm_103a"])
        cubin = rng.randbytes(64) * rng.randrange(1, 9) + target.encode()
        name = f"function{number}"
        record = {"name": name, "target": target, "cubin": hashlib.sha256(cubin).hexdigest(), "symbols": {"m": 16}}
        package.add_function(record, cubin)
        cubins[name] = cubin
    programs = [{"constants": [1.5, 0.1, 1000], "operations": "add mul", "operands": [0, 1, 2, 3], "results": [4]}]
    tables: dict[str, Any] = {"gemm": {"entries": [1, 2, 3]}, "build": {"version": "1"}}
    tables["universal"] = {"forms": [{"program": 0}], "programs": programs}
    for name, table in tables.items():
        package.set_table(name, table)
    path = folder / "sample.aot"
    package.write(path, level=1)
    with Archive.open(path) as archive:
        records = {name: archive.record_bytes(name) for name in archive.functions}
    return Sample(path.read_bytes(), records, cubins, tables)


ATOMS: list[Any] = [-1, 0, 1, 2, 63, 2**31, 2**32, 2**63, 2**64, 10**400, True, None, 0.5, 1.0, "", "a", "sm_90a"]
ATOMS += [
    "sm_100a",
    "sm_103a",
    "sm_101a",
    "sm_10x",
    "sm_9x",
    "records",
    "tables",
    "x" * 300,
    "\x00",
    "é",
    [],
    {},
    [0],
    [0, 0],
    "0" * 64,
    "A" * 64,
]


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip, cut, insert, repeat or move bytes."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        at, to = sorted(rng.randrange(len(out) + 1) for _ in range(2))
        choice = rng.randrange(6)
        if choice <= 1 and out:
            out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
        elif choice == 2:
            del out[at:]
        elif choice == 3:
            out[at:at] = rng.randbytes(rng.randrange(1, 17))
        elif choice == 4:
            out[at:to] = b""
        else:
            out[at:at] = out[at:to]
        if not out:
            break
    return bytes(out)


def mutate_value(rng: random.Random, value: Any) -> Any:
    """Change one place of a JSON value: replace, remove, duplicate, swap or nudge it."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.8:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key, other = rng.choice(keys), rng.choice(keys)
        copy: Any = value.copy()
        choice = rng.randrange(8)
        if choice == 0:
            del copy[key]
        elif choice == 1:
            copy[key], copy[other] = copy[other], copy[key]
        elif choice == 2 and isinstance(copy, list):
            copy.insert(rng.randrange(len(copy) + 1), copy[key])
        elif choice == 2:
            copy[rng.choice([f"{key}2", "extra", "", "a b", "\x7f"])] = copy[key]
        elif choice == 3:
            copy[key] = copy[other]
        else:
            copy[key] = mutate_value(rng, copy[key])
        return copy
    if type(value) is int and rng.random() < 0.6:
        return value + rng.choice([-2, -1, 1, 2, 64])
    return rng.choice(ATOMS)


HOWS = ["bytes", "splice", "index bytes", "head", "column", "block bytes", "block frame", "block content", "document"]


def mutate_column(rng: random.Random, parts: Parts) -> Parts:
    """Change the names or a column of numbers or digests; numbers stay what 32 bits can hold."""
    field = rng.choice(["names", "lengths", "cubins", "block_digests", "blob_digests"])
    column: list[Any] = list(getattr(parts, field))
    atoms: list[Any] = [0, 1, 2, 63, 64 << 20, 2**31, 2**32 - 1]
    if field == "names":
        atoms = ["", "a", "a b", "\n", "\x7f", "é", "x" * 256, "function0"]
    elif field.endswith("digests"):
        atoms = [b"", bytes(31), bytes(32), bytes(33), rng.randbytes(32)]
    for _ in range(rng.choice([1, 1, 2])):
        at, choice = rng.randrange(len(column)) if column else 0, rng.randrange(6)
        if choice == 0 or not column:
            column.insert(at, rng.choice(atoms + column))
        elif choice == 1:
            del column[at]
        elif choice == 2:
            rng.shuffle(column)
        elif choice == 3 and type(column[at]) is int:
            column[at] = min(max(0, column[at] + rng.choice([-2, -1, 1, 2])), 2**32 - 1)
        else:
            column[at] = rng.choice(atoms + column)
    changed: dict[str, Any] = {field: column}
    return replace(parts, **changed)


def mutate_document(rng: random.Random, parts: Parts) -> Parts:
    """Change a record or table and sign it all the way up, as a hostile writer would."""
    number = rng.choice([n for n, row in enumerate(parts.head["blocks"]) if row["kind"] in ("records", "tables")])
    documents = parts.documents_of(number)
    at = rng.randrange(len(documents))
    if rng.random() < 0.5:
        documents[at] = encode(mutate_value(rng, json.loads(documents[at])))
    else:
        documents[at] = mutate_bytes(rng, documents[at]) or b" "
    return replace_documents(parts, number, documents)


def mutate(rng: random.Random, sample: Sample, other: Sample) -> tuple[str, bytes]:
    """A damaged archive, and how it was damaged."""
    parts = disassemble(sample.data)
    how = rng.choice(HOWS)
    if how == "bytes":
        return how, mutate_bytes(rng, sample.data)
    if how == "splice":
        at = rng.randrange(len(sample.data))
        return how, sample.data[:at] + other.data[rng.choice([at, rng.randrange(len(other.data))]) :]
    if how == "index bytes":
        return how, assemble(parts, raw=mutate_bytes(rng, encode_index(parts)))
    if how == "head":
        head = parts.head
        for _ in range(rng.choice([1, 1, 2, 3])):
            head = mutate_value(rng, head)
        raw = encode_index(replace(parts, head=head))
        if rng.random() < 0.1:
            raw = json.dumps(head).encode() + b"\n" + raw.split(b"\n", 1)[1]
        return how, assemble(parts, raw=raw)
    if how == "column":
        return how, assemble(mutate_column(rng, parts))
    if how == "document":
        return how, assemble(mutate_document(rng, parts))
    number = rng.randrange(len(parts.blocks))
    blocks = list(parts.blocks)
    if how == "block bytes":
        blocks[number] = mutate_bytes(rng, blocks[number])
    elif how == "block frame":
        blocks[number] = rng.choice([blocks[number] * 2, blocks[number] + b"\0", rng.choice(blocks), b"", b"\x28\xb5"])
    else:
        raw = mutate_bytes(rng, zstandard.decompress(blocks[number]))
        sizes = rng.choice([True, False])
        blocks[number] = zstandard.ZstdCompressor(write_content_size=sizes).compress(raw)
    return how, assemble(sign_blocks(replace(parts, blocks=blocks)))


def read_everything(path: Path, samples: list[Sample]) -> str:
    """Read all that the archive will give; returns how it ended, fails if it gives what no sample holds."""
    wrong = []
    try:
        with Archive.open(path) as archive:
            checks = archive.verify()
            archive.sizes()
            for name in archive.functions:
                try:
                    record, cubin = archive.record(name), archive.cubin(name)
                except ArchiveError as error:
                    wrong.append(type(error).__name__)
                    continue
                assert (record["name"], record["target"]) == (name, archive.functions[name].target)
                assert record["target"] in archive.targets
                assert record["cubin"] == hashlib.sha256(cubin).hexdigest()
                if samples:
                    pair = archive.record_bytes(name), cubin
                    assert pair in [(sample.records.get(name), sample.cubins.get(name)) for sample in samples]
            for name in archive.tables:
                try:
                    table = archive.table(name)
                except ArchiveError as error:
                    wrong.append(type(error).__name__)
                    continue
                assert not samples or table in samples[0].tables.values()
            assert all(check.ok for check in checks) == (not wrong), (wrong, checks)
    except ArchiveError as error:
        return type(error).__name__
    return ", ".join(sorted(set(wrong))) or "intact"


def fuzz(seconds: float, seed: int, rounds: int | None = None) -> Counter[str]:
    """Run for `seconds`, or for `rounds`; returns how often each way of damage ended how."""
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutant.aot"
        end = time.monotonic() + seconds
        while time.monotonic() < end and rounds != 0:
            sample, other = (make_sample(rng, Path(folder), rng.randrange(1, 8)) for _ in range(2))
            for _ in range(50):
                how, data = mutate(rng, sample, other)
                path.write_bytes(data)
                try:
                    samples = [] if how == "document" else [sample, other]
                    outcomes[f"{how}: {read_everything(path, samples)}"] += 1
                except BaseException:
                    kept = Path(tempfile.gettempdir()) / f"fuzz_archive_{seed}.aot"
                    kept.write_bytes(data)
                    print(f"seed {seed}, {how}: the archive is kept at {kept}", file=sys.stderr)
                    raise
            rounds = rounds - 1 if rounds is not None else None
    return outcomes


def main() -> None:
    """Fuzz for a while and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    outcomes = fuzz(options.seconds, options.seed)
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:8}  {outcome}")
    print(f"{outcomes.total():8}  archives, no escape and no wrong content")


if __name__ == "__main__":
    main()
