"""What a form and its options come to: sides of WGMMA, stages, clusters and shared memory of one kernel.

Pure arithmetic, some of it on numbers that may be the compiler's. Knows nothing of which options are legal (`choices`),
and imports no compiler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from runtime.numbers.scaling import SCALE_BLOCK

from ..sizes import (
    BARRIER_BYTES,
    RESERVED_BYTES_PER_CTA,
    SHARED_BYTES_PER_CTA,
    SHARED_BYTES_PER_SM,
    STATIC_BYTES,
    SWIZZLE_ATOM_BYTES,
    SWIZZLE_ATOM_ROWS,
    WARP,
    WARP_GROUP,
    WGMMA_ROWS,
)
from .form import Form

FEW_TOKENS, FEW_WEIGHTS = 64, 128  # tiles up to which weights take WGMMA's M side, which comes in 64 rows
HALF_GROUP = 8  # gates, or ups, of the 16 rows of B that a gated epilogue takes together
_MOST_STAGES = 32
QUANTISERS = 4  # warps that take stages in turn, where A is quantised
_BOX_TOKENS = 16
# Columns whose 8-bit products the tensor cores accumulate in their own precision: docs/kernels/sm90_small_m.md.
_PROMOTION_COLUMNS = 256


class Memory(NamedTuple):
    """Shared memory of a CTA: how many stages, and bytes of each part.

    `staging` and, where `apart` is 0, `partial` lie over the stages, which are done with by then; `apart` follows them.
    """

    stages: int
    m_side: int  # one stage of the operand on WGMMA's M side
    n_side: int
    staging: int
    partial: int
    apart: int
    block: int  # stages, what lies over them, and `apart`


class Sides(NamedTuple):
    """A number for each of WGMMA's M and N sides."""

    m: int
    n: int


