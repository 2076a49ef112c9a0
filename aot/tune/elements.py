"""Numbers to tensors of an element type and back, also where torch has the type and no conversion: packed ones; and
tensors full of NaN, or of what integers have in its place.

Needs torch. Knows nothing of operands.
"""

from __future__ import annotations

import torch

from runtime.errors import AotError
from runtime.numbers.dtypes import DTYPES, TORCH_NAMES

TORCH_DTYPES = {short: getattr(torch, name) for short, name in TORCH_NAMES.items()}


def name_of(tensor: torch.Tensor) -> str:
    """The short name of a tensor's element type."""
    return next(short for short, dtype in TORCH_DTYPES.items() if dtype == tensor.dtype)


def to_type(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """`values` (..., n) as elements of `dtype`, to nearest; of a packed type (..., n / unit), saturated.

    Raises:
        AotError: torch has no such tensors.
    """
    if dtype not in TORCH_DTYPES:
        raise AotError(f"torch has no tensors of {dtype}; it has them of {', '.join(TORCH_DTYPES)}")
    if DTYPES[dtype].unit == 1:
        return values.to(TORCH_DTYPES[dtype])
    bits = DTYPES[dtype].bits
    levels = torch.tensor(_magnitudes(dtype), device=values.device)
    codes = torch.bucketize(values.abs().float(), (levels[1:] + levels[:-1]) / 2)
    codes = (codes + (torch.signbit(values).long() << (bits - 1))).unflatten(-1, (-1, DTYPES[dtype].unit))
    whole = sum(codes[..., place] << (bits * place) for place in range(DTYPES[dtype].unit))
    assert isinstance(whole, torch.Tensor)
    return whole.to(torch.uint8).view(TORCH_DTYPES[dtype])


def to_numbers(tensor: torch.Tensor, dtype: str, wide: torch.dtype = torch.float32) -> torch.Tensor:
    """What a tensor of `dtype` holds, element by element, as numbers of the type `wide`."""
    if DTYPES[dtype].unit == 1:
        return tensor.to(wide)
    bits, magnitudes = DTYPES[dtype].bits, _magnitudes(dtype)
    numbers = torch.tensor([*magnitudes, *(-x for x in magnitudes)], dtype=wide, device=tensor.device)
    raw = tensor.view(torch.uint8).long()
    codes = [raw >> (bits * place) & ((1 << bits) - 1) for place in range(DTYPES[dtype].unit)]
    return numbers[torch.stack(codes, -1).flatten(-2)]


def poisoned(shape: tuple[int, ...], dtype: str, device: str) -> torch.Tensor:
    """A tensor full of NaN, or of the least integer there is."""
    of = TORCH_DTYPES[dtype]
    if not of.is_floating_point:
        return torch.full(shape, torch.iinfo(of).min, device=device, dtype=of)
    return torch.full(shape, float("nan"), device=device).to(of)


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Which elements are still what `poisoned` made them."""
    if not tensor.dtype.is_floating_point:
        return tensor == torch.iinfo(tensor.dtype).min
    return torch.isnan(tensor.float())


def _magnitudes(dtype: str) -> list[float]:
    """The numbers of a packed type that are not negative, by their bits: subnormal ones first, and none is infinite."""
    d = DTYPES[dtype]
    assert d.mantissa_bits is not None
    steps, bias = 1 << d.mantissa_bits, 2 ** (d.bits - 2 - d.mantissa_bits) - 1
    exponents = range(1 << (d.bits - 1 - d.mantissa_bits))
    return [(m + steps * (e > 0)) / steps * 2.0 ** (max(e, 1) - bias) for e in exponents for m in range(steps)]
