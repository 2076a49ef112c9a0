"""The int4 GEMMs that the plugin puts before vLLM's own: what they take, compute and leave; on the CPU."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import runtime
from runtime.plugin.log import warn_once
from runtime.torch.weights import PreparedWeight, widened
from runtime.vllm import hooks

from . import vllm_stand_in
from .recording_driver import signature
from .test_w4 import packed
from .torch_stand_in import Graphs, OnCpu, near
from .vllm_stand_in import FP8, MINE, K, N, Server, Start

start = vllm_stand_in.start  # a fixture

ZERO, SYMMETRIC = "int4_zero_weight", "int4_weight"


def of(scaling: str, epilogue: str = "none") -> dict[str, Any]:
    return signature(N, K, dtype="bf16", b="u4", d="bf16", scaling=scaling, epilogue=epilogue)


@dataclasses.dataclass(frozen=True)
class ScalarType:
    """As vLLM has it."""

    bias: int
    size_bits: int = 4
    signed: bool = False

    def is_integer(self) -> bool:
        return True

    def is_signed(self) -> bool:
        return self.signed

    def __str__(self) -> str:
        return f"uint{self.size_bits}b{self.bias}"


def described(scaling: str = ZERO, **more: Any) -> Any:
    """A layer as vLLM describes it."""
    words = {
        "full_weight_shape": (K, 2 * N),
        "partition_weight_shape": (K, N),
        "weight_type": ScalarType(0 if scaling == ZERO else 8),
        "act_type": torch.bfloat16,
        "group_size": 128,
        "zero_points": scaling == ZERO,
        "has_g_idx": False,
        "out_type": None,
    }
    return types.SimpleNamespace(**words | more)


class Parameter(nn.Parameter):
    """vLLM's: it knows which of its axes is which."""

    def __new__(cls, data: Any, **axes: int) -> Any:
        made = super().__new__(cls, data, requires_grad=False)
        vars(made).update(axes)
        return made


