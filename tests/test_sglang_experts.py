"""What the plugin takes of the experts of a model in SGLang, and what it leaves; in modules shaped like SGLang's, on
the CPU. Libraries are those of `tests.test_vllm_experts`, whose launches write what the reference of tuning says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from runtime.moe.combine import Signature as Combine
from runtime.moe.permute import Signature as Permute
from runtime.plugin.log import warn_once
from runtime.torch import experts as torch_experts

from . import sglang_stand_in
from .sglang_experts_stand_in import Fp8MoEMethod, FusedMoE, OtherMoEMethod, UnquantizedFusedMoEMethod, made_by
from .sglang_stand_in import Server, Start
from .test_vllm_experts import EXPERTS, FIVE, FOUR, OF_FP8, SIGNATURES, TOP_K, K, N, _library, tokens
from .torch_stand_in import HIDDEN
from .vllm_experts_stand_in import wide

start = sglang_stand_in.start  # a fixture


@pytest.fixture
def serve(start: Start, tmp_path: Path) -> Any:
    """Starts schedulers whose archive has experts of these signatures."""

    def make(signatures: list[Any] = SIGNATURES, state: str = "tuned") -> Server:
        server = start()
        warn_once.cache_clear()
        torch_experts._has.cache_clear()
        server.lib = _library(tmp_path, signatures, state)
        return server

    return make


def layer_of(method: Any = None, top_k: int = TOP_K) -> FusedMoE:
    return FusedMoE(method or UnquantizedFusedMoEMethod(), (EXPERTS, N, K), top_k)


def wanted_of(layer: Any, x: Any, weights: Any, ids: Any) -> Any:
    """In float64."""
    w13, w2 = (
        wide(getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale_inv", None))
        for name in ("w13", "w2")
    )
    return made_by(x, w13, w2, ids, weights, layer.quant_method.runner.config)


def near(found: Any, wanted: Any, most: float = 1e-2) -> None:
    assert found.dtype == torch.bfloat16
    assert float((found.double() - wanted).norm()) < most * float(wanted.norm())


def test_experts_that_the_archive_has_take_four_launches(serve: Any) -> None:
    server, layer = serve(), layer_of()
    server.serve(layer)
    for count in (1, 9):
        given = tokens(count)
        near(layer(*given), wanted_of(layer, *given))
    assert server.lib.calls == 2 * FOUR
    assert layer.quant_method.runner.called == 0
    (line,) = server.lines
    assert "serves 1 of 1 expert layers (4 signatures preloaded, for 3 numbers of tokens planned)" in line


def test_experts_in_fp8_by_blocks_take_five(serve: Any) -> None:
    server, layer = serve(OF_FP8), layer_of(Fp8MoEMethod())
    server.serve(layer)
    given = tokens()
    near(layer(*given), wanted_of(layer, *given), 6e-2)
    assert server.lib.calls == FIVE
    assert layer.quant_method.runner.called == 0


def test_experts_of_other_ranks_add_nothing_and_a_factor_multiplies_what_the_rest_make(serve: Any) -> None:
    """SGLang takes ids of experts elsewhere to -1 before."""
    server, layer = serve(), layer_of(UnquantizedFusedMoEMethod(routed_scaling_factor=2.5))
    server.serve(layer)
    x, weights, ids = tokens()
    ids[0], ids[3, 1] = -1, -1
    found = layer(x, weights, ids)
    near(found, wanted_of(layer, x, weights, ids))
    assert not bool(found[0].any())


def test_router_weights_on_the_input_are_of_the_permutation(serve: Any) -> None:
    of_one = [Permute("bf16", EXPERTS, 1, K, weights="f32"), Combine("bf16", "bf16", 1, K, "none")]
    server, method = serve([*SIGNATURES, *of_one]), UnquantizedFusedMoEMethod(apply_router_weight_on_input=True)
    layer = layer_of(method, 1)
    server.serve(layer)
    x, weights, ids = (t[:, :1] if t.shape[1] == TOP_K else t for t in tokens())
    given = x, weights + 0.5, ids
    near(layer(*given), wanted_of(layer, *given))
    assert server.lib.calls == FOUR


@pytest.mark.parametrize("operation", sorted(set(FOUR)))
def test_a_launch_that_fails_is_sglangs_to_compute(serve: Any, operation: str) -> None:
    server, layer = serve(), layer_of()
    server.serve(layer)
    server.lib.lacking = operation
    for _ in range(2):
        given = tokens()
        near(layer(*given), wanted_of(layer, *given))
    assert layer.quant_method.runner.called == 2
    assert [line for line in server.lines if "computed by SGLang's kernels" in line] == server.lines[1:2]


def left(server: Server, layer: Any, **more: Any) -> str:
    """The line of a server that leaves this layer to SGLang, which computes it."""
    server.serve(layer, **more)
    layer(*tokens())
    assert layer.quant_method.runner.called == 1
    assert server.lib.calls == []
    (line,) = server.lines
    return line


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (OtherMoEMethod(), "OtherMoEMethod computes experts"),
        (UnquantizedFusedMoEMethod(activation="relu2"), "activation relu2"),
        (UnquantizedFusedMoEMethod(is_gated=False), "activation silu"),
        (UnquantizedFusedMoEMethod(gemm1_clamp_limit=7.0), "the gate has limits of its own"),
        (UnquantizedFusedMoEMethod(no_combine=True), "rows of experts are wanted apart"),
        (Fp8MoEMethod((64, 64)), "no scales of blocks of 128"),
        (Fp8MoEMethod(), "bf16_moe_permute_e6_top3_k32_block"),
    ],
)
def test_layers_that_no_launch_computes_are_left_and_named(serve: Any, method: Any, reason: str) -> None:
    assert reason in left(serve(), layer_of(method))


def test_experts_of_another_backend_are_left(serve: Any) -> None:
    server, layer = serve(), layer_of(UnquantizedFusedMoEMethod("deep_gemm"))
    server.serve(layer)
    assert layer.quant_method.runner.fused_func is None
    assert "SGLang computes them by deep_gemm" in server.lines[0]


def test_experts_that_a_method_computes_without_its_runner_are_left(serve: Any) -> None:
    method = UnquantizedFusedMoEMethod()
    method.use_flashinfer_cutlass = True
    assert "SGLang computes them by flashinfer_cutlass" in left(serve(), layer_of(method))


def test_kernels_that_were_never_run_are_left(serve: Any) -> None:
    assert "never run on a GPU; run: aot tune" in left(serve(state="ranked"), layer_of())


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"setting": {"cute_aot": {"archive": "model.aot", "experts": False}}}, "the setting leaves experts to it"),
        ({"enable_lora": True}, "--enable-lora computes them with adapters"),
        ({"enable_torch_compile": True}, "--enable-torch-compile traces them"),
        ({"enable_symm_mem": True}, "--enable-symm-mem wants what they make in memory of its own"),
    ],
)
def test_a_server_may_leave_all_experts(serve: Any, more: Any, reason: str) -> None:
    assert reason in left(serve(), layer_of(), **more)


def test_a_model_that_is_loaded_again_without_an_archive_is_sglangs(serve: Any) -> None:
    server, layer = serve(), layer_of()
    server.serve(layer)
    server.lib = serve([]).lib
    server.serve(layer)
    layer(*tokens())
    assert layer.quant_method.runner.called == 1


def test_linear_layers_are_served_beside_experts(serve: Any) -> None:
    server = serve()
    server.serve(server.linear(HIDDEN, HIDDEN), layer_of())
    assert "serves 1 of 1 linear layers and 1 of 1 expert layers" in server.lines[0]


@pytest.mark.parametrize(("in_all", "expected"), [(None, 20 * TOP_K), (EXPERTS, 20 * TOP_K), (4 * EXPERTS, 15)])
def test_functions_are_chosen_for_the_rows_that_a_rank_expects(serve: Any, in_all: int | None, expected: int) -> None:
    server = serve()
    layer = layer_of(UnquantizedFusedMoEMethod(num_experts=in_all))
    server.serve(layer)
    x, weights, ids = tokens(20)
    ids[::2] = -1  # experts of other ranks
    near(layer(x, weights, ids), wanted_of(layer, x, weights, ids))
    assert server.lib.chosen_for == [20, expected, expected, 20]
