"""How long sm90_small_m takes: a guess from its tiles, for putting the choices for a problem in order.

It stands apart from the kernels, whose sources name what is compiled, so that a better guess compiles nothing anew.
Imports no compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ..kernels.sm90.small_m.form import Form
from ..kernels.sm90.small_m.plan import Plan
from ..search.costs import H200, Extents, Machine, Number, ceil, maximum, minimum, select
from ..search.variants import Variant

# Fitted to times on an H200 (132 SMs; November 2026): microseconds, bytes, cycles.
_START_US, _START_OF_CTA_US, _OVERLAP_US = 1.0, 1.68, 0.7
_MEMORY_BYTES_PER_US, _L2_BYTES_PER_US = 4.57e6, 11.7e6
_READ_AGAIN = 0.63  # what another row of tiles of D costs, in reads of B
_CYCLES_PER_US = 2200
_POWER = {2: 2.4e6, 1: 4.0e6}  # multiply-adds of an SM, a microsecond, while all are busy; by bytes of an element
_EXACT = 1.12  # for moving the sums of 8-bit products to f32 registers
_SPLIT_US, _SPLIT_SUMS_PER_US, _STORE_SUMS_PER_US = 0.23, 7100, 10_900  # a CTA, and its sums
_SPARE_PER_US = 250_000  # rows past M that a CTA loads, times columns of A
_LATENCY_US = 1.51  # of a load while the memory is busy
_TAIL = 1.34
_REST = 0.08
# Clusters of 4 and 8 CTAs do not fill every GPC: how many CTAs fit with one and with two an SM, of 132 and 264.
_CTAS_IN_CLUSTERS = {1: (132, 264), 2: (132, 264), 4: (120, 248), 8: (120, 240)}
_MULTIPROCESSORS = _CTAS_IN_CLUSTERS[1][0]
_WGMMA_ROWS = 64
# Beyond twice the M that the kernel is meant for nothing was fitted, and kernels for many tokens are to be tried first.
_FITTED_M, _BEYOND = 512, 1.3


class _Tile(NamedTuple):
    """What of a variant does not depend on the problem."""

    tile_m: int
    tile_n: int
    split_k: int
    cluster_n: int
    per_sm: int
    depth: int  # elements of K in a stage
    bytes: int  # of an element
    stages: int
    cycles: float  # for a tile and 32 bytes of K
    piece: int
    resident: int  # CTAs
    overlap_us: float


@cache
def _tile(v: Variant, form_of: Callable[[Variant], Form]) -> _Tile:
    form = form_of(v)
    plan = Plan.of(v.options, form)
    tile_m, tile_n, split_k, cluster_n, per_sm = (
        v.integer(name) for name in ("tile_m", "tile_n", "split_k", "cluster_n", "ctas_per_sm")
    )
    return _Tile(
        tile_m,
        tile_n,
        split_k,
        cluster_n,
        per_sm,
        plan.tile_k,
        form.element_bytes,
        plan.stages,
        _wgmma_cycles(*plan.sides) * (_EXACT if form.element_bytes == 1 else 1),
        plan.box_tokens,
        _CTAS_IN_CLUSTERS[split_k * cluster_n][per_sm - 1],
        _OVERLAP_US if plan.overlap != "serial" else 0.0,
    )


def estimate_us(v: Variant, form_of: Callable[[Variant], Form], of: Extents, m: Number, machine: Machine = H200) -> Any:
    """A guess at the time in microseconds, good for putting the choices for one problem in order and for nothing else.

    The slowest of three flows (memory to L2, L2 to the SMs, and what the busiest SM takes in, with what it keeps in
    flight, and multiplies), a little of the other two, and the time to start, add up and store; or what power allows.
    How well it orders variants is in `aot.search.rank`.
    """
    t, n, k, batch = _tile(v, form_of), of.n, of.k, of.batch
    larger = machine.multiprocessors / _MULTIPROCESSORS
    tiles_m, tokens = ceil(m / t.tile_m), minimum(m, t.tile_m)
    tiles_n = ceil(n / (t.tile_n * t.cluster_n)) * t.cluster_n
    ctas = batch * tiles_m * tiles_n * t.split_k
    columns = ceil(k / (t.depth * t.split_k)) * t.depth  # of K, for a CTA

    power_us = batch * tiles_m * tiles_n * k * (t.tile_m * t.tile_n) / (machine.multiprocessors * _POWER[t.bytes])
    b_bytes = batch * n * k * t.bytes
    memory_rate = machine.memory_gbps * (_MEMORY_BYTES_PER_US / H200.memory_gbps)
    memory_us = b_bytes * (1 + _READ_AGAIN * (tiles_m - 1)) / memory_rate
    a_bytes = batch * tiles_m * tiles_n * tokens * k * t.bytes / t.cluster_n
    l2_us = (b_bytes * tiles_m + a_bytes) / (larger * _L2_BYTES_PER_US)

    waves = ctas / (larger * t.resident)
    busiest = minimum(t.per_sm, ceil(ctas / machine.multiprocessors))
    in_flight = busiest * t.stages * (t.tile_n + tokens) * t.depth * t.bytes
    load_us = (t.tile_n + tokens) * columns * t.bytes * _LATENCY_US / in_flight
    cta_us = maximum(load_us, columns * (t.cycles * t.bytes / 32 / _CYCLES_PER_US))
    several = (waves * busiest + _TAIL * (ceil(waves) - waves)) * cta_us
    sm_us = select(waves, 1, busiest * cta_us, several)

    slowest = maximum(maximum(memory_us, l2_us), sm_us)
    flows = maximum(slowest + _REST * (memory_us + l2_us + sm_us - slowest), power_us)
    starts = _START_US + ceil(waves) * (_START_OF_CTA_US / t.per_sm)
    spare = (ceil(m / t.piece) * t.piece - m) * k / (t.cluster_n * t.split_k * _SPARE_PER_US)
    sums = tokens * t.tile_n
    meeting = spare + (_SPLIT_US + sums / _SPLIT_SUMS_PER_US if t.split_k > 1 else 0) + sums / _STORE_SUMS_PER_US
    us = flows + starts + meeting - t.overlap_us
    return select(m, _FITTED_M, us, us * _BEYOND)


def _wgmma_cycles(left: int, right: int) -> float:
    """For a tile of so many rows on WGMMA's two sides and 32 bytes of K, of the tensor cores or of shared memory,
    whichever takes longer.

    An instruction multiplies 64 rows by the whole other side, in half as many cycles as that has rows, and reads both
    from shared memory, at 128 bytes a cycle, of which TMA's writes have their share.
    """
    blocks = math.ceil(left / _WGMMA_ROWS)
    return max(blocks * right / 2, (blocks * (_WGMMA_ROWS + right) + left + right) * 32 / 128)
