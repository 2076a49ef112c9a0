"""Bombs in tables and cubins, and of much of several things, each of which is taken alone."""

from __future__ import annotations

import itertools
import random
import struct
from typing import Any

from runtime.device.gpus import Gpu
from runtime.gemm.signature import MAJORS
from runtime.limits import MAX_COST_NODES, MAX_COST_RESULTS, MAX_UNIVERSAL_FORMS, MAX_UNIVERSAL_NODES
from runtime.numbers.epilogue import EPILOGUES
from runtime.numbers.scaling import SCALINGS
from runtime.program.operation import OVERLAPS
from tests import mutant_forms, mutants
from tests.bomb_archives import (
    FIRST,
    MEGABYTE,
    Bombs,
    archive,
    count,
    use,
)
from tests.made_up_kernel import PROGBITS, STRTAB, SYMTAB, Sections, elf
from tests.recording_driver import entry, gemm_record, signature, table

BOMBS = Bombs()

# --- tables ---


@BOMBS.add
def table_of_zeros() -> tuple[bytes, mutants.Content]:
    return archive(gemm_record("bomb"), tables={"gemm": bytes(60 * MEGABYTE)})


@BOMBS.add
def table_of_many_entries() -> tuple[bytes, mutants.Content]:
    entries = [entry(signature(8 * (i + 1), 512), [(None, "bomb")]) for i in range(20_000)]
    return archive(gemm_record("bomb"), tables={"gemm": table(entries)})


@BOMBS.add
def table_of_one_entry_many_times() -> tuple[bytes, mutants.Content]:
    return archive(gemm_record("bomb"), tables={"gemm": table([entry(signature(), [(None, "bomb")])] * 150_000)})


@BOMBS.add
def table_of_many_ranges() -> tuple[bytes, mutants.Content]:
    return archive(*_pair(gemm_record("bomb")), tables={"gemm": table([_dense(20_000)])})


@BOMBS.add
def table_of_many_ranges_for_torch() -> tuple[bytes, mutants.Content]:
    """Each M is held against each of them."""
    made = entry(signature(512, 512), [(None, "bomb")], torch_faster=[(2 * i + 1, 2 * i + 1) for i in range(100_000)])
    return archive(gemm_record("bomb"), tables={"gemm": table([made])})


@BOMBS.add
def table_of_many_gpus() -> tuple[bytes, mutants.Content]:
    """One entry for each of many kinds of GPU, all for one signature."""
    made = [entry(signature(512, 512), [(None, "bomb")], gpu=Gpu(f"GPU {i}", i + 1, 1)) for i in range(20_000)]
    return archive(gemm_record("bomb"), tables={"gemm": table(made)})


@BOMBS.add
def table_of_many_candidates() -> tuple[bytes, mutants.Content]:
    made = entry(signature(), [(None, "bomb")], candidates=[[16, ["bomb"] * 5_000_000]])
    return archive(gemm_record("bomb"), tables={"gemm": table([made])})


@BOMBS.add
def table_of_ranges_and_timings() -> tuple[bytes, mutants.Content]:
    """Each range is held against each timing."""
    made = _dense(5_000)
    made["timings"] = [{"m": i + 1, "function": "bomb", "us": 1.0, "baseline_us": 1.0} for i in range(5_000)]
    return archive(*_pair(gemm_record("bomb")), tables={"gemm": table([made])})


@BOMBS.add
def table_of_a_huge_signature() -> tuple[bytes, mutants.Content]:
    made = [entry(signature(10**400, 10**400), [(10**400, "bomb"), (None, "other")], [[10**400, ["bomb"]]])]
    return archive(gemm_record("bomb"), tables={"gemm": table(made)})


@BOMBS.add
def table_tuning_of_many_machines() -> tuple[bytes, mutants.Content]:
    rows = b'{"compute_capability":"9.0","gpu":"H200","multiprocessors":1},' * 800_000
    text = b'{"schema":1,"environments":[' + rows + b'{"compute_capability":"9.0","gpu":"H200"}]}'
    return archive(gemm_record("bomb"), tables=_gemm_table() | {"tuning": text})


@BOMBS.add
def table_tuning_of_a_long_number() -> tuple[bytes, mutants.Content]:
    machine = b'{"compute_capability":"9.0","gpu":"H200","multiprocessors":' + b"9" * 4000 + b"}"
    text = b'{"schema":1,"environments":[' + machine + b"]}"
    return archive(gemm_record("bomb"), tables=_gemm_table() | {"tuning": text})


