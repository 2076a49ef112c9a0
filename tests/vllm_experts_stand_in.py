"""Modules shaped like those of vLLM's experts that the plugin hooks: names, parameters and who calls whom.

They have no code of vLLM's. What Triton computes there is computed by torch here, and counted.
"""

from __future__ import annotations

import enum
import math
import types
from typing import Any

import torch
from torch import nn

FUSED = "vllm.model_executor.layers.fused_moe"
TRITON, METHOD, FP8_METHOD, ROUTED = (
    f"{FUSED}.experts.triton_moe",
    f"{FUSED}.unquantized_fused_moe_method",
    "vllm.model_executor.layers.quantization.fp8",
    f"{FUSED}.routed_experts",
)
_ROUND = 256  # bytes, at multiples of which workspaces begin


def contents() -> dict[str, dict[str, Any]]:
    """Fresh modules' contents, by their names."""
    activation, no_op = _activation(), _no_op()
    triton, other = _triton(no_op)
    (unquantised, fp8), routed = _methods(triton), _routed(activation)
    return {
        f"{FUSED}.activation": {"MoEActivation": activation},
        f"{FUSED}.topk_weight_and_reduce": {"TopKWeightAndReduceNoOP": no_op},
        TRITON: {"TritonExperts": triton, "OtherExperts": other},
        METHOD: {"UnquantizedFusedMoEMethod": unquantised},
        FP8_METHOD: {"Fp8MoEMethod": fp8},
        ROUTED: {"RoutedExperts": routed},
    }


def _activation() -> Any:
    class MoEActivation(enum.Enum):
        SILU = "silu"
        GELU = "gelu"
        GELU_TANH = "gelu_tanh"
        SWIGLUOAI = "swigluoai"
        SWIGLUSTEP = "swiglustep"

    return MoEActivation


def _no_op() -> Any:
    class TopKWeightAndReduceNoOP:
        def apply(
            self,
            output: Any,
            fused_expert_output: Any,
            topk_weights: Any,
            topk_ids: Any,
            apply_router_weight_on_input: bool,
        ) -> Any:
            return fused_expert_output if output is None else output.copy_(fused_expert_output)

    return TopKWeightAndReduceNoOP