@dataclass(frozen=True)
class Plan:
    """All that a kernel is specialised on: `choices.OPTIONS`, and the form."""

    form: Form
    tile_m: int  # tokens
    tile_n: int  # rows of B
    split_k: int
    cluster_n: int
    ctas_per_sm: int
    overlap: str

    @classmethod
    def of(cls, options: Mapping[str, Any], form: Form) -> Plan:
        """The plan of `options` for a form."""
        names = "tile_m", "tile_n", "split_k", "cluster_n", "ctas_per_sm", "overlap"
        return cls(form, *(options[name] for name in names))

    # Sides of WGMMA, and who multiplies.

    @property
    def swapped(self) -> bool:
        """Whether weights take WGMMA's M side, and tokens its N side, and not the other way round."""
        return self.tile_m <= FEW_TOKENS and self.tile_n <= FEW_WEIGHTS

    @property
    def sides(self) -> Sides:
        """Rows of a tile on WGMMA's M and N sides."""
        return Sides(self.tile_n, self.tile_m) if self.swapped else Sides(self.tile_m, self.tile_n)

    @property
    def mma_rows(self) -> int:
        """Rows that WGMMA multiplies on its M side: whole atoms of 64."""
        return math.ceil(self.sides.m / WGMMA_ROWS) * WGMMA_ROWS

    @property
    def consumers(self) -> int:
        """Consumer warp groups: one for each 64 rows of WGMMA's M side, up to three."""
        atoms = math.ceil(self.sides.m / WGMMA_ROWS)
        return atoms if atoms < 4 else 2

    @property
    def consumer_threads(self) -> int:
        """Of all consumer warp groups."""
        return self.consumers * WARP_GROUP

    @property
    def threads(self) -> int:
        """Of a CTA: the consumers', a producer warp's, and those of warps that quantise A."""
        return self.consumer_threads + WARP * (1 + QUANTISERS * self.form.quantises)

    # Stages, and the TMA boxes that fill them.

    @property
    def tile_k(self) -> int:
        """Columns of a stage: rows of 256 bytes for few tokens, of 128 for many, which leaves more stages."""
        if self.form.scaled_by_stage:
            return SCALE_BLOCK
        return (2 if self.tile_m <= FEW_TOKENS else 1) * SWIZZLE_ATOM_BYTES // self.form.element_bytes

    @property
    def box_tokens(self) -> int:
        """Rows of A in a TMA box. Rows past M take longer to load than others, so boxes wholly past it are left out."""
        return _BOX_TOKENS if self.tile_m // self.cluster_n % _BOX_TOKENS == 0 else SWIZZLE_ATOM_ROWS

    @property
    def boxes(self) -> int:
        """Of A, in a tile."""
        return self.tile_m // self.box_tokens

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.split_k * self.cluster_n

    @property
    def full_arrivals(self) -> int:
        """At a full barrier: TMA's, with its bytes; the warp's that quantised A, or where scales come along each
        lane's, with its own of those."""
        if self.form.quantises:
            return 2
        return 1 + WARP * (self.form.scaling == "block")

    @property
    def empty_arrivals(self) -> int:
        """At an empty barrier, of one CTA: each warp's, or each thread's where each has read scales."""
        return self.consumer_threads // (1 if self.form.scaled_by_stage else WARP)

    @property
    def promotion_interval(self) -> int:
        """Stages of K after which f32 registers take over what the tensor cores accumulated, or 0 for never."""
        if self.form.element_bytes > 1:
            return 0
        return (SCALE_BLOCK if self.form.scaled_by_stage else _PROMOTION_COLUMNS) // self.tile_k

    # The epilogue, whose accumulators go through shared memory, a row a token.

    @property
    def staging_pitch(self) -> int:
        """F32 elements from one token's sums to the next, so that a warp's stores meet different banks.

        Swapped, a warp stores eight rows of four tokens at a time; else pairs of columns of four tokens.
        """
        return self.tile_n + 4 if self.swapped else self.tile_n + 8 * (self.tile_n % 16 == 0)

    def staged_row(self, row: Any) -> Any:
        """Where the sums of row `row` of a tile are staged, in the order of `row_of_b`: there, as TMA loads such
        rows."""
        return row

    @property
    def token_share(self) -> int:
        """Tokens of a tile that a CTA reduces."""
        return self.tile_m // self.split_k

    @property
    def partial_offset(self) -> int:
        """Where others' partial sums lie, in f32 elements: behind the stages, or behind this CTA's own."""
        memory = self.memory
        return (memory.block - memory.apart) // 4 if memory.apart else memory.staging // 4

    @property
    def epilogue_terms(self) -> int:
        """F32 elements of what a tile's epilogue keeps: scales of its tokens and rows of B, and bias."""
        return self.bias_offset + (self.tile_n if self.form.parts.bias else 0)

    @property
    def rows_offset(self) -> int:
        """Where scales of rows of B begin in these, behind those of tokens."""
        return self.tile_m if self.form.scaling == "row_column" else 0

    @property
    def bias_offset(self) -> int:
        """Where bias begins in these."""
        return self.rows_offset + (self.tile_n if self.form.scales_of_rows else 0)

    @property
    def memory(self) -> Memory:
        """What fits the shared memory of a CTA, if `ctas_per_sm` of them share an SM."""
        m_side, n_side = (rows * self.tile_k * self.form.element_bytes for rows in self.sides)
        pitch_bytes = self.staging_pitch * 4
        staging = self.tile_m * pitch_bytes
        partial = (self.split_k - 1) * self.token_share * pitch_bytes
        apart = partial if self.swapped else 0
        free = min(SHARED_BYTES_PER_CTA, SHARED_BYTES_PER_SM // self.ctas_per_sm - RESERVED_BYTES_PER_CTA)
        free -= STATIC_BYTES + BARRIER_BYTES + self.epilogue_terms * 4 + apart
        scales = self.tile_m * 4 if self.form.scaled_by_stage else 0
        stages = min(_MOST_STAGES, free // (m_side + n_side + scales))
        over = staging + partial - apart
        block = max(stages * (m_side + n_side), over) + apart
        return Memory(stages if over <= free else 0, m_side, n_side, staging, partial, apart, block)

    @property
    def stages(self) -> int:
        """Of A and B in shared memory."""
        return self.memory.stages


def row_of_b(tile_n: int, form: Form, tile: Any, position: Any, extent_n: Any) -> Any:
    """Which row of B is at `position` in a tile of D; numbers may be the compiler's. Where there is none, no such row
    or one that is not looked at."""
    if not form.gated:
        return tile * tile_n + position
    group, half, column = position // (2 * HALF_GROUP), position // HALF_GROUP % 2, position % HALF_GROUP
    pair = (tile * (tile_n // (2 * HALF_GROUP)) + group) * HALF_GROUP + column
    return 2 * pair + half if form.parts.interleaved else pair + half * (extent_n // 2)
