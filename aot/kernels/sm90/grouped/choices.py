"""Which choices a grouped GEMM has, and which go together for a form, as pure arithmetic.

Knows nothing of how a kernel is made (`plan` says what choices come to), and imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.numbers.dtypes import DTYPES
from runtime.numbers.scaling import SCALE_BLOCK

from ...group_sizes import MOST_GROUPS
from ..persistent import choices as persistent
from ..persistent.form import Form
from ..sizes import CLUSTER_EXTENTS, TILE_EXTENTS
from .plan import all_choices, plan_of

# Of blocks of A and of B, that a thread loads for a stage: with more the compiler spills, and in some clusters with as
# many.
_MOST_LOADED_SCALES = 5

# What the kernels can be asked for. What is worth asking for is in `aot.providers.likely_grouped`.
OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "schedule": ("cooperative", "pingpong"),
    "swap": (False, True),  # rows of B on WGMMA's M side, and tokens on its N side, where a tile of 8 wastes nothing
    "tile_m": TILE_EXTENTS,  # rows of A; those that 64 does not divide are swapped
    "tile_n": TILE_EXTENTS,  # rows of B
    "cluster_n": CLUSTER_EXTENTS,  # tiles of the same rows of A, whose CTAs load a share of them each and multicast it
    # Clusters of two tiles of the same rows of B, which are shared so. A group's last tile along M, if there is no
    # other, has its neighbour along N beside it, and each CTA loads its own.
    "share_b": (False, True),
    # What may happen before the kernel before this one ends: nothing, or all but reading and writing ("launch").
    "overlap": ("serial", "launch"),
}
# Gathered rows are loaded by threads, which multicast nothing.
OPTIONS_OF_GATHERED = {name: values for name, values in OPTIONS.items() if name not in ("cluster_n", "share_b")}


def rule(options: Mapping[str, Any], form: Form) -> str | None:
    """Why options that are allowed one by one are not together in a kernel of this form, or None: what the hardware and
    this kernel demand."""
    if (form.scaling == "none") != (DTYPES[form.a].bits > 8):
        return "8-bit inputs have scales of rows or of blocks, and no others have"
    if form.gathered and form.scaling == "block":
        return "the warps that load scales of blocks are those that gather rows"
    if options.get("share_b") and (options["swap"] or options["cluster_n"] > 1):
        return "rows of B are shared on WGMMA's N side, by clusters that share nothing else"
    if form.quantises and (form.scaling != "block" or form.masked or form.gathered):
        return "D in 8 bits is made of 8-bit inputs with scales of blocks, of rows that lie by groups"
    if reason := persistent.rule(all_choices(options), form):
        return reason
    plan = plan_of(options, form)
    if form.quantises and (plan.out_columns, plan.epilogue_tiles, plan.atom_layout.columns) != (SCALE_BLOCK, 1, 2):
        return "what shares a scale of D is in one epilogue tile of each warp group"
    most = _MOST_LOADED_SCALES
    if plan.pairs_tiles or (form.masked and plan.cluster > 1 and form.epilogue != "none"):
        most -= 1
    if plan.staged_scales and 2 * plan.m_atoms + plan.scale_blocks.scales > most:
        return "the warps that load scales also find groups, and have registers for fewer scales"
    return None


def limit(options: Mapping[str, Any], form: Form, groups: int, n: int) -> str | None:
    """Why these choices cannot compute a form for so many groups, each with a B of `n` rows, or None."""
    if groups > MOST_GROUPS:
        return f"the scheduler has room for {MOST_GROUPS} groups"
    if form.quantises and n % (SCALE_BLOCK * (2 if form.gated else 1)):
        return f"columns of D are whole blocks of {SCALE_BLOCK}, which share scales"
    return persistent.limit(options, form, n)
