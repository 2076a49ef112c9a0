"""How long a persistent Hopper GEMM takes: a guess from its tiles, for putting the choices for a problem in order.

Pure arithmetic over numbers that any such kernel has, whoever wrote it. It stands apart from the kernels, whose sources
name what is compiled, so that a better guess compiles nothing anew. Imports no compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from runtime.numbers.dtypes import DTYPES
from runtime.numbers.epilogue import Epilogue

from ..kernels.sm90.persistent.form import Form
from ..kernels.sm90.persistent.plan import STAGE_BYTES_OF_K, Plan
from ..kernels.sm90.sizes import WARP_GROUP
from ..search import h200
from ..search.costs import Extents, Machine, Number, ceil, floor, maximum, minimum, select, sqrt
from ..search.h200 import H200
from ..search.rates import ElementRates
from ..search.variants import Variant

_RATES = h200.PERSISTENT
_WGMMA_ROWS = 64
_MACS_PER_CYCLE = 4096  # of an SM's tensor cores, in 8 bits
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
    order: str = "rows"  # of tiles; see `persistent.choices.OPTIONS`
    gated: bool = False
    residual: bool = False
    promoted_columns: int = 0  # of a warpgroup's sums, where those of each stage are scaled
    moved_up: bool = (
        False  # the last tile along M, so that it hangs over M only where it is the first too; not with stream-K
    )
    nonpersistent: bool = False  # a CTA for each tile


def of_own(v: Variant, form_of: Callable[[Variant], Form], of: Extents, m: Number, machine: Machine = H200) -> Any:
    """Microseconds for a variant of sm90_persistent; see `estimate_us`."""
    tiling, plan = _own(v, form_of)
    if not plan.stream_k:
        return estimate_us(tiling, of, m, machine) - (_RATES.overlap_us if plan.overlap else 0.0)
    clusters, resident = _clusters(tiling, m, of.n) * of.batch, _resident(plan.cluster, machine)
    slices, shared = _slices(plan, clusters, resident, of.k * tiling.bytes_in / STAGE_BYTES_OF_K)
    exchanged = (slices - 1) * shared * (2 * plan.partials_bytes)
    exchange_us = select(slices, 1, 0.0, _RATES.shared_tiles_us + exchanged / _RATES.exchanged_bytes_per_us)
    return estimate_us(tiling, of, m, machine, slices) + exchange_us


def _slices(plan: Plan, clusters: Any, resident: Any, stages: Number) -> tuple[Any, Any]:
    """Into how many slices of K the tiles of the last wave are cut where a tile is shared, and how many these are; of
    numbers that need not be known."""
    shared = clusters - floor(clusters / resident) * resident
    most = minimum(floor(resident / maximum(shared, 1)), floor(ceil(stages) / plan.least_slice))
    slices: Any = 1
    for count in plan.slices:  # ascending
        slices = select(count, most, count, slices)
    return select(shared, 0, 1, slices), shared


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
        plan.epilogue_tiles,
        str(v.options["order"]),
        plan.form.gated,
        Epilogue.of(plan.form.epilogue).residual,
        plan.columns // plan.atom_layout.columns if plan.form.scaling == "block" else 0,
        not plan.stream_k,
        plan.nonpersistent,
    )
    return tiling, plan


def of_operator(v: Variant, of: Extents, m: Number, machine: Machine = H200) -> Any:
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
    return estimate_us(tiling, of, m, machine)


def _clusters(t: Tiling, m: Number, n: Number) -> Any:
    """Tiles of D, as a cluster takes them at a time."""
    return _clusters_m(t, m) * ceil(n / (t.tile_n * t.cluster_n))


def _clusters_m(t: Tiling, m: Number) -> Any:
    """Clusters' tiles along M."""
    return ceil(m / (t.tile_m * t.cluster_m))


def _resident(cluster: int, machine: Machine) -> Any:
    """Clusters of so many CTAs that run at a time."""
    return floor(machine.multiprocessors * _RATES.resident(cluster) / H200.multiprocessors)


