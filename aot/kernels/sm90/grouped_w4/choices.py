"""Which choices a grouped GEMM of 4-bit weights has, and which go together for a form, as pure arithmetic.

Knows nothing of how a kernel is made (`plan` says what choices come to), and imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...w4.choices import rule_of_halves
from ...w4.form import Form
from ..sizes import WARP_GROUP
from ..w4 import choices as w4
from ..w4.choices import REGISTERS_PER_SM
from .plan import Plan

_SHALLOW_BLOCKS = 2  # of 64 columns in a stage
_OTHER_REGISTERS = 80  # of a consumer thread, where stages are deeper

# What the kernel can be asked for. What is worth asking for is in `aot.providers.likely_w4`.
OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    **{name: w4.OPTIONS[name] for name in ("tile_m", "tile_n", "tile_k", "sliced_k", "ctas_per_sm")},
    # What may happen before the kernel before this one ends: nothing, or all but reading and writing ("launch").
    "overlap": ("serial", "launch"),
}


def rule(options: Mapping[str, Any], form: Form) -> str | None:
    """Why options that are allowed one by one are not together in a kernel of this form, or None: what the hardware and
    this kernel demand."""
    plan = Plan.of(options, form)
    return rule_of_halves(form, plan.tile_n) or w4.rule_of_resources(plan) or _rule_of_deep_stages(plan)


def _rule_of_deep_stages(plan: Plan) -> str | None:
    """Why registers do not hold the codes of a stage beside what a tile leaves in them, or None: seen by compiling."""
    threads = -(-plan.threads * plan.ctas_per_sm // WARP_GROUP) * WARP_GROUP
    registers = REGISTERS_PER_SM // threads // 8 * 8
    if plan.blocks_k > _SHALLOW_BLOCKS and plan.tile_m // 2 + _OTHER_REGISTERS > registers:
        return f"stages of {plan.tile_k} columns need {_OTHER_REGISTERS} registers besides sums, of {registers}"
    return None
