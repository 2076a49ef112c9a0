"""What a form and its options come to: warp groups, stages and shared memory of one kernel for 4-bit weights.

It is the plan of the few-token GEMM but for the operand B, so that its epilogue and split-K serve here too. Pure
arithmetic; knows nothing of which options are legal (`choices`), and imports no compiler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.numbers.weights import WeightFormat

from ...w4.form import BLOCK_K, BLOCK_WORDS, SCALE_WORDS, SLAB_ROWS, Form
from ..sizes import (
    BARRIER_BYTES,
    RESERVED_BYTES_PER_CTA,
    SHARED_BYTES_PER_CTA,
    SHARED_BYTES_PER_SM,
    STATIC_BYTES,
    WARP,
    WARP_GROUP,
    WGMMA_ROWS,
)
from ..small_m.form import Form as SmallMForm
from ..small_m.plan import HALF_GROUP, Memory, Sides
from ..small_m.plan import Plan as SmallMPlan

MOST_STAGES = 32
_TMA_ALIGNMENT_BYTES = 128


@dataclass(frozen=True)
class Plan(SmallMPlan):
    """All that a kernel is specialised on: `choices.OPTIONS`, and the form."""

    weights: WeightFormat
    sliced_k: int  # groups of consumer warp groups that take stages in turn
    stage_k: int  # columns of a stage

    @classmethod
    def of(cls, options: Mapping[str, Any], form: Form) -> Plan:  # type: ignore[override]
        """The plan of `options` for a form."""
        names = "tile_m", "tile_n", "split_k", "cluster_n", "ctas_per_sm", "overlap", "sliced_k"
        chosen = {name: options[name] for name in names} | {"stage_k": options["tile_k"]}
        return cls(form=SmallMForm(epilogue=form.epilogue), weights=form.format, **chosen)

    @property
    def swapped(self) -> bool:
        """Weights take WGMMA's M side, which registers can feed, and tokens its N side."""
        return True

    @property
    def persistent(self) -> bool:
        """Whether a CTA makes several tiles, so that every stage is filled again."""
        return False

    @property
    def halves(self) -> bool:
        """Whether half of a tile's rows are gates, and half are ups from the second half of all rows of B."""
        return self.form.gated and not self.form.parts.interleaved

    def staged_row(self, row: Any) -> Any:
        """Where the sums of row `row` of a tile are staged. Gates and ups, which rows of 16 hold as B has them, go
        where `row_of_b` has them: eight gates, then the eight ups that go with them."""
        if not self.form.gated:
            return row
        if self.halves:
            half = row // (self.tile_n // 2)
            pair = row - half * (self.tile_n // 2)
        else:
            half, pair = row % 2, row // 2
        return pair // HALF_GROUP * (2 * HALF_GROUP) + half * HALF_GROUP + pair % HALF_GROUP

    @property
    def row_groups(self) -> int:
        """Consumer warp groups that multiply a stage: one for each 64 rows of B."""
        return math.ceil(self.tile_n / WGMMA_ROWS)

    @property
    def consumers(self) -> int:
        """All consumer warp groups."""
        return self.row_groups * self.sliced_k

    @property
    def slice_threads(self) -> int:
        """Of those that multiply a stage."""
        return self.row_groups * WARP_GROUP

    @property
    def empty_arrivals(self) -> int:
        """At an empty barrier, of one CTA: each warp's that multiplies the stage."""
        return self.slice_threads // WARP

    @property
    def sliced_bytes(self) -> int:
        """Of the sums of all slices but the first, which follow `staging`."""
        return (self.sliced_k - 1) * self.mma_rows * self.tile_m * 4

    @property
    def tile_k(self) -> int:
        """Columns of a stage."""
        return self.stage_k

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
    def codes_bytes(self) -> int:
        """Of a stage of 4-bit codes."""
        return self.slabs * self.blocks_k * BLOCK_WORDS * 4

    @property
    def scales_bytes(self) -> int:
        """Of a stage of their scales."""
        return self.slabs * self.scale_blocks * SCALE_WORDS * 4

    @property
    def scales_pitch_bytes(self) -> int:
        """From one stage of scales to the next."""
        return -(-self.scales_bytes // _TMA_ALIGNMENT_BYTES) * _TMA_ALIGNMENT_BYTES

    @property
    def stage_bytes(self) -> Sides:
        """Of a stage: of codes and scales, and of A."""
        a_bytes = self.tile_m * self.tile_k * self.form.element_bytes
        return Sides(self.codes_bytes + self.scales_pitch_bytes, a_bytes)

    def whole_rounds(self, stages: int) -> int:
        """So many stages or a few less, so that one is always filled for the same slice of K within a tile. A slice
        that took one of another's could wait for its phase after next, whose parity is that of the phase before, which
        is over: loads do not end in order."""
        return stages // self.sliced_k * self.sliced_k

    @property
    def memory(self) -> Memory:
        """What fits the shared memory of a CTA, if `ctas_per_sm` of them share an SM: all stages of A, then of codes,
        then of scales."""
        m_side, n_side = self.stage_bytes
        pitch_bytes = self.staging_pitch * 4
        staging = self.tile_m * pitch_bytes
        partial = (self.split_k - 1) * self.token_share * pitch_bytes
        free = min(SHARED_BYTES_PER_CTA, SHARED_BYTES_PER_SM // self.ctas_per_sm - RESERVED_BYTES_PER_CTA)
        free -= STATIC_BYTES + BARRIER_BYTES + self.epilogue_terms * 4 + partial
        stages = self.whole_rounds(min(MOST_STAGES, free // (m_side + n_side)))
        over = staging + self.sliced_bytes
        block = max(stages * (m_side + n_side), over) + partial
        return Memory(stages if over <= free else 0, m_side, n_side, staging, partial, partial, block)
