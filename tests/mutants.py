"""Archives as a hostile writer could make them: real records and tables changed field by field, and signed.

`tests/fuzz_archive.py` damages bytes; here everything on the way to a change is right, so that what reads records,
launch programs and tables meets it. `tests/data/records.json` has the real records. Knows nothing of who reads.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import zstandard

from runtime.numbers.dtypes import DTYPES

from . import mutant_cubins, mutant_forms
from .fuzz_archive import Parts, assemble, encode_index, mutate_bytes, mutate_column, mutate_value
from .mutant_programs import PROGRAM_CHANGES, Refused

RECORDS = Path(__file__).parent / "data" / "records.json"
_COMPRESSOR = zstandard.ZstdCompressor(level=1)

NUMBERS: list[Any] = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 257, 1023, 1024, 1025]
NUMBERS += [4096, 8192, 20_000, 20_001, 32_764, 32_765, 65_535, 65_536, 1 << 20, 1 << 30, (1 << 31) - 1, 1 << 31]
NUMBERS += [(1 << 32) - 1, 1 << 32, 1 << 48, 1 << 57, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, 10**30, 10**400]
NUMBERS += [-1, -2, -8, -(1 << 31), -(1 << 63), -(1 << 64), -(10**400)]
WORDS: list[Any] = ["", "a", "b", "d", "m", "n", "k", "x", "const", "add", "loop", "raw", "tma", "sm_90a", "sm_100a"]
WORDS += ["sm_80", "bf16", "f32", "e4m3", "none", "weights", "\0", "é", "\ud800", "x" * 300, "tensor", "ranked", "\n"]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [0], {"a": 1}, 0.0, 0.5, 1.0, 32.0, 64.0, 1e308, -0.0, 1e-7]
SIZES = [2, 3, 16, 17, 40, 300]


@dataclass
class Content:
    """What goes into an archive: records as JSON, their names as they were and their cubins, tables, and texts that no
    JSON encoder writes, by placeholder.
    """

    records: list[Any]
    names: list[str]
    cubins: list[bytes]
    tables: dict[str, Any]
    raw: dict[str, str] = field(default_factory=dict)
    how: list[str] = field(default_factory=list)

    def raw_text(self, text: str) -> str:
        """A word that is written as `text`, which may be no JSON."""
        name = f"@raw{len(self.raw)}@"
        self.raw[name] = text
        return name

    def encode(self, obj: Any) -> bytes:
        try:
            text = json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        except TypeError:  # keys of several types
            text = json.dumps(obj, separators=(",", ":"), ensure_ascii=False)
        for name, raw in self.raw.items():
            text = text.replace(f'"{name}"', raw)
        return text.encode("utf-8", "surrogatepass")


def real_records() -> list[dict[str, Any]]:
    """Records of functions that the DSL compiled, one of each kind."""
    found: list[dict[str, Any]] = json.loads(RECORDS.read_text())
    return found


# --- places ---


def _place(rng: random.Random, obj: Any) -> tuple[Any, Any] | None:
    """A container and a key in it, each level as likely as another."""
    where = None
    while isinstance(obj, (dict, list)) and obj and (where is None or rng.random() < 0.8):
        key = rng.choice(list(obj)) if isinstance(obj, dict) else rng.randrange(len(obj))
        where = obj, key
        obj = obj[key]
    return where


def _junk(rng: random.Random, content: Content) -> Any:
    choice = rng.random()
    if choice < 0.5:
        return rng.choice(NUMBERS)
    if choice < 0.7:
        return rng.choice(WORDS)
    if choice < 0.93:
        return json.loads(json.dumps(rng.choice(OTHERS)))
    if choice < 0.95:
        return "x" * rng.choice([1000, 1000, 100_000])
    depth = rng.choice([50, 400, 900, 3000, 3000, 100_000])
    texts = ["[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "9" * rng.choice([300, 4301, 20_000])]
    texts += ["1e999", "NaN", "-0", "1E5", "0.10", "1e400", '"\\u0061"', '{"a":1,"a":2}']
    return content.raw_text(rng.choice(texts))


def _nudged(rng: random.Random, value: Any) -> Any:
    """Something like `value`, of which a careless check may be satisfied."""
    if isinstance(value, bool):
        return rng.choice([int(value), not value, float(value), str(value)])
    if isinstance(value, int):
        changed = [value + d for d in (-64, -8, -2, -1, 1, 2, 8, 64)] + [value * 2, -value, value << 32]
        return rng.choice([*changed, float(value) if abs(value) < 1 << 1000 else 0.5, str(value)[:50], [value]])
    if isinstance(value, str):
        return rng.choice(
            [value + "\0", value.upper(), value + value[:20], value[:-1], [value], {value: 1}, " " + value]
        )
    return [value]


def change_anything(rng: random.Random, content: Content) -> None:
    """Change one place in one record or table."""
    documents: list[Any] = [*content.records, content.tables]
    place = _place(rng, rng.choice(documents))
    if place is None:
        return
    where, key = place
    choice = rng.randrange(12)
    if choice <= 3:
        where[key] = _junk(rng, content)
    elif choice <= 6:
        where[key] = _nudged(rng, where[key])
    elif choice == 7:
        del where[key]
    elif choice == 8:
        other = _place(rng, rng.choice(documents))
        if other is not None:
            where[key] = json.loads(json.dumps(other[0][other[1]]))
    elif isinstance(where, list):
        if choice == 9:
            where[key:key] = [where[key]] * rng.choice(SIZES)
        elif choice == 10:
            rng.shuffle(where)
        else:
            other_key = rng.randrange(len(where))
            where[key], where[other_key] = where[other_key], where[key]
    elif choice == 9:
        where[rng.choice(["extra", "", "kind", "name", "m2"])] = where[key]
    elif choice == 10:
        where[rng.choice(WORDS)] = where.pop(key)
    else:
        other_key = rng.choice(list(where))
        where[key], where[other_key] = where[other_key], where[key]


# --- records ---


def _record(rng: random.Random, content: Content) -> dict[str, Any]:
    record = rng.choice(content.records)
    if not isinstance(record, dict):
        raise Refused
    return record


def _change_tensor(rng: random.Random, content: Content) -> None:
    """Extents, strides, element types and alignments that a record may have."""
    record = _record(rng, content)
    tensor = rng.choice([a for a in record["arguments"] if a["kind"] == "tensor"])
    what = rng.choice(["shape", "strides", "dtype", "alignment", "rank"])
    if what == "dtype":
        tensor["dtype"] = rng.choice([*DTYPES, "f64", "i4"])
    elif what == "alignment":
        tensor["alignment"] = rng.choice([0, 1, 2, 3, 16, 4096, 8192, 1 << 62])
    elif what == "rank":
        extra = rng.choice([1, 2, 14, 15, 400])
        tensor["shape"] = [rng.choice([1, "m", 0])] * extra + tensor["shape"]
        tensor["strides"] = [rng.choice([1, "m", 0])] * extra + tensor["strides"]
    else:
        at = rng.randrange(len(tensor[what]))
        tensor[what][at] = rng.choice([*NUMBERS, *record["symbols"]])


def _change_symbols(rng: random.Random, content: Content) -> None:
    """Rename, add or alter a symbol, everywhere or in one place."""
    record = _record(rng, content)
    symbols, how = record["symbols"], rng.randrange(5)
    name = rng.choice(list(symbols))
    if how == 0:
        symbols[name]["divisibility"] = rng.choice([1, 2, 3, 16, 1 << 20, (1 << 20) + 1, 0])
    elif how == 1:
        symbols[name]["width"] = rng.choice([1, 8, 16, 32, 64, 128])
    elif how == 2:
        for i in range(rng.choice(SIZES)):
            symbols[f"{name}{i}"] = dict(symbols[name])
            if rng.random() < 0.5:
                record["program"]["values"].append([f"{name}{i}", symbols[name]["width"]])
    elif how == 3:
        del symbols[name]
    else:
        other = rng.choice(WORDS)
        symbols[other] = symbols.pop(name)
        for a in record["arguments"]:
            for what in ("shape", "strides"):
                a[what] = [other if x == name else x for x in a.get(what, [])] if what in a else a.get(what)
                if a[what] is None:
                    del a[what]
        if rng.random() < 0.8:
            record["program"]["values"] = [[other if x == name else x, w] for x, w in record["program"]["values"]]


def _wrap_arguments(rng: random.Random, content: Content) -> None:
    """Some arguments as a tuple, nested."""
    record = _record(rng, content)
    arguments = record["arguments"]
    start = rng.randrange(len(arguments))
    end = rng.randrange(start, len(arguments)) + 1
    inner = arguments[start:end]
    for depth in range(rng.choice([1, 1, 2, 4, 5, 6])):
        inner = [{"kind": "tuple", "name": f"t{depth}", "items": inner}]
    arguments[start:end] = inner


def _add_argument(rng: random.Random, content: Content) -> None:
    """An argument of another kind, or many."""
    record = _record(rng, content)
    device = [a["name"] for a in record["arguments"] if a["kind"] == "device"]
    kinds: list[dict[str, Any]] = [
        {"kind": "scalar", "dtype": rng.choice(["i32", "i64", "f32", "bf16"])},
        {"kind": "none"},
        {"kind": "stream"},
        {"kind": "device", "property": "max_active_clusters", "cluster_size": rng.choice([0, 1, 2, 17, 64, 65])},
        {
            "kind": "workspace",
            "bytes": rng.choice([0, 1, 1 << 30, (1 << 30) + 1]),
            "each": rng.choice([None, "x", *device]),
            "zeroed": rng.choice([True, False]),
        },
        {"kind": "tensor", "dtype": "bf16", "shape": ["m"], "strides": [1], "alignment": 16},
        {"kind": "tuple", "items": []},
    ]
    for i in range(rng.choice([1, 1, 1, 2, 100])):
        added = rng.choice(kinds) | {"name": rng.choice([f"new{i}", f"new{i}", "m", "a"])}
        record["arguments"].insert(rng.randrange(len(record["arguments"]) + 1), added)
        if added["kind"] in ("tensor", "workspace") and rng.random() < 0.9:
            record["program"]["pointers"].append(added["name"])
        if added["kind"] in ("scalar", "device") and rng.random() < 0.7:
            record["program"]["values"].append([added["name"], rng.choice([32, 32, 64])])


def _change_kernels(rng: random.Random, content: Content) -> None:
    """More kernels, each launched or not; resources; symbols."""
    record = _record(rng, content)
    kernels, how = record["kernels"], rng.randrange(3)
    if how == 0:
        kernels[0][rng.choice(["registers", "shared_bytes", "local_bytes"])] = rng.choice(NUMBERS)
    elif how == 1:
        kernels[0]["symbol"] = rng.choice([*WORDS, "x" * 70_000])
    else:
        for i in range(rng.choice(SIZES)):
            kernels.append(kernels[0] | {"symbol": f"k{i}"})
            if rng.random() < 0.9:
                launches = record["program"]["launches"]
                launches.append(launches[0] | {"kernel": len(kernels) - 1})


# --- tables ---


def _change_entry(rng: random.Random, content: Content) -> None:
    """Ranges, candidates, timings and signatures of the gemm table."""
    entries = content.tables["gemm"]["entries"]
    entry = rng.choice(entries)
    how = rng.randrange(12)
    if how == 0:
        bounds = [rng.choice(NUMBERS) for _ in range(rng.choice([1, 2, 5]))]
        other = rng.choice(content.names)
        if other not in entry["functions"]:
            entry["functions"].append(other)
        bounds = sorted(bounds) if rng.random() < 0.5 else bounds
        count = len(entry["functions"])
        entry["ranges"] = [[b, i % count] for i, b in enumerate([*bounds, None])]
    elif how == 1:
        entry["ranges"] = entry["ranges"][::-1]
    elif how == 2:
        entry["candidates"] = [[rng.choice(NUMBERS), [index for _, index in entry["ranges"]] * rng.choice([1, 2, 50])]]
    elif how == 3:
        row = {
            "m": rng.choice(NUMBERS),
            "function": "f",
            "us": rng.choice([5.0, 0, 1e-300, 10**400]),
            "baseline_us": 1e12,
        }
        entry["timings"] = [row | {"spread": rng.choice(NUMBERS)}, row][: rng.choice([1, 2])]
    elif how == 4:
        entry["signature"][rng.choice(["n", "k", "batch"])] = rng.choice(NUMBERS)
    elif how == 5:
        field_, words = rng.choice([("epilogue", ["silu", "bias", "swiglu"]), ("scaling", ["tensor", "block"])])
        entry["signature"][field_] = rng.choice(words)
    elif how == 6:
        entries.extend(json.loads(json.dumps(entry)) for _ in range(rng.choice(SIZES)))
        if rng.random() < 0.8:
            for i, copied in enumerate(entries):
                copied["signature"]["n"] = 8 * (i + 1)
    elif how == 7:
        gpus = content.tables["gemm"]["gpus"]
        gpus.append({"name": rng.choice(WORDS), "multiprocessors": rng.choice(NUMBERS), "memory_gbps": 4_800})
        entry["gpu"] = rng.choice([None, 0, len(gpus) - 1, len(gpus)])
    elif how == 8:
        bounds = [*sorted(rng.sample(range(1, 9000), rng.choice([0, 1, 3]))), rng.choice([None, None, *NUMBERS])]
        places = [rng.choice([0, i % 2, *NUMBERS]) for i in range(len(bounds))]
        entry["invariant"] = rng.choice([None, [], 0, [list(row) for row in zip(bounds, places, strict=True)]])
    elif how == 9:
        ends = [rng.choice([*NUMBERS, None]) for _ in range(rng.choice([2, 4]))]
        entry["torch_faster"] = [ends[i : i + 2] for i in range(0, len(ends), 2)]
        entry |= {"tuned_to": rng.choice([*NUMBERS, None]), "state": rng.choice(["tuned", "ranked"])}
    elif how == 10:
        names = entry["functions"]
        rng.choice([names.reverse, names.clear, lambda: names.append(rng.choice(WORDS)), lambda: names.extend(names)])()
    else:
        content.tables[rng.choice(["build", "tuning", "other"])] = _junk(rng, content)


def _change_form(rng: random.Random, content: Content) -> None:
    """Forms and cost programs of the universal table."""
    for _ in range(rng.choice([1, 1, 2])):
        mutant_forms.change(rng, content.tables["universal"], content.raw_text)


RECORD_CHANGES: list[Callable[[random.Random, Content], None]] = [
    _change_tensor,
    _change_symbols,
    _wrap_arguments,
    _add_argument,
    _change_kernels,
    _change_entry,
    _change_form,
    _change_form,
]


def _change_program(rng: random.Random, content: Content) -> None:
    record = _record(rng, content)
    rng.choice(PROGRAM_CHANGES)(rng, record["program"])


# --- archives ---


def fresh(rng: random.Random, samples: list[str]) -> Content:
    """A valid archive of some of `samples`, records as text, with an entry and a form for each that is a GEMM."""
    chosen = rng.sample(samples, rng.choice([1, 1, 1, 2]))
    records = [json.loads(text) for text in chosen]
    entries = [entry for record in records if (entry := _entry(record)) is not None]
    signatures = [entry["signature"] for entry in entries]
    gemms = [(entry["functions"][0], entry["target"], entry["signature"]) for entry in entries]
    tables: dict[str, Any] = {
        "build": {
            "schema": 1,
            "models": [{"gemms": [{"signature": "up", "name": "up"} for _ in signatures]}],
            "tools": {"nvidia-cutlass-dsl": "4.8.1"},
        },
        "gemm": {"schema": 1, "gpus": [], "entries": entries},
        "universal": mutant_forms.table_of(gemms),
        "tuning": {
            "schema": 1,
            "environments": [{"gpu": "H200", "compute_capability": "9.0", "multiprocessors": 132}],
        },
    }
    names = [record["name"] for record in records]
    return Content(records, names, [cubin(r, n) for r, n in zip(records, names, strict=True)], tables)


def _entry(record: dict[str, Any]) -> dict[str, Any] | None:
    """A gemm entry served by `record`, whose signature its sample has; that is no part of a record."""
    of = record.pop("gemm", None)
    if of is None:
        return None
    name = record["name"]
    base = {"signature": of, "target": record["target"], "gpu": None, "state": "ranked", "functions": [name]}
    served = {"ranges": [[None, 0]], "invariant": [[None, 0]], "torch_faster": [], "candidates": [[64, [0]]]}
    return base | served | {"timings": []}


def make(rng: random.Random, samples: list[str]) -> Content:
    """A mutant's content; `how` says what was changed."""
    content = fresh(rng, samples)
    for _ in range(rng.choice([1, 1, 2, 3, 4])):
        choice = rng.random()
        if choice < 0.4:
            change: Callable[[random.Random, Content], None] = change_anything
        elif choice < 0.7:
            change = _change_program
        else:
            change = rng.choice(RECORD_CHANGES)
        try:
            change(rng, content)
        except (Refused, LookupError, TypeError, ValueError, AttributeError):
            change_anything(rng, content)  # an earlier change left nothing to do it to
        content.how.append(change.__name__.strip("_"))
    _change_cubins(rng, content)
    return content


