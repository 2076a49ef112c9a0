"""The gemm table: which function serves which M on which GPU, and what a miss says."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from aot.pack import tables
from runtime.device.gpus import Gpu
from runtime.errors import KernelMiss, RecordError
from runtime.gemm.operation import GEMM
from runtime.gemm.signature import Signature
from runtime.limits import MAX_CALL_FUNCTIONS
from runtime.program.record import Record
from runtime.tables.dispatch import Dispatch, record_mismatch, serves

from .pace import assert_takes_less_than
from .recording_driver import H200, entry, gemm_record, operands_record, signature, table

HOPPER, AMPERE, ADA = (9, 0), (8, 0), (8, 9)
WANTED = Signature.from_json(signature())
TABLE = table(
    [
        entry(
            signature(),
            [(16, "small"), (128, "medium"), (None, "large")],
            candidates=[[1, ["small", "tiny"]], [256, ["large", "wide", "medium"]]],
        ),
        entry(signature(), [(None, "old")], target="sm_80"),
        entry(signature(), [(None, "newer")], target="sm_86"),
        entry(signature(n=4096), [(None, "square")]),
        entry(signature(batch=4), [(None, "batched")]),
        entry(signature(dtype="f16"), [(None, "half")]),
    ]
)
TARGETS = {
    **dict.fromkeys(
        ("small", "medium", "large", "tiny", "wide", "square", "batched", "half"),
        "sm_90a",
    ),
    "old": "sm_80",
    "newer": "sm_86",
}


@pytest.fixture
def dispatch() -> Dispatch:
    return Dispatch.from_json(TABLE, GEMM, TARGETS)


@pytest.mark.parametrize(
    ("target", "capability", "answer"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 6), True),
        ("sm_80", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 0), True),
        ("sm_100a", (10, 3), False),
        ("sm_103a", (10, 3), True),
        ("sm_120a", (12, 0), True),
        ("sm_120a", (12, 1), False),
        ("x86", (9, 0), False),
    ],
)
def test_targets_serve_the_gpus_that_can_run_their_cubins(
    target: str, capability: tuple[int, int], answer: bool
) -> None:
    assert serves(target, capability) is answer


@pytest.mark.parametrize(
    ("m", "name"),
    [(1, "small"), (16, "small"), (17, "medium"), (128, "medium"), (129, "large"), (1 << 30, "large")],
)
def test_ranges_end_at_their_m_max(dispatch: Dispatch, m: int, name: str) -> None:
    assert dispatch.find(WANTED, HOPPER, m) == name


def test_nearest_target_is_preferred(dispatch: Dispatch) -> None:
    assert dispatch.find(WANTED, AMPERE, 1) == "old"
    assert dispatch.find(WANTED, ADA, 1) == "newer"


def test_alternatives_are_the_candidates_of_the_nearest_m_then_the_other_ranges(dispatch: Dispatch) -> None:
    chosen = dispatch.lookup(WANTED, HOPPER)
    assert chosen.functions(3) == ("small", "tiny", "medium", "large")
    assert chosen.functions(300) == ("large", "wide", "medium", "small")


def test_entries_for_a_gpu_are_one_a_signature(dispatch: Dispatch) -> None:
    assert [e.ranges[-1][1] for e in dispatch.entries_for(HOPPER)] == ["large", "square", "batched", "half"]
    assert [e.ranges[-1][1] for e in dispatch.entries_for(ADA)] == ["newer"]
    assert dispatch.entries_for((7, 0)) == ()


def test_miss_orders_entries_by_distance_and_says_what_differs(dispatch: Dispatch) -> None:
    with pytest.raises(KernelMiss) as miss:
        dispatch.lookup(Signature.from_json(signature(n=4104)), HOPPER)
    lines = str(miss.value).splitlines()
    assert lines == [
        "no kernel for bf16_bf16_bf16_f32_none_n4104_k4096 on compute capability 9.0",
        "the nearest of 6 entries:",
        "  bf16_bf16_bf16_f32_none_n4096_k4096 for sm_90a: N is 4096, wanted 4104",
        "  bf16_bf16_bf16_f32_none_n6144_k4096 for sm_90a: N is 6144, wanted 4104",
        "  bf16_bf16_bf16_f32_none_n6144_k4096 for sm_80: N is 6144, wanted 4104, "
        "sm_80 does not run on compute capability 9.0",
        "add the problem to the manifest and build the archive again",
    ]


def test_miss_of_another_gpu_names_the_target(dispatch: Dispatch) -> None:
    with pytest.raises(KernelMiss, match=r"for sm_90a: sm_90a does not run on compute capability 10\.0"):
        dispatch.lookup(WANTED, (10, 0))


def test_miss_names_types_and_batch(dispatch: Dispatch) -> None:
    with pytest.raises(KernelMiss, match="batch is 1, wanted 2"):
        dispatch.lookup(Signature.from_json(signature(batch=2)), HOPPER)
    with pytest.raises(KernelMiss, match="A is bf16, wanted e4m3, B is bf16, wanted e4m3"):
        dispatch.lookup(Signature.from_json(signature(dtype="e4m3", d="bf16")), HOPPER)


def test_miss_of_an_empty_table_says_so() -> None:
    with pytest.raises(KernelMiss, match="has no entries"):
        Dispatch.from_json(table([]), GEMM).lookup(WANTED, HOPPER)


def damaged(path: list[Any], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(TABLE)
    place: Any = changed
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return changed


FIRST = ["entries", 0]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["entries"], {}, "must be a list"),
        (["more"], 1, "exactly the fields"),
        ([*FIRST, "more"], 1, "exactly the fields"),
        ([*FIRST, "signature", "n"], 0, "integer from 1 to 2147483647"),
        ([*FIRST, "target"], "hopper", "unknown target"),
        ([*FIRST, "target"], "sm_80", "is for sm_90a, the entry is for sm_80"),
        ([*FIRST, "state"], "fast", "state must be one of"),
        ([*FIRST, "ranges"], [], "there is no range"),
        ([*FIRST, "state"], ["tuned"], "state must be one of"),
        ([*FIRST, "ranges"], {}, "ranges: must be a list"),
        ([*FIRST, "ranges", 2, 0], 4096, "has m_max null"),
        ([*FIRST, "ranges", 0, 0], None, "has m_max null"),
        ([*FIRST, "ranges", 1, 0], 16, "ranges: .*ascending order, found 16 after 16"),
        ([*FIRST, "ranges", 0, 0], 0, "ascending order"),
        ([*FIRST, "ranges", 0, 0], 16.0, "ascending order"),
        ([*FIRST, "ranges", 0, 0], True, "ascending order"),
        ([*FIRST, "ranges", 0, 0], [16], "ascending order"),
        ([*FIRST, "ranges", 0, 1], 5, "ranges: 5 is no index into the 5 functions"),
        ([*FIRST, "ranges", 0, 1], -1, "-1 is no index"),
        ([*FIRST, "ranges", 0, 1], False, "False is no index"),
        ([*FIRST, "ranges", 0, 1], "small", "'small' is no index"),
        ([*FIRST, "ranges", 0, 1], 1, "up to M = 16 and after it have the same function"),
        ([*FIRST, "ranges", 1], [128, 1, 1], r"a row is \[m_max, index of a function\], found \[128, 1, 1\]"),
        ([*FIRST, "ranges", 1], {"m_max": 128, "function": 1}, "a row is"),
        ([*FIRST, "functions", 0], "gone", "'gone' is not in the archive"),
        ([*FIRST, "functions", 0], 7, "must be a word"),
        ([*FIRST, "functions", 0], "medium", "'medium' is there twice"),
        ([*FIRST, "functions"], [*TABLE["entries"][0]["functions"], "square"], "'square' is used by no range"),
        ([*FIRST, "invariant"], 0, "invariant: must be a list"),
        ([*FIRST, "invariant"], [], "invariant: there is no range"),
        ([*FIRST, "invariant"], [[None, 5]], "invariant: 5 is no index into the 5 functions"),
        ([*FIRST, "invariant"], [[None, "small"]], "invariant: 'small' is no index"),
        ([*FIRST, "invariant"], [[16, 0], [64, 1]], "invariant: the last range, and only that, has m_max null"),
        ([*FIRST, "invariant"], [[None, 0], [None, 1]], "has m_max null"),
        ([*FIRST, "invariant"], [[16, 0], [16, 1], [None, 0]], "invariant: .*ascending order, found 16 after 16"),
        ([*FIRST, "invariant"], [[16, 0], [None, 0]], "up to M = 16 and after it have the same function"),
        ([*FIRST, "invariant"], [[16, 0, 1], [None, 0]], "invariant: a row is"),
        ([*FIRST, "functions"], [*TABLE["entries"][0]["functions"], "gone"], "'gone' is not in the archive"),
        ([*FIRST, "candidates", 0], [1], "a row is"),
        ([*FIRST, "candidates", 1, 0], 1, "candidates: .*ascending order"),
        ([*FIRST, "candidates", 0, 1], [7], "candidates at M = 1: 7 is no index"),
        ([*FIRST, "candidates", 0, 1], 7, "candidates at M = 1: must be a list"),
        ([*FIRST, "tuned_to"], 0, "tuned_to: .*ascending order, found 0 after 0"),
        ([*FIRST, "tuned_to"], True, "tuned_to: .*found True"),
        ([*FIRST, "tuned_to"], "64", "tuned_to: .*found '64'"),
        ([*FIRST, "torch_faster"], [[0, 5]], "torch_faster: .*ascending order, found 0 after 0"),
        ([*FIRST, "torch_faster"], [[1, 5], [5, 7]], "ascending order, found 5 after 5"),
        ([*FIRST, "torch_faster"], [[6, 5]], "may not end before it begins, found 5 after 6"),
        ([*FIRST, "torch_faster"], [[6, True]], "may not end before it begins, found True"),
        ([*FIRST, "torch_faster"], [[1, None], [5, 7]], "only the last range"),
        ([*FIRST, "torch_faster"], [[1, 2, 3]], "a row is"),
        ([*FIRST, "torch_faster"], [["1", 2]], "ascending order, found '1'"),
        ([*FIRST, "apart"], [[6, 5]], "apart: a range may not end before it begins, found 5 after 6"),
        ([*FIRST, "timings"], None, "timings: must be a list"),
        (["entries", 3], TABLE["entries"][0], "two entries for .* on sm_90a, any GPU"),
        ([*FIRST, "gpu"], 0, "gpu: 0 is no index into the 0 gpus"),
        (["gpus"], [H200._asdict()], r"no entry is for NVIDIA H200 \(132 SMs, 4800 GB/s\)"),
        (["gpus"], [H200._asdict()] * 2, r"gpus\[1\]: NVIDIA H200 .* is there twice"),
        (["gpus"], [H200._asdict() | {"name": ""}], r"gpus\[0\]: name must be a word"),
        (["gpus"], [H200._asdict() | {"name": "x" * 300}], "name must be a word"),
        (["gpus"], [H200._asdict() | {"multiprocessors": 0}], "multiprocessors must be 1 to 65536, found 0"),
        (["gpus"], [H200._asdict() | {"multiprocessors": True}], "multiprocessors must be"),
        (["gpus"], [H200._asdict() | {"memory_gbps": 4.8}], "memory_gbps must be 0 to 1000000, found 4.8"),
        (["gpus"], [H200._asdict() | {"l2_bytes": 1}], "exactly the fields"),
        (["gpus"], {}, "gpus: must be a list"),
    ],
)
def test_table_that_breaks_a_rule_is_refused(path: list[Any], value: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        Dispatch.from_json(damaged(path, value), GEMM, TARGETS)


def test_table_that_is_no_object_is_refused() -> None:
    with pytest.raises(RecordError, match="exactly the fields"):
        Dispatch.from_json([], GEMM)


def test_table_of_many_ranges_is_read_in_little_time() -> None:
    """15,000 ranges take 8 ms, most of it for signatures and names; the bound allows for busy machines."""
    ranges: list[tuple[int | None, str]] = [(m, f"f{m % 20}") for m in range(1, 100)]
    made = table([entry(signature(n), [*ranges, (None, "f0")]) for n in range(8, 8 * 151, 8)])
    targets = {f"f{i}": "sm_90a" for i in range(20)}
    assert_takes_less_than(0.06, lambda: Dispatch.from_json(made, GEMM, targets))


# --- kinds of GPU ---

H100, H20 = Gpu("NVIDIA H100 80GB HBM3", 132, 3_352), Gpu("NVIDIA H20", 78, 4_000)
PCIE, NEW = Gpu("NVIDIA H100 PCIe", 114, 2_039), Gpu("NVIDIA H300", 130, 8_000)


def served_on(gpu: Gpu, *kinds: Gpu | None, ranked: tuple[Gpu | None, ...] = ()) -> str:
    """What serves on `gpu` of entries for `kinds`, each with a function of the kind's name, of which `ranked` are."""
    entries = [
        entry(
            signature(), [(None, kind.name if kind else "any")], gpu=kind, state="ranked" if kind in ranked else "tuned"
        )
        for kind in kinds
    ]
    return Dispatch.from_json(table(entries), GEMM).find(WANTED, HOPPER, 1, gpu)


