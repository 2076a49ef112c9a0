"""Which of `sm90_persistent`'s legal choices are worth compiling: what won somewhere, of wider ones, over layers of
models at several M on H200s and H100s.

An opinion: who names a variant that is left out here gets it. It stands apart from the kernels, whose sources name what
is compiled, so that another opinion compiles nothing anew. Imports no compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.numbers.scaling import SCALE_BLOCK

from ..kernels.sm90.persistent.form import Form
from ..kernels.sm90.persistent.plan import Plan

# What won somewhere of each choice.
OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "tile_m": tuple(range(64, 264, 8)),
    "tile_n": (64, 80, 96, 112, 128, 144, 160, 168, 176, 192, 224, 256),
    "cluster_m": (1, 2),
    "cluster_n": (1, 2, 4),
    "split_k": (1, 2, 4),
}
# Of which K is shared: swap, tile_m, tile_n.
_SHARED_TILES = {(False, 128, 128), (True, 128, 128), (True, 168, 128)}
# Of swapped tiles with a CTA each: the tokens, by cluster_m, cluster_n, split_k and tile_n. Where all tiles are one
# wave these gain 2 to 5% by a stage more, and others nothing; slices of K in clusters of several tiles gained up to 15%
# on an H100, where tiles alone leave many SMs idle (benchmarks/results/slices_h100.json).
_ONE_TILE: dict[tuple[int, int, int, int], Sequence[int]] = {
    (2, 1, 1, 64): range(88, 160, 8),
    (2, 1, 1, 128): range(72, 96, 8),
    (2, 1, 1, 192): range(88, 104, 8),
    (2, 4, 1, 64): range(80, 144, 8),
    (1, 1, 2, 64): range(160, 256, 32),
    (1, 1, 2, 128): range(112, 120, 8),
    (1, 2, 2, 128): (112, 144),
    (1, 4, 2, 128): (96, 128),
    (2, 2, 2, 128): (80, 96),
}
# Of swapped tiles whose tokens are loaded in turn: rows of B, and the most tokens.
_IN_TURN_TILE_N, _MOST_IN_TURN = 128, 120
_COOPERATIVE_ROWS, _COOPERATIVE_TOKENS = 192, 144  # of swapped tiles in clusters of 2 x 1, and the fewest tokens
_SMALL_TILE = 128**2  # sums
_SWIZZLED_COLUMNS = 16  # epilogue tiles in multiples of these have rows of a swizzle atom
_FEWEST_UNSWIZZLED = 24  # columns of an epilogue tile; of 8 none was tried
_STAGES_BESIDE_UNSWIZZLED = 4
_IDLE = "clusters of four leave SMs idle"
_LEAST_SUB_BLOCK = 32  # columns of a tile that share a scale of a block of B


def unlikely(options: Mapping[str, Any], form: Form) -> str | None:
    """Why legal options, each among `OPTIONS`, are not worth trying together, or None."""
    if form.promotion_interval and options["order"] != "rows":
        return "other orders of tiles were seen to win for 16-bit types only"
    for opinion in _OPINIONS.values():
        if reason := opinion(options):
            return reason
    if form.scaling == "block" and (reason := _of_blocks(options)):
        return reason
    return _of_new_choices(options, form) or _of_epilogue_tiles(options, form)


def hopeless(options: Mapping[str, Any]) -> bool:
    """Whether these choices, the kernel's first, are not worth trying whatever the others and the form are."""
    *_, last = options
    opinion = _OPINIONS.get(last)
    return opinion is not None and opinion(options) is not None


def _of_rows(options: Mapping[str, Any]) -> str | None:
    rows, pingpong = options["tile_n" if options["swap"] else "tile_m"], options["schedule"] == "pingpong"
    taller = 192 if pingpong and options["swap"] else 128 if pingpong else 256
    if rows in (64, 128, taller) or _cooperative_rows(options):
        return None
    return f"{rows} rows on WGMMA's M side never won"


def _cooperative_rows(options: Mapping[str, Any]) -> bool:
    """Whether a tile has 192 rows of B for two warp groups, which share its tokens."""
    cooperative = options["schedule"] == "cooperative" and options["swap"]
    return cooperative and options["tile_n"] == _COOPERATIVE_ROWS and options["tile_m"] >= _COOPERATIVE_TOKENS


def _of_cluster(options: Mapping[str, Any]) -> str | None:
    if _cooperative_rows(options) and (options["cluster_m"], options["cluster_n"]) != (2, 1):
        return "192 rows for two warp groups won in clusters of two along M"
    if options["cluster_m"] * options["cluster_n"] <= 2:
        return None
    # How K is split is chosen later: some way may do.
    if any(_clusters_of_four_win({**options, "split_k": slices}) for slices in OPTIONS["split_k"]):
        return None
    return _IDLE


def _clusters_of_four_win(options: Mapping[str, Any]) -> bool:
    if not options["swap"]:
        return False
    if (options["cluster_m"], options["cluster_n"], options["split_k"], options["tile_n"]) in _ONE_TILE:
        return True
    # Up to M = 130 or so they won where B is wide.
    return options["cluster_m"] == options["split_k"] == 1 and options["schedule"] == "pingpong"


