"""How long a grouped GEMM of our own takes: a guess from its tiles, for putting the choices for a problem in order.

Rows are taken to be spread over groups at random, each as likely as any other, as a router's load is at best; of masked
rows M is what each group has on average. Rates are
those of an H200's persistent GEMM; nothing here was fitted to grouped GEMMs. Imports no compiler.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from runtime.grouped_gemm import Signature
from runtime.numbers.dtypes import DTYPES

from ..kernels.sm90.persistent.plan import Plan
from ..search.grouped_gemm import active_groups, rows_of
from ..search.variants import Variant

_PROCESSORS = 132
_READ_BYTES_PER_US = 4.3e6  # of weights that no cache has
_FLOPS_PER_US = 720e6  # bf16, at the clock that power leaves
_FLOPS_PER_US_FP8 = 1100e6  # of e4m3, whose sums are promoted
_LAUNCH_US, _TILE_US = 3.0, 0.6  # to begin and end a kernel, and a tile's epilogue that nothing hides
_HIDDEN = 0.1  # of the shorter of two, which does not quite hide behind the longer
_LOADED_BYTES_PER_US = 0.055e6  # into an SM's shared memory, from L2


def estimate_us(plan: Plan, signature: Signature, m: int) -> float:
    """Microseconds on an H200 at `m` rows of `signature`, weights not in L2."""
    tile = _Tile(plan.tokens, plan.rows if plan.swap else plan.columns, plan.cluster_along_n)
    return _us(tile, signature, m) - _tiles(tile, signature, m) / _PROCESSORS * (0.3 if plan.pingpong else 0.0)


def of_operator(variant: Variant, signature: Signature, m: int) -> float:
    """The same of the Operator API's, whose tiles a pair of CTAs may share: for their order, on whatever GPU."""
    share = 2 if variant.options["two_cta"] else 1
    tile = _Tile(variant.integer("tile_m") // share, variant.integer("tile_n"), variant.integer("cluster_n"))
    return _us(tile, signature, m)


class _Tile(NamedTuple):
    """A CTA's tile of D: its rows, of B its rows, and how many CTAs load its rows of A together."""

    m: int
    n: int
    shared_by: int


def _tiles(tile: _Tile, signature: Signature, m: int) -> float:
    """How many tiles there are on average."""
    rows = rows_of(signature, m)
    active = active_groups(signature.groups, rows)
    return active * max(1.0, math.ceil(rows / active / tile.m - 0.5)) * math.ceil(signature.n / tile.n)


def _us(tile: _Tile, signature: Signature, m: int) -> float:
    element = DTYPES[signature.a].bytes
    waves = math.ceil(_tiles(tile, signature, m) / _PROCESSORS)
    loaded = (tile.m / tile.shared_by + tile.n) * signature.k * element
    rate = _FLOPS_PER_US_FP8 if DTYPES[signature.a].narrow else _FLOPS_PER_US
    products = 2.0 * tile.m * tile.n * signature.k * _PROCESSORS / rate
    computed = waves * (max(products, loaded / _LOADED_BYTES_PER_US) + _TILE_US)
    all_rows = rows_of(signature, m)
    rows = active_groups(signature.groups, all_rows) * signature.n + all_rows
    read = (
        rows * signature.k * element + all_rows * signature.columns * DTYPES[signature.d].bytes
    ) / _READ_BYTES_PER_US
    return _LAUNCH_US + max(computed, read) + _HIDDEN * min(computed, read)
