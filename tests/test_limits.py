"""Limits on what a file may cost: one table for Python and C, and no evaluator that takes what the other does not."""

from __future__ import annotations

import hashlib
import random
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from aot.pack import tables
from runtime import limits, native
from runtime.container import canonical
from runtime.container.archive import HEADER, Archive
from runtime.container.errors import IndexMalformed, SizeLimitExceeded
from runtime.errors import RecordError
from runtime.gemm.operation import GEMM
from runtime.gemm.signature import Signature
from runtime.program.program import Program
from runtime.program.record import Record
from runtime.tables.dispatch import Dispatch

from .samples import record

NATIVE = Path(str(native.__file__)).with_name("limits.h")
Change = Callable[[dict[str, Any]], object]


@pytest.fixture(params=["native", "python"])
def evaluator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(native, "_native", None)
    elif native._native is None:
        pytest.skip("runtime._native was not built")


def test_native_code_has_the_limits_of_python() -> None:
    found = {name: eval(value) for name, value in re.findall(r"(MAX_\w+) = ([\d *]+)", NATIVE.read_text())}
    assert len(found) > 10
    grid = dict(zip(("MAX_GRID_X", "MAX_GRID_Y", "MAX_GRID_Z"), limits.MAX_GRID, strict=True))
    assert found == {name: grid.get(name) or getattr(limits, name) for name in found}


# --- launch programs ---


def loops(count: int, rounds: int = 1, variables: int = 1) -> list[Any]:
    """Loops over the program of `tests.samples`, whose first input has 32 bits and which has 6 inputs."""
    made = []
    for number in range(count):
        first = 6 + number
        test = first + variables
        refs = [first + i for i in range(variables)]
        made.append(["loop", 32, rounds, 0, [0] * variables, [["eq", 1, 0, 0]], test, [], refs])
    return made


def program(nodes: list[Any]) -> dict[str, Any]:
    one = {"kernel": 0, "grid": [0] * 3, "block": [0] * 3, "shared_bytes": 2, "attributes": [], "parameters": []}
    return dict(record()["program"]) | {"nodes": nodes, "launches": [one]}


def with_launches(count: int) -> dict[str, Any]:
    obj = program([])
    return obj | {"launches": obj["launches"] * count}


def with_parameters(count: int) -> dict[str, Any]:
    obj = program([])
    obj["launches"][0]["parameters"] = [{"size": 1, "words": [], "slots": []}] * count
    return obj


def with_inputs(count: int) -> dict[str, Any]:
    obj = program([])
    obj["values"] += [[f"x{i}", 32] for i in range(count - len(obj["values"]))]
    return obj


def with_pointers(count: int) -> dict[str, Any]:
    return program([]) | {"pointers": [f"p{i}" for i in range(count)]}


BIGGEST: dict[str, tuple[Callable[[int], dict[str, Any]], int, str]] = {
    "nodes": (lambda n: program([["const", 32, 0]] * n), limits.MAX_NODES, "more than 2048 nodes"),
    "loops": (lambda n: program(loops(n)), limits.MAX_LOOPS, "more than 32 loops"),
    "variables": (lambda n: program(loops(1, 1, n)), limits.MAX_LOOP_VARIABLES, "1 to 16 variables, found 17"),
    "rounds": (lambda n: program(loops(1, n)), limits.MAX_LOOP_ROUNDS, "1 to 256, found 257"),
    "launches": (with_launches, limits.MAX_LAUNCHES, "there are 9, at most 8"),
    "parameters": (with_parameters, limits.MAX_PARAMETERS, "has 257 parameters, at most 256"),
    "inputs": (with_inputs, limits.MAX_INPUTS, "there are 257, at most 256"),
    "pointers": (with_pointers, limits.MAX_POINTERS, "there are 65, at most 64"),
}


@pytest.mark.usefixtures("evaluator")
@pytest.mark.parametrize("what", BIGGEST)
def test_program_may_have_so_much_and_no_more(what: str) -> None:
    make, most, message = BIGGEST[what]
    Program.from_json(make(most), 1)
    with pytest.raises(RecordError, match=message):
        Program.from_json(make(most + 1), 1)


@pytest.mark.usefixtures("evaluator")
def test_loops_may_take_so_many_steps_and_no_more() -> None:
    def steps(nodes: int) -> dict[str, Any]:
        """A loop of 256 rounds with one variable and that many nodes."""
        (loop,) = loops(1, limits.MAX_LOOP_ROUNDS)
        loop[7] = [["const", 32, 0]] * (nodes - 1)
        return program([loop])

    most = limits.MAX_LOOP_STEPS // limits.MAX_LOOP_ROUNDS - 2
    Program.from_json(steps(most), 1)
    with pytest.raises(RecordError, match="may take 16640 steps, at most 16384"):
        Program.from_json(steps(most + 1), 1)


