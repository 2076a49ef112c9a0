"""Which of `sm90_w4`'s legal choices are worth compiling: sizes that were timed on an H200, over layers of models at M
from 1 to 128. And which of `sm90_grouped_w4`'s, of which nobody has timed any, by how those behave.

An opinion, as `likely_small_m` is: who names a variant that is left out here gets it. Imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..kernels.sm90.w4.plan import Plan
from ..kernels.w4.form import BLOCK_K, Form

# The sizes that were timed, in the order in which they are tried.
OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "tile_m": (8, 16, 32, 64, 128),
    "tile_n": (48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256, 320),
    "tile_k": (128, 256),
    "split_k": (1, 2, 4, 8),
    "cluster_n": (1, 2, 4),
    "sliced_k": (1, 2, 3, 4, 6),
    "ctas_per_sm": (1, 2),
}
# Of groups, whose tiles are many.
OPTIONS_OF_GROUPS = {name: OPTIONS[name] for name in ("tile_m", "tile_n", "tile_k", "sliced_k", "ctas_per_sm")} | {
    "tile_n": (64, 96, 128, 160, 192, 256, 320)
}
# What goes together of split_k, cluster_n and ctas_per_sm. Clusters of four and eight CTAs do not fill every GPC.
_CLUSTERS = (
    (1, 1, 1),
    (1, 1, 2),
    (2, 1, 1),
    (2, 1, 2),
    (4, 1, 1),
    (4, 1, 2),
    (1, 2, 1),
    (1, 2, 2),
    (2, 2, 1),
    (2, 2, 2),
)
_SHARED_TOKENS = 32  # from which loads of A are worth sharing
_DEEP_STAGES_TOKENS = 16  # up to which stages may be 256 columns deep
_ENOUGH_STAGES = 4  # of a slice
_WARP_GROUPS = range(2, 9)  # of an SM: fewer do not dequantise as fast as memory reads


def unlikely(options: Mapping[str, Any], form: Form) -> str | None:
    """Why legal options are not worth trying together, or None."""
    return _of_cluster(options) or unlikely_plan(Plan.of(options, form))


def unlikely_plan(plan: Plan) -> str | None:
    """Why a plan, of one GEMM or of groups, leaves an SM waiting, or None."""
    if plan.tile_k > 2 * BLOCK_K and plan.tile_m > _DEEP_STAGES_TOKENS:
        return f"above {_DEEP_STAGES_TOKENS} tokens, so deep stages are too few"
    if (groups := plan.consumers * plan.ctas_per_sm) not in _WARP_GROUPS:
        return f"{groups} warp groups of an SM, and not {_WARP_GROUPS[0]} to {_WARP_GROUPS[-1]}"
    if plan.stages < _ENOUGH_STAGES * plan.sliced_k:
        return f"with {plan.stages} stages loads stop while one is multiplied"
    return None


def hopeless(options: Mapping[str, Any]) -> bool:
    """Whether these choices, the first of `OPTIONS`, are not worth trying whatever the others and the form are."""
    *_, last = options
    return last == "ctas_per_sm" and _of_cluster(options) is not None


def _of_cluster(options: Mapping[str, Any]) -> str | None:
    wanted = tuple(options[name] for name in ("split_k", "cluster_n", "ctas_per_sm"))
    if wanted not in _CLUSTERS:
        return f"(split_k, cluster_n, ctas_per_sm) is one of {_CLUSTERS}, not {wanted}"
    if options["cluster_n"] > 1 and options["tile_m"] < _SHARED_TOKENS:
        return f"loads of A are worth sharing from {_SHARED_TOKENS} tokens on"
    return None