def cubin(record: Any, name: str) -> bytes:
    """The made-up cubin of a record that was `name` and has its kernels, if they could be."""
    return mutant_cubins.of_record(record, name.encode())


def _change_cubins(rng: random.Random, content: Content) -> None:
    """Have half of the cubins say what the records now do, and damage some."""
    for i, (record, name) in enumerate(zip(content.records, content.names, strict=True)):
        if rng.random() < 0.5:
            content.cubins[i] = cubin(record, name)
        if rng.random() < 0.3:
            content.cubins[i] = mutant_cubins.damaged(rng, content.cubins[i])
            content.how.append("cubin")


def write(rng: random.Random, content: Content) -> bytes:
    """The archive, signed all the way up; one in ten has a damaged index besides."""
    functions: list[tuple[str, str, bytes, bytes]] = []
    for record, original, binary in zip(content.records, content.names, content.cubins, strict=True):
        name, target = original, "sm_90a"
        if isinstance(record, dict):
            record["cubin"] = record.get("cubin") and hashlib.sha256(binary).hexdigest()
            found = record.get("name"), record.get("target")
            if isinstance(found[0], str) and found[0].isascii() and found[0].isprintable() and 0 < len(found[0]) < 256:
                name = found[0].replace(" ", "_")
            if found[1] in ("sm_80", "sm_90a", "sm_100a"):
                target = str(found[1])
        functions.append((target, name, content.encode(record), binary))
    functions.sort()
    names = sorted(content.tables)
    blobs = {"records": [f[2] for f in functions]}
    for target in sorted({f[0] for f in functions}):
        blobs[f"{target.rstrip('a')[:-1]}x"] = [f[3] for f in functions if f[0] == target]
    blobs["tables"] = [content.encode(content.tables[name]) for name in names]
    parts = parts_of(functions, names, blobs)
    if rng.random() < 0.1:
        content.how.append("index")
        if rng.random() < 0.5:
            parts = mutate_column(rng, parts)
        else:
            head = mutate_value(rng, parts.head)
            return assemble(parts, raw=_index(content, replace(parts, head=head)))
        if rng.random() < 0.2:
            return assemble(parts, raw=mutate_bytes(rng, _index(content, parts)))
    return assemble(parts, raw=_index(content, parts))


