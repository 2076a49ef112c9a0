"""How long a persistent Hopper GEMM takes: a guess from its tiles, for putting the choices for a problem in order.

Pure arithmetic over numbers that any such kernel has, whoever wrote it. It stands apart from the kernels, whose sources
name what is compiled, so that a better guess compiles nothing anew. Imports no compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from runtime.dtypes import DTYPES
from runtime.signature import Signature

from ..kernels.sm90.persistent_choices import STAGE_BYTES_OF_K, Form, Plan
from ..variants import Variant

# Fitted to times on H200s (132 SMs, power-limited; November 2026), in microseconds, bytes and multiply-adds.
_MULTIPROCESSORS = 132
_RESIDENT = {1: 132, 2: 66, 4: 30}  # clusters that run at a time, by CTAs
_L2_BYTES_PER_US = 17.8e6
_MEMORY_BYTES_PER_US = 8.3e6  # beside other flows, of which some is hidden
_FLOOR_BYTES_PER_US = 3.9e6  # where there is nothing else
_SHARING_START_US = 0.3  # of CTAs in lockstep
_MEETING_US = 0.9  # of CTAs that split K, before they push sums
_PUSHED_BYTES_PER_US = 0.028e6
_SHARED_TILES_US = 0.86  # of the CTAs that share a tile through memory
_EXCHANGED_BYTES_PER_US = 2.67e6  # that they write and read back
_QUADS = 0.98  # the time of tiles in this order against any other, on average; from shape to shape 0.8 to 1.0
_OVERLAP_US = 0.7  # what a launch gains that may begin early; taken from kernels for few tokens
_SPARE_BYTE_US = 2e-6  # of a row past M that a CTA loads
_READ_OF_ROWS = 0.45  # what a byte that WGMMA reads of its 64 rows costs, against one of columns
_NORM = 4  # the power in the norm that makes one time of four
_WGMMA_ROWS = 64
_OPERATOR_PIECES = 4  # or so, of NVIDIA's kernels


@dataclass(frozen=True)
class Tiling:
    """How D (M, N) and K fall into tiles. Bytes are those of an element; `pushed_bytes` go from CTA to CTA where K is
    split; `swap` has rows of B on WGMMA's M side."""

    tile_m: int
    tile_n: int
    cluster_m: int
    cluster_n: int
    split_k: int = 1
    swap: bool = False
    pingpong: bool = False
    bytes_in: int = 2
    bytes_out: int = 2
    pushed_bytes: int = 0
    pieces: int = 0  # of D, that a warpgroup stores one after the other
    order: str = "rows"  # of tiles; see `persistent_choices.OPTIONS`


@dataclass(frozen=True)
class _Rates:
    """What depends on the bytes of an element."""

    start_us: float
    power: float  # multiply-adds of an SM while all are busy
    byte: float  # multiply-adds that take as much energy as a byte that WGMMA reads of its columns
    clock: float  # multiply-adds of an SM while few are
    shared_bytes: float  # of an SM's shared memory, that WGMMA reads
    brought: float  # what a byte that TMA brings costs of these, in time and energy
    epilogue_us: float  # of 128 x 128 sums by one warpgroup
    piece_us: float  # of each piece of it; in 16 bits none was seen
    seen: float  # of it, and of all that a tile costs besides, where no other warpgroup multiplies
    pingpong: float  # power that pingpong takes, against cooperative


_RATES = {
    2: _Rates(3.3, 5.9e6, 3.84, 2.86e6, 0.583e6, 4.34, 0.428, 0.0, 1.98, 0.923),
    1: _Rates(3.45, 14.4e6, 24.3, 6.15e6, 0.26e6, 1.44, 0.637, 0.099, 0.786, 1.0),
}


def of_own(v: Variant, form_of: Callable[[Variant], Form], signature: Signature, m: int) -> float:
    """Microseconds for a variant of sm90_persistent; see `estimate_us`."""
    tiling, plan = _own(v, form_of)
    extents = m, signature.n, signature.k
    if not plan.stream_k:
        return estimate_us(tiling, extents, signature.batch) - (_OVERLAP_US if plan.overlap else 0.0)
    clusters = _clusters(tiling, m, signature.n) * signature.batch
    stages = math.ceil(signature.k * tiling.bytes_in / STAGE_BYTES_OF_K)
    slices, shared = plan.slices_of(clusters, _RESIDENT[plan.cluster], stages)
    exchanged = 2 * (slices - 1) * shared * plan.partials_bytes
    exchange_us = _SHARED_TILES_US + exchanged / _EXCHANGED_BYTES_PER_US if slices > 1 else 0.0
    return estimate_us(tiling, extents, signature.batch, slices) + exchange_us


