"""Mutate valid archives; only ArchiveError may escape the reader, and what it does return must be what was put in.

    python tests/fuzz_archive.py [--seconds 60] [--seed 0]

Half of the mutations sign their work: every digest on the way to the damage is computed again, so that the checks
behind the digests are reached too. `disassemble` and `assemble` are written from docs/format.md and share no code
with the reader or the writer.
"""

from __future__ import annotations

import argparse
import hashlib
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

from aot.pack import Package
from runtime.archive import Archive
from runtime.errors import ArchiveError


@dataclass(frozen=True)
class Parts:
    """An archive taken apart: its index as a JSON value and its blocks as stored."""

    index: Any
    blocks: list[bytes]


def disassemble(data: bytes) -> Parts:
    offset, length = struct.unpack_from("<QQ", data, 16)
    index = json.loads(zstandard.decompress(data[offset : offset + length]))
    blocks, position = [], 64
    for row in index["blocks"]:
        blocks.append(data[position : position + row["length"]])
        position += row["length"]
    return Parts(index, blocks)


def encode(index: Any) -> bytes:
    return json.dumps(index, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def assemble(index: Any, blocks: list[bytes], **header: Any) -> bytes:
    """Put an archive together, its digest right; `index` may be text already, `header` overrides fields."""
    raw = index if isinstance(index, bytes) else encode(index)
    stored = header.get("stored", zstandard.compress(raw))
    fields = {
        "magic": b"CUTEAOT\0",
        "version": 1,
        "raw_length": len(raw),
        "offset": 64 + sum(map(len, blocks)),
        "length": len(stored),
        "digest": hashlib.sha256(stored).digest(),
    }
    fields.update((key, value) for key, value in header.items() if key != "stored")
    return struct.pack("<8sIIQQ32s", *fields.values()) + b"".join(blocks) + stored


def sign_blocks(parts: Parts) -> Parts:
    """Make the index agree with the lengths and digests of the blocks as they are now."""
    index = json.loads(json.dumps(parts.index))
    for row, block in zip(index["blocks"], parts.blocks, strict=True):
        row["length"] = len(block)
        row["sha256"] = hashlib.sha256(block).hexdigest()
    return Parts(index, parts.blocks)


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
    tables: dict[str, Any] = {"gemm": {"entries": [1, 2, 3]}, "build": {"version": "1"}}
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


HOWS = ["bytes", "splice", "index bytes", "index value", "block bytes", "block frame", "block content", "document"]


def mutate_document(rng: random.Random, parts: Parts) -> Parts:
    """Change a record or table and sign it all the way up, as a hostile writer would."""
    numbers = [n for n, row in enumerate(parts.index["blocks"]) if row["kind"] in ("records", "tables")]
    number = rng.choice(numbers)
    row = parts.index["blocks"][number]
    raw = zstandard.decompress(parts.blocks[number])
    documents = []
    for length in row["blob_lengths"]:
        documents.append(raw[:length])
        raw = raw[length:]
    at = rng.randrange(len(documents))
    if rng.random() < 0.5:
        documents[at] = encode(mutate_value(rng, json.loads(documents[at])))
    else:
        documents[at] = mutate_bytes(rng, documents[at]) or b" "
    row["blob_lengths"] = [len(document) for document in documents]
    row["blob_sha256s"] = [hashlib.sha256(document).hexdigest() for document in documents]
    blocks = list(parts.blocks)
    blocks[number] = zstandard.compress(b"".join(documents))
    return sign_blocks(replace(parts, blocks=blocks))


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
        return how, assemble(mutate_bytes(rng, encode(parts.index)), parts.blocks)
    if how == "index value":
        index = parts.index
        for _ in range(rng.choice([1, 1, 2, 3])):
            index = mutate_value(rng, index)
        return how, assemble(encode(index) if rng.random() < 0.9 else json.dumps(index).encode(), parts.blocks)
    if how == "document":
        parts = mutate_document(rng, parts)
        return how, assemble(parts.index, parts.blocks)
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
    parts = sign_blocks(replace(parts, blocks=blocks))
    return how, assemble(parts.index, parts.blocks)


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