@BOMBS.add
def table_build_of_many_gemms() -> tuple[bytes, mutants.Content]:
    gemms = b'{"name":"up","signature":"up"},' * 1_500_000
    text = b'{"schema":1,"models":[{"gemms":[' + gemms + b'{"name":"up","signature":"up"}]}]}'
    return archive(gemm_record("bomb"), tables=_gemm_table() | {"build": text})


@BOMBS.add
def table_build_of_long_names() -> tuple[bytes, mutants.Content]:
    """The name that is asked for is held against each."""
    gemms = [{"name": "bf16_" * 20_000 + str(i), "signature": "bf16" + "x" * 50_000} for i in range(20)]
    return archive(gemm_record("bomb"), tables=_gemm_table() | {"build": {"schema": 1, "models": [{"gemms": gemms}]}})


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
    return archive(*records, tables=tables, cubin={"bomb": _noise("")} if padded else None)


def _long_program(nodes: int, results: int = 1, word: str = "sqrt") -> dict[str, Any]:
    """A program of so many operations, one after the other."""
    inputs, operands = 6, [0] * nodes
    if nodes:
        operands = [0, *range(inputs, inputs + nodes - 1)]
    return {"constants": [], "operations": " ".join([word] * nodes), "operands": operands, "results": [3] * results}


@BOMBS.add
def forms_that_share_a_long_program() -> tuple[bytes, mutants.Content]:
    return _forms([_long_program(MAX_COST_NODES)], MAX_UNIVERSAL_FORMS)


