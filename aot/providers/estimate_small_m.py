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
from ..search import h200
from ..search.costs import Extents, Machine, Number, ceil, maximum, minimum, select, sqrt
from ..search.h200 import H200
from ..search.variants import Variant

_RATES = h200.SMALL_M
_WGMMA_ROWS = 64
_QUANTISED_BYTES = 2  # of an element of A that kernels quantise


class _Tile(NamedTuple):
    """What of a variant does not depend on the problem."""

    tile_m: int
    tile_n: int
    split_k: int
    cluster_n: int
    per_sm: int
    depth: int  # elements of K in a stage
    bytes: int  # of an element that is multiplied
    bytes_a: int  # of one of A in memory
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
        _QUANTISED_BYTES if form.quantises else form.element_bytes,
        plan.stages,
        _wgmma_cycles(*plan.sides) * (_RATES.exact if form.element_bytes == 1 else 1),
        plan.box_tokens,
        _RATES.resident(split_k * cluster_n, per_sm),
        _RATES.overlap_us if plan.overlap != "serial" else 0.0,
    )


def estimate_us(v: Variant, form_of: Callable[[Variant], Form], of: Extents, m: Number, machine: Machine = H200) -> Any:
    """A guess at the time in microseconds, good for putting the choices for one problem in order and for nothing else.

    The slowest of three flows (memory to L2, L2 to the SMs, and what the busiest SM takes in, with what it keeps in
    flight, and multiplies), a little of the other two, and the time to start, add up and store; or what power allows.
    How well it orders variants is in `aot.search.rank`.
    """
    t, n, k, batch = _tile(v, form_of), of.n, of.k, of.batch
    larger = machine.multiprocessors / H200.multiprocessors
    tiles_m, tokens = ceil(m / t.tile_m), minimum(m, t.tile_m)
    tiles_n = ceil(n / (t.tile_n * t.cluster_n)) * t.cluster_n
    ctas = batch * tiles_m * tiles_n * t.split_k
    columns = ceil(k / (t.depth * t.split_k)) * t.depth  # of K, for a CTA

    power = _RATES.power_macs_per_us[t.bytes]
    power_us = batch * tiles_m * tiles_n * k * (t.tile_m * t.tile_n) / (machine.multiprocessors * power)
    b_bytes = batch * n * k * t.bytes
    memory_rate = machine.memory_gbps * (_RATES.memory_bytes_per_us / H200.memory_gbps)
    memory_us = b_bytes * (1 + _RATES.read_again * (tiles_m - 1)) / memory_rate
    a_bytes = batch * tiles_m * tiles_n * tokens * k * t.bytes_a / t.cluster_n
    past_n_bytes = batch * tiles_m * (tiles_n * t.tile_n - n) * k * t.bytes  # of B's tiles, which TMA fills with zeros
    l2_us = (b_bytes * tiles_m + a_bytes) / (larger * _RATES.l2_bytes_per_us)
    l2_us = l2_us + past_n_bytes / (larger * _RATES.past_n_bytes_per_us)

    waves = ctas / (larger * t.resident)
    busiest = minimum(t.per_sm, ceil(ctas / machine.multiprocessors))
    in_flight = busiest * t.stages * (t.tile_n + tokens) * t.depth * t.bytes
    load_us = (t.tile_n + tokens) * columns * t.bytes * _RATES.latency_us / in_flight
    cta_us = maximum(load_us, columns * (t.cycles * t.bytes / 32 / _RATES.cycles_per_us))
    several = (waves * busiest + _RATES.tail * (ceil(waves) - waves)) * cta_us
    sm_us = select(waves, 1, busiest * cta_us, several)

    slowest = maximum(maximum(memory_us, l2_us), sm_us)
    flows = maximum(slowest + _RATES.rest * (memory_us + l2_us + sm_us - slowest), power_us)
    starts = _RATES.start_us + ceil(waves) * (_RATES.start_of_cta_us / t.per_sm)
    spare = (ceil(m / t.piece) * t.piece - m) * k / (t.cluster_n * t.split_k * _RATES.spare_elements_per_us)
    sums = tokens * t.tile_n
    split_us = _RATES.split_us + sums / _RATES.split_sums_per_us if t.split_k > 1 else 0
    meeting = spare + split_us + sums / _RATES.store_sums_per_us
    # Each doubling of the waves that read B again adds 4%, as times at M = 65 to 8192 have it on average.
    again = sqrt(sqrt(sqrt(sqrt(maximum(minimum(waves, tiles_m), 1)))))
    return (flows + starts + meeting) * again - t.overlap_us


def _wgmma_cycles(left: int, right: int) -> float:
    """For a tile of so many rows on WGMMA's two sides and 32 bytes of K, of the tensor cores or of shared memory,
    whichever takes longer.

    An instruction multiplies 64 rows by the whole other side, in half as many cycles as that has rows, and reads both
    from shared memory, at 128 bytes a cycle, of which TMA's writes have their share.
    """
    blocks = math.ceil(left / _WGMMA_ROWS)
    return max(blocks * right / 2, (blocks * (_WGMMA_ROWS + right) + left + right) * 32 / 128)
