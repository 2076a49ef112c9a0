"""DeepGEMM as a peer of the benchmarks: what it is given, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import bench_random
import peers
from peers import deep_gemm

from aot.tune.gemm.operands import OperandSet, Weights, reference
from runtime.gemm.signature import Signature

from . import bench_cases
from .bench_cases import BLOCK, case, run

without_a_gpu = bench_cases.without_a_gpu  # a fixture
pytestmark = pytest.mark.usefixtures("without_a_gpu")


@pytest.fixture
def fake_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The module, with a GEMM that computes by the reference and keeps what it is given."""
    calls: list[tuple[Any, ...]] = []

    def fp8_gemm_nt(a: Any, b: Any, d: Any, *, disable_ue8m0_cast: bool) -> None:
        assert disable_ue8m0_cast
        calls.append((a, b))
        d.copy_(reference(BLOCK, OperandSet(a[0], b[0], d, {"scale_a": a[1], "scale_b": b[1]})))

    module = ModuleType("deep_gemm")
    module.__dict__["fp8_gemm_nt"] = fp8_gemm_nt
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "")
    return calls


def test_deep_gemm_gets_scales_of_weights_without_padding(fake_deep_gemm: list[Any], tmp_path: Path) -> None:
    peer = peers.load("deep_gemm", peers.Settings(tmp_path, 1))
    said = run(case(BLOCK), peers={"deep_gemm": peer})["contenders"]["deep_gemm"]
    assert (said["us"], said["variant"]) == (11.0, "fp8_gemm_nt")
    assert said["error"] < 3e-3
    assert all(b[1].is_contiguous() and b[1].shape == (2, 3) for _, b in fake_deep_gemm)
    assert all(a[1].stride() == (1, 8) for a, _ in fake_deep_gemm)


def test_deep_gemm_lays_scales_out_once(fake_deep_gemm: list[Any]) -> None:
    (launch,) = deep_gemm.DeepGemm(peers.Settings(Path("unused"), 1)).launches(BLOCK, 5).values()
    operands = Weights(BLOCK, 5, 0, 1, device="cpu").operands(5)[0]
    assert not operands.extras["scale_b"].is_contiguous()
    launch(operands)
    launch(operands)
    assert fake_deep_gemm[0][1][1] is fake_deep_gemm[1][1][1]


def test_deep_gemm_refuses_what_it_has_no_kernel_for(fake_deep_gemm: list[Any]) -> None:
    peer = deep_gemm.DeepGemm(peers.Settings(Path("unused"), 1))
    said = run(case(), peers={"deep_gemm": peer})["contenders"]["deep_gemm"]
    assert said == {"unsupported": "its GEMMs of e4m3 take scales of blocks"}
    assert peer.refuse(BLOCK) is None
    assert peer.refuse(Signature("e4m3", "e4m3", "f16", "f32", "none", 256, 384, scaling="block")) is not None
    assert fake_deep_gemm == []


def test_a_failure_of_deep_gemm_is_its_own(fake_deep_gemm: list[Any]) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("nvcc is missing\nand more")

    sys.modules["deep_gemm"].__dict__["fp8_gemm_nt"] = broken
    peer = deep_gemm.DeepGemm(peers.Settings(Path("unused"), 1))
    said = run(case(BLOCK), peers={"deep_gemm": peer})["contenders"]
    assert said["deep_gemm"]["failed"] == "RuntimeError: nvcc is missing"
    assert said["ours"]["us"] == 10.0


def test_deep_gemm_that_is_not_installed_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deep_gemm", "vllm", "vllm.third_party.deep_gemm"):
        monkeypatch.setitem(sys.modules, name, None)
    found, said = bench_random.open_peers(SimpleNamespace(deep_gemm=True))  # type: ignore[arg-type]
    assert found == {}
    assert said["deep_gemm"].startswith("absent (")
    assert bench_random.open_peers(SimpleNamespace(deep_gemm=False)) == ({}, {})  # type: ignore[arg-type]
