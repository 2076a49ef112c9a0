"""Modules shaped like those of vLLM that have experts in MXFP4 or int4: names, parameters and who calls whom.

They have no code of vLLM's. As there, weights are laid out for a class of experts that computes routing too, and then
nothing else can read them.
"""

from __future__ import annotations

import enum
import types
from typing import Any

import torch
from torch import nn

from .vllm_experts_stand_in import FUSED, TRITON, Kernel

MXFP4 = "vllm.model_executor.layers.quantization.mxfp4"
ORACLE, CONFIG = f"{FUSED}.oracle.unquantized", f"{FUSED}.config"
_QUANTISATION = "vllm.model_executor.layers.quantization"
_COMPRESSED = f"{_QUANTISATION}.compressed_tensors.compressed_tensors_moe"
INT4 = {
    "AutoAWQMoEMethod": f"{_QUANTISATION}.auto_awq",
    "AutoGPTQMoEMethod": f"{_QUANTISATION}.auto_gptq",
    "CompressedTensorsWNA16MarlinMoEMethod": f"{_COMPRESSED}.compressed_tensors_moe_wna16_marlin",
}
# Of a method: what parameters are called behind the weight's name, and whether there are zero points at all.
NAMES = {
    "AutoAWQMoEMethod": ("_qweight", "_scales", "_qzeros"),
    "AutoGPTQMoEMethod": ("_qweight", "_scales", "_qzeros"),
    "CompressedTensorsWNA16MarlinMoEMethod": ("_weight_packed", "_weight_scale", "_weight_zero_point"),
}
_HALVES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def contents(of_experts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Fresh modules' contents, by their names, beside those of other experts."""

    class UnquantizedMoeBackend(enum.Enum):
        TRITON = "TRITON"

    def make_unquantized_moe_kernel(
        quant_config: Any, moe_config: Any, backend: Any, experts_cls: type, routing_tables: Any = None
    ) -> Kernel:
        kernel = Kernel(experts_cls())
        kernel.fused_experts.w1_bias, kernel.fused_experts.w2_bias = quant_config
        return kernel

    def biased_moe_quant_config(
        w1_bias: Any, w2_bias: Any, gemm1_alpha: Any = None, gemm1_beta: Any = None, gemm1_clamp_limit: Any = None
    ) -> Any:
        return w1_bias, w2_bias

    made = {"UnquantizedMoeBackend": UnquantizedMoeBackend, "make_unquantized_moe_kernel": make_unquantized_moe_kernel}
    gpt_oss, other, *of_int4 = _methods(of_experts[TRITON]["TritonExperts"])
    return {
        **{module: {method.__name__: method} for module, method in zip(INT4.values(), of_int4, strict=True)},
        ORACLE: made,
        CONFIG: {"biased_moe_quant_config": biased_moe_quant_config},
        MXFP4: {"GptOssMxfp4MoEMethod": gpt_oss, "Mxfp4MoEMethod": other},
    }


def numbers(blocks: Any, scales: Any) -> Any:
    """What packed weights and scales of a checkpoint mean."""
    table = torch.tensor([*_HALVES, *(-half for half in _HALVES)])
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return table[codes.long()] * torch.exp2(scales.float() - 127).repeat_interleave(32, -1)


def packed(experts: int, n: int, k: int, seed: int) -> tuple[Any, Any]:
    """Any bytes, as weights whose products are of the size of what they multiply, and their scales."""
    random = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, n, k // 2), generator=random, dtype=torch.uint8)
    return blocks, torch.randint(121, 125, (experts, n, k // 32), generator=random, dtype=torch.uint8)


def numbers_of_int4(method: str, q: Any, scales: Any, zeros: Any) -> Any:
    """What int4 of a checkpoint means, of one expert: (N, K)."""
    eights = torch.arange(0, 32, 4)
    if method == "AutoAWQMoEMethod":  # of eight columns of N, in an order of its own
        order = [0, 4, 1, 5, 2, 6, 3, 7]
        codes, points = ((x.unsqueeze(-1) >> eights & 15)[..., order].flatten(1).T for x in (q, zeros))
    else:
        codes = (q.T.unsqueeze(-1) >> eights & 15).flatten(1)
        points = torch.full_like(scales.T, 8) if zeros is None else (zeros.unsqueeze(-1) >> eights & 15).flatten(1).T
    return (codes - points.repeat_interleave(128, 1)).float() * scales.T.float().repeat_interleave(128, 1)


def _has_zeros(method: Any) -> bool:
    return not getattr(method, "symmetric", type(method).__name__ == "AutoGPTQMoEMethod")


def _methods(triton: Any) -> tuple[type, ...]:
    class OwnExperts(triton):
        """Reads the bytes of weights from the last to the first."""

        packed_scales: Any

        def apply(self, output: Any, hidden_states: Any, w1: Any, w2: Any, *more: Any, **words: Any) -> None:
            of_w1, of_w2 = (numbers(w.flip(-1), s) for w, s in zip((w1, w2), self.packed_scales, strict=True))
            super().apply(output, hidden_states, of_w1, of_w2, *more, **words)

    class FusedMoEMethodBase:
        moe_kernel: Kernel | None = None
        moe_quant_config: Any = None

        def __init__(self, **moe: Any) -> None:
            parallel = types.SimpleNamespace(use_all2all_kernels=False, enable_eplb=False)
            usual = {"moe_backend": "auto", "is_lora_enabled": False, "has_bias": True, "in_dtype": torch.bfloat16}
            self.moe = types.SimpleNamespace(**usual | {"moe_parallel_config": parallel} | moe)
            self.experts_cls: type = OwnExperts

        def process_weights_after_loading(self, layer: Any) -> None:
            layer.laid_out = True
            self.moe_kernel = Kernel(self.experts_cls())
            made = self.moe_kernel.fused_experts
            made.w1_bias, made.w2_bias = (getattr(layer, f"{name}_bias", None) for name in ("w13", "w2"))
            made.packed_scales = layer.w13_weight_scale.data, layer.w2_weight_scale.data
            for name in ("w13", "w2"):
                weight = getattr(layer, f"{name}_weight")
                setattr(layer, f"{name}_weight", nn.Parameter(weight.data.flip(-1), requires_grad=False))
                delattr(layer, f"{name}_weight_scale")

        def apply(self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any) -> Any:
            assert self.moe_kernel is not None
            return self.moe_kernel.apply(layer, x, topk_weights, topk_ids)

    class GptOssMxfp4MoEMethod(FusedMoEMethodBase):
        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)

    class Mxfp4MoEMethod(FusedMoEMethodBase):
        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)

    return GptOssMxfp4MoEMethod, Mxfp4MoEMethod, *_int4_methods(triton, FusedMoEMethodBase)


def _int4_methods(triton: Any, base: Any) -> tuple[type, ...]:
    class OwnInt4Experts(triton):
        """Has the numbers of what was laid out, which it cannot read from the weights of a call."""

        wide: Any

        def apply(self, output: Any, hidden_states: Any, w1: Any, w2: Any, *more: Any, **words: Any) -> None:
            super().apply(output, hidden_states, *self.wide, *more, **words)

    class Int4Method(base):
        def __init__(self, zero_point: bool = True, desc_act: bool = False, is_sym: bool = True, **moe: Any) -> None:
            super().__init__(**{"has_bias": False} | moe)
            self.experts_cls = OwnInt4Experts
            self.quant_config = types.SimpleNamespace(zero_point=zero_point, desc_act=desc_act, is_sym=is_sym)

        def process_weights_after_loading(self, layer: Any) -> None:
            layer.laid_out = True
            self.moe_kernel = Kernel(self.experts_cls())
            self.moe_kernel.fused_experts.wide = tuple(read_int4(self, layer, name) for name in ("w13", "w2"))
            for name in ("w13", "w2"):
                q = getattr(layer, name + NAMES[type(self).__name__][0])
                n = getattr(layer, name + NAMES[type(self).__name__][1]).shape[2]
                setattr(layer, f"{name}_weight", nn.Parameter(q.data.view(len(q), n, -1), requires_grad=False))

    class AutoAWQMoEMethod(Int4Method):
        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)

    class AutoGPTQMoEMethod(Int4Method):
        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)

    class CompressedTensorsWNA16MarlinMoEMethod(Int4Method):
        def __init__(self, symmetric: bool = True, actorder: Any = None, **moe: Any) -> None:
            super().__init__(**moe)
            self.symmetric, self.actorder = symmetric, actorder

        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)

    return AutoAWQMoEMethod, AutoGPTQMoEMethod, CompressedTensorsWNA16MarlinMoEMethod


