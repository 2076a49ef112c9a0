"""What the plugin takes of a model's experts with weights in MXFP4, and what it leaves before vLLM lays them out."""

from __future__ import annotations

import types
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from runtime import KernelMiss
from runtime.grouped_gemm import Signature as Grouped
from runtime.moe.combine import Signature as Combine
from runtime.moe.permute import Signature as Permute

from . import test_vllm_experts, vllm_stand_in
from .test_vllm_experts import EXPERTS, FOUR, GATE_OF_GPT_OSS, GLOBALLY, TOP_K, Both, close, kernel_of, wanted_of
from .vllm_experts_stand_in import ROUTED, TRITON
from .vllm_mxfp4_stand_in import MXFP4, ORACLE, fill
from .vllm_stand_in import HIDDEN, Server

start, serve = vllm_stand_in.start, test_vllm_experts.serve  # fixtures

N, K = 64, 128
OF_MXFP4: list[Any] = [
    Permute("bf16", EXPERTS, TOP_K, K),
    Permute("bf16", EXPERTS, TOP_K, K, GLOBALLY),
    Combine("bf16", "bf16", TOP_K, K),
    Grouped("bf16", "e2m1", "bf16", EXPERTS, 2 * N, K, f"bias+{GATE_OF_GPT_OSS}", scaling="mxfp4_weight"),
    Grouped("bf16", "e2m1", "bf16", EXPERTS, K, N, "bias", scaling="mxfp4_weight"),
]
OF_SILU = [
    *OF_MXFP4[:3],
    Grouped("bf16", "e2m1", "bf16", EXPERTS, 2 * N, K, "swiglu", scaling="mxfp4_weight"),
    Grouped("bf16", "e2m1", "bf16", EXPERTS, K, N, scaling="mxfp4_weight"),
]
QUANTISED = {"quant": "mxfp4"}


def of_mxfp4(server: Server, globally: int = 0, method: str = "GptOssMxfp4MoEMethod", **moe: Any) -> Any:
    """A layer as GPT-OSS has them, or with SiLU and without biases."""
    gpt_oss = method.startswith("GptOss")
    made = getattr(server.modules[MXFP4], method)(**{"has_bias": gpt_oss} | moe)
    layer = server.modules[ROUTED].RoutedExperts(made, (EXPERTS, N, K), TOP_K, globally)
    if gpt_oss:
        layer.activation = type(layer.activation).SWIGLUOAI
    fill(layer)
    return layer


def tokens(count: int = 9, of: int = EXPERTS) -> tuple[Any, Any, Any]:
    random = torch.Generator().manual_seed(count)
    x = torch.randn((count, K), generator=random).bfloat16()
    chosen = torch.rand((count, of), generator=random).topk(TOP_K).indices.int()
    return x, torch.rand((count, TOP_K), generator=random).softmax(-1), chosen


# --- what is taken ---


@pytest.mark.parametrize("globally", [0, GLOBALLY])
def test_experts_of_gpt_oss_take_four_launches(serve: Any, globally: int) -> None:
    server = serve(OF_MXFP4)
    layer = of_mxfp4(server, globally)
    server.serve(layer, **QUANTISED)
    for count in (9, 20):
        given = tokens(count, of=globally or EXPERTS)
        close(layer(*given), wanted_of(layer, *given))
    assert server.lib.calls == 2 * FOUR
    assert kernel_of(layer).called == 0
    assert isinstance(kernel_of(layer), server.modules[TRITON].TritonExperts)
    (line,) = server.lines
    planned = 0 if globally else 3  # of experts elsewhere a call alone knows how many rows operands have
    assert f"serves 1 of 1 expert layers (4 signatures preloaded, for {planned} numbers of tokens planned)" in line


def test_experts_with_silu_and_no_biases_are_taken_too(serve: Any) -> None:
    server = serve(OF_SILU)
    layer = of_mxfp4(server, method="Mxfp4MoEMethod")
    server.serve(layer, **QUANTISED)
    given = tokens()
    close(layer(*given), wanted_of(layer, *given))
    assert server.lib.calls == FOUR