def estimate_us(t: Tiling, of: Extents, m: Number, machine: Machine = H200, slices: Number = 1) -> Any:
    """A guess at the time in microseconds, with the last wave's tiles cut into `slices` of K.

    A norm of four flows (tile after tile through the busiest SM, products and what they move at the power that there
    is, bytes out of L2, bytes out of memory), the time to start, the rows past M that are loaded, and the epilogues
    that nothing hides. How well it orders variants is in `aot.search.rank`.
    """
    n, k, batch = of.n, of.k, of.batch
    rates = _RATES.by_element_bytes[t.bytes_in]
    larger, memory_faster = machine.multiprocessors / H200.multiprocessors, machine.memory_gbps / H200.memory_gbps
    cluster = t.cluster_m * t.cluster_n * t.split_k
    clusters = _clusters(t, m, n) * batch
    waves = ceil(clusters / _resident(cluster, machine))
    tiles, depth = clusters * cluster, k / t.split_k
    products, brought = depth * (t.tile_m * t.tile_n), depth * ((t.tile_m + t.tile_n) * t.bytes_in)
    tile_us = maximum(products / rates.clock_macs_per_us * _promoted(t), brought / rates.brought_bytes_per_us)
    epilogue_us = _epilogue_us(t, rates)
    # Of two warpgroups that alternate, one multiplies while the other stores.
    next_us = maximum(tile_us, (tile_us + epilogue_us) / 2) if t.pingpong else tile_us
    busy_us = (waves - 1) * next_us + tile_us / slices
    rows, columns = (t.tile_n, t.tile_m) if t.swap else (t.tile_m, t.tile_n)
    # WGMMA reads 64 rows and all columns for each 64 rows.
    reads = depth * (math.ceil(rows / _WGMMA_ROWS) * (rates.row_bytes * _WGMMA_ROWS + columns) * t.bytes_in)
    energy = products + reads * rates.byte_macs
    power = rates.power_macs_per_us / (rates.pingpong if t.pingpong else 1.0)
    power_us = tiles * energy / (machine.multiprocessors * power)
    loads = depth * ((t.tile_m / t.cluster_n + t.tile_n / t.cluster_m) * t.bytes_in)
    out = t.bytes_out * (_RATES.out_bytes + (_RATES.residual_bytes if t.residual else 0.0)) / (2 if t.gated else 1)
    memory = batch * (n * k * t.bytes_in + m * k * t.bytes_in + m * n * out)
    l2_us = tiles * loads / (larger * _RATES.l2_bytes_per_us)
    memory_us = memory / (memory_faster * _RATES.memory_bytes_per_us)
    floor_us = memory / (memory_faster * _RATES.floor_bytes_per_us)
    body_us = maximum(_norm(busy_us, power_us, l2_us, memory_us), floor_us)
    body_us = body_us * (_RATES.quads if t.order == "quads" else 1.0)
    if t.nonpersistent:
        body_us = body_us * _RATES.one_tile + (waves - 1) * _RATES.one_tile_wave_us
    # Each CTA of a cluster along M hangs over it then.
    past_m = maximum(t.tile_m - m, 0) * t.cluster_m if t.moved_up else _clusters_m(t, m) * t.tile_m * t.cluster_m - m
    receivers = batch * (ceil(n / (t.tile_n * t.cluster_n)) * t.cluster_n)
    past_m_us = past_m * k * receivers * t.bytes_in / (larger * _RATES.past_m_bytes_per_us)
    shown = 1 + (waves - 1) * (0.0 if t.pingpong else rates.seen)
    return body_us + past_m_us + epilogue_us * shown + rates.start_us


def _promoted(t: Tiling) -> float:
    """How many times as long the products of a stage take because they are promoted: of two warpgroups one promotes
    while the other multiplies, and where that takes longer the tensor cores wait."""
    if not t.promoted_columns:
        return 1.0
    sums = _WGMMA_ROWS * t.promoted_columns
    multiplied = sums * STAGE_BYTES_OF_K / _MACS_PER_CYCLE
    atoms = max(1, t.tile_m // (2 * _WGMMA_ROWS))  # that a warpgroup promotes of a stage, one after the other
    promoted = sums / WARP_GROUP + _RATES.promotion_cycles + _RATES.stage_cycles / atoms
    return max(1.0, (multiplied + promoted) / (2 * multiplied))


def _epilogue_us(t: Tiling, rates: ElementRates) -> float:
    """From sums to D, of one tile by the warpgroups that have it."""
    sums_us = rates.epilogue_us + (_RATES.residual_us if t.residual else 0.0)
    found = sums_us * t.tile_m * t.tile_n / 128**2 / (1 if t.pingpong else 2) + rates.piece_us * t.pieces
    meeting_us = _RATES.meeting_us + t.pushed_bytes / _RATES.pushed_bytes_per_us if t.split_k > 1 else 0.0
    return found / t.split_k + meeting_us


def _norm(*flows: Any) -> Any:
    """Their norm to the power of four, which makes one time of several that share a GPU."""
    squares = [flow * flow for flow in flows]
    return sqrt(sqrt(sum(square * square for square in squares)))
