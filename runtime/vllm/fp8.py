"""Classes for vLLM's lists of fp8 GEMMs, in front of its own: layers whose scaled products an archive has kernels for.

Knows how vLLM describes such a layer, and the classes of its lists by the methods that they must fill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArgumentError
from ..gemm.signature import Signature
from ..numbers.scaling import SCALE_BLOCK
from ..plugin.quantising import Unquantised, quantise_with
from ..plugin.scaled import QUANTISING, SCALED
from ..program.tensor import dtype_name

# By the groups that share a scale, rows by columns, of activations (M, K) and of weights (N, K); -1 means all of them.
_SCALINGS = {
    ((-1, -1), (-1, -1)): "tensor",
    ((1, -1), (-1, 1)): "row_column",
    ((1, SCALE_BLOCK), (SCALE_BLOCK, SCALE_BLOCK)): "block",
}


def wanted(config: Any) -> Signature:
    """The signature of a layer that vLLM describes, without its bias, which is added afterwards.

    Raises:
        ArgumentError: there is none, by element types or by how scales are shared.
    """
    keys = {"activations": config.activation_quant_key, "weights": config.weight_quant_key}
    for name, key in keys.items():
        if key.dtype != torch.float8_e4m3fn or key.scale.dtype != torch.float32:
            raise ArgumentError(f"{name} of {key.dtype} with scales of {key.scale.dtype} are not e4m3 with f32 ones")
        if not key.symmetric or key.scale2 is not None:
            raise ArgumentError(f"{name} have zero points, or scales of scales")
    groups = (tuple(keys["activations"].scale.group_shape), tuple(keys["weights"].scale.group_shape))
    if groups not in _SCALINGS:
        raise ArgumentError(f"no kernel has one scale for {groups[0]} of activations and {groups[1]} of weights")
    if _SCALINGS[groups] == "block" and keys["activations"].scale.static:
        raise ArgumentError("activations have static scales by blocks")
    n, k = config.weight_shape
    d = dtype_name(config.out_dtype or config.input_dtype)
    return Signature("e4m3", "e4m3", d, "f32", "none", n, k, scaling=_SCALINGS[groups])


def classes(
    scaled: type,
    block: type,
    asked: Callable[[Any], tuple[bool, str | None]],
    made: Callable[[Any, Any], tuple[int, Unquantised | None]],
) -> tuple[type, type]:
    """Classes for vLLM's two lists, derived from its `scaled` and `block`.

    `asked` says of a layer's description whether the archive computes it, and if not why not; `made` is told of each
    GEMM of these classes and the layer's description, and returns the number by which operators know the library, and
    how tokens are computed as they are.
    """

    class Asked:
        """What both classes answer."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None  # what there is for this GPU shows at each layer

        @classmethod
        def can_implement(cls, config: Any) -> tuple[bool, str | None]:
            return asked(config)

        def take(self, config: Any) -> None:
            """Note what serves this layer, and leave tokens as they are, which vLLM's `apply_weights` quantises by an
            attribute."""
            self.number, self.way = made(self, config)
            quantiser: Any = getattr(self, "quant_fp8", None)
            if self.way is None or not hasattr(quantiser, "forward_cuda"):
                self.way = None
                return
            quantise_with(self.way.scaling, quantiser.forward_cuda)

            def as_it_comes(x: Any, scale: Any = None, scale_ub: Any = None, **more: Any) -> tuple[Any, Any]:
                given = scale is not None or scale_ub is not None
                return quantiser(x, scale, scale_ub, **more) if given else (x, None)

            self.quant_fp8 = as_it_comes

        def product(self, a: Any, b: Any, scale_a: Any, scale_b: Any, dtype: Any) -> Any:
            """The product of `a` (M, K), quantised or not, and `b` (N, K)."""
            if scale_a is not None or self.way is None:
                return SCALED(self.number, a, b, scale_a, scale_b, dtype)
            return QUANTISING(self.number, a.contiguous(), b, scale_b, dtype, *self.way)

    class CuteAotFp8(Asked, scaled):
        """Scaled by tensor, or by row and column."""

        def __init__(self, c: Any, layer_param_names: Any) -> None:
            super().__init__(c, layer_param_names)
            self.take(c)

        def input_quant_key(self) -> Any:
            """Activations that were quantised before with one static scale are taken as they come."""
            key = self.config.activation_quant_key
            return key if key.scale.static and tuple(key.scale.group_shape) == (-1, -1) else None

        def apply_scaled_mm(
            self, *, A: Any, B: Any, out_dtype: Any, As: Any, Bs: Any, bias: Any, output_shape: Any
        ) -> Any:
            d = self.product(A, B.t(), As, Bs, out_dtype)
            return (d if bias is None else d + bias).view(*output_shape)

    class CuteAotFp8Block(Asked, block):
        """Scaled by blocks of 128."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.take(config)

        def apply_block_scaled_mm(self, A: Any, B: Any, As: Any, Bs: Any) -> Any:
            return self.product(A, B, As, Bs, self.config.out_dtype or self.config.input_dtype)

    return CuteAotFp8, CuteAotFp8Block
