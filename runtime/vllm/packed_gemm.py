"""Products with prepared int4 weights as an operator of torch's: `cute_aot::packed_gemm`, which serves every M.

Weights come as bytes, since compilers of graphs do not know 4-bit types. Where no kernel of the library takes a call,
torch computes it inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArgumentError, KernelMiss
from ..plugin.log import say_once
from ..torch.direct_calls import DIRECT, Direct
from ..torch.operator import OPERATORS, TAGS, bare, library_of, tell_inductor
from ..torch.weights import PreparedWeight, widened

OPERATORS.define("packed_gemm(int library, Tensor a, Tensor b, Tensor scale_b, Tensor? bias=None) -> Tensor", tags=TAGS)


def _packed_gemm(
    library: int, a: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return _computed(library, a, b, scale_b, bias, {})


def direct(library: int, *_names: str) -> Callable[..., None]:
    """What generated code calls in the place of the operator; see `runtime.torch.direct`."""

    def call(
        a: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor
    ) -> None:
        _computed(library, a, b, scale_b, bias, {"out": out})

    return call


def _computed(
    library: int,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    to: dict[str, Any],
) -> torch.Tensor:
    """a (M, K) times b (N, K / 2) of `PreparedWeight`, as bytes, in a's type, or written to `to["out"]`."""
    weight = PreparedWeight(bare(b).view(torch.uint4), bare(scale_b))
    more = {} if bias is None else {"bias": bare(bias)}
    try:
        found: torch.Tensor = library_of(library).gemm(bare(a), weight.b, scale_b=weight.scale_b, **more, **to)
    except (KernelMiss, ArgumentError) as error:
        say_once(library_of(library), f"an int4 GEMM of N {b.shape[0]} and K {a.shape[-1]}", error)
        found = torch.nn.functional.linear(a, widened(weight), bias)
        found = to["out"].copy_(found) if "out" in to else found
    return found


for _key in ("CUDA", "CPU"):
    OPERATORS.impl("packed_gemm", _packed_gemm, _key)


@torch.library.register_fake("cute_aot::packed_gemm", lib=OPERATORS)
def _fake(library: int, a: torch.Tensor, b: torch.Tensor, _scale_b: Any, _bias: Any = None) -> torch.Tensor:
    tell_inductor()
    return a.new_empty((a.shape[0], b.shape[0]))


PACKED = torch.ops.cute_aot.packed_gemm.default
DIRECT[PACKED] = Direct(__name__, "direct")
