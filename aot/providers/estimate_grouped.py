"""How long a grouped GEMM of our own takes: a guess from its tiles, for putting the choices for a problem in order.

Rows are taken to be spread over groups at random, each as likely as any other, as a router's load is at best. Rates are
those of an H200's persistent GEMM; nothing here was fitted to grouped GEMMs. Imports no compiler.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from runtime.grouped_gemm import Signature
from runtime.numbers.dtypes import DTYPES

from ..kernels.sm90.persistent.plan import Plan
from ..search import h200
from ..search.grouped_gemm import active_groups, rows_of
from ..search.variants import Variant

_PROCESSORS, _RATES = h200.MULTIPROCESSORS, h200.GROUPED


def estimate_us(plan: Plan, signature: Signature, m: int) -> float:
    """Microseconds on an H200 at `m` rows of `signature`, weights not in L2."""
    of_b = plan.rows if plan.swap else plan.columns
    tile = _Tile(plan.tokens, of_b, plan.cluster_along_n, plan.pairs_tiles, plan.passes_over and plan.m_atoms == 1)
    hidden_us = _RATES.pingpong_us if plan.pingpong else 0.0
    # A warp group's epilogue is hidden by the other's next tile.
    hiding = max(0.0, _tiles(tile, signature, m) / _PROCESSORS - 1.0)
    return _us(tile, signature, m) - hiding * hidden_us


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


def _us(tile: _Tile, signature: Signature, m: int) -> float:
    element = DTYPES[signature.a].bits / 8
    waves = math.ceil(_tiles(tile, signature, m) / _PROCESSORS)
    rows_of_group = rows_of(signature, m) / signature.groups
    tiles = tiles_of_group(rows_of_group, tile.m)
    # Of a pair each CTA loads half of B's rows; a group's last tile may be in none.
    of_b = tile.n * (tiles_of_group(rows_of_group, 2 * tile.m) / tiles if tile.pairs else 1.0)
    loaded_us = (tile.m / tile.shared_by + of_b) * signature.k * element / _RATES.loaded_bytes_per_us
    narrow = DTYPES[signature.a].narrow
    rate = _RATES.narrow_flops_per_us if narrow else _RATES.flops_per_us
    multiplied = tiles_of_group(rows_of_group, tile.m // 2) / (2 * tiles) if tile.halves else 1.0
    products_us = 2.0 * tile.m * tile.n * multiplied * signature.k * _PROCESSORS / rate
    # Loads and products of 8-bit types take nearly as long as each other, so neither hides the other quite.
    hidden_us = _RATES.hidden * min(products_us, loaded_us) if narrow else 0.0
    computed = waves * (max(products_us, loaded_us) + hidden_us + _RATES.tile_us)
    made = rows_of(signature, m)
    rows = active_groups(signature.groups, made) * signature.n + made
    stored = made * signature.columns * DTYPES[signature.d].bits / 8
    read = (rows * signature.k * element + stored) / _RATES.read_bytes_per_us
    return _RATES.launch_us + max(computed, read) + _RATES.hidden * min(computed, read)
