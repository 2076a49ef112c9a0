"""How long sm80_grouped_w4 takes: a guess from its tiles, for putting the choices for a problem in order. Nothing of it
was measured.

Tiles take what `estimate_sm80_w4` says; rows are taken to be spread over groups as `estimate_grouped` has it. Imports
no compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from runtime.grouped_gemm import Signature, active_groups

from ..kernels.sm80.grouped_w4.choices import REGISTERS_OF_TILES
from ..kernels.sm80.grouped_w4.plan import Plan
from ..search.a100 import MMA_SYNC
from ..search.h200 import H200, MULTIPROCESSORS
from ..search.variants import Variant
from .estimate_grouped import tiles_of_group
from .estimate_sm80_w4 import Tile, tile_of, whole_us


@cache
def _tile(v: Variant, plan_of: Callable[[Variant], Plan]) -> Tile:
    return tile_of(plan_of(v), v.target, REGISTERS_OF_TILES)


def estimate_us(v: Variant, plan_of: Callable[[Variant], Plan], signature: Signature, m: int) -> float:
    """A guess at the microseconds at `m` rows of `signature`, weights not in L2."""
    s, t, rates = signature, _tile(v, plan_of), MMA_SYNC
    across, stages = math.ceil(s.n / t.tile_n), math.ceil(s.k / t.tile_k)
    tiles = s.groups * tiles_of_group(m / s.groups, t.tile_m) * across
    tokens = min(m * across / tiles, t.tile_m)
    read_bytes = active_groups(s.groups, m) * s.n * s.k * t.weight_bytes
    memory_us: Any = read_bytes / (H200.memory_gbps * (1e3 * rates.memory_share))
    l2_bytes = tiles * s.k * (t.tile_n * t.weight_bytes + 2 * tokens)
    l2_us = l2_bytes / (MULTIPROCESSORS * rates.l2_bytes_per_us_of_sm)
    of_sm = math.ceil(tiles / MULTIPROCESSORS)
    at_once = min(of_sm, t.resident)
    # A CTA begins to load a tile when it has stored the one before.
    alone_cycles = stages * t.alone_cycles + rates.latency_cycles
    cycles = of_sm * max(stages * t.busy_cycles, alone_cycles / at_once)
    return float(whole_us(t, memory_us, l2_us, cycles, of_sm, tokens))
