"""Products with scales as operators of torch's, which serve every M: `cute_aot::scaled_gemm`, and of activations that
nobody has quantised yet `cute_aot::quantising_gemm`.

Generated code that is kept on disk calls `direct` and `direct_quantising` here, so names and parameters must stay.
Knows nothing of how products are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..torch.direct_calls import DIRECT, Direct
from ..torch.operator import OPERATORS, TAGS, library_of, tell_inductor
from .quantising import Unquantised, multiply_unquantised
from .scaled_products import multiply

OPERATORS.define(
    "scaled_gemm(int library, Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType dtype) -> Tensor",
    tags=TAGS,
)
OPERATORS.define(
    "quantising_gemm(int library, Tensor x, Tensor b, Tensor scale_b, ScalarType dtype, str scaling, int few, "
    "str overlap, bool quantises, int behind, bool packed) -> Tensor",
    tags=TAGS,
)


def _scaled_gemm(
    library: int, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return multiply(library_of(library), a, b, scale_a, scale_b, {"dtype": dtype})


def _quantising_gemm(
    library: int, x: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype, *way: Any
) -> torch.Tensor:
    return multiply_unquantised(library_of(library), x, b, scale_b, Unquantised(*way), {"dtype": dtype})


def direct(library: int, *_names: str, dtype: torch.dtype) -> Callable[..., None]:
    """What generated code calls in the place of the operator; see `runtime.torch.direct`."""

    def call(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *, out: torch.Tensor
    ) -> None:
        multiply(library_of(library), a, b, scale_a, scale_b, {"out": out})

    return call


def direct_quantising(library: int, *_names: str, dtype: torch.dtype, **way: Any) -> Callable[..., None]:
    """As `direct`, of `quantising_gemm`."""
    of = Unquantised(**way)

    def call(x: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor, *, out: torch.Tensor) -> None:
        multiply_unquantised(library_of(library), x, b, scale_b, of, {"out": out})

    return call


for _key in ("CUDA", "CPU"):
    OPERATORS.impl("scaled_gemm", _scaled_gemm, _key)
    OPERATORS.impl("quantising_gemm", _quantising_gemm, _key)


@torch.library.register_fake("cute_aot::scaled_gemm", lib=OPERATORS)
def _fake(library: int, a: torch.Tensor, b: torch.Tensor, _a: Any, _b: Any, dtype: torch.dtype) -> torch.Tensor:
    tell_inductor()
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


@torch.library.register_fake("cute_aot::quantising_gemm", lib=OPERATORS)
def _fake_quantising(library: int, x: torch.Tensor, b: torch.Tensor, _b: Any, dtype: torch.dtype, *_way: Any) -> Any:
    tell_inductor()
    return x.new_empty((x.shape[0], b.shape[0]), dtype=dtype)


SCALED = torch.ops.cute_aot.scaled_gemm.default
QUANTISING = torch.ops.cute_aot.quantising_gemm.default
DIRECT[SCALED] = Direct(__name__, "direct")
DIRECT[QUANTISING] = Direct(__name__, "direct_quantising")
