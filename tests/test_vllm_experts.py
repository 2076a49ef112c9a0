"""What the plugin takes of a model's experts, and what it leaves to vLLM, in modules shaped like vLLM's; on the CPU.

Libraries are real ones, whose launches write what the reference of tuning says. Weights are those of tiny experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from aot.providers.grouped_arguments import grouped_tensors
from aot.search.variants import Variant
from runtime import KernelMiss
from runtime.container.archive import Archive
from runtime.grouped_gemm import Signature as Grouped
from runtime.moe.combine import Signature as Combine
from runtime.moe.permute import Signature as Permute
from runtime.plugin.log import warn_once
from runtime.quantise import Signature as Quantise
from runtime.torch import experts as torch_experts

from . import vllm_stand_in
from .moe.on_cpu import ExpertsOnCpu, experts
from .moe.test_operation import tensors_of
from .recording_driver import RecordingDriver, entry, operands_record, tensors_record, write_archive
from .torch_stand_in import HIDDEN, ONE, OnCpu
from .vllm_experts_stand_in import FP8_METHOD, METHOD, ROUTED, TRITON, wide
from .vllm_stand_in import MINE, Server, Start

start = vllm_stand_in.start  # a fixture

EXPERTS, N, K, TOP_K, GLOBALLY = 6, 48, 32, 3, 18
FOUR = ["moe_permute", "grouped_gemm", "grouped_gemm", "moe_combine"]
SIGNATURES: list[Any] = [
    Permute("bf16", EXPERTS, TOP_K, K),
    Permute("bf16", EXPERTS, TOP_K, K, GLOBALLY),
    Combine("bf16", "bf16", TOP_K, K),
    Grouped("bf16", "bf16", "bf16", EXPERTS, 2 * N, K, "swiglu"),
    Grouped("bf16", "bf16", "bf16", EXPERTS, K, N),
]
GATE_OF_GPT_OSS = "swiglu_clamped_interleaved"
OF_FP8 = [
    Permute("bf16", EXPERTS, TOP_K, K, scaling="block"),
    Permute("bf16", EXPERTS, TOP_K, K, GLOBALLY, "block"),
    SIGNATURES[2],
    Grouped("e4m3", "e4m3", "bf16", EXPERTS, 2 * N, K, "swiglu", scaling="block"),
    Grouped("e4m3", "e4m3", "bf16", EXPERTS, K, N, scaling="block"),
    Quantise("bf16", "e4m3", N, "block", EXPERTS),
]
FIVE = ["moe_permute", "grouped_gemm", "quantise", "grouped_gemm", "moe_combine"]
OF_GPT_OSS = [
    *SIGNATURES[:3],
    Grouped("bf16", "bf16", "bf16", EXPERTS, 2 * N, K, f"bias+{GATE_OF_GPT_OSS}"),
    Grouped("bf16", "bf16", "bf16", EXPERTS, K, N, "bias"),
]


class Both(ExpertsOnCpu, OnCpu):  # type: ignore[misc]  # both have `calls`, of words or GEMMs
    """Computes linear layers as well; `lacking` is the operation that has no kernel at any M."""

    lacking = ""

    def call(self, operation: str, *tensors: Any, **more: Any) -> Any:
        if operation == self.lacking:
            raise KernelMiss(f"no kernel for {operation} can run", "no kernel runs")
        return super().call(operation, *tensors, **more)


def _record(name: str, of: Any) -> Any:
    if of.operation != "grouped_gemm":
        return tensors_record(name, *tensors_of(of))
    variant = Variant(
        "test",
        "test",
        "sm_90a",
        (),
        (of.a, of.b, of.d),
        operation=of.operation,
        epilogue=of.epilogue,
        scaling=of.scaling,
    )
    return tensors_record(name, *grouped_tensors(variant, of.rows))


def _library(folder: Path, signatures: list[Any], state: str) -> Both:
    """Of an archive for each operation, one on the other."""
    kernels = write_archive(folder / "gemm.aot", [operands_record("one", ONE)], [entry(ONE, [(None, "one")])])
    archives = [folder / "gemm.aot"]
    for operation in sorted({s.operation for s in signatures}):
        of = {f"{operation}{i}": s for i, s in enumerate(signatures) if s.operation == operation}
        rows = [entry(s.to_json(), [(None, name)], state=state) for name, s in of.items()]
        archives.append(folder / f"{operation}.aot")
        kernels |= write_archive(archives[-1], [_record(*item) for item in of.items()], rows, operation)
    return Both([Archive.open(path) for path in archives], RecordingDriver(kernels=kernels))


@pytest.fixture
def serve(start: Start, tmp_path: Path) -> Any:
    """Makes servers whose archive has experts of these signatures."""

    def make(signatures: list[Any] = SIGNATURES, state: str = "tuned") -> Server:
        server = start()
        warn_once.cache_clear()
        torch_experts._has.cache_clear()
        server.lib = _library(tmp_path, signatures, state)
        return server

    return make


def routed(server: Server, globally: int = 0, *, method: str = "UnquantizedFusedMoEMethod", **moe: Any) -> Any:
    """A layer of experts."""
    made = getattr(server.modules[FP8_METHOD if method.startswith("Fp8") else METHOD], method)(**moe)
    return server.modules[ROUTED].RoutedExperts(made, (EXPERTS, N, K), TOP_K, globally)


def of_gpt_oss(server: Server, globally: int = 0) -> Any:
    """A layer of experts with biases and GPT-OSS's gate."""
    layer = routed(server, globally, has_bias=True)
    layer.activation = type(layer.activation).SWIGLUOAI
    return layer


