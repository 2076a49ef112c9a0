"""Numbers of fewer than 8 bits in torch's tensors, and tiles of scales: what torch has types for and no conversion.

Who calls brings torch along; nothing is imported for it. Knows nothing of who quantises what.
"""

from __future__ import annotations

from typing import Any

from .dtypes import DTYPES
from .scaling import TILE_BLOCKS, TILE_ROWS, TILE_SCALES


def pack(torch: Any, values: Any, dtype: str) -> Any:
    """`values` (..., n) as a tensor (..., n / unit) of a packed type: to nearest, ties to even, saturated, NaN too.

    n must be a multiple of the unit, and torch must have the type.
    """
    d = DTYPES[dtype]
    levels = torch.tensor(_magnitudes(dtype), device=values.device)
    halfway = (levels[1:] + levels[:-1]) / 2
    # What is just halfway goes to the number before, so after an odd one halfway begins a bit earlier.
    halfway[1::2] = torch.nextafter(halfway[1::2], torch.zeros_like(halfway[1::2]))
    codes = torch.bucketize(values.abs().float(), halfway)
    codes = (codes + (torch.signbit(values).long() << (d.bits - 1))).unflatten(-1, (-1, d.unit))
    whole = sum(codes[..., place] << (d.bits * place) for place in range(d.unit))
    return whole.to(torch.uint8).view(getattr(torch, d.torch))


def unpack(torch: Any, tensor: Any, dtype: str, wide: Any) -> Any:
    """The numbers in a tensor (..., n / unit) of a packed type, as (..., n) of the type `wide` of torch's."""
    d, magnitudes = DTYPES[dtype], _magnitudes(dtype)
    numbers = torch.tensor([*magnitudes, *(-x for x in magnitudes)], dtype=wide, device=tensor.device)
    raw = tensor.view(torch.uint8).long()
    codes = [raw >> (d.bits * place) & ((1 << d.bits) - 1) for place in range(d.unit)]
    return numbers[torch.stack(codes, -1).flatten(-2)]


def _magnitudes(dtype: str) -> list[float]:
    """The numbers of a packed type that are not negative, by their bits: subnormal ones first, and none is infinite."""
    d = DTYPES[dtype]
    assert d.mantissa_bits is not None
    steps, bias = 1 << d.mantissa_bits, 2 ** (d.bits - 2 - d.mantissa_bits) - 1
    exponents = range(1 << (d.bits - 1 - d.mantissa_bits))
    return [(m + steps * (e > 0)) / steps * 2.0 ** (max(e, 1) - bias) for e in exponents for m in range(steps)]


def to_tiles(torch: Any, scales: Any) -> Any:
    """A matrix of scales, rows by blocks along K, in tiles of 128 x 4 (`runtime.numbers.scaling.TILES`): (tiles of
    rows, scales of a row of tiles). Of what fills up the last tiles no bit is set:
    a scale of 0, or in ue8m0 the least."""
    rows, blocks = scales.shape
    of_rows, of_blocks = -(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS)
    whole = torch.zeros((of_rows * TILE_ROWS, of_blocks * TILE_BLOCKS), dtype=torch.uint8, device=scales.device)
    whole[:rows, :blocks] = scales.view(torch.uint8)
    split = whole.view(of_rows, TILE_ROWS // 32, 32, of_blocks, TILE_BLOCKS).permute(0, 3, 2, 1, 4)
    return split.reshape(of_rows, of_blocks * TILE_SCALES).view(scales.dtype)


def from_tiles(tiles: Any) -> Any:
    """The matrix of scales that `to_tiles` was given, with whole tiles of rows and blocks."""
    of_rows, of_blocks = tiles.shape[0], tiles.shape[1] // TILE_SCALES
    split = tiles.reshape(of_rows, of_blocks, 32, TILE_ROWS // 32, TILE_BLOCKS)
    return split.permute(0, 3, 2, 1, 4).reshape(of_rows * TILE_ROWS, of_blocks * TILE_BLOCKS)
