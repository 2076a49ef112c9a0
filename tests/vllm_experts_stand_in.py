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
TRITON, METHOD, ROUTED = (
    f"{FUSED}.experts.triton_moe",
    f"{FUSED}.unquantized_fused_moe_method",
    f"{FUSED}.routed_experts",
)
_ROUND = 256  # bytes, at multiples of which workspaces begin


def contents() -> dict[str, dict[str, Any]]:
    """Fresh modules' contents, by their names."""
    activation, no_op = _activation(), _no_op()
    triton, other = _triton(no_op)
    methods, routed = _methods(triton), _routed(activation)
    return {
        f"{FUSED}.activation": {"MoEActivation": activation},
        f"{FUSED}.topk_weight_and_reduce": {"TopKWeightAndReduceNoOP": no_op},
        TRITON: {"TritonExperts": triton, "OtherExperts": other},
        METHOD: methods,
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
            ids = topk_ids if expert_map is None else expert_map[topk_ids.long()]
            for token, of in enumerate(ids.tolist()):
                found = torch.zeros(hidden_states.shape[1])
                for expert, weight in zip(of, topk_weights[token].tolist(), strict=True):
                    if 0 <= expert < len(w1):
                        sums = _product(w1, self.w1_bias, expert, hidden_states[token])
                        found += weight * _product(w2, self.w2_bias, expert, _gated(activation, sums))
                output[token] = found.to(output.dtype)

    class OtherExperts(TritonExperts):
        pass

    return TritonExperts, OtherExperts


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
        experts, sizes = self.fused_experts, (x.shape[0], *layer.w13_weight.shape[1:], topk_ids.shape[1])
        words = layer.global_num_experts, layer.w13_weight.shape[0], None, layer.activation
        shape13, shape2, of_output = experts.workspace_shapes(*sizes, *words)
        counts = max(math.prod(shape13), math.prod(of_output)), math.prod(shape2)
        begin = -(-counts[0] * 2 // _ROUND) * _ROUND // 2
        memory = torch.full((begin + counts[1],), float("nan"), dtype=x.dtype)
        common, workspace2 = memory[: counts[0]], memory[begin:].view(shape2)
        made = common[: math.prod(of_output)].view(of_output)
        experts.apply(
            output=made,
            hidden_states=x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            a1q_scale=None,
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


def _methods(triton: Any) -> dict[str, Any]:
    class FusedMoEMethodBase:
        moe = types.SimpleNamespace(has_bias=False)

    class UnquantizedFusedMoEMethod(FusedMoEMethodBase):
        def __init__(self, **moe: Any) -> None:
            usual = {"moe_backend": "auto", "is_lora_enabled": False, "has_bias": False}
            self.moe, self.experts_cls = types.SimpleNamespace(**usual | moe), triton
            self.moe_kernel: Kernel | None = None

        def process_weights_after_loading(self, layer: Any) -> None:
            layer.processed = True
            if self.moe_kernel is None:
                self.moe_kernel = Kernel(self.experts_cls())
                made = self.moe_kernel.fused_experts
                made.w1_bias, made.w2_bias = (getattr(layer, f"{name}_bias", None) for name in ("w13", "w2"))

        def apply(self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any) -> Any:
            assert self.moe_kernel is not None
            return self.moe_kernel.apply(layer, x, topk_weights, topk_ids)

    class Fp8MoEMethod(FusedMoEMethodBase):
        def process_weights_after_loading(self, layer: Any) -> None:
            layer.processed = True

    return {"UnquantizedFusedMoEMethod": UnquantizedFusedMoEMethod, "Fp8MoEMethod": Fp8MoEMethod}


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
