"""What a GEMM of 4-bit weights computes, as far as its code depends on it: the format of weights, and the epilogue.

Also the blocks that weights come in. Knows nothing of tiles, and imports no compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.numbers.epilogue import Epilogue
from runtime.numbers.weights import BLOCK_COLUMNS, BLOCK_ROWS, FORMATS, LANES, WORDS, WeightFormat

SLAB_ROWS, BLOCK_K = BLOCK_ROWS, BLOCK_COLUMNS  # what a warp multiplies at a time
BLOCK_WORDS = LANES * WORDS  # of a slab's codes for so many columns
SCALE_WORDS = SLAB_ROWS // 2  # of a slab's scales, each for two rows


@dataclass(frozen=True)
class Form:
    """Of all that decides the code, what is no choice: a word of `runtime.numbers.weights.FORMATS`, and that of the
    epilogue."""

    weights: str = "mxfp4_weight"
    epilogue: str = "none"

    @property
    def format(self) -> WeightFormat:
        """What the word of weights says."""
        return FORMATS[self.weights]

    @property
    def parts(self) -> Epilogue:
        """What the epilogue's word says."""
        return Epilogue.of(self.epilogue)

    @property
    def halves(self) -> bool:
        """Whether half of a tile's rows are gates, and half are ups from the second half of all rows of B."""
        return self.parts.gated and not self.parts.interleaved
