"""Which M values to rank candidates for. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_TILES_M, _TILES_N, _WAVES = (64, 128, 256), (128, 256), 4
_FROM, _STEP = 64, 1.06  # tiles for tokens come in steps of 8, so that another is right every few percent


def points(tokens: Sequence[int]) -> list[int]:
    """The M values to rank for: the given ones, and more between the first and the last: powers of two, and from 64 up
    every 6%."""
    octaves = math.log(max(tokens) / _FROM, _STEP)
    every = (round(_FROM * _STEP**i) for i in range(max(0, math.ceil(octaves))))
    between = {1 << i for i in range(3, 31)} | set(every)
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