@pytest.mark.parametrize(
    ("gpu", "kinds", "ranked", "answer"),
    [
        (H200, (H20, H100, H200, None), (), H200.name),
        (H200._replace(memory_gbps=0), (H20, H100, H200, None), (), H200.name),
        (H200, (H20, H200, None), (H200, None), H200.name),  # this very kind, though ranked
        (H200, (H20, H100), (), H100.name),  # as many SMs
        (NEW, (H20, H100, H200), (), H200.name),  # as near in SMs, nearer in memory
        (NEW, (H100, H200._replace(memory_gbps=0)), (), H100.name),
        (PCIE, (H20, H100), (), H100.name),
        (H200._replace(name="NVIDIA H200 MIG 1g.18gb", multiprocessors=16), (H200, H20), (), H20.name),
        (H200._replace(multiprocessors=16), (H200, H20), (), H20.name),  # a part of one is another kind
        (H200, (H20, None), (H20,), "any"),  # the only tuned one
        (H200, (H20, None), (None,), H20.name),
        (H200, (H20, None), (), H20.name),  # a kind before any
        (H200, (H20, None), (H20, None), H20.name),
        (H200, (None,), (None,), "any"),
    ],
)
def test_entry_of_the_nearest_kind_serves(
    gpu: Gpu, kinds: tuple[Gpu | None, ...], ranked: tuple[Gpu | None, ...], answer: str
) -> None:
    assert served_on(gpu, *kinds, ranked=ranked) == answer
    assert served_on(gpu, *reversed(kinds), ranked=ranked) == answer


