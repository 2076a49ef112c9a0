"""How long a grouped GEMM of our own takes: a guess from its tiles, for putting the choices for a problem in order.

Rows are taken to be spread over groups at random, each as likely as any other, as a router's load is at best. Rates are
those of an H200's persistent GEMM; to grouped GEMMs only the rate was fitted at which an SM that has few tiles loads
these from memory (`aot.search.h200.GROUPED`). Imports no compiler.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from runtime.grouped_gemm import Signature, active_groups
from runtime.numbers.dtypes import DTYPES

from ..kernels.sm90.persistent.plan import Plan
from ..search import h200
from ..search.grouped_gemm import rows_of
from ..search.variants import Variant
from . import likely_grouped

_PROCESSORS, _RATES = h200.MULTIPROCESSORS, h200.GROUPED
# Up to so many rows of B for each SM, of all groups that have rows, two tiles of 192, and so many rows of A in such a
# group, SMs have few tiles, and it matters how evenly they share them; with twice as many it does not.
_FEW_ROWS_OF_B, _FEW_ROWS_OF_A = 384, 16
_NONE = 0.05  # of a tile, that none is expected


def estimate_us(plan: Plan, signature: Signature, m: int) -> float:
    """Microseconds on an H200 at `m` rows of `signature`, weights not in L2."""
    of_b = plan.loaded_rows if plan.swap else plan.columns
    tile = _Tile(plan.tokens, of_b, plan.cluster_along_n, plan.pairs_tiles, plan.passes_over and plan.m_atoms == 1)
    few = _few(signature, m) if any(likely_grouped.RAGGED.values()) else 0.0  # the choice among these needs it
    hidden_us = _RATES.pingpong_us if plan.pingpong else 0.0
    # A warp group's epilogue is hidden by the other's next tile.
    hiding = max(0.0, _tiles(tile, signature, m) / _PROCESSORS - 1.0)
    # Ragged tiles are for SMs that have few: of many there are as many more as each is smaller, and nobody timed them.
    us = (_us(tile, signature, m) - hiding * hidden_us) * (plan.rows / plan.loaded_rows)
    return us + few * (_us_of_few(tile, signature, m) - us) if few else us


def of_operator(variant: Variant, signature: Signature, m: int) -> float:
    """The same of the Operator API's, whose tiles a pair of CTAs may share: for their order, on whatever GPU."""
    share = 2 if variant.options["two_cta"] else 1
    tile = _Tile(variant.integer("tile_m") // share, variant.integer("tile_n"), variant.integer("cluster_n"))
    return _us(tile, signature, m)


class _Tile(NamedTuple):
    """A CTA's tile of D: its rows, of B its rows, how many CTAs load its rows of A together, whether pairs of tiles
    share rows of B, and whether half a tile without rows is not multiplied."""

    m: int
    n: int
    shared_by: int
    pairs: bool = False
    halves: bool = False


def _tiles(tile: _Tile, signature: Signature, m: int) -> float:
    """How many tiles there are on average."""
    return (
        signature.groups
        * tiles_of_group(rows_of(signature, m) / signature.groups, tile.m)
        * math.ceil(signature.n / tile.n)
    )


def tiles_of_group(rows: float, tile_m: int) -> float:
    """How many tiles along M a group has on average that has so many rows on average: the sum over k of the chance that
    it has more than k tiles' rows. Their number is Poisson's, or for k above 0 normal of the same variance."""
    found, k = -math.expm1(-rows), max(1, math.floor((rows - 4 * math.sqrt(rows)) / tile_m))
    found *= k  # that many it has for certain, if any
    while True:
        chance = 0.5 * math.erfc((k * tile_m + 0.5 - rows) / math.sqrt(2 * rows))
        if chance < 1e-4:
            return found
        found, k = found + chance, k + 1


def _few(signature: Signature, m: int) -> float:
    """How much it is true that SMs have few tiles, whatever these are, from 0 to 1. With scales of blocks nobody
    looked."""
    if signature.scaling == "block":
        return 0.0
    rows = rows_of(signature, m)
    active = active_groups(signature.groups, rows)
    times = rows / active / _FEW_ROWS_OF_A, active * signature.n / _PROCESSORS / _FEW_ROWS_OF_B
    return math.prod(min(1.0, max(0.0, 2.0 - each)) for each in times)


def _us_of_few(tile: _Tile, signature: Signature, m: int) -> float:
    """Microseconds where SMs have few tiles: by those of the SM that has most, which loads them no faster than from
    memory, whatever the others do. Along M there are as many whole tiles as on average, since a group reads all rows of
    B or none; along N those that a cluster has past N take an SM too."""
    element = DTYPES[signature.a].bits / 8
    along_m = signature.groups * tiles_of_group(rows_of(signature, m) / signature.groups, tile.m)
    along_n = math.ceil(signature.n / (tile.n * tile.shared_by)) * tile.shared_by
    waves = math.ceil(math.ceil(along_m - _NONE) * along_n / _PROCESSORS)
    loaded_us = (tile.m / tile.shared_by + tile.n) * signature.k * element / _RATES.cold_bytes_per_us
    return _launched_us(waves * _tile_us(tile, loaded_us, signature), signature, m)


def _us(tile: _Tile, signature: Signature, m: int) -> float:
    element = DTYPES[signature.a].bits / 8
    waves = math.ceil(_tiles(tile, signature, m) / _PROCESSORS)
    rows_of_group = rows_of(signature, m) / signature.groups
    tiles = tiles_of_group(rows_of_group, tile.m)
    # Of a pair each CTA loads half of B's rows; a group's last tile may be in none.
    of_b = tile.n * (tiles_of_group(rows_of_group, 2 * tile.m) / tiles if tile.pairs else 1.0)
    loaded_us = (tile.m / tile.shared_by + of_b) * signature.k * element / _RATES.loaded_bytes_per_us
    multiplied = tiles_of_group(rows_of_group, tile.m // 2) / (2 * tiles) if tile.halves else 1.0
    return _launched_us(waves * _tile_us(tile, loaded_us, signature, multiplied), signature, m)


def _tile_us(tile: _Tile, loaded_us: float, signature: Signature, multiplied: float = 1.0) -> float:
    """Of one tile, whose stages take so long to load, and which is multiplied to this part."""
    narrow = DTYPES[signature.a].narrow
    rate = _RATES.narrow_flops_per_us if narrow else _RATES.flops_per_us
    products_us = 2.0 * tile.m * tile.n * multiplied * signature.k * _PROCESSORS / rate
    # Loads and products of 8-bit types take nearly as long as each other, so neither hides the other quite.
    hidden_us = _RATES.hidden * min(products_us, loaded_us) if narrow else 0.0
    return max(products_us, loaded_us) + hidden_us + _RATES.tile_us


def _launched_us(computed: float, signature: Signature, m: int) -> float:
    """Of a launch whose SMs compute for so long, and which reads what groups with rows have of B."""
    element = DTYPES[signature.a].bits / 8
    made = rows_of(signature, m)
    rows = active_groups(signature.groups, made) * signature.n + made
    stored = made * signature.columns * DTYPES[signature.d].bits / 8
    read = (rows * signature.k * element + stored) / _RATES.read_bytes_per_us
    return _RATES.launch_us + max(computed, read) + _RATES.hidden * min(computed, read)
