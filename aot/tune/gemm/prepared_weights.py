"""Random 4-bit weights as `runtime.torch.weights` prepares them, and what numbers they are.

Needs torch. Knows nothing of kernels.
"""

from __future__ import annotations

import torch

from runtime.numbers.scaling import FRAGMENTS, SCALINGS
from runtime.numbers.weights import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    FORMATS,
    INT4_ZERO,
    LANES,
    MINUS_0,
    WORDS,
    codes_of,
    scales_of,
)

from ..elements import TORCH_DTYPES

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low three bits


def prepared(scaling: str) -> bool:
    """Whether weights of a scaling lie in memory as registers take them."""
    return SCALINGS[scaling].layout == FRAGMENTS


def random_weight(n: int, k: int, dtype: str, generator: torch.Generator) -> torch.Tensor:
    """Any bytes, since any are a weight."""
    shape = (n, k // 2)
    raw = torch.randint(0, 256, shape, device=generator.device, generator=generator, dtype=torch.uint8)
    return raw.view(TORCH_DTYPES[dtype])


def scale_size(scaling: str) -> float:
    """By what scales in memory are larger than those of weights."""
    return 2.0 ** FORMATS[scaling].scale_exponent if prepared(scaling) else 1.0


def put_zero_points(scaling: str, scale_b: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """`scale_b` with random zero points, of which u4 has 16, where the scaling has them."""
    if prepared(scaling) and FORMATS[scaling].zeros:
        of_points = scale_b[..., 1::2, :]
        drawn = torch.randint(0, 16, of_points.shape, device=generator.device, generator=generator)
        of_points.view(torch.int16).copy_(drawn + MINUS_0)
    return scale_b


def dequantised(scaling: str, b: torch.Tensor, scale_b: torch.Tensor) -> torch.Tensor:
    """The numbers (N, K) in float32, each rounded to bf16 once."""
    if not prepared(scaling):
        return _of_rows(b, scale_b, SCALINGS[scaling].k or 1)
    form = FORMATS[scaling]
    n, units = b.shape
    shape = (2 * units // BLOCK_COLUMNS, n // BLOCK_ROWS, LANES, WORDS)
    codes = codes_of(b.view(torch.uint8).view(torch.int32).reshape(shape), form)
    if form.codes == "e2m1":
        magnitudes = torch.tensor([*_E2M1, *(-x for x in _E2M1)], device=codes.device)
        numbers = magnitudes[codes]
    else:
        numbers = (codes - INT4_ZERO).float()
    scales = scales_of(scale_b.float() * 2.0**-form.scale_exponent, form)
    if form.zeros:
        points = scales_of(scale_b.view(torch.int16).int(), form)[:, 1::2] - MINUS_0
        numbers, scales = (codes - points.repeat_interleave(form.group, 1)).float(), scales[:, ::2]
    return (numbers * scales.repeat_interleave(form.group, 1)).to(torch.bfloat16).float()


def _of_rows(b: torch.Tensor, scale_b: torch.Tensor, group: int) -> torch.Tensor:
    """Of int4 in rows, the first of two in the low bits, with a scale (K / group, N) for each group."""
    raw = b.view(torch.uint8)
    codes = torch.stack((raw & 15, raw >> 4), -1).flatten(1).to(torch.int32)
    numbers = (codes ^ INT4_ZERO) - INT4_ZERO  # from two's complement
    return (numbers * scale_b.float().t().repeat_interleave(group, 1)).to(torch.bfloat16).float()
