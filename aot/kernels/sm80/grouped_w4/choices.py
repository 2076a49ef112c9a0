"""Which choices a grouped GEMM of 4-bit weights by mma.sync has, and which go together, as pure arithmetic: those of
the GEMM that makes its tiles.

Knows nothing of how a kernel is made (`plan` says what choices come to), and imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...w4.choices import rule_of_halves
from ...w4.form import BLOCK_K, Form
from ..w4.choices import OPTIONS as OPTIONS
from ..w4.choices import hopeless as hopeless
from ..w4.choices import rule_of_form, rule_of_resources, rule_of_warps
from .plan import Plan

REGISTERS_OF_TILES = 16  # of a thread, for where the next tile is, and the operands of a tile's group
_MOST_WARP_BLOCKS = 2  # of a stage: with more kernels spill, seen by compiling


def rule(options: Mapping[str, Any], form: Form) -> str | None:
    """Why options that are allowed one by one are not together in a kernel of this form, or None: what the hardware and
    this kernel demand."""
    plan = Plan.of(options, form)
    if reason := rule_of_warps(options) or rule_of_form(options, form) or rule_of_halves(form, plan.tile_n):
        return reason
    if plan.warp_blocks > _MOST_WARP_BLOCKS:
        return f"a slice of a stage has more than {_MOST_WARP_BLOCKS} blocks of {BLOCK_K} columns"
    return rule_of_resources(plan, REGISTERS_OF_TILES)
