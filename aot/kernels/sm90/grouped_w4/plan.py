"""What a form and its options come to: the plan of a GEMM of 4-bit weights whose CTAs make one tile after another.

Sums have room of their own, so that the next tile's stages are loaded while they are stored. Pure arithmetic; knows
nothing of which options are legal (`choices`), and imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...w4.form import Form
from ..group_sizes import GROUPS_BYTES
from ..sizes import (
    BARRIER_BYTES,
    RESERVED_BYTES_PER_CTA,
    SHARED_BYTES_PER_CTA,
    SHARED_BYTES_PER_SM,
    STATIC_BYTES,
)
from ..small_m.plan import Memory
from ..w4.plan import MOST_STAGES
from ..w4.plan import Plan as W4Plan

# What the GEMM of 4-bit weights may choose besides: a tile has all of K, and shares its rows of A with no other CTA.
FIXED = {"split_k": 1, "cluster_n": 1}


@dataclass(frozen=True)
class Plan(W4Plan):
    """All that a kernel is specialised on: `choices.OPTIONS`, and the form."""

    @classmethod
    def of(cls, options: Mapping[str, Any], form: Form) -> Plan:  # type: ignore[override]
        """The plan of `options` for a form."""
        found = super().of({**options, **FIXED}, form)
        assert isinstance(found, cls)
        return found

    @property
    def persistent(self) -> bool:
        """A CTA makes every tile that falls to it."""
        return True

    @property
    def tile_buffers(self) -> int:
        """Tiles that there is room for what their epilogue needs of: the next one's is fetched while one is stored."""
        return 2

    @property
    def staging_offset(self) -> int:
        """Bytes before sums, which follow the stages."""
        memory = self.memory
        return memory.stages * (memory.m_side + memory.n_side)

    @property
    def memory(self) -> Memory:
        """What fits the shared memory of a CTA, if `ctas_per_sm` of them share an SM: all stages of A, then of codes,
        then of scales; then sums."""
        m_side, n_side = self.stage_bytes
        staging = self.tile_m * self.staging_pitch * 4
        apart = staging + self.sliced_bytes
        free = min(SHARED_BYTES_PER_CTA, SHARED_BYTES_PER_SM // self.ctas_per_sm - RESERVED_BYTES_PER_CTA)
        free -= STATIC_BYTES + BARRIER_BYTES + GROUPS_BYTES + self.tile_buffers * self.epilogue_terms * 4 + apart
        stages = self.whole_rounds(max(0, min(MOST_STAGES, free // (m_side + n_side))))
        return Memory(stages, m_side, n_side, staging, 0, 0, stages * (m_side + n_side) + apart)
