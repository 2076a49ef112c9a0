"""Which of `sm90_small_m`'s legal choices are worth compiling: what won somewhere, of wider ones, over 11 layers at 11
M from 1 to 256 on an H200.

An opinion: who names a variant that is left out here gets it. It stands apart from the kernels, whose sources name what
is compiled, so that another opinion compiles nothing anew. Imports no compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..kernels.sm90.small_m.form import Form
from ..kernels.sm90.small_m.plan import Plan

# Rows of B that a tile may have, by its tokens. Only multiples of 16 can be gated, and of 64 be N-major.
_TILES_N: dict[int, tuple[int, ...]] = {
    8: (48, 56, 64, 96, 112, 144, 224),
    16: (48, 56, 64, 96, 112, 128, 144),
    32: (48, 64, 128, 144, 224),
    64: (48, 56, 64, 128, 144, 224),
    96: (64, 88, 104, 128, 144),
    128: (48, 56, 64, 72, 88, 96, 104, 120, 128, 176, 224),
    192: (80, 88, 104, 120, 144),
    256: (112,),
}
# What goes together of split_k, cluster_n and ctas_per_sm, up to as many tokens.
_CLUSTERS: dict[int, tuple[tuple[int, int, int], ...]] = {
    16: ((1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (2, 1, 2), (4, 1, 2), (4, 2, 1), (8, 1, 2)),
    64: ((1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 1, 1), (2, 4, 1), (4, 1, 1), (4, 2, 1)),
    256: ((1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 1, 1), (2, 4, 1), (4, 1, 1), (4, 2, 1), (8, 1, 1)),
}
# What won somewhere of each choice.
OPTIONS: dict[str, tuple[int | str | bool, ...]] = {
    "tile_m": tuple(_TILES_N),
    "tile_n": tuple(sorted({tile_n for tiles in _TILES_N.values() for tile_n in tiles})),
    "split_k": (1, 2, 4, 8),
    "cluster_n": (1, 2, 4),
    "ctas_per_sm": (1, 2),
}
_TILES_N_OF_EIGHT = (88, 96)  # with split_k = 8
_WIDEST_SPLIT = 144  # of tile_n with split_k above 2, or clusters of more than two
_MOST_TOKENS_OF_EARLY_WEIGHTS = 64
_ENOUGH_STAGES = 3
_MOST_QUANTISED_TOKENS = 16


def unlikely(options: Mapping[str, Any], form: Form) -> str | None:
    """Why legal options, each among `OPTIONS`, are not worth trying together, or None."""
    for opinion in _OPINIONS.values():
        if reason := opinion(options):
            return reason
    if form.quantises and options["tile_m"] > _MOST_QUANTISED_TOKENS:
        return "quantising more tokens takes longer than reading B: at 32 up to 1.6 times as long on an H100"
    stages = Plan.of(options, form).stages
    if stages < _ENOUGH_STAGES:
        return f"with {stages} stages loads stop while one is multiplied: up to 4 times as slow on an H200"
    return None


def hopeless(options: Mapping[str, Any]) -> bool:
    """Whether these choices, the kernel's first, are not worth trying whatever the others and the form are."""
    *_, last = options
    opinion = _OPINIONS.get(last)
    return opinion is not None and opinion(options) is not None


def _of_tile(options: Mapping[str, Any]) -> str | None:
    tile_m, tile_n = options["tile_m"], options["tile_n"]
    likely = _TILES_N[tile_m]
    return None if tile_n in likely else f"with {tile_m} tokens, tile_n is one of {likely}"


def _of_cluster(options: Mapping[str, Any]) -> str | None:
    tile_m, tile_n, split_k, cluster_n = (options[o] for o in ("tile_m", "tile_n", "split_k", "cluster_n"))
    wanted = split_k, cluster_n, options["ctas_per_sm"]
    clusters = next(found for most, found in _CLUSTERS.items() if tile_m <= most)
    if wanted not in clusters:
        return f"with {tile_m} tokens, (split_k, cluster_n, ctas_per_sm) is one of {clusters}, not {wanted}"
    if split_k == 8 and tile_n not in _TILES_N_OF_EIGHT:
        return f"split_k = 8 is for tile_n of {_TILES_N_OF_EIGHT}"
    if tile_n > _WIDEST_SPLIT and (split_k > 2 or split_k * cluster_n > 2):
        return f"tile_n above {_WIDEST_SPLIT} is for clusters of up to two"
    return None


def _of_overlap(options: Mapping[str, Any]) -> str | None:
    tile_m = options["tile_m"]
    if options["overlap"] == "weights" and tile_m > _MOST_TOKENS_OF_EARLY_WEIGHTS:
        return f"with {tile_m} tokens, launches that load weights early are about 2% behind those that only begin early"
    return None


# What needs to be known of a combination, by the last choice that it looks at.
_OPINIONS: dict[str, Callable[[Mapping[str, Any]], str | None]] = {
    "tile_n": _of_tile,
    "ctas_per_sm": _of_cluster,
    "overlap": _of_overlap,
}
