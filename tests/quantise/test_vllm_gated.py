"""MLPs of vLLM's in fp8: of few tokens one kernel computes gates and activation, in a compiled graph; on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import runtime
from aot.tune.quantise.measures import activated
from runtime.plugin.log import warn_once

from .. import vllm_stand_in
from ..recording_driver import signature
from ..rmsnorm.test_vllm_fp8 import compiled
from ..test_vllm_fp8 import made
from ..test_vllm_fp8_few import MOST, SCALINGS, layer_of
from ..vllm_stand_in import LAYERS, MINE, K, Server, fp8_layer
from . import test_vllm
from .test_vllm import Down, Mlp, OfRows, each, expected

start, serve = vllm_stand_in.start, test_vllm.serve  # fixtures

HIDDEN, GATES = 256, 2 * K
MOST_GATED = 24  # tokens that kernels of quantised tokens compute the activation for, behind what quantises
PLAIN = [signature(GATES, HIDDEN, dtype="e4m3", d="bf16", scaling=scaling) for scaling in SCALINGS]
OF_FEW = [signature(GATES, HIDDEN, b="e4m3", scaling=s, overlap="weights") for s in SCALINGS.values()]
GATED = [of | {"epilogue": "swiglu"} for of in OF_FEW]
GATED_BEHIND = [of | {"epilogue": "swiglu", "overlap": "weights"} for of in PLAIN]
GATED_MORE = [of | {"epilogue": "swiglu"} for of in PLAIN]


class WithGates(OfRows):
    """Computes the activation in the place of an epilogue, unless it is `lacking` that."""

    lacking = False

    def gemm(self, a: Any, b: Any, *, epilogue: str = "none", out: Any = None, **more: Any) -> Any:
        if epilogue == "none":
            return super().gemm(a, b, out=out, **more)
        if self.lacking:
            raise runtime.KernelMiss("none", "no kernel runs")
        more.setdefault("dtype", torch.bfloat16)
        found = activated(super().gemm(a, b, **more), epilogue)
        self.calls[-1] = ("gated", a.shape[0], more.get("overlap", "serial"))  # type: ignore[assignment]
        return found if out is None else out.copy_(found)


def loaded(server: Server, scaling: str) -> tuple[Mlp, Callable[..., Any]]:
    """An MLP of a model that the server loads, and the same compiled as the server does."""
    mlp = Mlp(server.modules[f"{LAYERS}.activation"].SiluAndMul())
    config = server.config(MINE, quant=object())
    worker = server._worker(config, nn.ModuleList([mlp]))
    of_gates = made(server, fp8_layer(scaling, GATES, HIDDEN), scaling)
    mlp.gate_up_proj = Down(of_gates, layer_of(scaling, n=GATES, k=HIDDEN))
    mlp.down_proj = Down(made(server, fp8_layer(scaling), scaling), layer_of(scaling))
    worker.load_model()
    return mlp, compiled(mlp, config.compilation_config.inductor_compile_config)


def near(found: Any, mlp: Mlp, x: Any) -> bool:
    """As near as tokens allow that e4m3 held twice."""
    act = expected((x.float() @ mlp.gate_up_proj.layer.exact.T).bfloat16())
    wanted = act.float() @ mlp.down_proj.layer.exact.T
    return bool((found.float() - wanted).norm() <= 0.1 * wanted.norm())


@each
def test_few_tokens_have_one_kernel_for_gates_and_activation(serve: Callable[..., Server], scaling: str) -> None:
    server = serve(more=[*PLAIN, *OF_FEW, *GATED], of=WithGates)
    mlp, run = loaded(server, scaling)
    for m in (MOST + 1, MOST, 1, 40):
        server.lib.calls.clear()
        x = torch.randn(m, HIDDEN).bfloat16() / HIDDEN**0.5
        assert near(run(x), mlp, x)
        if m <= MOST:
            assert server.lib.calls == [("gated", m, "weights"), ("gemm", m, "none")]
        else:
            assert server.lib.calls == [("gemm", m, "scaled"), ("swiglu", m, scaling), ("gemm", m, "scaled")]
    assert "serves 1 of 1 quantising activations and 2 of 2 fp8 layers (7 signatures preloaded" in server.lines[0]


@each
@pytest.mark.parametrize("more", [True, False])
def test_more_tokens_have_gates_and_activation_in_one_kernel_and_are_quantised(
    serve: Callable[..., Server], scaling: str, more: bool
) -> None:
    """Up to `MOST_GATED` by a kernel that begins behind what quantises; beyond where that was tuned."""
    gated = [*GATED, *GATED_BEHIND, *(GATED_MORE if more else ())]
    server = serve(more=[*PLAIN, *OF_FEW, *gated], of=WithGates, most=MOST_GATED)
    mlp, run = loaded(server, scaling)
    for m in (MOST_GATED, MOST_GATED + 1, MOST):
        server.lib.calls.clear()
        x = torch.randn(m, HIDDEN).bfloat16() / HIDDEN**0.5
        assert near(run(x), mlp, x)
        if m == MOST:
            of_gates, quantised = [("gated", m, "weights")], []
        elif m > MOST_GATED and not more:
            of_gates, quantised = [("gemm", m, "scaled")], [("swiglu", m, scaling)]
        else:
            early = "weights" if m <= MOST_GATED else "serial"
            of_gates, quantised = [("gated", m, early)], [("none", m, scaling)]
        assert server.lib.calls == [*of_gates, *quantised, ("gemm", m, "none" if m == MOST else "scaled")]


@pytest.mark.parametrize("case", ["not tuned", "read by others", "outside a graph"])
def test_others_have_the_servers_activation(serve: Callable[..., Server], case: str) -> None:
    server = serve(more=[*PLAIN, *OF_FEW, *(GATED if case != "not tuned" else ())], of=WithGates)
    mlp, run = loaded(server, "block")
    if case == "outside a graph":
        run = mlp
    elif case == "read by others":
        mlp.act_fn = nn.Sequential(Doubled(), mlp.act_fn)
    x = torch.randn(MOST, HIDDEN).bfloat16() / HIDDEN**0.5
    run(x)
    assert [name for name, *_ in server.lib.calls] == ["gemm", "gemm"]


class Doubled(nn.Module):
    def forward(self, x: Any) -> Any:
        return 2 * x


def test_what_the_archive_refuses_takes_two_kernels(serve: Callable[..., Server]) -> None:
    warn_once.cache_clear()
    server = serve(more=[*PLAIN, *OF_FEW, *GATED], of=WithGates)
    mlp, run = loaded(server, "block")
    server.lib.lacking = True
    x = torch.randn(MOST, HIDDEN).bfloat16() / HIDDEN**0.5
    assert near(run(x), mlp, x)
    assert [name for name, *_ in server.lib.calls] == ["gemm", "gemm"]
    said = f"an fp8 GEMM of few tokens of N {GATES} and K {HIDDEN} with swiglu took two kernels: KernelMiss"
    assert any(said in line for line in server.lines)