def test_kinds_that_are_as_near_are_taken_by_name() -> None:
    twins = [H200._replace(name=name) for name in ("NVIDIA B", "NVIDIA A")]
    assert served_on(H200, *twins) == served_on(H200, *reversed(twins)) == "NVIDIA A"


def test_better_target_comes_before_a_nearer_kind() -> None:
    rows = [
        entry(signature(), [(None, "old")], target="sm_80", gpu=H200),
        entry(signature(), [(None, "newer")], target="sm_86", gpu=H20),
    ]
    assert Dispatch.from_json(table(rows), GEMM, TARGETS).find(WANTED, ADA, 1, H200) == "newer"


def test_entry_reads_as_it_was_written() -> None:
    row = entry(
        signature(),
        [(16, "small"), (None, "large")],
        candidates=[[8, ["tiny", "small"]]],
        gpu=H200,
        invariant=[(16, "wide"), (99, "small"), (None, "wide")],
        torch_faster=[(3, 3), (5, 9), (12, None)],
        apart=[(1, 2), (17, 32)],
    )
    (found,) = Dispatch.from_json(table([row]), GEMM, TARGETS).entries
    assert found.ranges == ((16, "small"), (None, "large"))
    assert found.candidates == ((8, ("tiny", "small")),)
    assert found.gpu == H200
    assert found.apart == ((1, 2), (17, 32))
    assert found.invariant_ranges == ((16, "wide"), (99, "small"), (None, "wide"))
    only = found.only_invariant()
    assert (only.names, only.ranges, only.invariant_ranges) == (("wide", "small"), *[found.invariant_ranges] * 2)
    assert (only.torch_faster, only.apart, only.candidates) == ((), (), ())
    assert [only.best(m) for m in (1, 16, 17, 99, 100)] == ["wide", "wide", "small", "small", "wide"]
    assert {name for m in (1, 50, 5000) for name in only.functions(m)} == {"wide", "small"}
    assert [m for m in range(1, 15) if found.torch_is_faster(m)] == [3, 5, 6, 7, 8, 9, 12, 13, 14]
    assert "timings" not in tables.table([tables.Row.of(found)], GEMM, TARGETS)["entries"][0]
    (again,) = Dispatch.from_json(tables.table([tables.Row.of(found)], GEMM, TARGETS), GEMM, TARGETS).entries
    assert tables.Row.of(again) == tables.Row.of(found)