def _of_sharing(options: Mapping[str, Any]) -> str | None:
    tile = options["swap"], options["tile_m"], options["tile_n"]
    if options["stream_k"] and (options["cluster_n"] > 1 or tile not in _SHARED_TILES):
        return "other tiles never won by being shared"
    return None


def _of_split(options: Mapping[str, Any]) -> str | None:
    if _cooperative_rows(options) and options["split_k"] > 1:
        return "192 rows for two warp groups won with K in one"
    few = options["cluster_m"] * options["cluster_n"] <= 2
    return None if few or _clusters_of_four_win(options) else _IDLE


def _of_grid(options: Mapping[str, Any]) -> str | None:
    cluster = options["cluster_m"], options["cluster_n"]
    if not options["nonpersistent"]:
        if math.prod(cluster) <= 2 or (cluster == (1, 4) and options["schedule"] == "pingpong"):
            return None
        return "larger clusters won pingpong along N, or with one tile a CTA"
    split = options["split_k"] > 1
    if (options["schedule"] == "pingpong") == split:
        return "one tile a CTA won with one warp group, or where K is split with both"
    tokens = _ONE_TILE.get((*cluster, options["split_k"], options["tile_n"]), ())
    if not options["swap"] or options["tile_m"] not in tokens:
        return "one tile a CTA won where swapped tiles of some sizes have one stage more"
    return None


def _of_order(options: Mapping[str, Any]) -> str | None:
    if options["order"] == "rows":
        return None
    if options["swap"] or options["split_k"] > 1 or options["stream_k"]:
        return "other orders were seen to win for plain tiles only"
    small = options["tile_m"] * options["tile_n"] < _SMALL_TILE
    if options["order"] == "columns" and options["cluster_n"] == 1:
        return "orders along columns win where CTAs side by side load rows together"
    if options["order"] == "two_rows" and (options["cluster_m"] == 1 or not small):
        return "two rows at a time win where CTAs of small tiles, one above the other, load columns together"
    if options["order"] == "quads" and (options["cluster_n"] == 1 or options["tile_m"] != 128 or not small):
        return "quads win where CTAs of 128 rows and few columns, side by side, load rows together"
    return None


def _of_overlap(options: Mapping[str, Any]) -> str | None:
    if options["order"] == "quads" and options["overlap"] != "serial":
        return "quads expect clusters where an idle chip has them, not as SMs come free"
    return None


# What needs to be known of a combination, by the last choice that it looks at.
_OPINIONS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "tile_n": _of_rows,
    "cluster_n": _of_cluster,
    "split_k": _of_split,
    "stream_k": _of_sharing,
    "nonpersistent": _of_grid,
    "order": _of_order,
    "overlap": _of_overlap,
}


def _of_blocks(options: Mapping[str, Any]) -> str | None:
    """Of tiles whose columns lie in two blocks of B those with few sub-blocks were timed on an H200."""
    sub_block = math.gcd(options["tile_n"], SCALE_BLOCK)
    if sub_block < _LEAST_SUB_BLOCK:
        return f"sub-blocks of {sub_block} columns choose among scales more often than any that were tried"
    return None


def _of_new_choices(options: Mapping[str, Any], form: Form) -> str | None:
    """Of choices that were timed for 16-bit types alone, and of loads in turn."""
    if form.promotion_interval and (options["nonpersistent"] or _cooperative_rows(options)):
        return "one tile a CTA, and 192 rows for two warp groups, were timed for 16-bit types only"
    if _cooperative_rows(options) and form.epilogue != "none":
        return "192 rows for two warp groups were timed with no epilogue"
    if options["cluster_m"] * options["cluster_n"] == 1 or not any(Plan.of(options, form).loads_in_turn):
        return None
    if options["nonpersistent"] and options["cluster_n"] == 4:
        return None  # of which `_ONE_TILE` says the tokens
    few = options["tile_n"] == _IN_TURN_TILE_N and options["tile_m"] <= _MOST_IN_TURN
    if form.promotion_interval or not options["swap"] or not few:
        return "loads in turn won for few tokens and 128 rows of B, swapped, in 16 bits"
    return None


def _of_epilogue_tiles(options: Mapping[str, Any], form: Form) -> str | None:
    """Of tiles whose epilogue tiles have an odd number of 16 bytes a row, which are stored without a swizzle."""
    if options["swap"]:
        return None
    parts = 1 if options["schedule"] == "pingpong" or options["tile_m"] % 128 == 0 else 2
    columns = options["tile_n"] // (2 if form.gated else 1) // parts
    if columns % (_SWIZZLED_COLUMNS * options["split_k"]) == 0:
        return None  # before there is a plan, for the time that it takes
    plan = Plan.of(options, form)
    if plan.epilogue_tile_columns % _SWIZZLED_COLUMNS == 0:
        return None
    if plan.epilogue_tile_columns < _FEWEST_UNSWIZZLED:
        return f"epilogue tiles of {plan.epilogue_tile_columns} columns are many"
    if plan.rows < 128 or plan.split_k > 1 or plan.stages < _STAGES_BESIDE_UNSWIZZLED:
        return "epilogue tiles without a swizzle are for tiles of 128 rows and more with K in one and stages enough"
    if not form.gated and plan.pingpong != plan.raster_along_n:
        return "of tiles of 168 those won that are pingpong along columns or cooperative down rows"
    return None