def layer_of(form: str, scaling: str, seed: int = 0) -> tuple[Any, Any]:
    """A layer as it was loaded, in rows of N ("compressed-tensors") or of K ("awq", "gptq"), and its numbers."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (N, K), generator=generator)
    points = torch.randint(0, 16, (N, K // 128), generator=generator)
    scales = (torch.rand((N, K // 128), generator=generator) * 0.02 + 0.001).bfloat16()
    layer = nn.Module()
    q, zeros = packed(codes, 8).int(), packed(points.t(), 8).int().t().contiguous()
    of_rows = {"input_dim": 1, "output_dim": 0}
    if form == "compressed-tensors":
        layer.q, layer.s = Parameter(q, packed_dim=1, **of_rows), Parameter(scales, **of_rows)
    else:
        turned = {"input_dim": 0, "output_dim": 1}
        layer.q = Parameter(q.t().contiguous(), packed_dim=0, **turned)
        layer.s = Parameter(scales.t().contiguous(), **turned)
    layer.z = Parameter(zeros, packed_dim=0, **of_rows)
    below = points if scaling == ZERO else torch.full_like(points, 8)
    numbers = (codes - below.repeat_interleave(128, 1)).float() * scales.float().repeat_interleave(128, 1)
    return layer, numbers.bfloat16().float()


@pytest.fixture
def begin(start: Start, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a server whose library computes such products."""

    def gemm(self: Any, a: Any, b: Any, *, scale_b: Any, bias: Any = None, out: Any = None) -> Any:
        assert (a.dtype, b.dtype, b.shape, scale_b.dtype) == (torch.bfloat16, torch.uint4, (N, K // 2), torch.bfloat16)
        self.calls.append((*b.shape, "none" if bias is None else "bias"))
        found = a.float() @ widened(PreparedWeight(b, scale_b)).float().T
        found = (found if bias is None else found + bias.float()).bfloat16()
        return found if out is None else out.copy_(found)

    monkeypatch.setattr(OnCpu, "gemm", gemm)
    return lambda signatures, **more: start(signatures, **more)


def classes(server: Server, platform: str = "CUDA") -> list[Any]:
    found = server.modules[FP8]._POSSIBLE_KERNELS
    return next(each for p, each in found.items() if p.name == platform)


def worker_of(server: Server) -> Any:
    return server._worker(server.config(MINE, quant=object()), nn.ModuleList())


def made(server: Server, config: Any, layer: Any) -> Any:
    """What vLLM makes of the first class of its list for a layer, whose weights are then in place."""
    first = classes(server)[0]
    assert first.get_min_capability() <= 80
    assert first.can_implement(config) == (True, None)
    kernel = first(config, w_q_param_name="q", w_s_param_name="s", w_zp_param_name="z", w_gidx_param_name="g")
    kernel.process_weights_after_loading(layer)
    return kernel


@pytest.mark.parametrize("scaling", [ZERO, SYMMETRIC])
@pytest.mark.parametrize("form", ["compressed-tensors", "awq"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("epilogues", [("none",), ("bias",), ("none", "bias")])
def test_int4_layers_that_the_archive_has_are_served_with_a_bias_and_without(
    begin: Any, form: str, scaling: str, with_bias: bool, epilogues: tuple[str, ...]
) -> None:
    server = begin([of(scaling, epilogue) for epilogue in epilogues])
    worker = worker_of(server)
    layer, numbers = layer_of(form, scaling)
    kernel = made(server, described(scaling), layer)
    worker.load_model()
    x, bias = torch.randn(2, 5, K).bfloat16(), torch.randn(N).bfloat16() if with_bias else None
    found = kernel.apply_weights(layer, x, bias)
    assert (found.shape, found.dtype) == ((2, 5, N), torch.bfloat16)
    assert near(found, x.float() @ numbers.T + (bias.float() if bias is not None else 0.0))
    added = "bias" in epilogues and (with_bias or "none" not in epilogues)
    assert server.lib.calls == [(N, K // 2, "bias" if added else "none")]
    assert "serves 1 of 1 int4 layers" in server.lines[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"partition_weight_shape": (K, 2 * N)}, "no kernel for bf16_u4_bf16_f32_none_n512_k384_int4_zero_weight"),
        ({"act_type": torch.float16}, "activations of torch.float16 are not bf16"),
        ({"out_type": torch.float16}, "are not bf16"),
        ({"weight_type": ScalarType(0, 8)}, "weights of uint8b0 with zero points are not int4"),
        ({"weight_type": ScalarType(0, signed=True)}, "are not int4"),
        ({"weight_type": ScalarType(8)}, "weights of uint4b8 with zero points are not int4"),
        ({"zero_points": False}, "weights of uint4b0 are not int4"),
        ({"group_size": 64}, "64 weights along K share a scale, not 128"),
        ({"has_g_idx": True}, "act-order"),
        ({"partition_weight_shape": None}, "TypeError"),
    ],
)
def test_layers_that_no_kernel_computes_are_left_and_named(begin: Any, change: Any, reason: str) -> None:
    server = begin([of(ZERO)])
    worker = worker_of(server)
    can, why = classes(server)[0].can_implement(described(**change))
    assert not can
    assert reason in why
    worker.load_model()
    assert "serves 0 of 1 int4 layers; vLLM computes the rest: 1 x " in server.lines[0]
    assert reason in server.lines[0]


def test_kernels_that_were_never_run_are_left(begin: Any) -> None:
    server = begin([of(ZERO)], state="ranked")
    worker_of(server)
    assert "never run on a GPU" in classes(server)[0].can_implement(described())[1]


def test_a_call_that_no_kernel_takes_is_computed_by_torch(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise runtime.KernelMiss("none", "no kernel runs")

    warn_once.cache_clear()
    server = begin([of(ZERO)])
    worker_of(server)
    layer, numbers = layer_of("awq", ZERO)
    kernel = made(server, described(), layer)
    monkeypatch.setattr(OnCpu, "gemm", fail)
    x = torch.randn(5, K).bfloat16()
    for _ in range(2):
        assert near(kernel.apply_weights(layer, x), x.float() @ numbers.T)
    (line,) = server.lines
    assert f"an int4 GEMM of N {N} and K {K} was computed by torch, slowly: KernelMiss, no kernel runs" in line


@pytest.mark.parametrize("epilogues", [("none",), ("bias",)])
def test_compiled_code_calls_the_operator_with_any_m(begin: Any, epilogues: tuple[str, ...]) -> None:
    server = begin([of(ZERO, epilogue) for epilogue in epilogues])
    worker_of(server)
    layer, numbers = layer_of("awq", ZERO)
    kernel, graphs = made(server, described(), layer), Graphs()

    compiled = torch.compile(lambda x: kernel.apply_weights(layer, x) + 1, fullgraph=True, backend=graphs)
    for m in (5, 7):
        x = torch.randn(m, K).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        assert near(compiled(x), x.float() @ numbers.T + 1)
    assert len(graphs) == 1


@pytest.mark.parametrize("epilogues", [("none",), ("bias",)])
def test_inductors_code_calls_what_the_operator_calls(begin: Any, epilogues: tuple[str, ...]) -> None:
    server = begin([of(ZERO, epilogue) for epilogue in epilogues])
    worker_of(server)
    layer, numbers = layer_of("awq", ZERO)
    kernel = made(server, described(), layer)
    x = torch.randn(5, K).bfloat16()
    with torch._inductor.config.patch(fx_graph_cache=False):
        step = torch.compile(lambda x: kernel.apply_weights(layer, x) + 1, fullgraph=True)
        found, (code,) = run_and_get_code(step, x)
    assert "torch.ops.cute_aot" not in code
    assert "import direct as cute_aot_packed_gemm" in code
    assert near(found, x.float() @ numbers.T + 1)


def test_operator_passes_torchs_own_checks(begin: Any) -> None:
    server = begin([of(ZERO)])
    worker_of(server)
    layer, _ = layer_of("awq", ZERO)
    kernel = made(server, described(), layer)
    given = kernel.number, torch.randn(5, K).bfloat16(), layer.q.data, layer.s.data, torch.randn(N).bfloat16()
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.cute_aot.packed_gemm.default, given, test_utils=tests)


def test_the_list_is_touched_once(begin: Any) -> None:
    server = begin([of(ZERO)])
    worker_of(server)
    worker_of(server)
    assert (len(classes(server)), len(classes(server, "ROCM"))) == (2, 1)


def test_a_class_of_vllms_that_differs_is_named_and_nothing_is_served(begin: Any) -> None:
    server = begin([of(ZERO)])
    base = server.modules[hooks.FILLED_INT4[0].module].MPLinearKernel
    base.apply_weights = lambda self, layer, x: None
    worker_of(server)
    assert "apply_weights has the parameters self, layer, x, not self, layer, x, bias" in server.lines[0]
    assert len(classes(server)) == 1