@cache
def _own(v: Variant, form_of: Callable[[Variant], Form]) -> tuple[Tiling, Plan]:
    """A variant's tiles, which a ranking asks for at every M."""
    plan = Plan.of(v.options, form_of(v))
    tiling = Tiling(
        v.integer("tile_m"),
        v.integer("tile_n"),
        v.integer("cluster_m"),
        v.integer("cluster_n"),
        plan.split_k,
        plan.swap,
        plan.pingpong,
        DTYPES[v.a].bytes,
        DTYPES[v.d].bytes,
        plan.pushed_bytes,
        plan.blocks * plan.pieces,
        str(v.options["order"]),
    )
    return tiling, plan


def of_operator(v: Variant, signature: Signature, m: int) -> float:
    """Microseconds for a variant of the Operator API's sm90_static_persistent; see `estimate_us`.

    Taken for a cooperative one of our own, whose times stand for it within a few percent.
    """
    tiling = Tiling(
        v.integer("tile_m"),
        v.integer("tile_n"),
        v.integer("cluster_m"),
        v.integer("cluster_n"),
        bytes_in=DTYPES[v.a].bytes,
        bytes_out=DTYPES[v.d].bytes,
        pieces=_OPERATOR_PIECES,
    )
    return estimate_us(tiling, (m, signature.n, signature.k), signature.batch)


def _clusters(t: Tiling, m: int, n: int) -> int:
    """Tiles of D, as a cluster takes them at a time."""
    return math.ceil(m / (t.tile_m * t.cluster_m)) * math.ceil(n / (t.tile_n * t.cluster_n))


def estimate_us(t: Tiling, extents: tuple[int, int, int], batch: int = 1, slices: int = 1) -> float:
    """A guess at the time on an H200 for `extents` M, N and K, with the last wave's tiles cut into `slices` of K.

    A norm of four flows (tile after tile through the busiest SM, products and what they move at the power that there
    is, bytes out of L2, bytes out of memory), the time to start, and the epilogues that nothing hides. How well it
    orders variants is in `aot.rank`.
    """
    m, n, k = extents
    rates = _RATES[t.bytes_in]
    cluster = t.cluster_m * t.cluster_n * t.split_k
    clusters = _clusters(t, m, n) * batch
    waves = math.ceil(clusters / _RESIDENT[cluster])
    tiles = clusters * cluster
    rows, columns = (t.tile_n, t.tile_m) if t.swap else (t.tile_m, t.tile_n)
    depth = k / t.split_k
    products = rows * columns * depth
    # WGMMA reads 64 rows and all columns for each 64 rows; TMA brings both once.
    reads = math.ceil(rows / _WGMMA_ROWS) * (_READ_OF_ROWS * _WGMMA_ROWS + columns)
    moved = (reads + rates.brought * (rows + columns)) * depth * t.bytes_in
    busy_us = (waves - 1 + 1 / slices) * max(products / rates.clock, moved / rates.shared_bytes)
    energy = products + rates.byte * moved
    power_us = tiles * energy / _MULTIPROCESSORS / rates.power * (rates.pingpong if t.pingpong else 1.0)
    loads = (t.tile_m / t.cluster_n + t.tile_n / t.cluster_m) * depth * t.bytes_in
    memory = batch * (n * k * t.bytes_in + m * k * t.bytes_in + m * n * t.bytes_out)
    flows = busy_us, power_us, tiles * loads / _L2_BYTES_PER_US, memory / _MEMORY_BYTES_PER_US
    body_us = max(sum(flow**_NORM for flow in flows) ** (1 / _NORM), memory / _FLOOR_BYTES_PER_US)
    body_us *= _QUADS if t.order == "quads" else 1.0
    epilogue_us = rates.epilogue_us * rows * columns / 128**2 / (1 if t.pingpong else 2) / t.split_k
    epilogue_us += rates.piece_us * t.pieces / t.split_k
    if t.split_k > 1:
        epilogue_us += _MEETING_US + t.pushed_bytes / _PUSHED_BYTES_PER_US
    spare_us = -m % t.tile_m / t.cluster_n * depth * t.bytes_in * _SPARE_BYTE_US
    shown = 1 + (waves - 1) * (0.0 if t.pingpong else rates.seen)
    return rates.start_us + body_us + spare_us + epilogue_us * shown + (_SHARING_START_US if cluster > 1 else 0.0)
