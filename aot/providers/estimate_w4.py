"""How long sm90_w4 takes: a guess from its tiles, for putting the choices for a problem in order.

It stands apart from the kernels, whose sources name what is compiled, so that a better guess compiles nothing anew.
Imports no compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ..kernels.sm90.w4.form import Form
from ..kernels.sm90.w4.plan import Plan
from ..search.costs import Extents, Machine, Number, ceil, maximum, minimum, select
from ..search.h200 import H200, W4
from ..search.variants import Variant


class _Tile(NamedTuple):
    """What of a variant does not depend on the problem."""

    tile_m: int
    tile_n: int
    split_k: int
    cluster_n: int
    per_sm: int
    depth: int  # columns of K in a stage
    stages: int
    weight_bytes: float  # of a weight, with its share of a scale
    slab_cycles: float  # of an SM, for a warp to multiply 16 rows by a stage's columns
    stage_cycles: float  # from a stage to the next, by the warps that multiply it
    groups: int  # warps of a stage, and those past the tile
    resident: int  # CTAs
    overlap_us: float


@cache
def _tile(v: Variant, form_of: Callable[[Variant], Form]) -> _Tile:
    form = form_of(v)
    plan = Plan.of(v.options, form)
    cluster = plan.split_k * plan.cluster_n
    return _Tile(
        plan.tile_m,
        plan.tile_n,
        plan.split_k,
        plan.cluster_n,
        plan.ctas_per_sm,
        plan.tile_k,
        plan.stages,
        (plan.codes_bytes + plan.scales_bytes) / (plan.tile_n * plan.tile_k),
        maximum(W4.slab_cycles, plan.tile_m / 8 * W4.token_cycles),
        W4.stage_cycles / plan.sliced_k,
        4 * plan.row_groups,
        W4.resident_ctas[cluster][plan.ctas_per_sm - 1],
        W4.overlap_us if plan.overlap != "serial" else 0.0,
    )


def estimate_us(v: Variant, form_of: Callable[[Variant], Form], of: Extents, m: Number, machine: Machine = H200) -> Any:
    """A guess at the time in microseconds, good for putting the choices for one problem in order and for nothing else.

    The slowest of memory, L2 and the busiest SM, which loads and dequantises, a little of the other two, and the time
    to start, add up and store.
    """
    t, n, k = _tile(v, form_of), of.n, of.k
    larger = machine.multiprocessors / H200.multiprocessors
    tiles_m, tokens = ceil(m / t.tile_m), minimum(m, t.tile_m)
    tiles_n = ceil(n / (t.tile_n * t.cluster_n)) * t.cluster_n
    ctas = tiles_m * tiles_n * t.split_k
    columns = ceil(k / (t.depth * t.split_k)) * t.depth  # of K, for a CTA

    b_bytes = n * k * t.weight_bytes
    memory_us = b_bytes * tiles_m / (machine.memory_gbps * (W4.memory_bytes_per_us / H200.memory_gbps))
    a_bytes = tiles_m * tiles_n * tokens * k * 2 / t.cluster_n
    l2_us = (b_bytes * tiles_m + a_bytes) / (larger * W4.l2_bytes_per_us)

    busiest = minimum(t.per_sm, ceil(ctas / machine.multiprocessors))
    stage_bytes = t.tile_n * t.depth * t.weight_bytes + tokens * t.depth * 2
    load_us = columns / t.depth * W4.latency_us / t.stages
    load_us = maximum(load_us, columns / t.depth * stage_bytes * busiest / W4.sm_bytes_per_us)
    cycles = maximum(t.slab_cycles * t.groups * busiest, t.stage_cycles)
    multiply_us = columns / t.depth * cycles / W4.cycles_per_us
    waves = ctas / (larger * t.resident)
    cta_us = maximum(load_us, multiply_us)
    sm_us = select(waves, 1, cta_us, (waves + W4.tail * (ceil(waves) - waves)) * cta_us)

    slowest = maximum(maximum(memory_us, l2_us), sm_us)
    flows = slowest + W4.rest * (memory_us + l2_us + sm_us - slowest)
    starts = W4.start_us + ceil(waves) * (W4.start_of_cta_us / t.per_sm)
    sums = tokens * t.tile_n
    split_us = W4.split_us + sums / W4.split_sums_per_us if t.split_k > 1 else 0
    return flows + starts + split_us + sums / W4.store_sums_per_us - t.overlap_us
