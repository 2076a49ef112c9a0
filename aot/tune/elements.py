"""Numbers to tensors of an element type and back, also where torch has the type and no conversion: packed ones; and
tensors full of NaN, or of what integers have in its place.

Needs torch. Knows nothing of operands.
"""

from __future__ import annotations

import torch

from runtime.errors import AotError
from runtime.numbers.dtypes import DTYPES, TORCH_NAMES
from runtime.numbers.packed import pack, unpack

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
    packed: torch.Tensor = pack(torch, values, dtype)
    return packed


def to_numbers(tensor: torch.Tensor, dtype: str, wide: torch.dtype = torch.float32) -> torch.Tensor:
    """What a tensor of `dtype` holds, element by element, as numbers of the type `wide`."""
    if DTYPES[dtype].unit == 1:
        return tensor.to(wide)
    numbers: torch.Tensor = unpack(torch, tensor, dtype, wide)
    return numbers


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