def test_weights_are_prepared_in_their_own_memory_and_not_laid_out(serve: Any) -> None:
    server = serve(OF_MXFP4)
    layer = of_mxfp4(server)
    names = [f"{name}_weight{of}" for name in ("w13", "w2") for of in ("", "_scale")]
    before = {name: (getattr(layer, name).data_ptr(), getattr(layer, name).clone()) for name in names}
    server.serve(layer, **QUANTISED)
    assert not layer.laid_out
    read = kernel_of(layer).launches.operands().prepared
    assert [of.data_ptr() for weight in read for of in weight] == [pointer for pointer, _ in before.values()]
    for name, (pointer, checkpoint) in before.items():
        assert getattr(layer, name).data_ptr() == pointer
        assert getattr(layer, name).shape == checkpoint.shape
        assert not torch.equal(getattr(layer, name), checkpoint)


def test_weights_that_are_loaded_again_are_prepared_again(serve: Any) -> None:
    server = serve(OF_MXFP4)
    layer, given = of_mxfp4(server), tokens()
    checkpoint = {name: weight.clone() for name, weight in layer.named_parameters()}
    worker = server.serve(layer, **QUANTISED)
    checkpoint["w13_weight"] ^= 8  # the signs of every other column
    layer.numbers["w13"][..., ::2] *= -1
    for name, weight in layer.named_parameters():
        weight.data.copy_(checkpoint[name])  # as a loader writes
    worker.load_model()
    close(layer(*given), wanted_of(layer, *given))
    assert server.lib.calls == FOUR


def test_weights_that_are_loaded_again_are_vllms_where_no_launch_computes_them_any_more(serve: Any) -> None:
    server = serve(OF_MXFP4)
    layer, given = of_mxfp4(server), tokens()
    checkpoint = {name: weight.clone() for name, weight in layer.named_parameters()}
    worker = server.serve(layer, **QUANTISED)
    for name, weight in layer.named_parameters():
        weight.data.copy_(checkpoint[name])
    layer.quant_method.moe.is_lora_enabled = True
    worker.load_model()
    assert layer.laid_out
    close(layer(*given), wanted_of(layer, *given))
    assert kernel_of(layer).called == 1


# --- what is left ---


def left(server: Server, layer: Any, given: Any = None) -> str:
    """The line of a server that leaves this layer, whose weights vLLM lays out as they were loaded, and computes."""
    chosen = layer.quant_method.experts_cls
    server.serve(layer, **QUANTISED)
    assert layer.laid_out
    assert type(kernel_of(layer)) is layer.quant_method.experts_cls is chosen
    given = given or tokens()
    close(layer(*given), wanted_of(layer, *given))
    assert kernel_of(layer).called == 1
    assert server.lib.calls == []
    (line,) = server.lines
    assert "serves 0 of 1 expert layers; vLLM computes the rest: 1 x " in line
    return line


@pytest.mark.parametrize("place", [0, 2, 3, 4])
def test_experts_without_one_of_the_four_are_left(serve: Any, place: int) -> None:
    server = serve([s for i, s in enumerate(OF_MXFP4) if i != place])
    assert f"no kernel for {OF_MXFP4[place].key()}" in left(server, of_mxfp4(server))


def test_kernels_that_were_never_run_are_left(serve: Any) -> None:
    server = serve(OF_MXFP4, state="ranked")
    assert "never run on a GPU; run: aot tune" in left(server, of_mxfp4(server))


@pytest.mark.parametrize(
    ("moe", "change", "reason"),
    [
        ({"moe_backend": "marlin"}, None, "moe_backend is 'marlin'"),
        ({"is_lora_enabled": True}, None, "of LoRA"),
        (
            {"moe_parallel_config": types.SimpleNamespace(use_all2all_kernels=True, enable_eplb=False)},
            None,
            "tokens are exchanged between ranks",
        ),
        (
            {"moe_parallel_config": types.SimpleNamespace(use_all2all_kernels=False, enable_eplb=True)},
            None,
            "experts move between ranks",
        ),
        ({"in_dtype": torch.float16}, None, "tokens are torch.float16"),
        ({}, lambda x: setattr(x, "swiglu_limit", 7.0), "limits of its own"),
        ({}, lambda x: x.w2_weight_scale.data[-1, -1, -1].fill_(151), "a scale of mxfp4 is 2^24"),
        (
            {},
            lambda x: setattr(x, "w2_bias", torch.nn.Parameter(x.w2_bias.float(), requires_grad=False)),
            "the bias of down is no",
        ),
        ({}, lambda x: delattr(x, "top_k"), "AttributeError"),
    ],
)
def test_layers_that_no_launch_computes_are_left_as_they_were_loaded(
    serve: Any, moe: Any, change: Any, reason: str
) -> None:
    server = serve(OF_MXFP4)
    layer = of_mxfp4(server, **moe)
    if change is not None:
        change(layer)
        layer.numbers["w2"][-1, -1, -32:] *= 2.0 ** (27 if "2^24" in reason else 0)
    assert reason in left(server, layer)


