"""Tensors in MXFP8, MXFP4 and NVFP4, as `Library.gemm` and `torch.nn.functional.scaled_mm` take them.

Several passes over a tensor in eager torch: for weights, once, and for tests. Activations in a server want one kernel
that quantises what it makes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import ArgumentError
from ..numbers.dtypes import DTYPES
from ..numbers.packed import pack, to_tiles
from ..numbers.scaling import SCALINGS


class Quantised(NamedTuple):
    """A tensor of numbers and its scales.

    `values` is (..., K) in e4m3, or (..., K/2) in `torch.float4_e2m1fn_x2`; `scales` has the scales of all rows in
    tiles of 128 x 4. Only NVFP4 has a `tensor_scale`, one f32 element: what `values` stand for is values * scales *
    tensor_scale, and `scale_ab` of `Library.gemm` is that of A times that of B.
    """

    values: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor | None = None


@torch.no_grad()
def quantise_mxfp8(x: torch.Tensor) -> Quantised:
    """`x` (..., K) in e4m3, with a power of two for each 32 along K, as OCP's Microscaling Formats 1.0 (6.3) has it.

    The scale is that of the largest number of the 32, which may saturate. Numbers must be finite.

    Raises:
        ArgumentError: `x` is no matrix of floats, or K is no multiple of 32.
    """
    return _mx(x, "mxfp8")


@torch.no_grad()
def quantise_mxfp4(x: torch.Tensor) -> Quantised:
    """`x` (..., K) in e2m1, otherwise as `quantise_mxfp8`."""
    return _mx(x, "mxfp4")


@torch.no_grad()
def quantise_nvfp4(x: torch.Tensor, tensor_scale: torch.Tensor | None = None) -> Quantised:
    """`x` (..., K) in e2m1, with a scale in e4m3 for each 16 along K and one in f32 for all.

    A scale makes the largest number of its 16 the largest of e2m1, 6. `tensor_scale`, one f32 element, is by default
    such that the largest scale is the largest of e4m3, 448; a checkpoint may have one of its own. Numbers must be
    finite.

    Raises:
        ArgumentError: `x` is no matrix of floats, K is no multiple of 16, or `tensor_scale` is no f32 element.
    """
    blocks = _blocks(x, "nvfp4")
    largest = blocks.abs().amax(-1)
    most = DTYPES["e2m1"].largest
    if tensor_scale is None:
        tensor_scale = (largest.amax() / (most * DTYPES["ue4m3"].largest)).reshape(1)
        tensor_scale = torch.where(tensor_scale == 0, torch.ones_like(tensor_scale), tensor_scale)
    elif tensor_scale.dtype != torch.float32 or tensor_scale.numel() != 1:
        found = f"{tensor_scale.dtype} of shape {tuple(tensor_scale.shape)}"
        raise ArgumentError(f"tensor_scale must be one element in torch.float32, found {found}")
    scales = (largest / most / tensor_scale).clamp(max=DTYPES["ue4m3"].largest).to(torch.float8_e4m3fn)
    factor = (scales.float() * tensor_scale).unsqueeze(-1)
    scaled = torch.where(factor == 0, torch.zeros_like(blocks), blocks / factor)
    own = tensor_scale.detach() if tensor_scale.requires_grad else tensor_scale
    return Quantised(_elements(scaled, x, "e2m1"), to_tiles(torch, scales), own)


def _mx(x: torch.Tensor, word: str) -> Quantised:
    element = DTYPES[SCALINGS[word].of[0]]
    blocks = _blocks(x, word)
    most = int(torch.frexp(torch.tensor(element.largest)).exponent)  # of two, above the largest number
    exponents = torch.frexp(blocks.abs().amax(-1)).exponent - most  # of the scale
    bias = 127
    codes = torch.where(blocks.any(-1), exponents + bias, 0).clamp(0, 2 * bias)
    scaled = torch.ldexp(blocks, (bias - codes).unsqueeze(-1))
    scales = codes.to(torch.uint8).view(torch.float8_e8m0fnu)
    return Quantised(_elements(scaled, x, element.name), to_tiles(torch, scales))


def _blocks(x: torch.Tensor, word: str) -> torch.Tensor:
    """`x` in f32 as (rows, blocks along K, elements of a block)."""
    size = SCALINGS[word].k
    assert size is not None
    if not x.dtype.is_floating_point or x.dim() < 1 or not x.numel() or x.shape[-1] % size:
        raise ArgumentError(
            f"{word} is for tensors (..., K) of floats with K a multiple of {size}, found {x.dtype} of {tuple(x.shape)}"
        )
    return x.reshape(-1, x.shape[-1] // size, size).float()


def _elements(scaled: torch.Tensor, x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Numbers as elements in the shape of `x`."""
    if DTYPES[dtype].unit == 1:
        largest = DTYPES[dtype].largest
        return scaled.clamp(-largest, largest).to(getattr(torch, DTYPES[dtype].torch)).contiguous().view(x.shape)
    packed: torch.Tensor = pack(torch, scaled.reshape(x.shape), dtype)
    return packed
