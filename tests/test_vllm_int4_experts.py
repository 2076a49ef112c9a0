"""What the plugin takes of a model's experts with weights in int4, and what it leaves before vLLM lays them out."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from runtime.grouped_gemm import Signature as Grouped
from runtime.moe.combine import Signature as Combine
from runtime.moe.permute import Signature as Permute

from . import test_vllm_experts, vllm_stand_in
from .test_vllm_experts import EXPERTS, FOUR, GLOBALLY, TOP_K, close, kernel_of, wanted_of
from .test_vllm_mxfp4 import left
from .vllm_experts_stand_in import ROUTED
from .vllm_mxfp4_stand_in import INT4, NAMES, fill_int4, read_int4
from .vllm_stand_in import Server

start, serve = vllm_stand_in.start, test_vllm_experts.serve  # fixtures

N, K = 128, 256
AWQ, GPTQ, COMPRESSED = INT4
QUANTISED = {"quant": "int4"}
# Of a method, and what it is told, the scaling of its weights.
METHODS: list[tuple[str, dict[str, Any], str]] = [
    (AWQ, {}, "int4_zero_weight"),
    (GPTQ, {}, "int4_weight"),
    (COMPRESSED, {}, "int4_weight"),
    (COMPRESSED, {"symmetric": False}, "int4_zero_weight"),
    (COMPRESSED, {"actorder": "weight"}, "int4_weight"),
]


def signatures(scaling: str) -> list[Any]:
    return [
        Permute("bf16", EXPERTS, TOP_K, K),
        Permute("bf16", EXPERTS, TOP_K, K, GLOBALLY),
        Combine("bf16", "bf16", TOP_K, K),
        Grouped("bf16", "u4", "bf16", EXPERTS, 2 * N, K, "swiglu", scaling=scaling),
        Grouped("bf16", "u4", "bf16", EXPERTS, K, N, scaling=scaling),
    ]


def of_int4(server: Server, method: str, globally: int = 0, **words: Any) -> Any:
    made = getattr(server.modules[INT4[method]], method)(**words)
    layer = server.modules[ROUTED].RoutedExperts(made, (EXPERTS, N, K), TOP_K, globally)
    fill_int4(layer)
    return layer


def tokens(count: int = 9, of: int = EXPERTS) -> tuple[Any, Any, Any]:
    random = torch.Generator().manual_seed(count)
    x = torch.randn((count, K), generator=random).bfloat16()
    chosen = torch.rand((count, of), generator=random).topk(TOP_K).indices.int()
    return x, torch.rand((count, TOP_K), generator=random).softmax(-1), chosen


@pytest.mark.parametrize("globally", [0, GLOBALLY])
@pytest.mark.parametrize(("method", "words", "scaling"), METHODS)
def test_experts_in_int4_take_four_launches(
    serve: Any, method: str, words: dict[str, Any], scaling: str, globally: int
) -> None:
    server = serve(signatures(scaling))
    layer = of_int4(server, method, globally, **words)
    server.serve(layer, **QUANTISED)
    assert not layer.laid_out
    for count in (9, 20):
        given = tokens(count, of=globally or EXPERTS)
        close(layer(*given), wanted_of(layer, *given))
    assert server.lib.calls == 2 * FOUR
    assert kernel_of(layer).called == 0
    assert "serves 1 of 1 expert layers" in server.lines[0]


@pytest.mark.parametrize(("method", "words", "scaling"), METHODS)
def test_weights_are_prepared_in_their_own_memory(serve: Any, method: str, words: dict[str, Any], scaling: str) -> None:
    server = serve(signatures(scaling))
    layer = of_int4(server, method, **words)
    weights, scales, _ = NAMES[method]
    before = {name: getattr(layer, name).data_ptr() for of in ("w13", "w2") for name in (of + weights, of + scales)}
    server.serve(layer, **QUANTISED)
    prepared = kernel_of(layer).launches.operands().prepared
    assert [weight.b.data_ptr() for weight in prepared] == [before[of + weights] for of in ("w13", "w2")]
    if scaling == "int4_weight":  # with zero points they need more
        assert [weight.scale_b.data_ptr() for weight in prepared] == [before[of + scales] for of in ("w13", "w2")]
    assert (layer.w13_weight.shape, layer.w2_weight.shape) == ((EXPERTS, 2 * N, K // 2), (EXPERTS, K, N // 2))


@pytest.mark.parametrize(("method", "words", "scaling"), METHODS[:3])
def test_weights_that_are_loaded_again_are_prepared_again(
    serve: Any, method: str, words: dict[str, Any], scaling: str
) -> None:
    server = serve(signatures(scaling))
    layer, given = of_int4(server, method, **words), tokens()
    checkpoint = {name: weight.clone() for name, weight in layer.named_parameters()}
    worker = server.serve(layer, **QUANTISED)
    for name, weight in checkpoint.items():
        getattr(layer, name).data.copy_(weight)  # as a loader writes
    worker.load_model()
    close(layer(*given), wanted_of(layer, *given))
    assert server.lib.calls == FOUR


@pytest.mark.parametrize(
    ("method", "words", "change", "reason"),
    [
        (AWQ, {"zero_point": False}, None, "weights of AWQ have no zero points"),
        (GPTQ, {"desc_act": True}, None, "act-order"),
        (GPTQ, {"is_sym": False}, None, "have zero points"),
        (COMPRESSED, {"actorder": "group"}, None, "act-order"),
        (AWQ, {"in_dtype": torch.float16}, None, "tokens are torch.float16"),
        (AWQ, {"is_lora_enabled": True}, None, "of LoRA"),
        (AWQ, {}, lambda x: x.w2_scales.data[-1, -1, -1].fill_(5000.0), "a scale of int4 is 4992.0"),
        (GPTQ, {}, lambda x: delattr(x, "top_k"), "AttributeError"),
    ],
)
def test_layers_that_no_launch_computes_are_left_as_they_were_loaded(
    serve: Any, method: str, words: dict[str, Any], change: Any, reason: str
) -> None:
    server = serve(signatures("int4_zero_weight") + signatures("int4_weight")[3:])
    layer = of_int4(server, method, **words)
    if change is not None:
        change(layer)
    layer.numbers = {of: read_int4(layer.quant_method, layer, of) for of in ("w13", "w2")}
    assert reason in left(server, layer, tokens())


@pytest.mark.parametrize("place", [0, 2, 3, 4])
def test_experts_without_one_of_the_four_are_left(serve: Any, place: int) -> None:
    all_of = signatures("int4_zero_weight")
    server = serve([s for i, s in enumerate(all_of) if i != place])
    assert f"no kernel for {all_of[place].key()}" in left(server, of_int4(server, AWQ), tokens())


def test_weights_that_are_not_of_their_layout_are_left(serve: Any) -> None:
    """As vLLM has them for kernels of FlashInfer's, in rows of N."""
    server = serve(signatures("int4_weight"))
    layer = of_int4(server, COMPRESSED)
    turned = layer.w13_weight_packed.data.transpose(1, 2).contiguous()
    layer.w13_weight_packed = torch.nn.Parameter(turned, requires_grad=False)
    layer.quant_method.__class__.__mro__[1].process_weights_after_loading = lambda self, layer: None
    server.serve(layer, **QUANTISED)
    assert "of gate and up, a tensor is torch.int32 (6, 256, 32), not torch.int32 (6, 32, 256)" in server.lines[0]
