"""Modules shaped like those of SGLang's experts that the plugin reads: names, fields and who calls whom.

They have no code of SGLang's. What Triton computes there is computed by torch here, and counted.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from .vllm_experts_stand_in import wide

MOE = "sglang.srt.layers.moe"
QUANTIZATION = "sglang.srt.layers.quantization"


class StandardCombineInput(NamedTuple):
    hidden_states: Any


class StandardDispatchOutput(NamedTuple):
    hidden_states: Any
    hidden_states_scale: Any
    topk_output: Any


class StandardTopKOutput(NamedTuple):
    topk_weights: Any
    topk_ids: Any
    router_logits: Any


@dataclass
class MoeRunnerConfig:
    num_experts: int | None = None
    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    no_combine: bool = False
    routed_scaling_factor: float | None = None
    gemm1_alpha: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None


@dataclass
class TritonMoeQuantInfo:
    w13_weight: Any
    w2_weight: Any
    use_fp8_w8a8: bool = False
    w13_scale: Any = None
    w2_scale: Any = None


class MoeRunner:
    """Of `backend`; `called` is how often its own function was."""

    def __init__(self, backend: str, config: MoeRunnerConfig) -> None:
        self.runner_backend = types.SimpleNamespace(value=backend, is_triton=lambda: backend == "triton")
        self.config, self.called = config, 0
        self.fused_func: Any = self._fused if backend == "triton" else None

    def run(self, dispatch_output: Any, quant_info: Any, lora_info: Any = None) -> Any:
        return self.fused_func(dispatch_output, quant_info, self.config)

    def _fused(self, dispatch_output: Any, quant_info: Any, config: Any) -> Any:
        self.called += 1
        weights, ids, _ = dispatch_output.topk_output
        x = dispatch_output.hidden_states
        w13, w2 = wide(quant_info.w13_weight, quant_info.w13_scale), wide(quant_info.w2_weight, quant_info.w2_scale)
        return StandardCombineInput(made_by(x, w13, w2, ids, weights, config).to(x.dtype))


def made_by(x: Any, w13: Any, w2: Any, ids: Any, weights: Any, config: Any) -> Any:
    """What experts make, in float64; ids that are no experts' add nothing."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, j in torch.cartesian_prod(*(torch.arange(extent) for extent in ids.shape)).tolist():
        expert, weight = int(ids[token, j]), float(weights[token, j])
        if not 0 <= expert < len(w13):
            continue
        before, behind = (weight, 1.0) if config.apply_router_weight_on_input else (1.0, weight)
        gate, up = (before * (w13[expert].double() @ x[token].double())).chunk(2)
        out[token] += behind * (w2[expert].double() @ (nn.functional.silu(gate) * up))
    return out * (config.routed_scaling_factor or 1.0)


class UnquantizedFusedMoEMethod:
    use_flashinfer_cutlass = False

    def __init__(self, backend: str = "triton", **config: Any) -> None:
        self.runner = MoeRunner(backend, MoeRunnerConfig(**config))

    def process_weights_after_loading(self, layer: Any) -> None: ...

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        return self.runner.run(dispatch_output, TritonMoeQuantInfo(layer.w13_weight, layer.w2_weight))


class Fp8MoEMethod(UnquantizedFusedMoEMethod):
    def __init__(self, block: tuple[int, int] = (128, 128), **config: Any) -> None:
        super().__init__(**config)
        self.quant_config = types.SimpleNamespace(weight_block_size=list(block))

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        scales = layer.w13_weight_scale_inv, layer.w2_weight_scale_inv
        return self.runner.run(dispatch_output, TritonMoeQuantInfo(layer.w13_weight, layer.w2_weight, True, *scales))


class OtherMoEMethod(UnquantizedFusedMoEMethod): ...


class FusedMoE(nn.Module):
    """Of `experts`, each of N and K, `top_k` for a token."""

    w13_input_scale = None

    def __init__(self, method: Any, sizes: tuple[int, int, int], top_k: int) -> None:
        super().__init__()
        experts, n, k = sizes
        self.quant_method, self.top_k = method, top_k
        for name, shape in (("w13", (experts, 2 * n, k)), ("w2", (experts, k, n))):
            weight = (torch.randn(shape) * shape[2] ** -0.5).bfloat16()
            if isinstance(method, Fp8MoEMethod):
                scale = torch.rand(experts, *(-(-extent // 128) for extent in shape[1:])) * 0.01 + 0.002
                setattr(self, f"{name}_weight_scale_inv", nn.Parameter(scale, requires_grad=False))
                weight = (weight.float() / wide(torch.ones(shape), scale)).to(torch.float8_e4m3fn)
            setattr(self, f"{name}_weight", nn.Parameter(weight, requires_grad=False))

    def forward(self, x: Any, topk_weights: Any, topk_ids: Any) -> Any:
        given = StandardDispatchOutput(x, None, StandardTopKOutput(topk_weights, topk_ids, None))
        return self.quant_method.apply(layer=self, dispatch_output=given).hidden_states


def contents() -> dict[str, dict[str, Any]]:
    """Modules' contents, by their names."""
    return {
        f"{MOE}.moe_runner.runner": {"MoeRunner": MoeRunner},
        f"{MOE}.token_dispatcher.standard": {"StandardCombineInput": StandardCombineInput},
    }