def test_writer_names_a_row_that_readers_would_refuse() -> None:
    row = tables.Row(WANTED, "sm_90a", None, "tuned", [(16, "small"), (None, "small")])
    with pytest.raises(RecordError, match=r"entry 1 ranges: .*same function"):
        tables.table([replace(row, gpu=H200, ranges=[(None, "small")]), row], GEMM, TARGETS)


# --- entries and records ---


def mismatch(changes: dict[str, dict[str, Any]], *, batched: bool = False, **wanted: Any) -> str | None:
    """What is said of a GEMM's record after changes to its arguments."""
    obj = gemm_record("g", batched=batched)
    for argument in obj["arguments"]:
        argument |= changes.get(argument["name"], {})
    one = {"kernel": 0, "grid": [0] * 3, "block": [0] * 3, "shared_bytes": 1, "attributes": [], "parameters": []}
    no_input = {"values": [], "nodes": [["const", 32, 1], ["const", 64, 0]], "launches": [one]}
    obj["program"] |= no_input  # since symbols may be gone
    return record_mismatch(Signature.from_json(signature(**wanted)), Record.from_json(obj))


def test_gemm_of_the_entrys_types_is_accepted() -> None:
    assert mismatch({}) is None
    assert mismatch({}, n=4096, k=4096) is None
    assert mismatch({}, batched=True, batch=3) is None


