"""Small archives that ask for much: each a way to make a reader spend time or memory that its size does not show.

    python tests/bombs.py NAME [first | second]

reads one as a server and as the command line do, with native code and without, and prints what took more than a second
of CPU time or 512 MB, or what escaped; exit status 1 if there is any. Half of these readings may be asked for: the
first does every operation, some with native code and some without, the second the others. `tests/test_bombs.py` runs
them all.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from runtime.device.gpus import Gpu
from runtime.gemm.signature import EPILOGUES, MAJORS, OVERLAPS
from runtime.limits import MAX_COST_NODES, MAX_COST_RESULTS, MAX_UNIVERSAL_FORMS, MAX_UNIVERSAL_NODES
from runtime.numbers.scaling import SCALINGS
from tests import fuzz_library, mutant_forms, mutants
from tests.fuzz_archive import Parts, assemble, disassemble, encode_index
from tests.fuzz_library import Finding, Fuzzer, Session
from tests.made_up_kernel import PROGBITS, STRTAB, SYMTAB, Sections, elf
from tests.recording_driver import entry, gemm_record, signature, table

FILE_BYTES = 100_000  # what each is below
RUNAWAY_SECONDS = 4.0
MEGABYTE = 1 << 20
_ZSTD = zstandard.ZstdCompressor(level=3)

Bomb = Callable[[], tuple[bytes, mutants.Content]]
BOMBS: dict[str, Bomb] = {}


def bomb(make: Bomb) -> Bomb:
    """Register a bomb under its function's name."""
    BOMBS[make.__name__] = make
    return make