def _triton(no_op: Any) -> tuple[Any, Any]:
    class TritonExperts:
        called = 0
        w1_bias: Any = None
        w2_bias: Any = None
        scales: Any = (None, None)

        @property
        def expects_unquantized_inputs(self) -> bool:
            return False

        def workspace_shapes(
            self,
            M: int,
            N: int,
            K: int,
            topk: int,
            global_num_experts: int,
            local_num_experts: int,
            expert_tokens_meta: Any,
            activation: Any,
        ) -> Any:
            return (M, topk, max(N // 2, K)), (M, topk, max(N, K)), (M, K)

        def finalize_weight_and_reduce_impl(self) -> Any:
            return no_op()

        def apply(
            self,
            output: Any,
            hidden_states: Any,
            w1: Any,
            w2: Any,
            topk_weights: Any,
            topk_ids: Any,
            activation: Any,
            global_num_experts: int,
            expert_map: Any,
            a1q_scale: Any,
            a2_scale: Any,
            workspace13: Any,
            workspace2: Any,
            expert_tokens_meta: Any,
            apply_router_weight_on_input: bool,
        ) -> None:
            self.called += 1
            of_w1, of_w2 = self.scales
            if of_w1 is not None and self.expects_unquantized_inputs:
                assert a1q_scale is None
                hidden_states, a1q_scale = narrow(hidden_states)
            if of_w1 is not None:
                hidden_states = hidden_states.float() * a1q_scale.repeat_interleave(128, 1)[:, : w1.shape[2]]
            ids = topk_ids if expert_map is None else expert_map[topk_ids.long()]
            for token, of in enumerate(ids.tolist()):
                found = torch.zeros(hidden_states.shape[1])
                for expert, weight in zip(of, topk_weights[token].tolist(), strict=True):
                    if 0 <= expert < len(w1):
                        sums = _product(wide(w1, of_w1), self.w1_bias, expert, hidden_states[token])
                        found += weight * _product(wide(w2, of_w2), self.w2_bias, expert, _gated(activation, sums))
                output[token] = found.to(output.dtype)

    class OtherExperts(TritonExperts):
        pass

    return TritonExperts, OtherExperts


def narrow(x: Any) -> Any:
    """Rows in e4m3, with a scale for each 128 elements, which are at most all."""
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def wide(weight: Any, scale: Any) -> Any:
    """A weight times the scales of its blocks, if it has any."""
    if scale is None:
        return weight
    whole = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return weight.float() * whole[:, : weight.shape[1], : weight.shape[2]]


def _product(weight: Any, bias: Any, expert: int, x: Any) -> Any:
    return weight[expert].float() @ x.float() + (0.0 if bias is None else bias[expert].float())


def _gated(activation: Any, sums: Any) -> Any:
    if activation.name != "SWIGLUOAI":
        gate, up = sums.chunk(2)
        return nn.functional.silu(gate) * up
    gate, up = sums[0::2].clamp(max=7.0), sums[1::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


class Kernel:
    """Of a layer's experts: gives them buffers of one piece of memory, which has NaN, and output where inputs are."""

    def __init__(self, fused_experts: Any) -> None:
        self.fused_experts = fused_experts

    def apply(self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any) -> Any:
        experts, sizes = self.fused_experts, (x.shape[0], layer.w13_weight.shape[1], x.shape[1], topk_ids.shape[1])
        words = layer.global_num_experts, layer.w13_weight.shape[0], None, layer.activation
        shape13, shape2, of_output = experts.workspace_shapes(*sizes, *words)
        counts = max(math.prod(shape13), math.prod(of_output)), math.prod(shape2)
        begin = -(-counts[0] * 2 // _ROUND) * _ROUND // 2
        memory = torch.full((begin + counts[1],), float("nan"), dtype=x.dtype)
        common, workspace2 = memory[: counts[0]], memory[begin:].view(shape2)
        made = common[: math.prod(of_output)].view(of_output)
        given, scale = x, None
        if layer.w13_weight.dtype == torch.float8_e4m3fn and not experts.expects_unquantized_inputs:
            given, scale = narrow(x)
        experts.apply(
            output=made,
            hidden_states=given,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            a1q_scale=scale,
            a2_scale=None,
            workspace13=common[: math.prod(shape13)].view(shape13),
            workspace2=workspace2,
            expert_tokens_meta=None,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
        )
        output = torch.empty_like(x)
        experts.finalize_weight_and_reduce_impl().apply(
            output=output,
            fused_expert_output=made,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
        )
        return output


def _methods(triton: Any) -> tuple[type, type]:
    class FusedMoEMethodBase:
        moe = types.SimpleNamespace(has_bias=False)
        moe_kernel: Kernel | None = None

        def __init__(self, **moe: Any) -> None:
            usual = {"moe_backend": "auto", "is_lora_enabled": False, "has_bias": False, "in_dtype": torch.bfloat16}
            self.moe, self.experts_cls = types.SimpleNamespace(**usual | moe), triton

        def setup(self, layer: Any) -> None:
            layer.processed = True
            if self.moe_kernel is None:
                self.moe_kernel = Kernel(self.experts_cls())
                made = self.moe_kernel.fused_experts
                made.w1_bias, made.w2_bias = (getattr(layer, f"{name}_bias", None) for name in ("w13", "w2"))
                made.scales = [getattr(layer, f"{name}_weight_scale_inv", None) for name in ("w13", "w2")]

        def apply(self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any) -> Any:
            assert self.moe_kernel is not None
            return self.moe_kernel.apply(layer, x, topk_weights, topk_ids)

    class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
        def process_weights_after_loading(self, layer: Any) -> None:
            self.setup(layer)

    class Fp8MoEMethod(FusedMoEMethodBase):
        block_quant = True

        def __init__(self, block: tuple[int, int] = (128, 128), **moe: Any) -> None:
            super().__init__(**moe)
            self.weight_block_size = list(block)

        def process_weights_after_loading(self, layer: Any) -> None:
            self.setup(layer)

    return UnquantizedFusedMoEMethod, Fp8MoEMethod


def _routed(activation: Any) -> Any:
    class RoutedExperts(nn.Module):
        """Of `experts`, each of N and K, `top_k` for a token; with `globally`, the last of so many."""

        swiglu_limit = swiglu_alpha = swiglu_beta = None
        apply_router_weight_on_input = False
        activation: Any

        def __init__(self, method: Any, sizes: tuple[int, int, int], top_k: int, globally: int = 0) -> None:
            super().__init__()
            experts, n, k = sizes
            self.quant_method, self.layer_name, self.top_k = method, "model.layers.0.mlp.experts", top_k
            self.activation, self.global_num_experts = activation.SILU, globally or experts
            self.w13_weight = nn.Parameter((torch.randn(experts, 2 * n, k) * k**-0.5).bfloat16(), requires_grad=False)
            self.w2_weight = nn.Parameter((torch.randn(experts, k, n) * n**-0.5).bfloat16(), requires_grad=False)
            if getattr(method, "block_quant", False):
                self.w13_input_scale = self.w2_input_scale = None
                for name in ("w13", "w2"):
                    weight = getattr(self, f"{name}_weight").float()
                    blocks = [-(-extent // 128) for extent in weight.shape[1:]]
                    scale = torch.rand(experts, *blocks) * 0.01 + 0.002
                    setattr(self, f"{name}_weight_scale_inv", nn.Parameter(scale, requires_grad=False))
                    narrowed = (weight / wide(torch.ones(weight.shape), scale)).to(torch.float8_e4m3fn)
                    setattr(self, f"{name}_weight", nn.Parameter(narrowed, requires_grad=False))
            if method.moe.has_bias:
                self.w13_bias = nn.Parameter(torch.randn(experts, 2 * n).bfloat16(), requires_grad=False)
                self.w2_bias = nn.Parameter(torch.randn(experts, k).bfloat16(), requires_grad=False)
            self.expert_map = None
            if globally:
                self.expert_map = torch.full((globally,), -1, dtype=torch.int32)
                self.expert_map[-experts:] = torch.arange(experts, dtype=torch.int32)

        def forward(self, x: Any, topk_weights: Any, topk_ids: Any) -> Any:
            return self.quant_method.apply(self, x, topk_weights, topk_ids)

    return RoutedExperts