def test_extents_may_be_fixed_at_the_entrys() -> None:
    fixed: dict[str, Any] = {"a": {"shape": ["m", 4096]}, "b": {"shape": [6144, 4096]}, "d": {"shape": ["m", 6144]}}
    assert mismatch(fixed) is None
    assert mismatch(fixed, n=4096) == "has N fixed at 6144, not 4096"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": {"shape": ["k", "n"]}}, "takes B of shape (k, n), not (N, K): K is k"),
        ({"a": {"shape": ["k", "m"]}}, "takes B of shape (n, k), not (N, K): K is m"),
        ({"d": {"shape": ["n", "m"]}}, "takes D of shape (n, m), not (M, N): M is m"),
        ({"a": {"shape": ["m", "n"]}, "b": {"shape": ["n", "n"]}}, "one symbol for two of M (m), K (n), N (n)"),
        ({"a": {"shape": [16, "k"]}, "d": {"shape": [16, "n"]}}, "has M fixed at 16, not any number of rows"),
        ({"a": {"shape": ["m", 64]}, "b": {"shape": ["n", 64]}}, "has K fixed at 64, not 4096"),
        ({"b": {"shape": ["n"], "strides": [1]}}, "takes B of shape (n), not (N, K)"),
        ({"b": {"strides": [1, "ldb"]}}, "takes B with innermost stride ldb, not 1"),
        ({"d": {"strides": ["ldd", 2]}}, "takes D with innermost stride 2, not 1"),
        ({"a": {"dtype": "f16"}}, "takes A as f16, not bf16"),
        ({"d": {"dtype": "f32"}}, "takes D as f32, not bf16"),
    ],
)
def test_record_that_is_not_the_entrys_gemm_is_told_apart(changes: dict[str, Any], message: str) -> None:
    found = mismatch(changes)
    assert found is not None
    assert message in found


