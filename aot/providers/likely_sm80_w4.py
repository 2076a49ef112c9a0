"""Which of `sm80_w4`'s and `sm80_grouped_w4`'s legal choices are worth compiling: by what an SM of an A100 can hold and
do, as none was timed.

An opinion, as `likely_small_m` is: who names a variant that is left out here gets it. Imports no compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..kernels.w4.form import BLOCK_K
from ..search.variants import Variant

# The sizes that are worth trying, in the order in which they are tried.
OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "tile_m": (8, 16, 32, 48, 64),
    "tile_n": (16, 32, 64, 128),
    "tile_k": (128, 256, 512, 1024),
    "warp_n": (16, 32),
    "sliced_k": (1, 2, 4, 8),
    "stages": (3, 4, 6),
}
_WARPS = (4, 8)  # of a CTA, two or more of which fit an SM
_BLOCKS = (1, 2)  # of a warp in a stage: with fewer it waits for others more often
_SHARED_ROWS_TOKENS = 32  # from which a warp reads so much of A that twice as many rows should share it
_DEEP_STAGES = 4  # up to which stages of few tokens may have two blocks for a warp
# Families that use more of a GPU, by what they compute.
_BETTER_ON = {"sm_90a": {"gemm": "sm90_w4", "grouped_gemm": "sm90_grouped_w4"}}


def unlikely(v: Variant) -> str | None:
    """Why a legal variant is not worth trying on its target, or None."""
    options = v.options
    if v.target in _BETTER_ON:
        better = _BETTER_ON[v.target][v.operation]
        return f"{better} has the tensor cores of {v.target} multiply more at a time"
    if reason := _of_warps(options):
        return reason
    blocks = v.integer("tile_k") // (BLOCK_K * v.integer("sliced_k"))
    if v.integer("stages") > _DEEP_STAGES and blocks > 1:
        return f"{options['stages']} stages are for those of one block a warp"
    return None


def hopeless(options: Mapping[str, Any]) -> bool:
    """Whether these choices, the first of `OPTIONS`, are not worth trying whatever the others are."""
    *_, last = options
    return last == "sliced_k" and _of_warps(options) is not None


def _of_warps(options: Mapping[str, Any]) -> str | None:
    tile_m, warp_n, sliced_k = (options[name] for name in ("tile_m", "warp_n", "sliced_k"))
    warps = options["tile_n"] // warp_n * sliced_k
    if warps not in _WARPS:
        return f"{warps} warps of a CTA, and not one of {_WARPS}"
    if warp_n > OPTIONS["warp_n"][0] and tile_m < _SHARED_ROWS_TOKENS:
        return f"below {_SHARED_ROWS_TOKENS} tokens more warps dequantise faster"
    if options["tile_k"] // (BLOCK_K * sliced_k) not in _BLOCKS:
        return f"a warp has one of {_BLOCKS} blocks of a stage"
    return None
