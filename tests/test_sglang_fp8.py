"""SGLang's fp8 layers: what the plugin takes, computes and leaves; on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import runtime
from runtime.plugin.log import warn_once
from runtime.sglang import hooks

from . import sglang_stand_in
from .recording_driver import signature
from .sglang_stand_in import E4M3, FP8, LAYERS, QUANTIZATION, Server, Start, scaled
from .torch_stand_in import Graphs, OnCpu, near, tensors

start = sglang_stand_in.start  # a fixture

N, K = 256, 384
SCALINGS = ("tensor", "row_column", "block")
SERVED = [signature(N, K, dtype="e4m3", d="bf16", scaling=scaling) for scaling in SCALINGS]
# As layers are scaled: by blocks, with a scale for each column and activations quantised in three ways, or with one.
LAYERS_OF: dict[str, dict[str, Any]] = {
    "block": {"scaling": "block"},
    "columns": {"scaling": "row_column"},
    "columns, compressed": {"scaling": "row_column", "compressed": True},
    "columns, static": {"scaling": "row_column", "static": True},
    "tensor": {"scaling": "tensor", "static": True},
    "tensor, compressed": {"scaling": "tensor", "static": True, "compressed": True},
}
SCALES_OF_A = {"block": (5, 3), "row_column": (5, 1), "tensor": ()}


@pytest.fixture
def begin(start: Start, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a scheduler whose library computes scaled products."""

    def gemm(self: Any, a: Any, b: Any, *, scale_a: Any, scale_b: Any, dtype: Any = None, out: Any = None) -> Any:
        self.calls.append((*b.shape, tuple(scale_a.shape)))
        assert a.dtype == b.dtype == E4M3
        assert scale_a.dtype == scale_b.dtype == torch.float32
        d = scaled(a, scale_a) @ scaled(b, scale_b).T
        return d.to(dtype) if out is None else out.copy_(d)

    monkeypatch.setattr(OnCpu, "gemm", gemm)
    return lambda signatures=SERVED, **more: start(signatures, **more)


def linear(server: Server, n: int = N, k: int = K, **more: Any) -> Any:
    """What makes a layer, which chooses its functions there."""
    return lambda: server.modules[f"{QUANTIZATION}.fp8"].Fp8Linear(n, k, **more)


def exact(layer: Any, x: Any) -> Any:
    """x (M, K) by the weight with its scales, in float32; where activations are not quantised."""
    scales = layer.weight_scale if layer.weight_scale_inv is None else layer.weight_scale_inv
    weight = layer.weight.t() if layer.weight_scale_inv is None else layer.weight
    return x.float() @ scaled(weight, scales).T