def fill(layer: Any) -> None:
    """Give a layer of experts weights of a checkpoint, and say what numbers they are."""
    experts, wide, k = layer.w13_weight.shape
    layer.laid_out, layer.numbers = False, {}
    for name, n, columns in (("w13", wide, k), ("w2", k, wide // 2)):
        blocks, scales = packed(experts, n, columns, n)
        setattr(layer, f"{name}_weight", nn.Parameter(blocks, requires_grad=False))
        setattr(layer, f"{name}_weight_scale", nn.Parameter(scales, requires_grad=False))
        layer.numbers[name] = numbers(blocks, scales)
    layer._expert_routing_tables = lambda: None


def read_int4(method: Any, layer: Any, of: str) -> Any:
    """The numbers of a layer's experts as they were loaded: (experts, N, K) of w13 or w2."""
    name = type(method).__name__
    q, scales, zeros = (getattr(layer, of + suffix) for suffix in NAMES[name])
    each = zeros if _has_zeros(method) else [None] * len(q)
    return torch.stack([numbers_of_int4(name, *tensors) for tensors in zip(q, scales, each, strict=True)])


def fill_int4(layer: Any) -> None:
    """Give a layer of experts weights of a checkpoint in int4, and say what numbers they are."""
    method = layer.quant_method
    experts, wide, k = layer.w13_weight.shape
    random = torch.Generator().manual_seed(3)
    layer.laid_out, layer.numbers = False, {}
    of_columns = type(method).__name__ == "AutoAWQMoEMethod"
    for of, n, columns in (("w13", wide, k), ("w2", k, wide // 2)):
        packed = (columns, n // 8) if of_columns else (columns // 8, n)
        low, high = -(1 << 31), 1 << 31
        made = (
            torch.randint(low, high, (experts, *packed), generator=random).int(),
            (torch.rand((experts, columns // 128, n), generator=random) * 0.02 + 0.001).bfloat16(),
            torch.randint(low, high, (experts, columns // 128, n // 8), generator=random).int(),
        )
        delattr(layer, f"{of}_weight")
        for suffix, tensor in zip(NAMES[type(method).__name__], made, strict=True):
            setattr(layer, of + suffix, nn.Parameter(tensor, requires_grad=False))
        layer.numbers[of] = read_int4(method, layer, of).bfloat16().float()
    layer._expert_routing_tables = lambda: None
