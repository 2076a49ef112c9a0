"""The memory of prepared weights (`runtime.numbers.weights`) as tensors of words, whose offsets threads add up.

Knows nothing of who loads them.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute

from runtime.numbers.weights import WeightFormat

from ...w4.form import BLOCK_K, BLOCK_WORDS, SCALE_WORDS, SLAB_ROWS
from ...w4.words import in_words

_MATRIX = 2  # modes of B, where it has no groups


def codes_of(b: cute.Tensor) -> cute.Tensor:
    """The memory of B (N, K[, groups]) as words: (words of a block, N / 16, K / 64[, groups]). Offsets into it have 64
    bits."""
    slabs, blocks = cute.size(b, mode=[0]) // SLAB_ROWS, cute.size(b, mode=[1]) // BLOCK_K
    stride = cute.assume(cutlass.Int64(slabs) * BLOCK_WORDS, divby=BLOCK_WORDS)
    shape: tuple[Any, ...] = (BLOCK_WORDS, slabs, blocks)
    steps: tuple[Any, ...] = (1, BLOCK_WORDS, stride)
    if cute.rank(b) > _MATRIX:
        shape, steps = (*shape, cute.size(b, mode=[2])), (*steps, in_words(b, b.stride[2]))
    return cute.make_tensor(cute.recast_ptr(b.iterator, dtype=cutlass.Int32), cute.make_layout(shape, stride=steps))


def scales_of(weights: WeightFormat, b: cute.Tensor, scale_b: cute.Tensor) -> cute.Tensor:
    """The memory of scales as words: (words for all rows, blocks of columns[, groups])."""
    words = cute.size(b, mode=[0]) // SLAB_ROWS * SCALE_WORDS
    shape: tuple[Any, ...] = (words, cute.size(b, mode=[1]) // weights.columns)
    steps: tuple[Any, ...] = (1, words)
    if cute.rank(b) > _MATRIX:
        shape, steps = (*shape, cute.size(b, mode=[2])), (*steps, in_words(scale_b, scale_b.stride[0]))
    pointer = cute.recast_ptr(scale_b.iterator, dtype=cutlass.Int32)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=steps))
