"""Which M values to rank candidates for, and from the best at each to the ranges of a dispatch entry. Pure."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence

_TILES_M, _TILES_N, _WAVES = (64, 128, 256), (128, 256), 4
_WHOLE_TILES = (240, 336, 400, 640)  # of 80 and 120 tokens, 112 and 168, 80, 128


def ranges(best: Sequence[tuple[int, str]]) -> list[tuple[int | None, str]]:
    """The ranges of a gemm table entry, given the function chosen at each M, ascending.

    A function chosen at M serves every M' in (the M before, M]; the last serves every larger M' too. Neighbours with
    the same function become one range.
    """
    if not best or any(a >= b for (a, _), (b, _) in itertools.pairwise(best)):
        raise ValueError(f"M values must be ascending, and there must be one: {best!r}")
    merged: list[tuple[int | None, str]] = []
    for m, function in best:
        if merged and merged[-1][1] == function:
            merged.pop()
        merged.append((m, function))
    merged[-1] = None, merged[-1][1]
    return merged


def invariant(ranked: Sequence[tuple[int, Sequence[str]]], sharing: Collection[str]) -> str | None:
    """The candidate to serve callers who want equal bits at every M; None where there is none.

    One with a tile shape and an order of sums along K that no M changes, so none of those `sharing` tiles through a
    workspace: of the others the one that is ranked before the rest at most M values, then at most M values among the
    candidates, then by name. Places stand in for times, which are not kept; tuning chooses by those.
    """
    alone = [[name for name in names if name not in sharing] for _, names in ranked]
    firsts = Counter(names[0] for names in alone if names)
    there = Counter(name for names in alone for name in names)
    return min(there, key=lambda name: (-firsts[name], -there[name], name), default=None)


def points(tokens: Sequence[int]) -> list[int]:
    """The M values to rank for: the given ones, and more between the first and the last.

    Powers of two, from 64 up their 1.5-folds too, every 32 from 128 to 512, and `_WHOLE_TILES`: the right tile changes
    quickly where few tiles cover M.
    """
    between = {x for i in range(3, 31) for x in (1 << i, 3 << (i - 1) if i >= 6 else 1 << i)}
    between |= {*range(128, 512, 32), *_WHOLE_TILES}
    return sorted({*tokens, *(x for x in between if min(tokens) < x < max(tokens))})


def waves(n: int, multiprocessors: int, tokens: Sequence[int]) -> list[int]:
    """The M values, between the first and the last of `tokens`, at which common tiles of D (M, `n`) fill the SMs just
    so, once to `_WAVES` times, and the next ones, for which they need a wave more."""
    full = {
        rows * tile_m
        for tile_m, tile_n in itertools.product(_TILES_M, _TILES_N)
        for wave in range(1, _WAVES + 1)
        if (rows := wave * multiprocessors // math.ceil(n / tile_n))
    }
    return sorted(m for m in full | {m + 1 for m in full} if min(tokens) < m < max(tokens))
