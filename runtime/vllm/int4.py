"""A class for vLLM's list of GEMMs of few-bit weights, in front of its own: layers in int4 whose products an archive
has kernels for.

Knows how vLLM describes such a layer, and its base class by the methods that it must fill.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArgumentError
from ..gemm.signature import Signature
from ..numbers.epilogue import Epilogue
from ..numbers.scaling import SCALINGS
from ..torch.weights import prepare_weight
from .packed_gemm import PACKED

_LAYOUT = "gptq_v2"  # of `prepare_weight`, which weights, scales and zero points have once K comes first
_BITS = 4
_NO_BIAS = "_cute_aot_no_bias"  # of a layer whose kernel adds one, and which may have none: zeros
_SCALINGS = {8: "int4_weight", 0: "int4_zero_weight"}  # by what is added to numbers, where zero points do not say


def wanted(config: Any) -> Signature:
    """The signature of a layer that vLLM describes, without its bias.

    Raises:
        ArgumentError: there is none, by element types, by how scales are shared, or by the order of columns.
    """
    weight = config.weight_type
    if config.act_type != torch.bfloat16 or config.out_type not in (None, torch.bfloat16):
        raise ArgumentError(f"activations of {config.act_type} are not bf16; serve with --dtype bfloat16")
    known = weight.is_integer() and not weight.is_signed() and weight.size_bits == _BITS
    if not known or weight.bias not in _SCALINGS or config.zero_points == bool(weight.bias):
        raise ArgumentError(f"weights of {weight}{' with zero points' if config.zero_points else ''} are not int4")
    scaling = _SCALINGS[weight.bias]
    if config.group_size != SCALINGS[scaling].k:
        raise ArgumentError(f"{config.group_size} weights along K share a scale, not {SCALINGS[scaling].k}")
    if config.has_g_idx:
        raise ArgumentError("columns of K are in another order (act-order)")
    k, n = config.partition_weight_shape
    return Signature("bf16", "u4", "bf16", "f32", "none", n, k, scaling=scaling)


def with_bias(signature: Signature) -> Signature:
    """The same with a bias in its epilogue."""
    return dataclasses.replace(signature, epilogue=Epilogue(bias=True).word())


def derived(
    base: type,
    permute: Callable[..., Any],
    asked: Callable[[Any], tuple[bool, str | None]],
    made: Callable[[Any, Any], tuple[int, bool, bool]],
) -> type:
    """A class for vLLM's list, derived from its `base`; `permute` is vLLM's, which brings a parameter's axes in order.

    `asked` says of a layer's description whether the archive computes it, and if not why not; `made` is told of each
    GEMM of this class and the layer's description, and returns the number by which operators know the library, and
    whether it serves the layer without a bias and with one.
    """

    class CuteAotInt4(base):
        """int4 by groups of 128, symmetric or with zero points."""

        @classmethod
        def get_min_capability(cls) -> int:
            return 0  # what there is for this GPU shows at each layer

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            return asked(c)

        def __init__(self, c: Any, *names: Any, **more: Any) -> None:
            super().__init__(c, *names, **more)
            self.number, self.plain, self.biased = made(self, c)

        def process_weights_after_loading(self, layer: Any) -> None:
            q, scales, zeros, _ = self._get_weight_params(layer)
            permute(q, input_dim=0, output_dim=1, packed_dim=0)
            permute(scales, input_dim=0, output_dim=1)
            if self.config.zero_points:
                permute(zeros, input_dim=0, output_dim=1, packed_dim=1)
            of_zeros = zeros.data if self.config.zero_points else None
            weight = prepare_weight(q.data, scales.data, _LAYOUT, of_zeros)
            self._transform_param(layer, self.w_q_name, lambda _: weight.b.view(torch.uint8))
            self._transform_param(layer, self.w_s_name, lambda _: weight.scale_b)
            if self.config.zero_points:
                self._transform_param(layer, self.w_zp_name, lambda old: torch.empty(0, device=old.device))
            if not self.plain:
                layer.register_buffer(_NO_BIAS, weight.scale_b.new_zeros(len(weight.b)), persistent=False)

        def apply_weights(self, layer: Any, x: Any, bias: Any = None) -> Any:
            b, scales = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
            added = bias if self.biased else None
            if added is None and not self.plain:
                added = getattr(layer, _NO_BIAS)
            d = PACKED(self.number, x.reshape(-1, x.shape[-1]).contiguous(), b, scales, added)
            d = d if bias is None or added is bias else d + bias
            return d.view(*x.shape[:-1], d.shape[-1])

    return CuteAotInt4
