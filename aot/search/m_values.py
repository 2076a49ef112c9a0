"""Which M values to rank candidates for. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

_TILES_M, _TILES_N, _WAVES = (64, 128, 256), (128, 256), 4
_WHOLE_TILES = (240, 336, 400, 640)  # of 80 and 120 tokens, 112 and 168, 80, 128


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