@BOMBS.add
def forms_of_long_programs() -> tuple[bytes, mutants.Content]:
    """As many operations as may be in all programs together."""
    return _forms([_long_program(MAX_COST_NODES - 1)] * (MAX_UNIVERSAL_NODES // MAX_COST_NODES), MAX_UNIVERSAL_FORMS)


@BOMBS.add
def forms_of_too_many_long_programs() -> tuple[bytes, mutants.Content]:
    return _forms([_long_program(MAX_COST_NODES - 1)] * 100, MAX_UNIVERSAL_FORMS)


@BOMBS.add
def forms_of_slow_operations() -> tuple[bytes, mutants.Content]:
    return _forms([_long_program(MAX_COST_NODES, word="exp")] * 30, MAX_UNIVERSAL_FORMS)


@BOMBS.add
def forms_of_many_functions() -> tuple[bytes, mutants.Content]:
    """128 functions in each of 512 forms, which each are held against."""
    return _forms([_long_program(8_000, MAX_COST_RESULTS)], MAX_UNIVERSAL_FORMS, MAX_COST_RESULTS)


@BOMBS.add
def forms_of_too_many_functions() -> tuple[bytes, mutants.Content]:
    return _forms([_long_program(1)], 200, 700)


@BOMBS.add
def form_of_a_program_of_two_million_operations() -> tuple[bytes, mutants.Content]:
    program = _long_program(0)
    return _forms([program | {"operations": "exp " * 2_000_000 + "exp", "operands": [0] * 500_000}], 1, padded=True)


@BOMBS.add
def form_of_a_million_results() -> tuple[bytes, mutants.Content]:
    return _forms([_long_program(1, 900_000)], 1, padded=True)


@BOMBS.add
def form_of_a_million_programs() -> tuple[bytes, mutants.Content]:
    return _forms([{}] * 450_000, 500, padded=True)


@BOMBS.add
def form_checked_on_many_gpus() -> tuple[bytes, mutants.Content]:
    data = mutant_forms.table_of([("bomb", "sm_90a", signature(512, 512))])
    data["forms"][0]["checked_on"] = ["NVIDIA H200"] * 900_000
    tables = _gemm_table() | {"universal": data}
    return archive(gemm_record("bomb"), tables=tables, cubin={"bomb": _noise("")})


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
    true = count(program)
    program["nodes"].append(["const", 1, 1])
    body = [["add", 32, 0, 0, ["nsw"]]] * 7
    inner = [["ult", 1, true + 1, 0]]
    for i in range(loops):
        program["nodes"].append(["loop", 32, 256, 0, [0], inner, true + i + 2, body, [true + i + 2 + 7]])
        inner = [["ult", 1, true + i + 2, 0]]
    program["nodes"] += [["add", 32, 0, 0, ["nsw", "nuw"]]] * (nodes - len(program["nodes"]) - 8 * loops)
    use(program, 0)
    program["launches"][0]["grid"] = [program["launches"][0]["grid"][0]] * 3
    launch = program["launches"][0] | {"grid": [FIRST] * 3, "attributes": []}
    words = [[4 * i, 4, count(program) - 1] for i in range(3_500)]
    launch["parameters"] = [*launch["parameters"], {"size": 32_000, "words": words, "slots": []}]
    program["launches"] = [launch] * launches
    return record


@BOMBS.add
def entries_of_a_large_program() -> tuple[bytes, mutants.Content]:
    """Each entry is a shape to preload for."""
    entries = [entry(signature(8 * (i + 1), 512), [(None, "bomb")]) for i in range(1_000)]
    return archive(_large(), tables={"gemm": table(entries)})


@BOMBS.add
def ranges_of_a_large_program() -> tuple[bytes, mutants.Content]:
    """Each range is a shape that a kernel may be asked for."""
    return archive(*_pair(_large()), tables={"gemm": table([_dense(2_000)])})


@BOMBS.add
def launches_of_a_large_program() -> tuple[bytes, mutants.Content]:
    return archive(_large(nodes=8_000, launches=16))


@BOMBS.add
def ranges_of_many_launches() -> tuple[bytes, mutants.Content]:
    return archive(*_pair(_large(nodes=100, launches=8)), tables={"gemm": table([_dense(2_000)])})


@BOMBS.add
def ranges_of_long_loops() -> tuple[bytes, mutants.Content]:
    return archive(*_pair(_large(nodes=400, loops=20)), tables={"gemm": table([_dense(1_000)])})


@BOMBS.add
def candidates_that_refuse_every_shape() -> tuple[bytes, mutants.Content]:
    """Each is tried, and why it cannot serve is told."""
    records = []
    for i in range(70):
        record = gemm_record(f"f{i:03d}", max_m=0)
        record["program"]["nodes"] += [["add", 32, 0, 0, ["nsw", "nuw"]]] * 400
        records.append(record)
    names = [record["name"] for record in records]
    made = [entry(signature(512, 512), [(None, names[0])], candidates=[[1, names]])]
    return archive(*records, tables={"gemm": table(made)})


# --- cubins ---


@BOMBS.add
def cubin_with_long_names() -> tuple[bytes, mutants.Content]:
    """65,000 sections whose names are one text of 8 MB."""
    count = 65_000
    names = b"x" * (8 * MEGABYTE) + b"\0"
    header = bytearray(b"\x7fELF\x02\x01" + bytes(58))
    struct.pack_into("<Q", header, 0x28, 64 + len(names))
    struct.pack_into("<HHH", header, 0x3A, 64, count, 0)
    section = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64, len(names), 0, 0, 1, 0)
    return archive(gemm_record("bomb"), cubin={"bomb": bytes(header) + names + section * count + _noise("")})


@BOMBS.add
def cubin_with_overlapping_sections() -> tuple[bytes, mutants.Content]:
    """Each section is the whole file."""
    count, size = 60_000, 12 * MEGABYTE
    header = bytearray(b"\x7fELF\x02\x01" + bytes(58))
    struct.pack_into("<Q", header, 0x28, 64)
    struct.pack_into("<HHH", header, 0x3A, 64, count, 0)
    section = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 0, size, 0, 0, 1, 0)
    return archive(
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
    return archive(*records, cubin=cubins)


_BOMB = struct.pack("<IBBHQQ", 1, 2, 0, 0, 0, 0)  # the symbol of the function
_LONG = struct.pack("<IBBHQQ", 6, 0, 0, 0, 0, 0)  # a symbol with the second name


@BOMBS.add
def cubin_of_one_function_many_times() -> tuple[bytes, mutants.Content]:
    """65,000 symbols, each of them the function that has a megabyte of attributes."""
    return _with_symbols(_BOMB * 65_000, struct.pack("<BBH", 1, 0, 0) * 262_000)


@BOMBS.add
def cubin_of_many_attributes() -> tuple[bytes, mutants.Content]:
    return _with_symbols(_BOMB, struct.pack("<BBH", 1, 0, 0) * 2_000_000)


@BOMBS.add
def cubin_of_symbols_with_a_long_name() -> tuple[bytes, mutants.Content]:
    """60,000 symbols that share a name of 8 MB."""
    return _with_symbols(_BOMB + _LONG * 60_000, name=b"x" * (8 * MEGABYTE))


@BOMBS.add
def cubin_of_symbols_whose_names_are_used_up() -> tuple[bytes, mutants.Content]:
    """60,000 symbols that share a name of 257 bytes, before a long one."""
    return _with_symbols(_BOMB + _LONG * 60_000, name=b"x" * 257 + b"\0" + b"x" * (8 * MEGABYTE))


@BOMBS.add
def cubins_of_as_much_as_may_be_read() -> tuple[bytes, mutants.Content]:
    """Five cubins of nearly a megabyte of attributes each."""
    return _with_symbols(_BOMB, struct.pack("<BBH", 1, 0, 0) * 262_000, functions=5)
