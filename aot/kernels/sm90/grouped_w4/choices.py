"""Which choices a grouped GEMM of 4-bit weights has, and which go together for a form, as pure arithmetic.

Knows nothing of how a kernel is made (`plan` says what choices come to), and imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...w4.choices import limit as limit_of_weights
from ...w4.form import SLAB_ROWS, Form
from ..group_sizes import MOST_GROUPS
from ..sizes import WARP_GROUP
from ..w4 import choices as w4
from ..w4.choices import REGISTERS_PER_SM
from .plan import Plan

_SHALLOW_BLOCKS = 2  # of 64 columns in a stage
_OTHER_REGISTERS = 80  # of a consumer thread, where stages are deeper

# What the kernel can be asked for. What is worth asking for is in `aot.providers.likely_grouped_w4`.
OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    **{name: w4.OPTIONS[name] for name in ("tile_m", "tile_n", "tile_k", "sliced_k", "ctas_per_sm")},
    # What may happen before the kernel before this one ends: nothing, or all but reading and writing ("launch").
    "overlap": ("serial", "launch"),
}


def rule(options: Mapping[str, Any], form: Form) -> str | None:
    """Why options that are allowed one by one are not together in a kernel of this form, or None: what the hardware and
    this kernel demand."""
    plan = Plan.of(options, form)
    if plan.halves and plan.tile_n % (2 * SLAB_ROWS):
        return f"half of a tile's rows of B are gates, so tile_n comes in multiples of {2 * SLAB_ROWS}"
    return w4.rule_of_resources(plan) or _rule_of_deep_stages(plan)


def _rule_of_deep_stages(plan: Plan) -> str | None:
    """Why registers do not hold the codes of a stage beside what a tile leaves in them, or None: seen by compiling."""
    threads = -(-plan.threads * plan.ctas_per_sm // WARP_GROUP) * WARP_GROUP
    registers = REGISTERS_PER_SM // threads // 8 * 8
    if plan.blocks_k > _SHALLOW_BLOCKS and plan.tile_m // 2 + _OTHER_REGISTERS > registers:
        return f"stages of {plan.tile_k} columns need {_OTHER_REGISTERS} registers besides sums, of {registers}"
    return None


def limit(form: Form, groups: int, n: int, k: int) -> str | None:
    """Why no kernel of this form computes so many groups, each with weights of N rows and K columns, or None."""
    if groups > MOST_GROUPS:
        return f"the scheduler has room for {MOST_GROUPS} groups"
    parts = form.parts
    if parts.gated and not parts.interleaved and n % (2 * SLAB_ROWS):
        return f"half of the rows of B are gates, so N must be a multiple of {2 * SLAB_ROWS}, found {n}"
    return limit_of_weights(form, n, k)