@pytest.mark.parametrize(("sizes", "reason"), [((32, 96), "K 32 of down"), ((72, 128), "K 72 of down")])
def test_extents_that_no_prepared_weight_has_are_left(serve: Any, sizes: Any, reason: str) -> None:
    n, k = sizes
    server = serve(OF_MXFP4)
    layer = of_mxfp4(server)
    layer.w13_weight = torch.nn.Parameter(torch.zeros(EXPERTS, 2 * n, k // 2, dtype=torch.uint8), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(torch.zeros(EXPERTS, k, n // 2, dtype=torch.uint8), requires_grad=False)
    for name in ("w13", "w2"):
        weight = getattr(layer, f"{name}_weight")
        scale = torch.zeros((*weight.shape[:2], weight.shape[2] // 16), dtype=torch.uint8)
        setattr(layer, f"{name}_weight_scale", torch.nn.Parameter(scale, requires_grad=False))
    server.serve(layer, **QUANTISED)
    assert layer.laid_out
    assert "are no multiples of 16 and 64" in server.lines[0]


def test_kernels_that_cannot_be_loaded_leave_weights_as_they_were(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise KernelMiss("gone", "no entry")

    server = serve(OF_MXFP4)
    monkeypatch.setattr(Both, "preload", fail)
    assert "1 x gone" in left(server, of_mxfp4(server))


def test_a_vllm_that_makes_kernels_in_another_way_computes_them(serve: Any) -> None:
    server = serve(OF_MXFP4)
    server.modules[ORACLE].make_unquantized_moe_kernel = lambda quant_config: None
    assert "has the parameters quant_config, not" in left(server, of_mxfp4(server))


def test_a_setting_leaves_experts_to_vllm(serve: Any) -> None:
    server = serve(OF_MXFP4)
    layer = of_mxfp4(server)
    server.serve(layer, config={"cute_aot": {"archive": "model.aot", "experts": False}}, **QUANTISED)
    assert layer.laid_out
    assert "1 x the setting leaves experts to it" in server.lines[0]


# --- what goes wrong ---


@pytest.mark.parametrize("operation", sorted(set(FOUR)))
def test_a_launch_that_fails_at_a_call_is_computed_of_weights_that_are_widened(serve: Any, operation: str) -> None:
    server = serve(OF_MXFP4)
    layer = of_mxfp4(server)
    server.serve(layer, **QUANTISED)
    server.lib.lacking = operation
    given = tokens()
    for _ in range(2):
        close(layer(*given), wanted_of(layer, *given))
    assert kernel_of(layer).called == 2
    assert sum(f"no kernel for {operation} can run" in line for line in server.lines) == 1


def test_what_goes_wrong_later_leaves_experts_that_vllm_cannot_read_any_more_where_they_are(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(OF_MXFP4)
    layer, linear = of_mxfp4(server), server.linear(HIDDEN, HIDDEN)

    def fail_for_linears(self: Any, tokens: Any = (), *, only: Any = None) -> None:
        if any("grouped" not in key and "moe" not in key for key in only):
            raise KernelMiss("gone", "no entry")

    monkeypatch.setattr(Both, "preload", fail_for_linears)
    server.serve(layer, linear, **QUANTISED)
    assert "serves nothing, vLLM's kernels do: gone" in server.lines[0]
    given = tokens()
    close(layer(*given), wanted_of(layer, *given))
    assert server.lib.calls == FOUR
    linear(torch.randn(2, HIDDEN).bfloat16())
    assert server.lib.calls == FOUR