@pytest.mark.parametrize(
    "more", [{"kind": "none", "name": "bias"}, {"kind": "scalar", "name": "alpha", "dtype": "f32"}]
)
def test_record_with_more_arguments_is_no_gemm(more: dict[str, Any]) -> None:
    obj = gemm_record("g")
    obj["arguments"].append(more)
    found = record_mismatch(WANTED, Record.from_json(obj))
    assert found == f"does not take the arguments of this gemm (a, b, d) but (a, b, d, {more['name']})"


# A GEMM with every operand there is, and one with scales of blocks.
FUSED: dict[str, Any] = {
    "epilogue": "bias+swiglu+residual+scale",
    "scaling": "row_column",
    "dtype": "e4m3",
    "d": "bf16",
}
BLOCKED = {"scaling": "block", "dtype": "e4m3", "d": "bf16"}
N_MAJOR = {"b_major": "n"}


def generic(wanted: dict[str, Any], changes: dict[str, dict[str, Any]] | None = None, **extents: int) -> str | None:
    """What is said of a GEMM's record as providers describe it, after changes to its arguments."""
    obj = operands_record("g", signature(**wanted))
    for argument in obj["arguments"]:
        argument |= (changes or {}).get(argument["name"], {})
    obj["program"]["pointers"] = [a["name"] for a in obj["arguments"] if a["kind"] == "tensor"]
    return record_mismatch(Signature.from_json(signature(**(wanted | extents))), Record.from_json(obj))


@pytest.mark.parametrize(
    "wanted", [FUSED, BLOCKED, N_MAJOR, {"epilogue": "relu+scale"}, BLOCKED | {"scaling": "tensor"}]
)
def test_gemm_with_all_operands_of_its_signature_is_accepted(wanted: dict[str, Any]) -> None:
    assert generic(wanted) is None
    assert generic(wanted, n=4096, k=4096) is None


def test_extents_of_blocks_and_columns_may_be_fixed_at_the_entrys() -> None:
    blocks: dict[str, Any] = {"scale_a": {"shape": ["m", 33]}, "scale_b": {"shape": [48, 33]}}
    assert generic(BLOCKED, blocks, k=4112) is None
    assert generic(BLOCKED, blocks) == "has K/128 fixed at 33, not 32"
    columns: dict[str, Any] = {"d": {"shape": ["m", 3072]}, "residual": {"shape": ["m", 3072]}}
    assert generic(FUSED, columns) is None
    assert generic(FUSED, columns, n=512) == "has P fixed at 3072, not 256"


