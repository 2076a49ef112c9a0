"""Which block of B scales which columns of a tile, where columns need not divide a block.

Pure arithmetic, some of it on numbers that may be the compiler's. Imports no compiler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from runtime.numbers.scaling import SCALE_BLOCK


@dataclass(frozen=True)
class ScaleBlocks:
    """The blocks of `SCALE_BLOCK` rows of B that a warp group's part of a tile has columns of.

    The part is `columns` neighbouring rows of B, from a multiple of as many on. Where a gate and what it gates are of
    different blocks there are two such ranges, `lanes`, in which blocks begin alike.
    """

    columns: int
    lanes: int = 1

    @property
    def sub_block(self) -> int:
        """Columns that lie in one block wherever the part begins, if they begin at a multiple of as many."""
        return math.gcd(self.columns, SCALE_BLOCK)

    @property
    def sub_blocks(self) -> int:
        """Sub-blocks of a lane."""
        return self.columns // self.sub_block

    @property
    def blocks(self) -> int:
        """The most blocks of B that the columns of a lane touch."""
        last_start = SCALE_BLOCK - self.sub_block
        return (last_start + self.columns - 1) // SCALE_BLOCK + 1

    @property
    def scales(self) -> int:
        """Scales of B that a block of K takes: those of a lane's blocks, then the other lane's."""
        return self.lanes * self.blocks

    def block_of(self, sub_block: int, start: Any) -> Any:
        """Which of its blocks, from 0, a sub-block lies in, of a part that begins `start` columns into its first
        block: a number where that is the same for all, else the compiler's if `start` is."""
        first = sub_block * self.sub_block // SCALE_BLOCK
        if first == (SCALE_BLOCK + (sub_block - 1) * self.sub_block) // SCALE_BLOCK:
            return first
        return (start + sub_block * self.sub_block) // SCALE_BLOCK

    def of_sum(self, number: int) -> tuple[int, int]:
        """The lane and the sub-block of the accumulators of 8 columns, `number` groups of 8 into the part; two lanes
        take turns."""
        return number % self.lanes, number // self.lanes * 8 // self.sub_block
