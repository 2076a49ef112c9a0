"""vLLM's Marlin as a peer of the benchmarks of 4-bit weights: what it is given, and what the scripts say of it."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import bench_grouped
import bench_w4
import peers
import render_benchmarks
import report
from peers import marlin, marlin_grouped

from aot.tune import measure
from aot.tune.gemm.operands import Weights
from aot.tune.grouped_gemm.measures import Weights as GroupedWeights
from runtime.gemm.signature import Signature
from runtime.grouped_gemm import Signature as Grouped
from runtime.numbers.weights import FORMATS
from runtime.torch import prepare_weight

from .bench_cases import Library
from .vllm_marlin_stand_in import StandIn, missing

MXFP4 = Signature("bf16", "e2m1", "bf16", "f32", "none", 48, 192, scaling="mxfp4_weight")
INT4 = Signature("bf16", "u4", "bf16", "f32", "none", 80, 256, scaling="int4_weight")
EXPERTS = Grouped("bf16", "e2m1", "bf16", 5, 96, 192, scaling="mxfp4_weight")
SETTINGS = peers.Settings(Path("unused"), 1, "cpu")
US = {"ours": 10.0, "bf16": 24.0, "torch": 25.0, "marlin": 12.0}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn().install(monkeypatch)


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Operands on the CPU, and times from `US`; of each measurement who took part."""
    timed: list[list[str]] = []

    def time_interleaved(launches: Any, operands: Any, *_: Any) -> dict[str, Any]:
        timed.append(list(launches))
        for launch in launches.values():
            launch(operands[-1])
        return {name: measure.Timing(US[name], 0.01) for name in launches}

    monkeypatch.setattr(bench_w4, "Weights", lambda s, m, l2_bytes, seed: Weights(s, m, l2_bytes, seed, "cpu"))
    monkeypatch.setattr(measure, "time_interleaved", time_interleaved)
    return timed


class OfBoth(Library):
    """An archive that computes by the reference, with weights of 4 bits and without."""

    def gemm(self, a: Any, b: Any, *, out: Any, **more: Any) -> None:
        if more:
            super().gemm(a, b, out=out, **more)
        else:
            out.copy_(a.float() @ b.float().t())


def run(s: Signature = MXFP4, **peers: Any) -> dict[str, Any]:
    return bench_w4.run(OfBoth(s), peers, s, 5, 20000, 3)


