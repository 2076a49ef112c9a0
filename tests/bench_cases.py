"""Cases of scripts/bench_random.py that run without a GPU: an archive that computes on the CPU, and made-up times."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import bench_random
import random_cases
import torch

from aot.tune import measure
from aot.tune.gemm.operands import OperandSet, Weights, reference
from runtime.gemm.signature import Signature

PLAIN = Signature("bf16", "bf16", "bf16", "f32", "none", 64, 128)
FUSED = Signature("bf16", "bf16", "bf16", "f32", "bias+relu", 64, 128)
BLOCK = Signature("e4m3", "e4m3", "bf16", "f32", "none", 256, 384, scaling="block")
US = {"ours": 10.0, "torch": 12.0, "torch again": 12.6, "against": 8.0, "on_slower": 9.0, "deep_gemm": 11.0}
GOOD, SLOW, WRONG = "a.good", "a.slow", "a.wrong"
SCREENED = {GOOD: 9.0, SLOW: 20.0, WRONG: 5.0}


def case(signature: Signature = PLAIN, m: int = 5) -> random_cases.Case:
    return random_cases.Case(random_cases.Layer(signature, ("model:layer",), 8192), m)


class Library:
    """An archive that computes on the CPU, by the reference."""

    digest = "d" * 64

    def __init__(self, signature: Signature = PLAIN, factor: float = 1.0, error: Exception | None = None) -> None:
        self.signature, self.factor, self.error = signature, factor, error
        self.functions = dict.fromkeys(SCREENED)
        self.forgotten = 0

    def gemm(self, a: Any, b: Any, *, out: Any, **more: Any) -> None:
        if self.error:
            raise self.error
        words = {k: v for k, v in more.items() if isinstance(v, torch.Tensor)}
        out.copy_(reference(self.signature, OperandSet(a, b, out, words)) * self.factor)

    def gemm_of(self, o: OperandSet) -> None:
        self.gemm(o.a, o.b, out=o.d)

    def entry(self, signature: Signature) -> Any:
        return SimpleNamespace(best=lambda m: f"best at {m}")

    def forget_captures(self) -> None:
        self.forgotten += 1


@pytest.fixture
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands on the CPU and times from `US`; launches run once, as a capture would."""

    def weights(signature: Signature, m: int, l2_bytes: int, seed: int) -> Weights:
        return Weights(signature, m, l2_bytes, seed, device="cpu")

    def time_interleaved(launches: Any, operands: Any, *_: Any) -> dict[str, Any]:
        for launch in launches.values():
            launch(operands[0])
        us = {name: US.get(name) or SCREENED[name.removeprefix("candidate: ")] for name in launches}
        return {name: measure.Timing(found, 0.01) for name, found in us.items()}

    monkeypatch.setattr(bench_random, "Weights", weights)
    monkeypatch.setattr(measure, "time_interleaved", time_interleaved)
    monkeypatch.setattr(bench_random, "baseline", lambda signature, example: ("torch.mm", lambda o: None))


def run(found: random_cases.Case, others: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    libraries = {"ours": Library(found.layer.signature), **(others or {})}
    with_defaults = {"peers": {}, "candidates": None, "l2_bytes": 0, "repeats": 7} | more
    result: dict[str, Any] = bench_random.Bench(libraries, **with_defaults).run(found)
    return result


def a_result(m: int, us: float = 10.0, torch_us: float = 12.0, gpu: str = "g1", **more: Any) -> dict[str, Any]:
    said = {"ours": {"us": us, "spread": 0.0, "error": 1e-3}, "torch": {"us": torch_us, "spread": 0.0}}
    found = {"layers": "model:layer", "signature": PLAIN.key(), "m": m, "group": "16 bits", "noise": 1.0, "gpu_id": gpu}
    return found | {"contenders": said} | more
