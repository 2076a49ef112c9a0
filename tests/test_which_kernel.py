"""scripts/which_kernel.py without a GPU: what a kernel's name says, and which cases are looked at."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import random_cases
import torch
import which_kernel

from aot.tune.gemm.operands import Weights
from runtime.gemm.signature import Signature

SIGNATURES = [Signature("bf16", "bf16", "bf16", "f32", "none", n, 64) for n in (64, 128)]
LAYERS = [random_cases.Layer(s, (f"model:n{s.n}",), 8192) for s in SIGNATURES]


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (
            "nvjet_sm90_tst_128x152_64x6_2x1_v_bz_coopA_TNN",
            {"tile": "128x152", "tile_k": 64, "stages": 6, "cluster": "2x1", "split_k": False},
        ),
        (
            "nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT",
            {"tile": "64x8", "tile_k": 64, "stages": 16, "cluster": "4x1", "split_k": True},
        ),
        (
            "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x128x64_warpgroupsize1x1x1_kernel__5x_cublas",
            {"tile": "64x128", "tile_k": 64, "split_k": False},
        ),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", {}),
    ],
)
def test_a_name_says_tile_cluster_and_split(kernel: str, said: dict[str, Any]) -> None:
    assert which_kernel.parts(kernel) == said


def test_kernels_are_counted_for_each_launch_with_their_median() -> None:
    events = [("gemm", 5.0), ("reduce", 1.0), ("gemm", 7.0), ("reduce", 2.0), ("gemm", 60.0), ("gemm", 6.0)]
    assert which_kernel.kernels(events, 4) == [
        {"kernel": "gemm", "us": 6.5, "per_launch": 1.0},
        {"kernel": "reduce", "us": 1.5, "per_launch": 0.5},
    ]


def test_every_operand_set_is_launched_under_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    class Profile:
        def __init__(self, activities: Any) -> None:
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self) -> Profile:
            launched.clear()
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def events(self) -> list[Any]:
            took = SimpleNamespace(elapsed_us=lambda: 3.0)
            kinds = {"gemm": torch.autograd.DeviceType.CUDA, "cudaLaunchKernel": torch.autograd.DeviceType.CPU}
            return [SimpleNamespace(name=n, device_type=k, time_range=took) for _ in launched for n, k in kinds.items()]

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    operands = Weights(SIGNATURES[0], 1, 10_000, seed=0, device="cpu").operands(1)
    found = which_kernel.profile(lambda o: launched.append(o.b.data_ptr()), operands)
    assert found == [{"kernel": "gemm", "us": 3.0, "per_launch": 1.0}]
    assert set(launched) == {o.b.data_ptr() for o in operands}
    assert len(launched) >= 8


def a_result(n: int, m: int, us: float) -> dict[str, Any]:
    said = {"ours": {"us": us}, "torch": {"us": 9.0}}
    return {"signature": SIGNATURES[n].key(), "m": m, "contenders": said}


def test_cases_behind_are_the_worst_first_and_once() -> None:
    results = [a_result(0, 1, 9.1), a_result(1, 2, 10.0), a_result(0, 3, 9.6), a_result(0, 3, 12.0)]
    unserved = {"signature": SIGNATURES[0].key(), "m": 4, "contenders": {"ours": {"unserved": "no kernel"}}}
    found = which_kernel.behind({"results": [*results, unserved]}, 0.97, LAYERS)
    assert [(c.layer.signature.n, c.m) for c in found] == [(64, 3), (128, 2)]


def test_layers_are_named_as_in_results_or_by_their_key() -> None:
    found = which_kernel.named(["model:n128", SIGNATURES[0].key()], [1, 7], LAYERS)
    assert [(c.layer.signature.n, c.m) for c in found] == [(128, 1), (128, 7), (64, 1), (64, 7)]
    with pytest.raises(KeyError, match="model:o"):
        which_kernel.named(["model:o"], [1], LAYERS)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "one of the two"),
        (["model:q", "--behind", "missing.json"], "one of the two"),
        (["--behind", "missing.json"], "missing.json is no result file"),
        (["model:no-such-layer"], "no layer is called 'model:no-such-layer'"),
    ],
)
def test_what_is_not_there_is_one_line(
    arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["which_kernel.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        which_kernel.main()
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err