@pytest.mark.parametrize("s", [MXFP4, INT4], ids=["mxfp4", "int4"])
def test_it_gets_what_weights_were_prepared_from(s: Signature) -> None:
    (o, *_) = Weights(s, 5, 0, 1, device="cpu").operands(5)
    packed, scales = marlin.checkpoint_of(FORMATS[s.scaling], o.b, o.extras["scale_b"])
    assert (packed.shape, len(scales)) == ((s.k // 8, s.n), s.k // FORMATS[s.scaling].group)
    if s is INT4:
        again = prepare_weight(packed, scales, "gptq")
    else:
        again = prepare_weight(packed.t().contiguous().view(torch.uint8), scales.t(), "mxfp4")
    for one, other in zip(again, (o.b, o.extras["scale_b"]), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("s", [MXFP4, INT4], ids=["mxfp4", "int4"])
def test_it_is_checked_as_ours_is_and_timed(s: Signature, vllm: StandIn, without_a_gpu: list[list[str]]) -> None:
    found = run(s, marlin=peers.load("marlin", SETTINGS))
    assert found["error"] < 3e-3
    assert found["marlin_error"] < 3e-3
    assert without_a_gpu == [["ours", "bf16", "torch", "marlin"]]
    assert {name: found[name] for name in ("us", "bf16_us", "torch_us", "marlin_us")} == {
        **{"us": 10.0, "bf16_us": 24.0, "torch_us": 25.0, "marlin_us": 12.0}
    }
    assert bench_w4.ratio(found, "marlin") == 1.2
    assert "   1.20" in bench_w4.line(found, ("bf16", "torch", "marlin"))


def test_weights_are_laid_out_once_and_before_anything_is_timed(
    vllm: StandIn, without_a_gpu: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = peers.load("marlin", SETTINGS)
    before = vllm.calls.count("repack")
    timed = measure.time_interleaved

    def then(*of: Any) -> Any:
        laid = vllm.calls.count("repack")
        found = timed(*of)
        assert vllm.calls.count("repack") == laid, "none while it is timed"
        return found

    monkeypatch.setattr(measure, "time_interleaved", then)
    run(marlin=peer)
    sets = len(Weights(MXFP4, 5, 20000, 5, device="cpu").b)
    assert sets > 1
    assert vllm.calls.count("repack") - before == 1 + sets


def test_laying_out_in_a_capture_is_refused(vllm: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    (launch,) = marlin.Marlin(SETTINGS).launches(MXFP4, 5).values()
    (o, *_) = Weights(MXFP4, 5, 0, 1, device="cpu").operands(5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(peers.PeerError, match="before a capture"):
        launch(o)


def test_what_is_wrong_is_not_timed(vllm: StandIn, without_a_gpu: list[list[str]]) -> None:
    peer = peers.load("marlin", SETTINGS)
    vllm.broken = True
    found = run(marlin=peer)
    assert "relative error" in found["marlin_error"]
    assert "marlin_us" not in found
    assert without_a_gpu == [["ours", "bf16", "torch"]]
    assert bench_w4.line(found, ("bf16", "torch", "marlin")).endswith(f"marlin: {found['marlin_error']}")
    assert [s for s in bench_w4.summarise([found]) if s["over"] == "marlin"] == []


@pytest.mark.parametrize("peer", [marlin.Marlin, marlin_grouped.GroupedMarlin])
def test_an_extension_that_runs_wrong_is_refused_when_it_is_opened(vllm: StandIn, peer: Any) -> None:
    vllm.broken = True
    with pytest.raises(peers.PeerMissing, match=r"Marlin of vLLM does not run here .*relative error"):
        peer(SETTINGS)


def test_an_extension_with_no_kernel_for_this_gpu_is_refused_when_it_is_opened(
    vllm: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_image(*_: Any, **__: Any) -> None:
        raise torch.AcceleratorError("CUDA error: no kernel image is available\nand more")

    monkeypatch.setattr(sys.modules["vllm._custom_ops"], "gptq_marlin_repack", no_image)
    with pytest.raises(peers.PeerMissing, match=r"no kernel image is available$"):
        marlin.Marlin(SETTINGS)


def test_an_extension_without_the_operator_is_refused(vllm: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace())
    with pytest.raises(peers.PeerMissing, match="registers no marlin_gemm"):
        peers.load("marlin", SETTINGS)


def test_a_peer_that_is_missing_ends_the_run_before_the_archive_is_opened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing(monkeypatch, ["vllm", "vllm._C_stable_libtorch"])
    monkeypatch.setattr(measure, "environment", lambda: {"l2_bytes": 0})
    monkeypatch.setattr(sys, "argv", ["bench_w4.py", "no such archive", "--peers", "marlin"])
    assert report.ends(bench_w4.main) == 2
    assert "vllm._C_stable_libtorch" in capsys.readouterr().err


def test_it_refuses_what_it_is_not_compared_for(vllm: StandIn) -> None:
    peer = marlin.Marlin(SETTINGS)
    assert peer.refuse(MXFP4) is None
    assert peer.refuse(Signature("bf16", "bf16", "bf16", "f32", "none", 64, 128)) is not None
    assert marlin_grouped.GroupedMarlin(SETTINGS).refuse(dataclasses.replace(EXPERTS, epilogue="swiglu")) is not None


def test_the_summary_has_each_other_of_its_own() -> None:
    results = [
        {"signature": MXFP4.key(), "m": m, "us": 10.0, "bf16_us": 20.0, "marlin_us": us}
        for m, us in ((1, 9.0), (16, 16.0), (32, 10.0))
    ]
    found = {(s["over"], *s["m"]): (s["cases"], s["mean"], s["worst"]) for s in bench_w4.summarise(results)}
    assert found == {
        ("bf16", 1, 16): (2, 2.0, 2.0),
        ("bf16", 17, 64): (1, 2.0, 2.0),
        ("marlin", 1, 16): (2, 1.2, 0.9),
        ("marlin", 17, 64): (1, 1.0, 1.0),
    }
    json.dumps(bench_w4.summarise(results))


# --- experts ---


def test_experts_are_right_by_the_check_of_tuning_in_blocks_of_any_size(vllm: StandIn) -> None:
    launches = marlin_grouped.GroupedMarlin(SETTINGS).launches(EXPERTS, 9)
    assert len(launches) == 5
    tried = {name: peers.written(launch) for name, launch in launches.items()}
    found = measure.check(EXPERTS, 9, GroupedWeights(EXPERTS, 9, 0, 3, "cpu"), tried)
    assert all(isinstance(error, float) and error < 3e-3 for error in found.values()), found
    assert {call for call in vllm.calls if call.startswith("moe")} == {f"moe {n}" for n in (8, 16, 32, 48, 64)}


def test_candidates_share_the_weights_that_are_laid_out(vllm: StandIn) -> None:
    launches = marlin_grouped.GroupedMarlin(SETTINGS).launches(EXPERTS, 9)
    (o, *_) = GroupedWeights(EXPERTS, 9, 0, 3, "cpu").operands(9)
    before = vllm.calls.count("repack")
    for launch in [*launches.values(), *launches.values()]:
        launch(o)
    assert vllm.calls.count("repack") - before == EXPERTS.groups


def test_a_peer_of_experts_is_missing_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ["deep_gemm", "vllm", "vllm.third_party.deep_gemm", "vllm._moe_C_stable_libtorch", "quack", "quack.cache"]
    missing(monkeypatch, absent)
    found, said = bench_grouped.open_peers(None, SETTINGS)
    assert found == {}
    assert all(state.startswith("absent (") for state in said.values())
    assert set(said) == {"deep_gemm", "marlin", "quack"}
    with pytest.raises(peers.PeerMissing, match=r"^marlin: "):
        bench_grouped.open_peers(["marlin"], SETTINGS)


# --- the page ---


def test_the_page_has_a_table_of_marlin(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = render_benchmarks.load("w4_h100")
    ours = render_benchmarks.load("w4_h200")
    timed = [r | {"us": 10.0, "marlin_us": 10.0 + r["m"] / 10, "marlin_error": 1e-3} for r in kept["results"]]
    wrong = {name: value for name, value in timed[0].items() if name != "marlin_us"} | {"marlin_error": "it is off"}
    files = {"w4_h100": kept | {"results": [wrong, *timed[1:]]}, "w4_h200": ours}
    monkeypatch.setattr(render_benchmarks, "load", files.__getitem__)
    found = render_benchmarks.weights()
    begin = next(i for i, line in enumerate(found) if line.startswith("| times Marlin, on an H100 | M = 1 |"))
    n, k = re.findall(r"_n(\d+)_k(\d+)_", wrong["signature"])[0]
    rows = found[begin + 2 : begin + 2 + len({r["signature"] for r in timed})]
    (first,) = [row for row in rows if f" {n} x {k} |" in row and row.startswith("| MXFP4")]
    assert [cell.strip() for cell in first.split("|")[2:-1]] == [
        "" if m == wrong["m"] else f"{1 + m / 100:.2f}" for m in sorted({r["m"] for r in timed})
    ]
    assert all(row.split("|")[3] == " 1.16 " for row in rows if row != first)
    assert any("Marlin is of vllm 0.25.0; wrong: 1." in line for line in found)