def _archive(
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
        data = record if isinstance(record, bytes) else _json(record | {"cubin": digest})
        functions.append(("sm_90a", name, data.replace(b"@cubin@", digest.encode()), binary))
    tables_held = {name: obj if isinstance(obj, bytes) else _json(obj) for name, obj in held.items()}
    blobs = {
        "records": [data for _, _, data, _ in functions],
        "sm_9x": list(dict.fromkeys(binary for *_, binary in functions)),
        "tables": [tables_held[name] for name in sorted(tables_held)],
    }
    parts = mutants.parts_of(functions, sorted(tables_held), blobs, _ZSTD)
    data = assemble(parts, stored=_ZSTD.compress(encode_index(parts)))
    content = mutants.Content(objects, names, binaries, {n: {} if isinstance(o, bytes) else o for n, o in held.items()})
    return data, content


def _json(obj: Any) -> bytes:
    return json.dumps(obj, sort_keys=True, separators=(",", ":")).encode()


def _record(**changed: Any) -> dict[str, Any]:
    return gemm_record("bomb") | changed


def _program(change: Callable[[dict[str, Any]], None]) -> tuple[bytes, mutants.Content]:
    """A GEMM whose program was changed."""
    record = gemm_record("bomb")
    change(record["program"])
    return _archive(record)


def _with_field(field: str, text: bytes) -> tuple[bytes, mutants.Content]:
    """A GEMM of whose record the field is this text."""
    return _archive(_json(_record(name="raw0", cubin="@cubin@", **{field: "@text@"})).replace(b'"@text@"', text))


def _index(parts: Callable[[Parts], Parts], head: bytes | None = None) -> tuple[bytes, mutants.Content]:
    """A sound archive but for its index."""
    data, content = _archive(gemm_record("bomb"))
    changed = parts(disassemble(data))
    raw = encode_index(changed)
    if head is not None:
        raw = head + b"\n" + raw.split(b"\n", 1)[1]
    return assemble(changed, raw=raw, stored=_ZSTD.compress(raw)), content


# --- the index ---


@bomb
def index_head_nested() -> tuple[bytes, mutants.Content]:
    return _index(lambda parts: parts, b"[" * (30 * MEGABYTE) + b"]" * (30 * MEGABYTE))


@bomb
def index_head_of_numbers() -> tuple[bytes, mutants.Content]:
    return _index(lambda parts: parts, b'{"blocks":[' + b"0," * (31 * MEGABYTE) + b'0],"functions":{},"tables":[]}')


@bomb
def index_head_of_objects() -> tuple[bytes, mutants.Content]:
    return _index(lambda parts: parts, b'{"blocks":[' + b"{}," * (20 * MEGABYTE) + b'{}],"functions":{},"tables":[]}')


@bomb
def index_head_of_strings() -> tuple[bytes, mutants.Content]:
    return _index(lambda parts: parts, b'{"blocks":[],"functions":{},"tables":[' + b'"a",' * (15 * MEGABYTE) + b'"a"]}')


@bomb
def index_head_with_a_long_number() -> tuple[bytes, mutants.Content]:
    return _index(lambda parts: parts, b'{"blocks":[],"functions":{"sm_90a":' + b"9" * 1_000_000 + b'},"tables":[]}')


@bomb
def index_of_many_blocks() -> tuple[bytes, mutants.Content]:
    row = b'{"blobs":1,"kind":"records","length":1},'
    return _index(lambda parts: parts, b'{"blocks":[' + row * 1_500_000 + row[:-1] + b'],"functions":{},"tables":[]}')


@bomb
def index_of_names_alone() -> tuple[bytes, mutants.Content]:
    return _index(lambda parts: replace(parts, names=["a"] * (30 * MEGABYTE)))


@bomb
def index_of_many_functions() -> tuple[bytes, mutants.Content]:
    """Sound, but that no record can be read: 250,000 functions of one cubin."""
    count = 250_000

    def grow(parts: Parts) -> Parts:
        names = sorted(f"{i:08d}" for i in range(count))
        blocks = [row | {"blobs": count} if row["kind"] == "records" else row for row in parts.head["blocks"]]
        head = parts.head | {"blocks": blocks, "functions": {"sm_90a": count}}
        digests = [bytes(32)] * count + parts.blob_digests[1:]
        return Parts(
            head, names, [1] * count + parts.lengths[1:], [count] * count, parts.block_digests, digests, parts.blocks
        )

    return _index(grow)


# --- blocks and documents ---


@bomb
def records_block_for_each_record() -> tuple[bytes, mutants.Content]:
    """A block of 60 MB, larger than what is kept, decompressed for each of its records."""
    records: list[Any] = [gemm_record(f"f{i:02d}") for i in range(40)]
    entries = [entry(signature(512 * (i + 1), 512), [(None, record["name"])]) for i, record in enumerate(records)]
    padding = gemm_record("zz")
    padding["family"] = "x" * (60 * MEGABYTE)
    return _archive(*records, padding, tables={"gemm": table(entries)})


@bomb
def cubins_block_for_each_cubin() -> tuple[bytes, mutants.Content]:
    """As above, of cubins: each function has its own, and one is long."""
    records = [gemm_record(f"f{i:02d}") for i in range(40)]
    entries = [entry(signature(512 * (i + 1), 512), [(None, record["name"])]) for i, record in enumerate(records)]
    long = gemm_record("zz")
    return _archive(*records, long, tables={"gemm": table(entries)}, cubin={"zz": bytes(60 * MEGABYTE)})


@bomb
def record_of_zeros() -> tuple[bytes, mutants.Content]:
    return _archive(bytes(60 * MEGABYTE))


@bomb
def record_of_spaces() -> tuple[bytes, mutants.Content]:
    return _archive(b" " * (60 * MEGABYTE) + b"{}")


@bomb
def record_nested() -> tuple[bytes, mutants.Content]:
    return _with_field("arguments", b"[" * (30 * MEGABYTE) + b"]" * (30 * MEGABYTE))


@bomb
def record_nested_in_objects() -> tuple[bytes, mutants.Content]:
    return _with_field("arguments", b'{"a":' * (10 * MEGABYTE) + b"1" + b"}" * (10 * MEGABYTE))


@bomb
def record_with_arguments_of_numbers() -> tuple[bytes, mutants.Content]:
    return _with_field("arguments", b"[" + b"0," * (30 * MEGABYTE) + b"0]")


@bomb
def record_with_arguments_of_objects() -> tuple[bytes, mutants.Content]:
    return _with_field("arguments", b"[" + b"{}," * (20 * MEGABYTE) + b"{}]")


@bomb
def record_with_a_name_of_numbers() -> tuple[bytes, mutants.Content]:
    return _with_field("family", b"[" + b"0," * (30 * MEGABYTE) + b"0]")


@bomb
def record_with_long_numbers() -> tuple[bytes, mutants.Content]:
    number = b"9" * 4300
    return _with_field("kernels", b"[" + (number + b",") * 14_000 + number + b"]")


@bomb
def record_with_a_number_of_a_million_digits() -> tuple[bytes, mutants.Content]:
    return _with_field("kernels", b"9" * 1_000_000)


@bomb
def record_with_a_long_fraction() -> tuple[bytes, mutants.Content]:
    return _with_field("kernels", b"0." + b"9" * (50 * MEGABYTE))


@bomb
def record_with_many_symbols() -> tuple[bytes, mutants.Content]:
    record = _record()
    record["symbols"] |= {f"s{i}": {"width": 32, "divisibility": 1} for i in range(12_000)}
    return _archive(record)


@bomb
def record_with_many_arguments() -> tuple[bytes, mutants.Content]:
    record = _record()
    record["arguments"] += [{"kind": "none", "name": f"n{i}"} for i in range(20_000)]
    return _archive(record)


@bomb
def record_with_many_arguments_of_one_name() -> tuple[bytes, mutants.Content]:
    record = _record()
    record["arguments"] += [{"kind": "none", "name": "n"}] * 2_000_000
    return _archive(record)


@bomb
def record_with_many_kernels() -> tuple[bytes, mutants.Content]:
    record = _record()
    record["kernels"] += [record["kernels"][0] | {"symbol": f"k{i}"} for i in range(12_000)]
    return _archive(record)


@bomb
def record_with_many_kernels_launched() -> tuple[bytes, mutants.Content]:
    record = _record()
    record["kernels"] += [record["kernels"][0] | {"symbol": f"k{i}"} for i in range(5_000)]
    record["program"]["launches"] = [record["program"]["launches"][0] | {"kernel": i} for i in range(5_001)]
    return _archive(record)


# --- launch programs ---

_FIRST = 5  # values that the program of `gemm_record` takes; its nodes follow


def _count(program: dict[str, Any]) -> int:
    return _FIRST + len(program["nodes"])


def _use(program: dict[str, Any], value: int) -> None:
    """Let the grid be a value of 32 bits, so that evaluating it cannot be left out."""
    program["launches"][0]["grid"][2] = value


@bomb
def program_of_many_nodes() -> tuple[bytes, mutants.Content]:
    def change(program: dict[str, Any]) -> None:
        program["nodes"] += [["add", 32, 0, 0, ["nsw", "nuw"]]] * (20_000 - len(program["nodes"]))

    return _program(change)


@bomb
def program_of_too_many_nodes() -> tuple[bytes, mutants.Content]:
    return _program(lambda program: program["nodes"].extend([["add", 32, 0, 0]] * 2_000_000))


@bomb
def program_of_much_poison() -> tuple[bytes, mutants.Content]:
    """Each node has a reason of its own with large numbers, of which one is told."""

    def change(program: dict[str, Any]) -> None:
        big = _count(program)
        program["nodes"].append(["const", 64, (1 << 64) - 1])
        program["nodes"] += [["mul", 64, big, big, ["nuw"]]] * (19_999 - len(program["nodes"]))
        program["nodes"].append(["trunc", 32, _count(program) - 1])
        _use(program, _count(program) - 1)

    return _program(change)


def _loop(limit: int, initial: list[int], test: int, body: list[Any], following: list[int]) -> list[Any]:
    return ["loop", 32, limit, 0, initial, [], test, body, following]


@bomb
def program_of_a_loop_with_many_nodes() -> tuple[bytes, mutants.Content]:
    """256 rounds of 19,000 nodes."""

    def change(program: dict[str, Any]) -> None:
        true = _count(program)
        program["nodes"].append(["const", 1, 1])
        body = [["add", 32, 0, 0]] * 19_000
        program["nodes"].append(_loop(256, [0], true, body, [true + 1]))
        _use(program, true + 1)

    return _program(change)


@bomb
def program_of_many_loops() -> tuple[bytes, mutants.Content]:
    """19,000 loops of 256 rounds, each of which sees all values before it."""

    def change(program: dict[str, Any]) -> None:
        true = _count(program)
        program["nodes"].append(["const", 1, 1])
        program["nodes"] += [_loop(256, [0], true, [], [0])] * 19_000
        _use(program, _count(program) - 1)

    return _program(change)


@bomb
def program_of_loops_with_many_variables() -> tuple[bytes, mutants.Content]:
    """Variables count as no nodes."""

    def change(program: dict[str, Any]) -> None:
        true = _count(program)
        program["nodes"].append(["const", 1, 1])
        program["nodes"] += [_loop(256, [0] * 20_000, true, [], [0] * 20_000)] * 20
        _use(program, _count(program) - 1)

    return _program(change)


@bomb
def program_of_many_values() -> tuple[bytes, mutants.Content]:
    """Each node after them knows by a bit for each on which it depends."""
    record = _record()
    names = [f"s{i}" for i in range(10_000)]
    record["arguments"] += [{"kind": "scalar", "name": name, "dtype": "i32"} for name in names]
    program = record["program"]
    program["values"] = [[name, 32] for name in names]
    program["nodes"] = [["add", 32, i % 10_000, 9_999] for i in range(5_000)] + [["zext", 64, 0], ["const", 32, 1]]
    one, zero = 15_001, 15_000
    launch = program["launches"][0]
    launch |= {"grid": [one] * 3, "block": [one] * 3, "shared_bytes": zero, "attributes": []}
    launch["parameters"] = [{"size": 8, "words": [], "slots": [[0, "raw", i, None]]} for i in range(3)]
    return _archive(record)


@bomb
def program_of_many_launches() -> tuple[bytes, mutants.Content]:
    return _program(lambda program: program.update(launches=program["launches"] * 1_000))


@bomb
def program_of_too_many_launches() -> tuple[bytes, mutants.Content]:
    return _program(lambda program: program.update(launches=program["launches"] * 150_000))


@bomb
def program_of_many_launches_with_many_words() -> tuple[bytes, mutants.Content]:
    """A thousand launches of 8,000 words each."""

    def change(program: dict[str, Any]) -> None:
        launch = program["launches"][0]
        launch["parameters"] = [{"size": 32_000, "words": [[4 * i, 4, 0] for i in range(8_000)], "slots": []}]
        program["launches"] = [launch] * 500

    return _program(change)


@bomb
def program_of_many_parameters() -> tuple[bytes, mutants.Content]:
    """Each of one byte, of which there is room for 32,764."""

    def change(program: dict[str, Any]) -> None:
        program["launches"][0]["parameters"] += [{"size": 1, "words": [], "slots": []}] * 32_000
        program["launches"] *= 20

    return _program(change)


@bomb
def program_of_many_slots() -> tuple[bytes, mutants.Content]:
    def change(program: dict[str, Any]) -> None:
        slots = [[8 * i, "tma", 0, None] for i in range(4_000)]
        program["launches"][0]["parameters"] = [{"size": 32_000, "words": [], "slots": slots}]
        program["launches"] *= 16

    return _program(change)


@bomb
def program_with_many_flags() -> tuple[bytes, mutants.Content]:
    """The same flag again and again, each held against the operands."""

    def change(program: dict[str, Any]) -> None:
        program["nodes"] += [["add", 32, 0, 0, ["nsw"] * 1_000]] * 5_000
        _use(program, _count(program) - 1)

    return _program(change)


# --- tables ---


@bomb
def table_of_zeros() -> tuple[bytes, mutants.Content]:
    return _archive(gemm_record("bomb"), tables={"gemm": bytes(60 * MEGABYTE)})


@bomb
def table_of_many_entries() -> tuple[bytes, mutants.Content]:
    entries = [entry(signature(8 * (i + 1), 512), [(None, "bomb")]) for i in range(20_000)]
    return _archive(gemm_record("bomb"), tables={"gemm": table(entries)})


@bomb
def table_of_one_entry_many_times() -> tuple[bytes, mutants.Content]:
    return _archive(gemm_record("bomb"), tables={"gemm": table([entry(signature(), [(None, "bomb")])] * 150_000)})


@bomb
def table_of_many_ranges() -> tuple[bytes, mutants.Content]:
    return _archive(*_pair(gemm_record("bomb")), tables={"gemm": table([_dense(20_000)])})


@bomb
def table_of_many_ranges_for_torch() -> tuple[bytes, mutants.Content]:
    """Each M is held against each of them."""
    made = entry(signature(512, 512), [(None, "bomb")], torch_faster=[(2 * i + 1, 2 * i + 1) for i in range(100_000)])
    return _archive(gemm_record("bomb"), tables={"gemm": table([made])})


@bomb
def table_of_many_gpus() -> tuple[bytes, mutants.Content]:
    """One entry for each of many kinds of GPU, all for one signature."""
    made = [entry(signature(512, 512), [(None, "bomb")], gpu=Gpu(f"GPU {i}", i + 1, 1)) for i in range(20_000)]
    return _archive(gemm_record("bomb"), tables={"gemm": table(made)})


@bomb
def table_of_many_candidates() -> tuple[bytes, mutants.Content]:
    made = entry(signature(), [(None, "bomb")], candidates=[[16, ["bomb"] * 5_000_000]])
    return _archive(gemm_record("bomb"), tables={"gemm": table([made])})


@bomb
def table_of_ranges_and_timings() -> tuple[bytes, mutants.Content]:
    """Each range is held against each timing."""
    made = _dense(5_000)
    made["timings"] = [{"m": i + 1, "function": "bomb", "us": 1.0, "baseline_us": 1.0} for i in range(5_000)]
    return _archive(*_pair(gemm_record("bomb")), tables={"gemm": table([made])})


@bomb
def table_of_a_huge_signature() -> tuple[bytes, mutants.Content]:
    made = [entry(signature(10**400, 10**400), [(10**400, "bomb"), (None, "other")], [[10**400, ["bomb"]]])]
    return _archive(gemm_record("bomb"), tables={"gemm": table(made)})


@bomb
def table_tuning_of_many_machines() -> tuple[bytes, mutants.Content]:
    rows = b'{"compute_capability":"9.0","gpu":"H200","multiprocessors":1},' * 800_000
    text = b'{"schema":1,"environments":[' + rows + b'{"compute_capability":"9.0","gpu":"H200"}]}'
    return _archive(gemm_record("bomb"), tables=_gemm_table() | {"tuning": text})


@bomb
def table_tuning_of_a_long_number() -> tuple[bytes, mutants.Content]:
    machine = b'{"compute_capability":"9.0","gpu":"H200","multiprocessors":' + b"9" * 4000 + b"}"
    text = b'{"schema":1,"environments":[' + machine + b"]}"
    return _archive(gemm_record("bomb"), tables=_gemm_table() | {"tuning": text})


@bomb
def table_build_of_many_gemms() -> tuple[bytes, mutants.Content]:
    gemms = b'{"name":"up","signature":"up"},' * 1_500_000
    text = b'{"schema":1,"models":[{"gemms":[' + gemms + b'{"name":"up","signature":"up"}]}]}'
    return _archive(gemm_record("bomb"), tables=_gemm_table() | {"build": text})


@bomb
def table_build_of_long_names() -> tuple[bytes, mutants.Content]:
    """The name that is asked for is held against each."""
    gemms = [{"name": "bf16_" * 20_000 + str(i), "signature": "bf16" + "x" * 50_000} for i in range(20)]
    return _archive(gemm_record("bomb"), tables=_gemm_table() | {"build": {"schema": 1, "models": [{"gemms": gemms}]}})


def _forms(
    programs: list[dict[str, Any]], count: int, functions: int = 1, padded: bool = False
) -> tuple[bytes, mutants.Content]:
    """So many forms in turn of these programs, each of so many functions; in a file that may hold 15 MB if `padded`."""
    names = ["bomb", *(f"bomb{i}" for i in range(functions - 1))]
    table_ = mutant_forms.table_of([(name, "sm_90a", signature(512, 512)) for name in names])
    (row,) = table_["forms"]
    kinds = itertools.product(OVERLAPS, MAJORS, EPILOGUES, (False, True), SCALINGS)
    rows = []
    for number, (overlap, major, epilogue, batched, scaling) in enumerate(itertools.islice(kinds, count)):
        form = {"overlap": overlap, "b_major": major, "epilogue": epilogue, "batched": batched, "scaling": scaling}
        rows.append(row | {"form": row["form"] | form, "program": number % len(programs)})
    tables = {"gemm": table([]), "universal": table_ | {"forms": rows, "programs": programs}}
    records = [gemm_record("bomb")] + [gemm_record("bomb") | {"name": name} for name in names[1:]]
    return _archive(*records, tables=tables, cubin={"bomb": _noise("")} if padded else None)


def _long_program(nodes: int, results: int = 1, word: str = "sqrt") -> dict[str, Any]:
    """A program of so many operations, one after the other."""
    inputs, operands = 6, [0] * nodes
    if nodes:
        operands = [0, *range(inputs, inputs + nodes - 1)]
    return {"constants": [], "operations": " ".join([word] * nodes), "operands": operands, "results": [3] * results}


@bomb
def forms_that_share_a_long_program() -> tuple[bytes, mutants.Content]:
    return _forms([_long_program(MAX_COST_NODES)], MAX_UNIVERSAL_FORMS)


@bomb
def forms_of_long_programs() -> tuple[bytes, mutants.Content]:
    """As many operations as may be in all programs together."""
    return _forms([_long_program(MAX_COST_NODES - 1)] * (MAX_UNIVERSAL_NODES // MAX_COST_NODES), MAX_UNIVERSAL_FORMS)


@bomb
def forms_of_too_many_long_programs() -> tuple[bytes, mutants.Content]:
    return _forms([_long_program(MAX_COST_NODES - 1)] * 100, MAX_UNIVERSAL_FORMS)


@bomb
def forms_of_slow_operations() -> tuple[bytes, mutants.Content]:
    return _forms([_long_program(MAX_COST_NODES, word="exp")] * 30, MAX_UNIVERSAL_FORMS)


@bomb
def forms_of_many_functions() -> tuple[bytes, mutants.Content]:
    """64 functions in each of 512 forms, which each are held against."""
    return _forms([_long_program(8_000, MAX_COST_RESULTS)], MAX_UNIVERSAL_FORMS, MAX_COST_RESULTS)


@bomb
def forms_of_too_many_functions() -> tuple[bytes, mutants.Content]:
    return _forms([_long_program(1)], 200, 700)


@bomb
def form_of_a_program_of_two_million_operations() -> tuple[bytes, mutants.Content]:
    program = _long_program(0)
    return _forms([program | {"operations": "exp " * 2_000_000 + "exp", "operands": [0] * 500_000}], 1, padded=True)


@bomb
def form_of_a_million_results() -> tuple[bytes, mutants.Content]:
    return _forms([_long_program(1, 900_000)], 1, padded=True)


@bomb
def form_of_a_million_programs() -> tuple[bytes, mutants.Content]:
    return _forms([{}] * 450_000, 500, padded=True)


@bomb
def form_checked_on_many_gpus() -> tuple[bytes, mutants.Content]:
    data = mutant_forms.table_of([("bomb", "sm_90a", signature(512, 512))])
    data["checked_on"] = {"sm_90a": ["NVIDIA H200"] * 900_000}
    tables = _gemm_table() | {"universal": data}
    return _archive(gemm_record("bomb"), tables=tables, cubin={"bomb": _noise("")})


def _gemm_table() -> dict[str, Any]:
    return {"gemm": table([entry(signature(512, 512), [(None, "bomb")])])}


def _pair(record: dict[str, Any]) -> list[dict[str, Any]]:
    """`record`, and another just like it by the name "other": ranges side by side are of different functions."""
    return [record, record | {"name": "other"}]


def _dense(count: int) -> dict[str, Any]:
    """An entry of so many ranges, of two functions in turn."""
    ranges: list[tuple[int | None, str]] = [(i + 1, ("bomb", "other")[i % 2]) for i in range(count)]
    return entry(signature(512, 512), [*ranges, (None, ("bomb", "other")[count % 2])])


# --- much of several things, each of which is taken alone ---


def _large(nodes: int = 8_000, launches: int = 1, loops: int = 0) -> dict[str, Any]:
    """A GEMM with so many nodes whose overflow is looked for, launches of 3,500 words, and loops of 2,000 steps."""
    record = gemm_record("bomb")
    program = record["program"]
    true = _count(program)
    program["nodes"].append(["const", 1, 1])
    body = [["add", 32, 0, 0, ["nsw"]]] * 7
    inner = [["ult", 1, true + 1, 0]]
    for i in range(loops):
        program["nodes"].append(["loop", 32, 256, 0, [0], inner, true + i + 2, body, [true + i + 2 + 7]])
        inner = [["ult", 1, true + i + 2, 0]]
    program["nodes"] += [["add", 32, 0, 0, ["nsw", "nuw"]]] * (nodes - len(program["nodes"]) - 8 * loops)
    _use(program, 0)
    program["launches"][0]["grid"] = [program["launches"][0]["grid"][0]] * 3
    launch = program["launches"][0] | {"grid": [_FIRST] * 3, "attributes": []}
    words = [[4 * i, 4, _count(program) - 1] for i in range(3_500)]
    launch["parameters"] = [*launch["parameters"], {"size": 32_000, "words": words, "slots": []}]
    program["launches"] = [launch] * launches
    return record


@bomb
def entries_of_a_large_program() -> tuple[bytes, mutants.Content]:
    """Each entry is a shape to preload for."""
    entries = [entry(signature(8 * (i + 1), 512), [(None, "bomb")]) for i in range(1_000)]
    return _archive(_large(), tables={"gemm": table(entries)})


@bomb
def ranges_of_a_large_program() -> tuple[bytes, mutants.Content]:
    """Each range is a shape that a kernel may be asked for."""
    return _archive(*_pair(_large()), tables={"gemm": table([_dense(2_000)])})


@bomb
def launches_of_a_large_program() -> tuple[bytes, mutants.Content]:
    return _archive(_large(nodes=8_000, launches=16))


@bomb
def ranges_of_many_launches() -> tuple[bytes, mutants.Content]:
    return _archive(*_pair(_large(nodes=100, launches=8)), tables={"gemm": table([_dense(2_000)])})


@bomb
def ranges_of_long_loops() -> tuple[bytes, mutants.Content]:
    return _archive(*_pair(_large(nodes=400, loops=20)), tables={"gemm": table([_dense(1_000)])})


@bomb
def candidates_that_refuse_every_shape() -> tuple[bytes, mutants.Content]:
    """Each is tried, and why it cannot serve is told."""
    records = []
    for i in range(70):
        record = gemm_record(f"f{i:03d}", max_m=0)
        record["program"]["nodes"] += [["add", 32, 0, 0, ["nsw", "nuw"]]] * 400
        records.append(record)
    names = [record["name"] for record in records]
    made = [entry(signature(512, 512), [(None, names[0])], candidates=[[1, names]])]
    return _archive(*records, tables={"gemm": table(made)})


# --- cubins ---


@bomb
def cubin_with_long_names() -> tuple[bytes, mutants.Content]:
    """65,000 sections whose names are one text of 8 MB."""
    count = 65_000
    names = b"x" * (8 * MEGABYTE) + b"\0"
    header = bytearray(b"\x7fELF\x02\x01" + bytes(58))
    struct.pack_into("<Q", header, 0x28, 64 + len(names))
    struct.pack_into("<HHH", header, 0x3A, 64, count, 0)
    section = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64, len(names), 0, 0, 1, 0)
    return _archive(gemm_record("bomb"), cubin={"bomb": bytes(header) + names + section * count + _noise("")})


@bomb
def cubin_with_overlapping_sections() -> tuple[bytes, mutants.Content]:
    """Each section is the whole file."""
    count, size = 60_000, 12 * MEGABYTE
    header = bytearray(b"\x7fELF\x02\x01" + bytes(58))
    struct.pack_into("<Q", header, 0x28, 64)
    struct.pack_into("<HHH", header, 0x3A, 64, count, 0)
    section = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 0, size, 0, 0, 1, 0)
    return _archive(
        gemm_record("bomb"), cubin={"bomb": (bytes(header) + section * count + _noise("")).ljust(size, b"\0")}
    )


def _noise(seed: str, count: int = 60_000) -> bytes:
    """Bytes that no compression makes fewer, as an archive that decompresses to much more than it has is not opened."""
    return random.Random(seed).randbytes(count)


def _with_symbols(
    rows: bytes, attributes: bytes = b"", name: bytes = b"", functions: int = 1
) -> tuple[bytes, mutants.Content]:
    """Functions of whose cubins the symbol table has these rows; `name` is the second of the symbols' names."""
    strings = b"\0bomb\0" + name + b"\0"
    sections: Sections = {
        "": (0, b"", 0),
        ".strtab": (STRTAB, strings, 0),
        ".symtab": (SYMTAB, bytes(24) + rows, 1),
        ".nv.info": (PROGBITS, struct.pack("<BBHII", 4, 0x2F, 8, 1, 32), 0),
        ".nv.info.bomb": (PROGBITS, attributes, 0),
    }
    records = [gemm_record(f"bomb{i}") for i in range(functions)]
    cubins = {
        r["name"]: elf(sections | {".payload": (PROGBITS, _noise(r["name"], 60_000 // functions), 0)}) for r in records
    }
    return _archive(*records, cubin=cubins)


_BOMB = struct.pack("<IBBHQQ", 1, 2, 0, 0, 0, 0)  # the symbol of the function
_LONG = struct.pack("<IBBHQQ", 6, 0, 0, 0, 0, 0)  # a symbol with the second name


@bomb
def cubin_of_one_function_many_times() -> tuple[bytes, mutants.Content]:
    """65,000 symbols, each of them the function that has a megabyte of attributes."""
    return _with_symbols(_BOMB * 65_000, struct.pack("<BBH", 1, 0, 0) * 262_000)


@bomb
def cubin_of_many_attributes() -> tuple[bytes, mutants.Content]:
    return _with_symbols(_BOMB, struct.pack("<BBH", 1, 0, 0) * 2_000_000)


@bomb
def cubin_of_symbols_with_a_long_name() -> tuple[bytes, mutants.Content]:
    """60,000 symbols that share a name of 8 MB."""
    return _with_symbols(_BOMB + _LONG * 60_000, name=b"x" * (8 * MEGABYTE))


@bomb
def cubin_of_symbols_whose_names_are_used_up() -> tuple[bytes, mutants.Content]:
    """60,000 symbols that share a name of 257 bytes, before a long one."""
    return _with_symbols(_BOMB + _LONG * 60_000, name=b"x" * 257 + b"\0" + b"x" * (8 * MEGABYTE))


@bomb
def cubins_of_as_much_as_may_be_read() -> tuple[bytes, mutants.Content]:
    """Five cubins of nearly a megabyte of attributes each."""
    return _with_symbols(_BOMB, struct.pack("<BBH", 1, 0, 0) * 262_000, functions=5)


# Plans of `Session.run`, and whether there is native code. Each of the first half has a twin in the second.
_ONE_HALF = [(plan, plan in (0, 2, 3)) for plan in range(fuzz_library.PLANS)]
_OTHER_HALF = [(plan, not compiled) for plan, compiled in _ONE_HALF]
READINGS = {"first": _ONE_HALF, "second": _OTHER_HALF, "all": [*_ONE_HALF, *_OTHER_HALF]}


def read(name: str, readings: str = "all") -> list[Finding]:
    """Read a bomb in the ways of `READINGS`; what should not have been."""
    data, content = BOMBS[name]()
    assert len(data) < FILE_BYTES, f"{name} has {len(data)} bytes"
    fuzz_library.RUNAWAY_SECONDS = RUNAWAY_SECONDS
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(0, Path(folder), None)
        path = Path(folder) / f"{name}.aot"
        path.write_bytes(data)
        del data
        findings = fuzzer.totals.findings
        for plan, compiled in READINGS[readings]:
            fuzz_library.limit_memory()
            session = Session(path, fuzzer.base, content, plan, patience=1.0)
            session.run(compiled)
            fuzzer.judge(plan, b"", compiled, session)
            if any(operation == "open" for _, operation, _ in findings):
                break
        return [finding for finding, _ in fuzzer.totals.findings.values()]


def tell(hearer: Connection, name: str, readings: str) -> None:
    """Send `hearer` what `read` finds, in words, or what it raises."""
    try:
        hearer.send([str(finding) for finding in read(name, readings)])
    except BaseException:
        hearer.send([traceback.format_exc()])
        raise


def main() -> None:
    """Read the bomb that is named."""
    found = read(*sys.argv[1:])
    for finding in found:
        print(f"{finding.kind}: {finding.operation}: {finding.what}: {finding.detail}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