@pytest.mark.parametrize(
    ("wanted", "changes", "message"),
    [
        (FUSED, {"bias": {"name": "residual"}, "residual": {"name": "bias"}}, "takes residual where bias belongs"),
        (FUSED, {"bias": {"dtype": "f32"}}, "takes bias as f32, not bf16"),
        (FUSED, {"bias": {"shape": ["p"]}}, "takes bias of shape (p), not (N): N is n"),
        (FUSED, {"bias": {"strides": [2]}}, "takes bias with innermost stride 2, not 1"),
        (FUSED, {"residual": {"shape": ["m", "n"]}}, "takes residual of shape (m, n), not (M, P): P is p"),
        (FUSED, {"residual": {"strides": [1, "ldresidual"]}}, "takes residual with innermost stride ldresidual, not 1"),
        (FUSED, {"d": {"shape": ["m", "n"]}, "residual": {"shape": ["m", "n"]}}, "has one symbol for two of"),
        (FUSED, {"scale_a": {"shape": ["n"]}}, "takes scale_a of shape (n), not (M): M is m"),
        (FUSED, {"scale_d": {"shape": ["m"]}}, "takes scale_d of shape (m), not (1)"),
        (FUSED, {"scale_d": {"shape": [2]}}, "takes scale_d of shape (2), not (1)"),
        (BLOCKED, {"scale_b": {"shape": ["kb", "nb"]}}, "takes scale_b of shape (kb, nb), not (N/128, K/128): K/128"),
        (BLOCKED, {"scale_b": {"strides": [1, "ldscale_b"]}}, "takes scale_b with innermost stride ldscale_b, not 1"),
        (BLOCKED, {"scale_a": {"shape": ["m", 1]}, "scale_b": {"shape": ["nb", 1]}}, "has K/128 fixed at 1, not 32"),
        (N_MAJOR, {"b": {"strides": ["ldb", 1]}}, "takes B with stride ldb of N, not 1"),
    ],
)
def test_record_whose_operands_are_not_the_entrys_is_told_apart(
    wanted: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    found = generic(wanted, changes)
    assert found is not None
    assert message in found


def test_record_for_other_operands_is_no_gemm_of_the_entry() -> None:
    obj = operands_record("g", signature(**FUSED))
    names = ("(a, b, d)", "(a, b, d, scale_a, scale_b, bias, residual, scale_d)")
    found = record_mismatch(Signature.from_json(signature(dtype="e4m3", d="bf16")), Record.from_json(obj))
    assert found == f"does not take the arguments of this gemm {names[0]} but {names[1]}"
    plain = Record.from_json(gemm_record("g", dtype="e4m3"))
    assert record_mismatch(Signature.from_json(signature(**FUSED)), plain) == (
        f"does not take the arguments of this gemm {names[1]} but {names[0]}"
    )


def test_miss_names_words_that_differ_and_prefers_another_overlap(dispatch: Dispatch) -> None:
    with pytest.raises(KernelMiss, match="epilogue is none, wanted silu"):
        dispatch.lookup(Signature.from_json(signature(epilogue="silu")), HOPPER)
    with pytest.raises(KernelMiss, match="scaling is none, wanted row_column"):
        dispatch.lookup(Signature.from_json(signature(scaling="row_column")), HOPPER)
    with pytest.raises(KernelMiss, match="major of B is k, wanted n"):
        dispatch.lookup(Signature.from_json(signature(b_major="n")), HOPPER)
    with pytest.raises(KernelMiss) as miss:
        dispatch.lookup(Signature.from_json(signature(overlap="weights")), HOPPER)
    assert str(miss.value).splitlines()[2].endswith("n6144_k4096 for sm_90a: overlap is serial, wanted weights")


def test_batches_are_for_batched_entries_and_only_those() -> None:
    assert mismatch({}, batch=3) == "takes A of shape (m, k), not (batch, M, K)"
    assert mismatch({}, batched=True) == "takes A of shape (l, m, k), not (M, K)"
    apart = {"b": {"shape": ["ldb", "n", "k"]}}
    assert mismatch(apart, batched=True, batch=3) == "takes B of shape (ldb, n, k), not (batch, N, K): batch is l"


def test_no_more_functions_are_tried_than_there_is_time_for() -> None:
    names = [f"f{i}" for i in range(100)]
    made = table([entry(signature(), [(None, "f0")], candidates=[[1, names]])])
    (found,) = Dispatch.from_json(made, GEMM, dict.fromkeys(names, "sm_90a")).entries
    assert found.functions(1) == tuple(names[:MAX_CALL_FUNCTIONS])