@pytest.mark.skipif(native._native is None, reason="runtime._native was not built")
@pytest.mark.parametrize("what", BIGGEST)
def test_native_code_leaves_no_program_to_python_for_its_size(what: str) -> None:
    make, most, _ = BIGGEST[what]
    obj = make(most)
    widths = [width for _, width in obj["values"]]
    assert native._native.Program.read(widths, obj["nodes"], obj["launches"], len(obj["pointers"]), 1) is not None


# --- records ---


def nested(depth: int) -> dict[str, Any]:
    argument: dict[str, Any] = {"kind": "none", "name": "x"}
    for _ in range(depth):
        argument = {"kind": "tuple", "name": "t", "items": [argument]}
    return argument


def unbind(obj: dict[str, Any]) -> None:
    for argument in obj["arguments"][:2]:
        argument["shape"][1] = 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda obj: obj["symbols"]["m"].update(width=32.0), "symbol 'm' is malformed"),
        (lambda obj: obj["symbols"]["m"].update(width=48), "symbol 'm' is malformed"),
        (lambda obj: obj["program"]["values"][0].__setitem__(1, 32.0), r"needs \[name, width\]"),
        (lambda obj: obj["program"]["values"][0].__setitem__(1, [32]), r"needs \[name, width\]"),
        (lambda obj: obj["arguments"][0].update(dtype=["bf16"]), "unknown element type"),
        (lambda obj: obj["arguments"][0].update(dtype={}), "unknown element type"),
        (lambda obj: obj["arguments"][2].update(dtype=["f32"]), "a scalar is one of"),
        (unbind, "the program's input 'n' is the extent or stride of no tensor"),
        (lambda obj: obj["arguments"].append(nested(5)), "unknown kind 'tuple'"),
        (lambda obj: obj["arguments"].extend([nested(0)] * 60), "has 66 arguments, at most 64"),
        (lambda obj: obj["kernels"].extend(obj["kernels"] * 16), "has 17 kernels, at most 16"),
        (lambda obj: obj["symbols"].update({f"s{i}": {} for i in range(125)}), "has 129 symbols, at most 128"),
    ],
)
def test_record_that_breaks_a_rule_is_refused(change: Change, message: str) -> None:
    obj = record()
    change(obj)
    with pytest.raises(RecordError, match=message):
        Record.from_json(obj)


SIGNATURE = Signature("bf16", "bf16", "bf16", "f32", "none", 64, 64).to_json()


@pytest.mark.parametrize(
    "change", [{"a": ["bf16"]}, {"d": {}}, {"n": 10**400}, {"k": 2**31}, {"batch": 1.0}, {"n": True}]
)
def test_signature_that_breaks_a_rule_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match="signature field") as refused:
        Signature.from_json(SIGNATURE | change)
    assert len(str(refused.value)) < 200


# --- documents ---