def _index(content: Content, parts: Parts) -> bytes:
    """The index, decompressed; its head may hold what no JSON encoder writes."""
    _, rest = encode_index(replace(parts, head={})).split(b"\n", 1)
    return content.encode(parts.head) + b"\n" + rest


def parts_of(
    functions: list[tuple[str, str, bytes, bytes]], names: list[str], blobs: dict[str, list[bytes]], zstd: Any = None
) -> Parts:
    """An archive of `functions` (target, name, record, cubin, sorted) and the tables `names`, as these blobs."""
    compress = (zstd or _COMPRESSOR).compress
    stored = {kind: compress(b"".join(each)) for kind, each in blobs.items()}
    rows = [{"blobs": len(blobs[kind]), "kind": kind, "length": len(stored[kind])} for kind in sorted(blobs)]
    targets = [f[0] for f in functions]
    counts = {target: targets.count(target) for target in sorted(set(targets))}
    all_blobs = [blob for kind in sorted(blobs) for blob in blobs[kind]]
    return Parts(
        {"blocks": rows, "functions": counts, "tables": names},
        [name for _, name, *_ in functions],
        [len(blob) for blob in all_blobs],
        [all_blobs.index(binary) for *_, binary in functions],
        [hashlib.sha256(stored[kind]).digest() for kind in sorted(blobs)],
        [hashlib.sha256(blob).digest() for blob in all_blobs],
        [stored[kind] for kind in sorted(blobs)],
    )