def of_fp8(server: Server, globally: int = 0, **moe: Any) -> Any:
    """A layer of experts with weights in e4m3 and scales of blocks."""
    return routed(server, globally, method="Fp8MoEMethod", **moe)


def tokens(count: int = 9, of: int = EXPERTS, ids: Any = torch.int32) -> tuple[Any, Any, Any]:
    random = torch.Generator().manual_seed(count)
    x = torch.randn((count, K), generator=random).bfloat16()
    chosen = torch.rand((count, of), generator=random).topk(TOP_K).indices
    return x, torch.rand((count, TOP_K), generator=random).softmax(-1), chosen.to(ids)


def close(found: Any, wanted: Any) -> None:
    assert found.dtype == torch.bfloat16
    assert float((found.double() - wanted).norm()) < 1e-2 * float(wanted.norm())


def wanted_of(layer: Any, x: Any, weights: Any, ids: Any) -> Any:
    local = ids.long() if layer.expert_map is None else layer.expert_map[ids.long()]
    gate = GATE_OF_GPT_OSS if layer.activation.name == "SWIGLUOAI" else "swiglu"
    biases = (layer.w13_bias, layer.w2_bias) if layer.quant_method.moe.has_bias else None
    w13, w2 = (
        layer.numbers.values()
        if hasattr(layer, "numbers")
        else (
            wide(getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale_inv", None))
            for name in ("w13", "w2")
        )
    )
    return experts(x, w13, w2, local, weights, gate, biases)


# --- what is taken ---


@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_experts_that_the_archive_has_take_four_launches(serve: Any, ids: Any) -> None:
    server = serve()
    layer = routed(server)
    server.serve(layer)
    for count in (1, 9, 2):
        given = tokens(count, ids=ids)
        close(layer(*given), wanted_of(layer, *given))
    assert layer.processed
    assert server.lib.calls == 3 * FOUR
    assert isinstance(kernel_of(layer), server.modules[TRITON].TritonExperts)
    assert kernel_of(layer).called == 0
    (line,) = server.lines
    assert "serves 1 of 1 expert layers (4 signatures preloaded, for 3 numbers of tokens planned)" in line


@pytest.mark.parametrize("globally", [0, GLOBALLY])
def test_experts_of_gpt_oss_take_four_launches(serve: Any, globally: int) -> None:
    server = serve(OF_GPT_OSS)
    layer = of_gpt_oss(server, globally)
    server.serve(layer)
    x, *routes = tokens(9, of=globally or EXPERTS)
    close(layer(x * 4, *routes), wanted_of(layer, x * 4, *routes))
    assert server.lib.calls == FOUR
    assert kernel_of(layer).called == 0


def test_tokens_that_come_times_their_router_weights_are_added_up_alone(serve: Any) -> None:
    """As vLLM passes them with one expert for each token, as Llama-4 has."""
    server = serve([*SIGNATURES, Permute("bf16", EXPERTS, 1, K), Combine("bf16", "bf16", 1, K, "none")])
    layer = routed(server)
    layer.top_k, layer.apply_router_weight_on_input = 1, True
    server.serve(layer)
    x, weights, ids = (t[:, :1] if t.shape[1] == TOP_K else t for t in tokens())
    weighed = x * weights.bfloat16()
    close(layer(weighed, weights, ids), wanted_of(layer, weighed, torch.ones_like(weights), ids))
    assert server.lib.calls == FOUR
    assert kernel_of(layer).called == 0


def test_experts_with_router_weights_on_the_input_want_a_combination_without(serve: Any) -> None:
    server = serve()
    layer = routed(server)
    layer.apply_router_weight_on_input = True
    assert "bf16_bf16_moe_combine_top3_n32_weights_none" in left(server, layer)


def kernel_of(layer: Any) -> Any:
    return layer.quant_method.moe_kernel.fused_experts


def test_experts_of_other_ranks_add_nothing(serve: Any) -> None:
    server = serve()
    layer = routed(server, GLOBALLY)
    server.serve(layer)
    given = tokens(20, of=GLOBALLY)
    wanted = wanted_of(layer, *given)
    elsewhere = [not bool(row.any()) for row in wanted]
    assert any(elsewhere)
    assert not all(elsewhere)
    found = layer(*given)
    close(found, wanted)
    assert not bool(found[torch.tensor(elsewhere)].any())
    assert server.lib.calls == FOUR


def test_linear_layers_are_served_beside_experts(serve: Any) -> None:
    server = serve()
    server.serve(server.linear(HIDDEN, HIDDEN), routed(server), of_fp8(server))
    (line,) = server.lines
    assert "serves 1 of 1 linear layers and 1 of 2 expert layers; vLLM computes the rest: " in line
    assert "1 x Fp8MoEMethod computes experts" in line
    assert "5 signatures preloaded" in line


@pytest.mark.parametrize(
    ("globally", "rows"), [(0, [3, 6, 12]), (24, [])], ids=["of all top-k", "which calls alone know"]
)
def test_grouped_gemms_are_preloaded_for_their_rows(
    serve: Any, monkeypatch: pytest.MonkeyPatch, globally: int, rows: list[int]
) -> None:
    asked = []
    monkeypatch.setattr(Both, "preload", lambda self, tokens=(), *, only=None: asked.append((list(tokens), set(only))))
    signatures = [*SIGNATURES, Permute("bf16", EXPERTS, TOP_K, K, 24)]
    server = serve(signatures)
    server.serve(routed(server, globally), sizes=(1, 2, 4))
    keys = {s.key(): s.operation for s in signatures}
    assert [(sizes, {keys[key] for key in only}) for sizes, only in asked] == [
        ([1, 2, 4], {"moe_permute", "moe_combine"}),
        (rows, {"grouped_gemm"}),
    ]


def test_the_key_of_the_compile_cache_follows_the_experts_that_are_taken(serve: Any) -> None:
    keys = []
    for config in (MINE, {"cute_aot": {"archive": "model.aot", "experts": False}}):
        server = serve()
        worker = server.serve(server.linear(HIDDEN, HIDDEN), routed(server), config=config)
        worker.vllm_config.additional_config = MINE  # vLLM's own key follows the setting
        keys.append(worker.vllm_config.compute_hash())
    assert keys[0] != keys[1]


# --- what is left ---


def left(server: Server, layer: Any, **more: Any) -> str:
    """The line of a server that leaves this layer to vLLM, whose class computes it."""
    server.serve(layer, **more)
    given = tokens()
    layer(*given)
    assert type(kernel_of(layer)) is layer.quant_method.experts_cls
    assert type(kernel_of(layer)).__module__ != "runtime.vllm.experts"
    assert kernel_of(layer).called == 1
    assert server.lib.calls == []
    (line,) = server.lines
    return line


@pytest.mark.parametrize("place", range(len(SIGNATURES)))
def test_experts_without_one_of_the_four_are_left(serve: Any, place: int) -> None:
    server = serve([s for i, s in enumerate(SIGNATURES) if i != place])
    line = left(server, routed(server, GLOBALLY if place == 1 else 0))
    assert "serves 0 of 1 expert layers; vLLM computes the rest: 1 x no kernel for" in line
    assert SIGNATURES[place].key() in line


@pytest.mark.parametrize("place", [3, 4])
def test_experts_with_biases_are_left_where_one_form_has_none(serve: Any, place: int) -> None:
    server = serve([*OF_GPT_OSS[:place], SIGNATURES[place], *OF_GPT_OSS[place + 1 :]])
    assert OF_GPT_OSS[place].key() in left(server, of_gpt_oss(server))


def test_kernels_that_were_never_run_are_left(serve: Any) -> None:
    server = serve(state="ranked")
    assert "never run on a GPU; run: aot tune" in left(server, routed(server))


def _stacked(layer: Any, name: str, change: Any) -> None:
    setattr(layer, name, torch.nn.Parameter(change(getattr(layer, name).data), requires_grad=False))


@pytest.mark.parametrize(
    ("moe", "change", "reason"),
    [
        ({"moe_backend": "triton"}, None, "moe_backend is 'triton'"),
        ({"is_lora_enabled": True}, None, "of LoRA"),
        (
            {"has_bias": True},
            lambda x: _stacked(x, "w2_bias", lambda b: torch.cat((b, b))),
            "the bias of down is no (6, 32)",
        ),
        ({"has_bias": True}, lambda x: _stacked(x, "w13_bias", lambda b: b.float()), "the bias of gate and up is no"),
        ({"has_bias": True}, lambda x: delattr(x, "w13_bias"), "AttributeError"),
        ({}, lambda x: setattr(x, "activation", type(x.activation).SWIGLUSTEP), "activation SWIGLUSTEP"),
        ({}, lambda x: setattr(x, "swiglu_limit", 7.0), "limits of its own"),
        ({}, lambda x: x.float(), "weights of torch.float32 are not of 16 bits"),
        ({}, lambda x: _stacked(x, "w2_weight", lambda w: w.mT.contiguous().mT), "of down, the weight has strides"),
        ({}, lambda x: delattr(x, "top_k"), "AttributeError"),
    ],
)
def test_layers_that_no_launch_computes_are_left_and_named(serve: Any, moe: Any, change: Any, reason: str) -> None:
    server = serve()
    layer = routed(server, **moe)
    if change is not None:
        change(layer)
    assert reason in left(server, layer)


def test_experts_of_another_class_are_left(serve: Any) -> None:
    server = serve()
    layer = routed(server)
    layer.quant_method.experts_cls = server.modules[TRITON].OtherExperts
    assert "vLLM computes them by OtherExperts" in left(server, layer)


def test_a_setting_leaves_experts_to_vllm(serve: Any) -> None:
    server = serve()
    config = {"cute_aot": {"archive": "model.aot", "experts": False}}
    line = left(server, routed(server), config=config)
    assert "serves 0 of 1 expert layers; vLLM computes the rest: 1 x the setting leaves experts to it" in line


def test_a_vllm_with_other_experts_has_its_linear_layers_served(serve: Any) -> None:
    server = serve()
    del server.modules[TRITON].TritonExperts.workspace_shapes
    server.serve(server.linear(HIDDEN, HIDDEN), routed(server))
    (line,) = server.lines
    assert "serves 1 of 1 linear layers and 0 of 1 expert layers" in line
    assert "TritonExperts.workspace_shapes is not there" in line


# --- what goes wrong ---


@pytest.mark.parametrize("operation", sorted(set(FOUR)))
def test_a_launch_that_fails_at_a_call_is_vllms_to_compute(serve: Any, operation: str) -> None:
    server = serve(OF_GPT_OSS)
    layer = of_gpt_oss(server)
    server.serve(layer)
    server.lib.lacking = operation
    given = tokens()
    for _ in range(2):
        close(layer(*given), wanted_of(layer, *given))
    assert kernel_of(layer).called == 2
    assert sum(f"no kernel for {operation} can run" in line for line in server.lines) == 1


def test_kernels_that_cannot_be_loaded_leave_all_experts(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise KernelMiss("gone", "no entry")

    server = serve()
    monkeypatch.setattr(Both, "preload", fail)
    layer = routed(server)
    server.serve(layer)
    given = tokens()
    close(layer(*given), wanted_of(layer, *given))
    assert server.lib.calls == []
    assert kernel_of(layer).called == 1
    assert "serves nothing, vLLM's kernels do: gone" in server.lines[0]


def test_weights_that_are_loaded_again_are_decided_again(serve: Any) -> None:
    server = serve()
    layer = routed(server)
    worker = server.serve(layer)
    worker.load_model()
    layer(*tokens())
    assert server.lib.calls == FOUR
    _stacked(layer, "w2_weight", lambda w: w.mT.contiguous().mT)
    worker.load_model()
    layer(*tokens())
    assert server.lib.calls == FOUR
    assert ["serves 1 of 1 expert layers" in line for line in server.lines] == [True, True, False]


def test_a_second_engine_keeps_the_first_ones_experts(serve: Any) -> None:
    server = serve()
    first, second = routed(server), routed(server)
    server.serve(first)
    server.serve(second, config={})
    first(*tokens())
    assert server.lib.calls == FOUR
    second(*tokens())
    assert kernel_of(second).called == 1


def test_buffers_that_vllm_gives_are_as_large_as_its_own_kernels_need(serve: Any) -> None:
    server = serve()
    layer = routed(server)
    server.serve(layer)
    triton = server.modules[TRITON].TritonExperts()
    sizes = (7, 2 * N, K, TOP_K, EXPERTS, EXPERTS, None, layer.activation)
    ours, theirs = kernel_of(layer).workspace_shapes(*sizes), triton.workspace_shapes(*sizes)
    assert (ours[0], ours[2]) == (theirs[0], theirs[2])
    (elements,) = ours[1]
    rows = 7 * TOP_K * 2 * N
    assert elements - rows == 2 * (8 + 7 * TOP_K)  # i32: ends, at a multiple of 16 bytes, and positions
