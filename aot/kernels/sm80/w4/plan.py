"""What a form and its options come to: warps, stages and shared memory of one kernel for 4-bit weights.

Pure arithmetic; knows nothing of which options are legal (`choices`), and imports no compiler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from runtime.numbers.weights import WeightFormat

from ...w4.form import BLOCK_K, BLOCK_WORDS, SCALE_WORDS, SLAB_ROWS, Form
from ..sizes import ACCESS_BYTES, MMA_COLUMNS, WARP

_ELEMENT_BYTES = 2  # of A
_WORD_BYTES = 4
_Plan = TypeVar("_Plan", bound="Plan")


@dataclass(frozen=True)
class Plan:
    """All that a kernel is specialised on: `choices.OPTIONS`, and the form."""

    form: Form
    tile_m: int  # tokens
    tile_n: int  # rows of B
    tile_k: int  # columns of a stage
    warp_n: int  # rows of B of a warp
    sliced_k: int  # warps that have the same rows, each its share of a stage's columns
    stages: int

    @classmethod
    def of(cls: type[_Plan], options: Mapping[str, Any], form: Form) -> _Plan:
        """The plan of `options` for a form."""
        names = "tile_m", "tile_n", "tile_k", "warp_n", "sliced_k", "stages"
        return cls(form, *(options[name] for name in names))

    @property
    def weights(self) -> WeightFormat:
        """How B and its scales lie in memory."""
        return self.form.format

    @property
    def halves(self) -> bool:
        """See `Form.halves`."""
        return self.form.halves

    # Who multiplies what: rows of B are on the M side of mma.sync, tokens on its N side.

    @property
    def row_warps(self) -> int:
        """Warps side by side along the rows of B."""
        return self.tile_n // self.warp_n

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.row_warps * self.sliced_k * WARP

    @property
    def warp_slabs(self) -> int:
        """Slabs of 16 rows of B of a warp."""
        return self.warp_n // SLAB_ROWS

    @property
    def token_tiles(self) -> int:
        """Groups of eight tokens, the N side of an instruction."""
        return self.tile_m // MMA_COLUMNS

    @property
    def warp_blocks(self) -> int:
        """Blocks of 64 columns that a warp multiplies of a stage."""
        return self.blocks_k // self.sliced_k

    @property
    def accumulators(self) -> int:
        """F32 registers of a thread."""
        return self.warp_n * self.tile_m // WARP

    # A stage.

    @property
    def slabs(self) -> int:
        """Slabs of 16 rows of B in a tile."""
        return self.tile_n // SLAB_ROWS

    @property
    def blocks_k(self) -> int:
        """Blocks of 64 columns in a stage."""
        return self.tile_k // BLOCK_K

    @property
    def scale_blocks(self) -> int:
        """Words of scales in a stage, for a row and the row 8 below it."""
        return self.tile_k // self.weights.columns

    @property
    def row_accesses(self) -> int:
        """Accesses of 16 bytes to a token's columns of a stage."""
        return self.tile_k * _ELEMENT_BYTES // ACCESS_BYTES

    @property
    def tokens_bytes(self) -> int:
        """Of A in a stage."""
        return self.tile_m * self.tile_k * _ELEMENT_BYTES

    @property
    def codes_bytes(self) -> int:
        """Of 4-bit codes in a stage."""
        return self.slabs * self.blocks_k * BLOCK_WORDS * _WORD_BYTES

    @property
    def scales_bytes(self) -> int:
        """Of their scales in a stage."""
        return self.slabs * self.scale_blocks * SCALE_WORDS * _WORD_BYTES

    @property
    def stage_bytes(self) -> int:
        """Of all."""
        return self.tokens_bytes + self.codes_bytes + self.scales_bytes

    @property
    def accesses(self) -> int:
        """Of 16 bytes, of a thread that loads its share of a stage."""
        parts = self.tokens_bytes, self.codes_bytes, self.scales_bytes
        return sum(math.ceil(part / (ACCESS_BYTES * self.threads)) for part in parts)

    # The sums, which go through shared memory where the stages were, a row a token.

    @property
    def staging_pitch(self) -> int:
        """F32 elements from one token's sums to the next, so that a warp's stores of eight rows of four tokens, every
        other one, meet different banks."""
        return self.tile_n + 4

    @property
    def staging_bytes(self) -> int:
        """Of the sums of all slices."""
        return self.sliced_k * self.tile_m * self.staging_pitch * 4

    @property
    def tile_bytes(self) -> int:
        """Of shared memory, that a tile takes."""
        return max(self.stages * self.stage_bytes, self.staging_bytes)

    @property
    def shared_bytes(self) -> int:
        """Of a CTA's shared memory."""
        return self.tile_bytes
