"""Which of `sm90_grouped_w4`'s legal choices are worth compiling: an opinion, from how `sm90_w4` behaves. Nobody has
timed any of them.

Nothing here decides the code of a kernel, so a change compiles nothing anew. Imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..kernels.sm90.grouped_w4.plan import Plan
from ..kernels.w4.form import BLOCK_K, Form
from .likely_w4 import DEEP_STAGES_TOKENS, ENOUGH_STAGES, WARP_GROUPS

# What is worth trying of each choice, in the order in which builds enumerate it.
OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "tile_m": (8, 16, 32, 64, 128),
    "tile_n": (64, 96, 128, 160, 192, 256, 320),
    "tile_k": (128, 256),
    "sliced_k": (1, 2, 3, 4, 6),
    "ctas_per_sm": (1, 2),
}


def unlikely(options: Mapping[str, Any], form: Form) -> str | None:
    """Why legal options are not worth trying together, or None."""
    if options["tile_k"] > 2 * BLOCK_K and options["tile_m"] > DEEP_STAGES_TOKENS:
        return f"above {DEEP_STAGES_TOKENS} tokens, so deep stages are too few"
    plan = Plan.of(options, form)
    if (groups := plan.consumers * plan.ctas_per_sm) not in WARP_GROUPS:
        return f"{groups} warp groups of an SM, and not {WARP_GROUPS[0]} to {WARP_GROUPS[-1]}"
    if plan.stages < ENOUGH_STAGES * plan.sliced_k:
        return f"with {plan.stages} stages loads stop while one is multiplied"
    return None
