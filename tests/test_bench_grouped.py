"""scripts/bench_grouped.py, as far as it needs no GPU: its cases, what a line says, and what DeepGEMM is given."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import bench_grouped
import peers
from peers import deep_gemm_grouped

from aot.problem import manifest
from aot.tune import measure
from aot.tune.grouped_gemm.measures import GroupedMeasures, OperandSet, Weights
from runtime.grouped_gemm import Signature

from .command_line import ROOT

BLOCK = Signature("e4m3", "e4m3", "bf16", 5, 128, 256, scaling="block")
MASKED = Signature("e4m3", "e4m3", "bf16", 5, 128, 256, scaling="block", rows="masked")
TILE = 16


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """DeepGEMM's module, whose GEMMs compute by the reference, and fill what nobody asked for; which were called."""
    found: list[str] = []

    def contiguous(a: Any, b: Any, d: Any, groups: Any, *, disable_ue8m0_cast: bool) -> None:
        assert disable_ue8m0_cast
        found.append("contiguous")
        assert len(groups) == len(a[0]) == len(a[1]) == len(d)
        assert len(groups) % TILE == 0
        d.fill_(7.0)
        for tile in groups.view(-1, TILE):
            assert len(set(tile.tolist()) - {-1}) == 1, "a tile is of one group"
        for group in sorted({*groups.tolist()} - {-1}):
            rows = groups == group
            operands = OperandSet(a[0][rows], b[0], _ends(group, int(rows.sum())), d[rows], _scales(a[1][rows], b[1]))
            d[rows] = GroupedMeasures().reference(BLOCK, operands)["d"].to(d.dtype)

    def masked(a: Any, b: Any, d: Any, counts: Any, expected_m: int, *, disable_ue8m0_cast: bool) -> None:
        assert disable_ue8m0_cast
        found.append(f"masked, expecting {expected_m}")
        assert a[0].shape[1] % TILE == 0, "tiles are stored whole"
        operands = OperandSet(a[0], b[0], counts, d, _scales(a[1], b[1]))
        made = GroupedMeasures().reference(MASKED, operands)["d"]
        d.copy_(torch.where(made.isnan(), 7.0, made))

    module = ModuleType("deep_gemm")
    module.__dict__["m_grouped_fp8_gemm_nt_contiguous"] = contiguous
    module.__dict__["m_grouped_fp8_gemm_nt_masked"] = masked
    module.__dict__["get_mk_alignment_for_contiguous_layout"] = lambda: TILE
    module.__dict__["get_mn_major_tma_aligned_tensor"] = lambda scale: scale
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "")
    return found


def _ends(group: int, rows: int) -> Any:
    return torch.tensor([rows if g >= group else 0 for g in range(BLOCK.groups)], dtype=torch.int32)


def _scales(scale_a: Any, scale_b: Any) -> dict[str, Any]:
    return {"scale_a": scale_a, "scale_b": scale_b}


def peer() -> deep_gemm_grouped.GroupedDeepGemm:
    return deep_gemm_grouped.GroupedDeepGemm(peers.Settings(Path("unused"), 1))


@pytest.mark.parametrize("s", [BLOCK, MASKED], ids=["contiguous", "masked"])
def test_deep_gemm_is_right_by_the_check_of_tuning(s: Signature, calls: list[str]) -> None:
    """Groups of no row and one that has all, which its copies are padded for; rows of no group stay as they are, of
    which one more set of consecutive rows has some."""
    (launch,) = peer().launches(s, 9).values()
    found = measure.check(s, 9, Weights(s, 9, 0, 3, "cpu"), {"deep_gemm": peers.written(launch)})
    assert found["deep_gemm"] < 5e-3  # type: ignore[operator]
    assert calls == (["contiguous"] * 4 if s is BLOCK else ["masked, expecting 9"] * 3)


def test_deep_gemm_copies_operands_once(calls: list[str]) -> None:
    (launch,) = peer().launches(BLOCK, 9).values()
    (o, *_) = Weights(BLOCK, 9, 0, 3, "cpu").operands(9)
    launch(o)
    first = launch._given(o).a[0]  # type: ignore[attr-defined]
    launch(o)
    assert launch._given(o).a[0] is first  # type: ignore[attr-defined]
    assert calls == ["contiguous"] * 2


def test_launches_that_may_begin_early_are_a_candidate_where_deep_gemm_has_them(calls: list[str]) -> None:
    said: list[bool] = []
    sys.modules["deep_gemm"].__dict__["set_pdl"] = said.append
    launches = peer().launches(BLOCK, 9)
    (o, *_) = Weights(BLOCK, 9, 0, 3, "cpu").operands(9)
    for name in ("pdl", "plain"):
        launches[name](o)
    assert said == [True, False]


