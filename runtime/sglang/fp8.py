"""The layers of SGLang's in fp8 that an archive computes: how one is told by its scales, and what is called instead.

Activations are quantised by SGLang's own functions, as it would for the same layer, or by the archive. Knows SGLang's
layers by their attributes, and the functions that `hooks` lists.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError, KernelMiss
from ..gemm.signature import Signature
from ..numbers.scaling import SCALE_BLOCK
from ..plugin.quantising import Unquantised, quantise_with
from ..plugin.scaled import QUANTISING, SCALED
from ..program.tensor import dtype_name
from ..torch.operator import library_of
from . import hooks

_MARK = "_cute_aot_scaled"  # of a weight that is served


class Weight(NamedTuple):
    """What calls need to know of a weight: the library's number, which scaling, the element type of activations and
    result, and how it is computed of tokens that nobody has quantised."""

    number: int
    scaling: str
    dtype: torch.dtype
    way: Unquantised | None = None


def is_fp8(layer: Any) -> bool:
    """Whether a layer has a weight in e4m3."""
    return getattr(getattr(layer, "weight", None), "dtype", None) == torch.float8_e4m3fn


def wanted(
    layer: Any, dtype: torch.dtype, backend: str, is_known: Callable[[Any], bool] = hooks.is_marked
) -> Signature:
    """The signature of a layer whose weight and scales are in place, without its bias, which is added afterwards.

    `dtype` is the model's element type, `backend` what `--fp8-gemm-backend` says, and `is_known` tells whether the
    plugin replaces a function that computes layers with scales of blocks.

    Raises:
        ArgumentError: there is none, by who computes it, by element types or by how scales are shared.
    """
    holder = getattr(layer, "scheme", None) or layer.quant_method
    if not any(base.__name__ in hooks.FP8_METHODS for base in type(holder).__mro__):
        raise ArgumentError(f"{type(holder).__name__} computes fp8 layers in a way that the plugin does not know")
    scale = getattr(layer, "weight_scale_inv", None)
    scale = getattr(layer, "weight_scale", None) if scale is None else scale
    if scale is None or scale.dtype != torch.float32:
        raise ArgumentError(f"the weight has scales of {getattr(scale, 'dtype', None)}, not of torch.float32")
    scaling = _scaling(layer, scale, holder, backend, is_known)
    n, k = matrix(layer, scaling).shape
    return Signature("e4m3", "e4m3", dtype_name(dtype), "f32", "none", n, k, scaling=scaling)


def matrix(layer: Any, scaling: str) -> Any:
    """The weight (N, K); SGLang stores it (K, N) where it is not scaled by blocks."""
    return layer.weight if scaling == "block" else layer.weight.t()


def is_dynamic(layer: Any) -> bool:
    """Whether activations have scales of their own, and not of the checkpoint."""
    return getattr(layer, "input_scale", None) is None


def take(layer: Any, weight: Weight) -> None:
    """Let calls for the weight of this layer go to the library that `weight` says."""
    if weight.way is not None:
        kernels: Any = importlib.import_module(hooks.FP8)
        quantise_with("row_column", kernels.sglang_per_token_quant_fp8)
        quantise_with("block", lambda x: _quantised_by_blocks(kernels, x))
    setattr(layer.weight, _MARK, weight)


def _quantised_by_blocks(kernels: Any, x: torch.Tensor) -> Any:
    return kernels.sglang_per_token_group_quant_fp8(x, SCALE_BLOCK, column_major_scales=True, scale_tma_aligned=True)


def leave(layer: Any) -> None:
    """Let SGLang compute it."""
    weight = getattr(layer, "weight", None)
    if weight is not None and hasattr(weight, _MARK):
        delattr(weight, _MARK)


def _scaling(layer: Any, scale: Any, holder: Any, backend: str, is_known: Callable[[Any], bool]) -> str:
    rows, columns = layer.weight.shape
    if getattr(layer, "weight_scale_inv", None) is not None or getattr(layer, "weight_block_size", None) is not None:
        if backend != "auto":
            raise ArgumentError(f"--fp8-gemm-backend asks for {backend}")
        if not is_known(getattr(holder, "w8a8_block_fp8_linear", None)):
            raise ArgumentError(f"{type(holder).__name__} chose a GEMM with block scales that the plugin does not know")
        if tuple(scale.shape) != (-(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK)):
            raise ArgumentError(f"scales of shape {tuple(scale.shape)} are not one for each 128 x 128 of the weight")
        return "block"
    if scale.numel() == columns:
        return "row_column"
    if scale.numel() != 1:
        raise ArgumentError(f"scales of shape {tuple(scale.shape)} are neither one nor one for each column")
    if getattr(layer, "input_scale", None) is None:
        raise ArgumentError("no kernel has one scale for the weight and one for each token")
    return "tensor"


# --- what torch.compile traces: attributes, SGLang's quantisation, and the operator ---


def around_linear(computed: Callable[..., Any]) -> Callable[..., Any]:
    """Of `apply_fp8_linear`; its weight is (K, N)."""
    kernels: Any = importlib.import_module(hooks.FP8)

    def apply_fp8_linear(
        input: Any,
        weight: Any,
        weight_scale: Any,
        input_scale: Any = None,
        input_scale_ub: Any = None,
        bias: Any = None,
        *args: Any,
        **more: Any,
    ) -> Any:
        mark = getattr(weight, _MARK, None)
        if mark is None or args or input.dtype != mark.dtype:
            return computed(input, weight, weight_scale, input_scale, input_scale_ub, bias, *args, **more)
        x = input.reshape(-1, input.shape[-1])
        per_token = more.get("use_per_token_if_dynamic", False)
        compressed = more.get("compressed_tensor_quant", False)
        if mark.way is not None and input_scale is None and (per_token or not compressed):
            columns = weight_scale.reshape(-1, 1)
            d = QUANTISING(mark.number, x.contiguous(), weight.t(), columns, mark.dtype, *mark.way)
            return (d if bias is None else d + bias).view(*input.shape[:-1], weight.shape[1])
        if compressed:
            x, scales = kernels.scaled_fp8_quant(x, input_scale, use_per_token_if_dynamic=per_token)
        elif input_scale is not None:
            x, scales = kernels.static_quant_fp8(x, input_scale, repeat_scale=mark.scaling == "row_column")
        else:
            x, scales = kernels.sglang_per_token_quant_fp8(x)
        if mark.scaling == "row_column":
            scales, weight_scale = scales.reshape(-1, 1), weight_scale.reshape(-1, 1)
            if input_scale is not None:
                scales = scales.expand(x.shape[0], 1).contiguous()
        d = SCALED(mark.number, x, weight.t(), scales, weight_scale, mark.dtype)
        return (d if bias is None else d + bias).view(*input.shape[:-1], weight.shape[1])

    return apply_fp8_linear


def around_block(computed: Callable[..., Any]) -> Callable[..., Any]:
    """Of a function of `FP8_BLOCKS`; its weight is (N, K)."""
    kernels: Any = importlib.import_module(hooks.FP8)

    def block_fp8_linear(
        input: Any, weight: Any, block_size: Any, weight_scale: Any, input_scale: Any = None, bias: Any = None
    ) -> Any:
        mark = getattr(weight, _MARK, None)
        if mark is None or input_scale is not None or input.dtype != mark.dtype:
            return computed(input, weight, block_size, weight_scale, input_scale, bias)
        x = input.reshape(-1, input.shape[-1])
        if mark.way is not None:
            d = QUANTISING(mark.number, x.contiguous(), weight, weight_scale, mark.dtype, *mark.way)
        else:
            x, scales = _quantised_by_blocks(kernels, x)
            d = SCALED(mark.number, x, weight, scales, weight_scale, mark.dtype)
        return (d if bias is None else d + bias).view(*input.shape[:-1], weight.shape[0])

    return block_fp8_linear


def around_deep_gemm(computed: Callable[..., Any]) -> Callable[..., Any]:
    """Of `gemm_nt_f8f8bf16`, which no trace enters; what the library refuses is SGLang's here as well."""

    def gemm_nt_f8f8bf16(lhs: Any, rhs: Any, out: Any) -> Any:
        mark = getattr(rhs[0], _MARK, None)
        if mark is None or mark.scaling != "block" or out.dtype != mark.dtype:
            return computed(lhs, rhs, out)
        try:
            library_of(mark.number).gemm(lhs[0], rhs[0], scale_a=lhs[1], scale_b=rhs[1], out=out)
        except (KernelMiss, ArgumentError):
            return computed(lhs, rhs, out)
        return None

    return gemm_nt_f8f8bf16