def close(found: Any, wanted: Any) -> bool:
    """As near as activations in e4m3 allow."""
    return bool((found.float() - wanted.float()).norm() <= 0.05 * wanted.float().norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", LAYERS_OF)
def test_layers_that_the_archive_has_are_served(begin: Any, kind: str, bias: bool) -> None:
    server = begin()
    more = LAYERS_OF[kind]
    (layer,) = server.serve(linear(server, **more, bias=bias)).model
    (x,) = tensors((5, K))
    found = layer(x[None])
    assert found.shape == (1, 5, N)
    assert found.dtype == torch.bfloat16
    assert close(found[0], exact(layer, x) + (layer.bias.float() if bias else 0))
    assert server.lib.calls == [(N, K, SCALES_OF_A[more["scaling"]])]
    assert "serves 1 of 1 fp8 layers (1 signatures preloaded, for 3 numbers of tokens planned)" in server.lines[0]


@pytest.mark.parametrize("kind", LAYERS_OF)
def test_compiled_code_calls_the_operator_with_any_m(begin: Any, kind: str) -> None:
    server = begin()
    (layer,) = server.serve(linear(server, **LAYERS_OF[kind])).model
    called = compiled_with_any_m(layer, (5, 7))
    assert sum("cute_aot.scaled_gemm" in target for target in called) == 1


def compiled_with_any_m(layer: Any, ms: tuple[int, ...]) -> list[str]:
    """What the only graph of a layer calls, which computes what the layer does at each of `ms`."""
    graphs = Graphs()
    compiled = torch.compile(lambda x: layer(x) + 1, fullgraph=True, backend=graphs)
    for m in ms:
        (x,) = tensors((m, K))
        torch._dynamo.mark_dynamic(x, 0)
        with torch.inference_mode():
            assert near(compiled(x), layer(x) + 1)
    return graphs.called()


@pytest.mark.parametrize("hook", hooks.FP8_BLOCKS, ids=lambda hook: hook.method)
def test_every_gemm_with_block_scales_gives_way(begin: Any, hook: hooks.Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    server = begin()
    monkeypatch.setattr(server.modules[f"{QUANTIZATION}.fp8"].Fp8LinearMethod, "chosen", hook.method)
    (layer,) = server.serve(linear(server, scaling="block")).model
    layer(*tensors((5, K)))
    assert server.lib.calls == [(N, K, (5, 3))]


def change(layer: Any, **more: Any) -> Any:
    def make() -> Any:
        made = layer()
        for name, value in more.items():
            setattr(made, name, value(getattr(made, name)))
        return made

    return make


def parameter(value: Any) -> Any:
    return nn.Parameter(value, requires_grad=False)


@pytest.mark.parametrize(
    ("scaling", "changes", "reason"),
    [
        ("tensor", {}, "no kernel has one scale for the weight and one for each token"),
        ("block", {"n": 512}, "no kernel for e4m3_e4m3_bf16_f32_none_n512_k384_block"),
        ("block", {"weight_scale_inv": lambda s: parameter(s.to(torch.uint8))}, "scales of torch.uint8"),
        ("block", {"weight_scale_inv": lambda s: parameter(s[:1])}, "scales of shape (1, 3) are not one for each 128"),
        ("row_column", {"weight_scale": lambda s: parameter(s[:7])}, "shape (7, 1) are neither one nor one for each"),
        ("row_column", {"weight": lambda w: parameter(w.contiguous())}, "the weight has strides"),
        ("row_column", {"weight_scale": lambda s: None}, "the weight has scales of None"),
    ],
)
def test_layers_that_no_kernel_computes_are_left_and_named(
    begin: Any, scaling: str, changes: dict[str, Any], reason: str
) -> None:
    server, changes = begin(), dict(changes)
    layer = linear(server, scaling=scaling, n=changes.pop("n", N))
    server.serve(change(layer, **changes))
    assert server.lib.calls == []
    assert "serves 0 of 1 fp8 layers; SGLang computes the rest: 1 x " in server.lines[0]
    assert reason in server.lines[0]


def test_a_layer_that_is_left_is_computed_by_sglang(begin: Any) -> None:
    server = begin()
    (layer,) = server.serve(linear(server, scaling="tensor")).model
    (x,) = tensors((5, K))
    assert torch.equal(layer(x), exact(layer, x).bfloat16())
    assert server.lib.calls == []


@pytest.mark.parametrize("scaling", ["row_column", "block"])
def test_methods_that_are_not_known_are_left(begin: Any, scaling: str) -> None:
    server = begin()
    unknown = server.modules[f"{QUANTIZATION}.fp8"].UnknownMethod
    server.serve(change(linear(server, scaling=scaling), quant_method=lambda _: unknown()))
    assert "UnknownMethod computes fp8 layers in a way that the plugin does not know" in server.lines[0]


def test_a_scheme_in_the_layer_is_asked_before_its_method(begin: Any) -> None:
    server = begin()
    fp8 = server.modules[f"{QUANTIZATION}.fp8"]
    made = linear(server, scaling="row_column")

    def layer() -> Any:
        found = made()
        found.quant_method, found.scheme = fp8.UnknownMethod(), fp8.Fp8LinearMethod()
        return found

    server.serve(layer)
    assert "serves 1 of 1 fp8 layers" in server.lines[0]


def test_a_gemm_with_block_scales_for_other_gpus_is_left(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = begin()
    monkeypatch.setattr(server.modules[f"{QUANTIZATION}.fp8"].Fp8LinearMethod, "chosen", "another_linear")
    server.serve(linear(server, scaling="block"))
    assert "chose a GEMM with block scales that the plugin does not know" in server.lines[0]


def test_a_backend_that_was_asked_for_is_kept(begin: Any) -> None:
    server = begin()
    server.serve(
        linear(server, scaling="block"), linear(server, scaling="row_column"), fp8_gemm_runner_backend="triton"
    )
    assert "serves 1 of 2 fp8 layers" in server.lines[0]
    assert "1 x --fp8-gemm-backend asks for triton" in server.lines[0]


def test_kernels_that_cannot_be_loaded_leave_the_layer(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise runtime.DeviceError("the driver\nrefused")

    server = begin()
    monkeypatch.setattr(OnCpu, "preload", fail)
    (layer,) = server.serve(linear(server, scaling="row_column")).model
    layer(*tensors((5, K)))
    assert server.lib.calls == []
    assert "1 x the driver refused" in server.lines[0]


def test_where_the_report_fails_fp8_layers_are_left_too(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    preload, asked = OnCpu.preload, []

    def fail_at_last(*args: Any, **more: Any) -> Any:
        asked.append(args)
        if len(asked) > 1:
            raise runtime.DeviceError("out of memory")
        return preload(*args, **more)

    server = begin()
    monkeypatch.setattr(OnCpu, "preload", fail_at_last)
    (layer,) = server.serve(linear(server, scaling="row_column")).model
    layer(*tensors((5, K)))
    assert server.lib.calls == []
    assert "serves nothing, SGLang's kernels do: out of memory" in server.lines[0]


@pytest.mark.parametrize("error", [runtime.KernelMiss("none", "no kernel runs"), runtime.LayoutError("odd", "strides")])
@pytest.mark.parametrize("kind", LAYERS_OF)
def test_a_call_that_no_kernel_takes_is_computed_by_torch(
    begin: Any, monkeypatch: pytest.MonkeyPatch, kind: str, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    warn_once.cache_clear()
    server = begin()
    (layer,) = server.serve(linear(server, **LAYERS_OF[kind])).model
    monkeypatch.setattr(OnCpu, "gemm", fail)
    (x,) = tensors((5, K))
    for _ in range(2):
        assert close(layer(x), exact(layer, x))
    assert f"N {N} and K {K} was computed by torch, slowly: {type(error).__name__}" in server.lines[-1]
    assert len(server.lines) == 2


@pytest.mark.parametrize("kind", ["row_column", "block"])
def test_activations_of_another_type_are_sglangs(begin: Any, kind: str) -> None:
    server = begin()
    (layer,) = server.serve(linear(server, scaling=kind)).model
    x = torch.randn(5, K)
    assert torch.equal(layer(x), exact(layer, x))
    assert server.lib.calls == []


def test_scales_that_come_with_activations_are_sglangs(begin: Any) -> None:
    server = begin()
    (layer,) = server.serve(linear(server, scaling="block")).model
    function = getattr(server.modules[FP8], hooks.FP8_BLOCKS[0].method)
    function(*tensors((5, K)), layer.weight, [128, 128], layer.weight_scale_inv, input_scale=torch.ones(5, 3))
    assert server.lib.calls == []


# --- DeepGEMM's entry point, which models call themselves ---


def deep_gemm(server: Server, layer: Any, dtype: Any = torch.bfloat16) -> Any:
    (x,), out = tensors((5, K)), torch.zeros(5, N, dtype=dtype)
    a, scales = server.modules[FP8].sglang_per_token_group_quant_fp8(x, 128)
    call = server.modules[f"{LAYERS}.deep_gemm_wrapper"].gemm_nt_f8f8bf16  # as the package passes it on
    assert call((a, scales), (layer.weight, layer.weight_scale_inv), out) is None
    return out, exact(layer, x)


def test_deep_gemm_gives_way_where_the_archive_has_the_weight(begin: Any) -> None:
    server = begin()
    served, left = server.serve(linear(server, scaling="block"), linear(server, scaling="block", k=128)).model
    assert close(*deep_gemm(server, served))
    assert server.lib.calls == [(N, K, (5, 3))]
    left.weight, left.weight_scale_inv = parameter(served.weight.clone()), served.weight_scale_inv
    assert bool((deep_gemm(server, left)[0] == 7).all())  # what the stand-in for DeepGEMM writes
    assert bool((deep_gemm(server, served, torch.float32)[0] == 7).all())
    assert len(server.lib.calls) == 1


def test_deep_gemm_computes_what_no_kernel_takes(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise runtime.KernelMiss("none", "no kernel runs")

    server = begin()
    (layer,) = server.serve(linear(server, scaling="block")).model
    monkeypatch.setattr(OnCpu, "gemm", fail)
    assert bool((deep_gemm(server, layer)[0] == 7).all())
