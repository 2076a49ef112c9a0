"""Layers in fp8 in vLLM whose archive quantises few tokens itself; on the CPU."""

from __future__ import annotations

import types
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

import runtime
from runtime.plugin import scaled as operator

from . import vllm_stand_in
from .recording_driver import signature
from .test_vllm_fp8 import SERVED, made, scaled, worker_of
from .torch_stand_in import OnCpu
from .vllm_stand_in import E4M3, K, N, Start, fp8_layer, quant_key

start = vllm_stand_in.start  # a fixture

MOST = 4  # tokens that kernels quantise
SCALINGS = {"block": "block_weight", "row_column": "column_weight"}
FEW = [signature(N, K, b="e4m3", scaling=scaling, overlap="weights") for scaling in SCALINGS.values()]
SHAPES = {"block": (N // 128, K // 128), "row_column": (N, 1)}


@pytest.fixture
def begin(start: Start, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a server whose library computes both products, and notes which and for how many tokens."""

    def gemm(
        self: Any, a: Any, b: Any, *, scale_b: Any, scale_a: Any = None, dtype: Any = None, overlap: str = "serial"
    ) -> Any:
        self.calls.append((a.shape[0], a.dtype == E4M3, overlap))
        return ((a.float() if scale_a is None else scaled(a, scale_a)) @ scaled(b, scale_b).T).to(dtype)

    monkeypatch.setattr(OnCpu, "gemm", gemm)
    return lambda signatures=(*SERVED, *FEW), **more: start(list(signatures), tuned_to=MOST, **more)


def layer_of(scaling: str, scale_ub: Any = None) -> Any:
    torch.manual_seed(1)
    weight = torch.randn(N, K).to(E4M3)
    scale = torch.rand(SHAPES[scaling]) + 0.5
    stored = weight if scaling == "block" else weight.t()
    return types.SimpleNamespace(weight=stored, weight_scale=scale, scale_ub=scale_ub, exact=scaled(weight, scale))


def close(found: Any, layer: Any, x: Any) -> bool:
    """As near as activations in e4m3 allow."""
    wanted = x.float() @ layer.exact.T
    return found.shape == wanted.shape and bool((found.float() - wanted).norm() <= 0.05 * wanted.norm())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_few_tokens_come_to_kernels_as_they_are(begin: Any, scaling: str) -> None:
    server = begin()
    worker = worker_of(server)
    gemm, layer = made(server, fp8_layer(scaling), scaling), layer_of(scaling)
    worker.load_model()
    for m in (1, MOST, MOST + 1, 40):
        x = torch.randn(1, m, K).bfloat16()
        assert close(gemm.apply_weights(layer, x), layer, x)
    quantised = [(m, m > MOST, "serial" if m > MOST else "weights") for m in (1, MOST, MOST + 1, 40)]
    assert server.lib.calls == quantised
    assert "serves 1 of 1 fp8 layers (2 signatures preloaded" in server.lines[0]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_archives_without_such_kernels_have_all_tokens_quantised(begin: Any, scaling: str) -> None:
    server = begin(SERVED)
    worker_of(server)
    gemm, layer = made(server, fp8_layer(scaling), scaling), layer_of(scaling)
    x = torch.randn(2, K).bfloat16()
    assert close(gemm.apply_weights(layer, x), layer, x)
    assert server.lib.calls == [(2, True, "serial")]
    assert gemm.quant_fp8.calls == 1


@pytest.mark.parametrize("change", [{"out_dtype": torch.float16}, {"input_dtype": torch.float16}])
def test_only_activations_of_the_results_type_are_taken_as_they_are(begin: Any, change: Any) -> None:
    server = begin([*SERVED, *FEW, signature(N, K, dtype="e4m3", d="f16", scaling="block")])
    worker_of(server)
    assert made(server, fp8_layer("block", **change), "block").way is None


def test_activations_with_a_bound_or_static_scales_are_quantised_by_vllm(begin: Any) -> None:
    server = begin()
    worker_of(server)
    gemm, layer = made(server, fp8_layer("row_column"), "row_column"), layer_of("row_column", torch.ones(1))
    x = torch.randn(2, K).bfloat16()
    assert close(gemm.apply_weights(layer, x), layer, x)
    assert server.lib.calls == [(2, True, "serial")]
    static = quant_key((-1, -1), static=True)
    assert made(server, fp8_layer(activation_quant_key=static), "tensor").way is None


def test_few_tokens_that_no_kernel_takes_are_quantised(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    operator._say_once.cache_clear()
    server = begin()
    worker_of(server)
    gemm, layer, computed = made(server, fp8_layer("block"), "block"), layer_of("block"), OnCpu.gemm

    def fail(self: Any, a: Any, b: Any, **more: Any) -> Any:
        if "scale_a" not in more:
            raise runtime.KernelMiss("none", "no kernel runs")
        return computed(self, a, b, **more)

    monkeypatch.setattr(OnCpu, "gemm", fail)
    x = torch.randn(2, K).bfloat16()
    assert close(gemm.apply_weights(layer, x), layer, x)
    assert server.lib.calls == [(2, True, "serial")]
    assert f"an fp8 GEMM of few tokens of N {N} and K {K} was computed of quantised tokens: KernelMiss, no kernel" in server.lines[0]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_compiled_code_calls_one_operator_with_any_m(begin: Any, scaling: str) -> None:
    server = begin()
    worker_of(server)
    gemm, layer, graphs = made(server, fp8_layer(scaling), scaling), layer_of(scaling), []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: gemm.apply_weights(layer, x) + 1, fullgraph=True, backend=backend)
    for m in (3, 7):
        x = torch.randn(m, K).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        assert close(compiled(x) - 1, layer, x)
    assert len(graphs) == 1
    assert [m for m, *_ in server.lib.calls] == [3, 7]


def test_operator_passes_torchs_own_checks(begin: Any) -> None:
    server = begin()
    worker_of(server)
    gemm, layer = made(server, fp8_layer("row_column"), "row_column"), layer_of("row_column")
    x, b = torch.randn(3, K).bfloat16(), layer.exact.bfloat16()  # torch compares copies, and copies no e4m3 on the CPU
    given = (gemm.number, x, b, torch.ones(N, 1), torch.bfloat16, *gemm.way)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator.QUANTISING, given, test_utils=tests)
