"""The gemm table: which function serves which M on which GPU, and what a miss says."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from runtime.dispatch import Dispatch, gemm_mismatch, serves
from runtime.errors import KernelMiss, RecordError
from runtime.limits import MAX_GEMM_FUNCTIONS
from runtime.record import Record
from runtime.signature import Signature

from .recording_driver import entry, gemm_record, operands_record, signature

HOPPER, AMPERE, ADA = (9, 0), (8, 0), (8, 9)
WANTED = Signature.from_json(signature())
TABLE = {
    "entries": [
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
}
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
    return Dispatch.from_json(TABLE, TARGETS)


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
        Dispatch.from_json({"entries": []}).lookup(WANTED, HOPPER)


def damaged(path: list[Any], value: Any) -> dict[str, Any]:
    table = copy.deepcopy(TABLE)
    place: Any = table
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return table


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
        ([*FIRST, "ranges", 2, "m_max"], 4096, "has m_max null"),
        ([*FIRST, "ranges", 0, "m_max"], None, "has m_max null"),
        ([*FIRST, "ranges", 1, "m_max"], 16, "ascending order, found 16 after 16"),
        ([*FIRST, "ranges", 0, "m_max"], 0, "ascending order"),
        ([*FIRST, "ranges", 0, "m_max"], 16.0, "ascending order"),
        ([*FIRST, "ranges", 0, "m_max"], True, "ascending order"),
        ([*FIRST, "ranges", 0, "function"], "gone", "'gone' is not in the archive"),
        ([*FIRST, "ranges", 0, "function"], 7, "must be a word"),
        ([*FIRST, "ranges", 0, "k"], 7, "exactly the fields"),
        ([*FIRST, "candidates", 0], [1], "a row of candidates"),
        ([*FIRST, "candidates", 1, 0], 1, "ascending order"),
        ([*FIRST, "candidates", 0, 1], ["gone"], "'gone' is not in the archive"),
        ([*FIRST, "timings"], None, "must be a list"),
        (["entries", 3], TABLE["entries"][0], "two entries for"),
    ],
)
def test_table_that_breaks_a_rule_is_refused(path: list[Any], value: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        Dispatch.from_json(damaged(path, value), TARGETS)


def test_table_that_is_no_object_is_refused() -> None:
    with pytest.raises(RecordError, match="exactly the fields"):
        Dispatch.from_json([])


# --- entries and records ---


def mismatch(changes: dict[str, dict[str, Any]], *, batched: bool = False, **wanted: Any) -> str | None:
    """What is said of a GEMM's record after changes to its arguments."""
    obj = gemm_record("g", batched=batched)
    for argument in obj["arguments"]:
        argument |= changes.get(argument["name"], {})
    one = {"kernel": 0, "grid": [0] * 3, "block": [0] * 3, "shared_bytes": 1, "attributes": [], "parameters": []}
    no_input = {"values": [], "nodes": [["const", 32, 1], ["const", 64, 0]], "launches": [one]}
    obj["program"] |= no_input  # since symbols may be gone
    return gemm_mismatch(Signature.from_json(signature(**wanted)), Record.from_json(obj))


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
    found = gemm_mismatch(WANTED, Record.from_json(obj))
    assert found == f"does not take the tensors of this GEMM (a, b, d) but (a, b, d, {more['name']})"


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
    return gemm_mismatch(Signature.from_json(signature(**(wanted | extents))), Record.from_json(obj))


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
    found = gemm_mismatch(Signature.from_json(signature(dtype="e4m3", d="bf16")), Record.from_json(obj))
    assert found == f"does not take the tensors of this GEMM {names[0]} but {names[1]}"
    plain = Record.from_json(gemm_record("g", dtype="e4m3"))
    assert gemm_mismatch(Signature.from_json(signature(**FUSED)), plain) == (
        f"does not take the tensors of this GEMM {names[1]} but {names[0]}"
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
    table = {"entries": [entry(signature(), [(None, "f0")], candidates=[[1, names]])]}
    (found,) = Dispatch.from_json(table, dict.fromkeys(names, "sm_90a")).entries
    assert found.functions(1) == tuple(names[:MAX_GEMM_FUNCTIONS])
