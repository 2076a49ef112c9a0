"""The memory of prepared weights (`runtime.numbers.weights`) as tensors of words, whose offsets threads add up.

Knows nothing of who loads them.
"""

from __future__ import annotations

import cutlass
from cutlass import cute

from runtime.numbers.weights import WeightFormat

from ...w4.form import BLOCK_K, BLOCK_WORDS, SCALE_WORDS, SLAB_ROWS


def codes_of(b: cute.Tensor) -> cute.Tensor:
    """B's memory as words: (words of a block, N / 16, K / 64). Offsets into it have 64 bits."""
    slabs, blocks = cute.size(b, mode=[0]) // SLAB_ROWS, cute.size(b, mode=[1]) // BLOCK_K
    stride = cute.assume(cutlass.Int64(slabs) * BLOCK_WORDS, divby=BLOCK_WORDS)
    layout = cute.make_layout((BLOCK_WORDS, slabs, blocks), stride=(1, BLOCK_WORDS, stride))
    return cute.make_tensor(cute.recast_ptr(b.iterator, dtype=cutlass.Int32), layout)


def scales_of(weights: WeightFormat, b: cute.Tensor, scale_b: cute.Tensor) -> cute.Tensor:
    """The memory of scales as words: (words for all rows, blocks of columns)."""
    words = cute.size(b, mode=[0]) // SLAB_ROWS * SCALE_WORDS
    layout = cute.make_layout((words, cute.size(b, mode=[1]) // weights.columns), stride=(1, words))
    return cute.make_tensor(cute.recast_ptr(scale_b.iterator, dtype=cutlass.Int32), layout)