@pytest.mark.parametrize("loads", [canonical.loads, canonical.loads_for_serving])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" + b"0," * limits.MAX_JSON_VALUES + b"0]", "about 1000001 values, at most 1000000"),
        (b"[" * 255 + b"]" * 255, "nests more than 254 deep"),
        (b"[" * 900 + b"]" * 900, "nests more than 254 deep"),
        (b"[" * 200_000 + b"]" * 200_000, "nests too deep"),
        (b"[18446744073709551616]", "18446744073709551616, an integer of more than 64 bits"),
        (b"[-9223372036854775809]", "an integer of more than 64 bits"),
        (b"[1" + b"0" * 400 + b"]", "an integer of more than 64 bits"),
        (b"[1" + b"0" * 9_000 + b"]", "an integer of more than 64 bits"),
    ],
)
def test_document_that_would_cost_much_is_refused(loads: Callable[[bytes], Any], data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loads(data)


@pytest.mark.parametrize("loads", [canonical.loads, canonical.loads_for_serving])
@pytest.mark.parametrize("data", [b"[18446744073709551615,-9223372036854775808]", b"[" * 254 + b"]" * 254])
def test_document_at_its_limits_is_read(loads: Callable[[bytes], Any], data: bytes) -> None:
    assert canonical._encode(loads(data)) == data


def test_integers_that_would_not_be_read_are_not_written() -> None:
    with pytest.raises(ValueError, match="more than 64 bits"):
        canonical.dumps({"a": [2**64]})


# --- the gemm table, and the file ---


def table(entries: int, ranges: int) -> dict[str, Any]:
    rows = [[m + 1, m % 2] for m in range(ranges - 1)] + [[None, (ranges - 1) % 2]]
    rest: dict[str, Any] = {"target": "sm_90a", "gpu": None, "state": "tuned", "functions": ["f", "g"], "ranges": rows}
    rest |= {"invariant": None, "torch_faster": [], "candidates": [], "timings": []}
    return {
        "schema": 1,
        "gpus": [],
        "entries": [{"signature": SIGNATURE | {"n": n + 1}, **rest} for n in range(entries)],
    }


def test_gemm_table_may_have_so_many_ranges_and_no_more() -> None:
    assert len(Dispatch.from_json(table(2, limits.MAX_TABLE_RANGES // 2), GEMM).entries) == 2
    with pytest.raises(RecordError, match="has 65538 ranges of M, at most 65536"):
        Dispatch.from_json(table(2, limits.MAX_TABLE_RANGES // 2 + 1), GEMM)
    both = table(1, limits.MAX_TABLE_RANGES // 2)
    both["entries"][0]["invariant"] = both["entries"][0]["ranges"]
    assert len(Dispatch.from_json(both, GEMM).entries) == 1
    both["entries"][0]["invariant"] = table(1, limits.MAX_TABLE_RANGES // 2 + 1)["entries"][0]["ranges"]
    with pytest.raises(RecordError, match="has 65537 ranges of M, at most 65536"):
        Dispatch.from_json(both, GEMM)


def test_gemm_table_with_too_many_entries_is_refused_before_they_are_read() -> None:
    with pytest.raises(RecordError, match="has 8193 entries, at most 8192"):
        Dispatch.from_json({"schema": 1, "gpus": [], "entries": [None] * (limits.MAX_TABLE_ENTRIES + 1)}, GEMM)


def archive(path: Path, blobs: list[bytes]) -> Path:
    """An archive with these as tables, each in a block of its own, made of zstd frames that say what they hold."""
    blocks = [zstandard.compress(blob) for blob in blobs]
    head = {
        "blocks": [{"blobs": 1, "kind": "tables", "length": len(block)} for block in blocks],
        "functions": {},
        "tables": [f"t{i:03}" for i in range(len(blobs))],
    }
    digests = [hashlib.sha256(part).digest() for part in blocks + blobs]
    lengths = struct.pack(f"<{len(blobs)}I", *map(len, blobs))
    write(path, canonical.dumps(head) + b"\n\n" + lengths + b"".join(digests), b"".join(blocks))
    return path


def write(path: Path, index: bytes, blocks: bytes = b"") -> None:
    stored = zstandard.compress(index)
    sizes = 1, len(index), HEADER.size + len(blocks), len(stored)
    path.write_bytes(struct.pack("<8sIIQQ32s", b"CUTEAOT\0", *sizes, hashlib.sha256(stored).digest()) + blocks + stored)


def test_archive_may_not_decompress_to_many_times_its_size(tmp_path: Path) -> None:
    whole = limits.EXPANSION_ALLOWANCE_BYTES
    Archive.open(archive(tmp_path / "good.aot", [bytes(whole // 2)] * 2)).close()
    with pytest.raises(SizeLimitExceeded, match="decompress to 2097152 bytes, more than 256 times the file's"):
        Archive.open(archive(tmp_path / "bomb.aot", [bytes(whole)] * 2))


def test_index_may_not_decompress_to_many_times_its_size(tmp_path: Path) -> None:
    write(tmp_path / "bomb.aot", bytes(1 << 20))
    with pytest.raises(SizeLimitExceeded, match="to 1048576 bytes, more than 16 times as many"):
        Archive.open(tmp_path / "bomb.aot")


def test_head_of_an_index_is_measured_before_it_is_parsed(tmp_path: Path) -> None:
    write(tmp_path / "long.aot", random.Random(0).randbytes(limits.MAX_INDEX_HEAD_BYTES + 1).replace(b"\n", b" "))
    with pytest.raises(IndexMalformed, match="its head has more than 262144 bytes"):
        Archive.open(tmp_path / "long.aot")


def test_builder_refuses_a_gemm_table_that_readers_would() -> None:
    of = Signature.from_json(SIGNATURE)
    most: list[tuple[int | None, str]] = [(m + 1, "fg"[m % 2]) for m in range(limits.MAX_TABLE_RANGES - 1)]
    targets = {"f": "sm_90a", "g": "sm_90a"}
    row = tables.Row(of, "sm_90a", None, "tuned", [*most, (None, "g")])
    assert len(tables.table([row], GEMM, targets)["entries"][0]["ranges"]) == limits.MAX_TABLE_RANGES
    more = tables.Row(replace(of, n=8), "sm_90a", None, "tuned", [(None, "g")])
    with pytest.raises(tables.TableTooLarge, match=r"65537 ranges of M, .*; split the manifests over"):
        tables.table([row, more], GEMM, targets)