def test_deep_gemm_refuses_what_it_has_no_kernel_for(calls: list[str]) -> None:
    others = (
        Signature("bf16", "bf16", "bf16", 5, 128, 256),
        Signature("e4m3", "e4m3", "bf16", 5, 128, 256, "swiglu", scaling="block"),
    )
    assert all(peer().refuse(s) for s in others)
    assert peer().refuse(BLOCK) is None
    assert calls == []


def test_groups_are_padded_to_tiles() -> None:
    groups, rows = deep_gemm_grouped.padded_rows(torch.tensor([3, 3, 7, 7], dtype=torch.int32), 4)
    assert groups.tolist() == [0, 0, 0, -1, 2, 2, 2, 2]
    assert rows.tolist() == [0, 1, 2, 4, 5, 6, 7]


def entries(state: str = "ranked") -> list[Any]:
    candidates = tuple((m, ("f",)) for m in (8, 64, 90, 1024))
    return [SimpleNamespace(signature=s, state=state, candidates=candidates) for s in (MASKED, BLOCK)]


def test_cases_are_m_of_the_manifest_and_some_at_random_whatever_else_is_asked_for() -> None:
    every = bench_grouped.cases(entries(), [], "", 2, 1)
    assert [m for e, m in every if e.signature is BLOCK] == sorted(m for e, m in every if e.signature is BLOCK)
    assert {8, 64, 90, 1024} < {m for e, m in every if e.signature is BLOCK}
    assert len(every) == 12
    alone = bench_grouped.cases(entries(), ["e4m3 block masked"], "", 2, 1)
    assert [m for _, m in alone] == [m for e, m in every if e.signature is MASKED]
    assert len(bench_grouped.cases(entries(), [], "masked", 2, 1)) == len(alone)
    assert 90 not in [m for _, m in bench_grouped.cases(entries("tuned"), [], "", 0, 1)], "which tuning added"


def a_result(m: int, ours: float, **others: float) -> dict[str, Any]:
    us = {"ours": ours, **others}
    return {"kind": "e4m3 block", "signature": "s", "m": m, "us": us, "floor_us": 5.0, "errors": {"ours": 1e-3}}


def test_summary_compares_only_what_was_timed() -> None:
    results = [a_result(8, 10.0, deep_gemm=20.0), a_result(16, 10.0), a_result(600, 10.0, deep_gemm=5.0, torch=30.0)]
    found = {(f["over"], f["regime"]): f for f in bench_grouped.summarise(results)}
    assert found["deep_gemm", "M = 1..64"] == {
        **{"kind": "e4m3 block", "over": "deep_gemm", "regime": "M = 1..64", "cases": 1},
        **{"geomean": 2.0, "worst": 2.0},
    }
    assert found["deep_gemm", "all M"]["geomean"] == 1.0
    assert found["torch", "all M"]["cases"] == 1


def test_a_line_names_what_is_wrong() -> None:
    found = a_result(8, 10.0, torch=20.0) | {"errors": {"ours": 1e-3, "deep_gemm pdl": "PeerError: no nvcc"}}
    assert "2.00" in bench_grouped.line(found)
    assert bench_grouped.line(found).endswith("deep_gemm pdl: PeerError: no nvcc")


def test_the_manifest_has_what_others_compute() -> None:
    asked = manifest.loads((ROOT / "benchmarks" / "grouped.yaml").read_text())
    kinds = [bench_grouped.kind(use.signature) for use in asked.uses]
    assert {what: kinds.count(what) for what in kinds} == dict.fromkeys(
        ("bf16", "e4m3 row_column", "e4m3 block", "e4m3 block masked"), 8
    )
    assert {use.signature.epilogue for use in asked.uses} == {"none"}


def test_the_manifest_of_4_bits_has_the_same_in_16() -> None:
    asked = manifest.loads((ROOT / "benchmarks" / "grouped_w4.yaml").read_text())
    kinds = [bench_grouped.kind(use.signature) for use in asked.uses]
    assert {what: kinds.count(what) for what in kinds} == {"bf16 mxfp4_weight": 4, "bf16": 4}
    results = [
        {"kind": kind, "signature": use.signature.key(), "m": 32, "us": {"ours": 10.0 if kind != "bf16" else 25.0}}
        for kind, use in zip(kinds, asked.uses, strict=True)
    ]
    found = {(f["kind"], f["over"]): f for f in bench_grouped.summarise(results) if f["regime"] == "all M"}
    assert set(found) == {("bf16 mxfp4_weight", bench_grouped.OURS_IN_16_BITS)}
    assert found["bf16 mxfp4_weight", bench_grouped.OURS_IN_16_BITS]["geomean"] == 2.5
    assert found["bf16 mxfp4_weight", bench_grouped.OURS_IN_16_BITS]["cases"] == 4
