"""The fp8 GEMMs that the plugin puts before vLLM's own: what they take, compute and leave; on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
import torch

import runtime
from runtime.plugin.log import warn_once
from runtime.plugin.scaled_products import widened
from runtime.vllm import hooks

from . import vllm_stand_in
from .recording_driver import signature
from .torch_stand_in import Graphs, OnCpu, near
from .vllm_stand_in import E4M3, GROUP, GROUPS, MINE, TENSOR, TOKEN, K, N, Server, Start, fp8_layer, quant_key

start = vllm_stand_in.start  # a fixture

SERVED = [signature(N, K, dtype="e4m3", d="bf16", scaling=scaling) for scaling in GROUPS]


def scaled(x: Any, scales: Any) -> Any:
    """x in float32, times the scale of each element's group, one element's after another's."""
    rows, columns = (torch.arange(extent) for extent in x.shape)
    matrix = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    row = torch.zeros_like(rows) if matrix.shape[0] == 1 else rows // (x.shape[0] // matrix.shape[0])
    column = torch.zeros_like(columns) if matrix.shape[1] == 1 else columns // 128
    return x.float() * matrix[row][:, column]


@pytest.fixture
def begin(start: Start, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a server whose library computes scaled products."""

    def gemm(self: Any, a: Any, b: Any, *, scale_a: Any, scale_b: Any, dtype: Any) -> Any:
        self.calls.append((*b.shape, (tuple(scale_a.shape), tuple(scale_b.shape))))
        assert scale_a.dtype == scale_b.dtype == torch.float32
        return (scaled(a, scale_a) @ scaled(b, scale_b).T).to(dtype)

    monkeypatch.setattr(OnCpu, "gemm", gemm)
    return lambda signatures=SERVED, **more: start(signatures, **more)


def lists(server: Server, platform: str = "CUDA") -> list[list[Any]]:
    module = server.modules["vllm.model_executor.kernels.linear"]
    every = [getattr(module, name) for name in hooks.FP8_LISTS]
    return [next(found for p, found in each.items() if p.name == platform) for each in every]


def made(server: Server, config: Any, scaling: str) -> Any:
    """What vLLM makes of the first class of a list, as it would for this layer."""
    first = lists(server)[scaling == "block"][0]
    assert first.is_supported(90) == (True, None)
    assert first.can_implement(config) == (True, None)
    return first(config) if scaling == "block" else first(config, ["weight"])


def worker_of(server: Server, **more: Any) -> Any:
    """A worker whose engine is quantised, and whose model is still to be made."""
    config = server.config(MINE, quant=more.pop("quant", object()), **more)
    return server._worker(config, torch.nn.ModuleList())


def operands(scaling: str, m: int = 5) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(m)
    a, b = (torch.randn(rows, K).to(E4M3) for rows in (m, N))
    shapes: dict[str, Any] = {
        "tensor": ((), (1,)),
        "row_column": ((m, 1), (N, 1)),
        "block": ((m, K // 128), (N // 128, K // 128)),
    }
    scale_a, scale_b = (torch.rand(shape) + 0.5 for shape in shapes[scaling])
    return a, b, scale_a, scale_b


def computed(gemm: Any, scaling: str, a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any = None) -> Any:
    if scaling == "block":
        return gemm.apply_block_scaled_mm(a, b, scale_a, scale_b)
    more = {"As": scale_a, "Bs": scale_b, "bias": bias, "output_shape": [1, a.shape[0], N]}
    return gemm.apply_scaled_mm(A=a, B=b.t(), out_dtype=torch.bfloat16, **more)


@pytest.mark.parametrize("scaling", GROUPS)
def test_scaled_products_that_the_archive_has_are_served(begin: Any, scaling: str) -> None:
    server = begin()
    worker = worker_of(server)
    gemm = made(server, fp8_layer(scaling), scaling)
    worker.load_model()
    a, b, scale_a, scale_b = operands(scaling)
    bias = None if scaling == "block" else torch.randn(N).bfloat16()
    found = computed(gemm, scaling, a, b, scale_a, scale_b, bias)
    assert found.shape == ((5, N) if scaling == "block" else (1, 5, N))
    assert found.dtype == torch.bfloat16
    reference = scaled(a, scale_a) @ scaled(b, scale_b).T
    assert near(found.reshape(5, N), reference if bias is None else reference + bias.float())
    assert server.lib.calls == [(N, K, (tuple(scale_a.shape), tuple(scale_b.shape)))]
    assert "serves 1 of 1 fp8 layers (1 signatures preloaded, for 3 numbers of tokens planned)" in server.lines[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"n": 512}, "no kernel for e4m3_e4m3_bf16_f32_none_n512_k384_tensor"),
        ({"out_dtype": torch.float16}, "no kernel for e4m3_e4m3_f16"),
        ({"out_dtype": None, "input_dtype": torch.float16}, "no kernel for e4m3_e4m3_f16"),
        ({"activation_quant_key": quant_key(TOKEN)}, "no kernel has one scale for (1, -1) of activations and (-1, -1)"),
        ({"scaling": "block", "activation_quant_key": quant_key(GROUP, static=True)}, "static scales by blocks"),
        ({"activation_quant_key": quant_key(TENSOR, dtype=torch.int8)}, "activations of torch.int8"),
        ({"weight_quant_key": quant_key(TENSOR, scale=torch.uint8)}, "with scales of torch.uint8"),
        ({"weight_quant_key": quant_key(TENSOR, symmetric=False)}, "weights have zero points"),
        ({"weight_quant_key": quant_key(TENSOR, scale2=1)}, "or scales of scales"),
        ({"weight_shape": None}, "TypeError"),
    ],
)
def test_layers_that_no_kernel_computes_are_left_and_named(begin: Any, change: Any, reason: str) -> None:
    server = begin()
    worker = worker_of(server)
    config = fp8_layer(**change)
    can, why = lists(server)["scaling" in change][0].can_implement(config)
    assert not can
    assert reason in why
    worker.load_model()
    assert "serves 0 of 1 fp8 layers; vLLM computes the rest: 1 x " in server.lines[0]
    assert reason in server.lines[0]


def test_kernels_that_were_never_run_are_left(begin: Any) -> None:
    server = begin(state="ranked")
    worker_of(server)
    assert "never run on a GPU" in lists(server)[0][0].can_implement(fp8_layer())[1]


def test_kernels_that_cannot_be_loaded_are_left(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise runtime.DeviceError("the driver\nrefused")

    server = begin()
    worker_of(server)
    monkeypatch.setattr(OnCpu, "preload", fail)
    assert lists(server)[0][0].can_implement(fp8_layer()) == (False, "the driver refused")


def test_kernels_are_loaded_once_when_a_layer_is_asked_for(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    preload, asked = OnCpu.preload, []

    def counted(*args: Any, **more: Any) -> Any:
        asked.append(args)
        return preload(*args, **more)

    monkeypatch.setattr(OnCpu, "preload", counted)
    server = begin()
    worker_of(server)
    assert server.lib.stats().kernels_loaded == 0
    for _ in range(3):
        made(server, fp8_layer(), "tensor")
    assert server.lib.stats().kernels_loaded == len(asked) == 1


@pytest.mark.parametrize("scaling", GROUPS)
@pytest.mark.parametrize("error", [runtime.KernelMiss("none", "no kernel runs"), runtime.LayoutError("odd", "strides")])
def test_a_call_that_no_kernel_takes_is_computed_by_torch(
    begin: Any, monkeypatch: pytest.MonkeyPatch, scaling: str, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    warn_once.cache_clear()
    server = begin()
    worker_of(server)
    gemm = made(server, fp8_layer(scaling), scaling)
    monkeypatch.setattr(OnCpu, "gemm", fail)
    a, b, scale_a, scale_b = operands(scaling)
    for _ in range(2):
        found = computed(gemm, scaling, a, b, scale_a, scale_b)
        assert near(found.reshape(5, N), scaled(a, scale_a) @ scaled(b, scale_b).T)
    (line,) = server.lines
    assert f"N {N} and K {K} was computed by torch, slowly: {type(error).__name__}, {error.reason}" in line  # type: ignore[attr-defined]


def test_blocks_at_the_edges_may_be_short() -> None:
    x = torch.ones(200, 300)
    found = widened(x, torch.arange(6.0).view(2, 3))
    assert (found[127, 127], found[128, 128], found[199, 299]) == (0, 4, 5)
    assert widened(x[:100], torch.arange(3.0).view(1, 3))[99].tolist() == [0] * 128 + [1] * 128 + [2] * 44


def test_exponents_as_scales_are_widened(begin: Any) -> None:
    server = begin()
    worker_of(server)
    gemm = made(server, fp8_layer("block"), "block")
    a, b, scale_a, _ = operands("block")
    scale_b = torch.full((N // 128, K // 128), 2.0)
    found = gemm.apply_block_scaled_mm(a, b, scale_a, scale_b.to(torch.float8_e8m0fnu))
    assert near(found, scaled(a, scale_a) @ scaled(b, scale_b).T)


def test_operator_passes_torchs_own_checks(begin: Any) -> None:
    server = begin()
    worker_of(server)
    number = made(server, fp8_layer("row_column"), "row_column").number
    scaled_gemm = torch.ops.cute_aot.scaled_gemm.default
    a, b, *scales = operands("row_column")
    a, b = a.bfloat16(), b.bfloat16()  # the checks compare copies, which torch cannot do with e4m3 on the CPU
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(scaled_gemm, (number, a, b, *scales, torch.bfloat16), test_utils=tests)


@pytest.mark.parametrize("scaling", GROUPS)
def test_compiled_code_calls_the_operator_with_any_m(begin: Any, scaling: str) -> None:
    server = begin()
    worker_of(server)
    gemm, graphs = made(server, fp8_layer(scaling), scaling), Graphs()

    def step(a: Any, scale_a: Any) -> Any:
        d = gemm.apply_block_scaled_mm(a, b, scale_a, scale_b) if scaling == "block" else None
        if d is None:
            more = {"As": scale_a, "Bs": scale_b, "bias": None, "output_shape": [*a.shape[:-1], N]}
            d = gemm.apply_scaled_mm(A=a, B=b.t(), out_dtype=torch.bfloat16, **more)
        return d + 1

    compiled = torch.compile(step, fullgraph=True, backend=graphs)
    for m in (5, 7):
        a, b, scale_a, scale_b = operands(scaling, m)
        torch._dynamo.mark_dynamic(a, 0)
        if scaling != "tensor":
            torch._dynamo.mark_dynamic(scale_a, 0)
        assert near(compiled(a, scale_a), scaled(a, scale_a) @ scaled(b, scale_b).T + 1)
    assert len(graphs) == 1


def test_activations_with_one_static_scale_are_taken_quantised(begin: Any) -> None:
    server = begin()
    worker_of(server)
    static = quant_key(TENSOR, static=True)
    assert made(server, fp8_layer(activation_quant_key=static), "tensor").input_quant_key() is static
    assert made(server, fp8_layer(), "tensor").input_quant_key() is None


def test_lists_are_touched_once_and_only_where_a_model_is_quantised(begin: Any) -> None:
    server = begin()
    worker_of(server, quant=None)
    assert [len(each) for each in lists(server)] == [1, 1]
    worker_of(server)
    worker_of(server)
    assert [len(each) for each in lists(server)] == [2, 2]
    assert [len(each) for each in lists(server, "ROCM")] == [1, 1]


def test_an_engine_without_an_archive_gets_none_of_it(begin: Any) -> None:
    server = begin()
    worker_of(server)
    server._worker(server.config({}, quant=object()), torch.nn.ModuleList())
    assert lists(server)[0][0].can_implement(fp8_layer()) == (False, "serves nothing")


def test_fp8_layers_are_in_the_key_also_where_the_others_were_left(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise runtime.DeviceError("no memory is left")

    server = begin()
    worker = worker_of(server)
    stock = worker.vllm_config.compute_hash()
    gemms = [made(server, fp8_layer(scaling), scaling) for scaling in ("tensor", "block")]
    both = worker.vllm_config.compute_hash()
    monkeypatch.setattr(OnCpu, "preload", fail)
    worker.load_model()
    assert "no memory is left" in server.lines[0]
    assert worker.vllm_config.compute_hash() == both != stock
    del gemms[1:]
    assert worker.vllm_config.compute_hash() not in (both, stock)


def test_classes_of_vllms_that_differ_are_named_and_nothing_is_served(begin: Any) -> None:
    server = begin()
    block = server.modules[hooks.FILLED[-1].module].Fp8BlockScaledMMLinearKernel
    block.apply_block_scaled_mm = lambda self, A, B: None
    worker_of(server)
    assert f"{hooks.FILLED[-1]} has the parameters self, A, B, not" in server.lines[0]
    assert [len(each) for each in lists(server)] == [1, 1]
