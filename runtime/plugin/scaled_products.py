"""Products of quantised tokens: by the library or, where it refuses a call, by torch.

Knows nothing of graphs, nor of who quantised the tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError, KernelMiss
from ..numbers.scaling import SCALE_BLOCK
from ..program.operation import OVERLAPS
from ..serve.library import Library
from ..torch.operator import bare
from .log import say_once


def multiply(
    lib: Library,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    to: dict[str, Any],
    overlap: str = OVERLAPS[0],
) -> torch.Tensor:
    """The product of a (M, K) and b (N, K) in the element type `to["dtype"]`, or written to `to["out"]`."""
    a, b, scale_a, scale_b = bare(a), bare(b), in_f32(scale_a), in_f32(scale_b)
    promised = {} if overlap == OVERLAPS[0] else {"overlap": overlap}
    try:
        found: torch.Tensor = lib.gemm(a, b, scale_a=scale_a, scale_b=scale_b, **promised, **to)
    except (KernelMiss, ArgumentError) as error:
        found = multiply_by_torch(lib, a, b, scale_a, scale_b, to, error)
    return found


def multiply_by_torch(
    lib: Library,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    to: dict[str, Any],
    error: Exception,
) -> torch.Tensor:
    """The product that the library refused with this error, which is said."""
    say_once(lib, f"an fp8 GEMM {extents(*b.shape)}", error)
    found = widened(a, scale_a) @ widened(b, scale_b).T
    return to["out"].copy_(found) if "out" in to else found.to(to["dtype"])


def widened(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x (rows, K) in float32, scaled: by one number, one for each row, or one for each 1 or 128 rows by 128 columns."""
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    for axis in (0, 1):
        if scales.shape[axis] not in (1, x.shape[axis]):
            scales = scales.repeat_interleave(SCALE_BLOCK, axis).narrow(axis, 0, x.shape[axis])
    return x.float() * scales


def in_f32(scales: torch.Tensor) -> torch.Tensor:
    """Scales as kernels take them; of checkpoints, some are ue8m0."""
    scales = bare(scales)
    return scales if scales.dtype is torch.float32 else scales.float()


def extents(n: int, k: int) -> str:
    """Those of B, as lines of a log have them."""
    return f"of N {n} and K {k}"
