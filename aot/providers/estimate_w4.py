"""How long sm90_w4 takes: a guess from its tiles, for putting the choices for a problem in order.

It stands apart from the kernels, whose sources name what is compiled, so that a better guess compiles nothing anew.
Imports no compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ..kernels.sm90.w4.plan import Plan
from ..kernels.w4.form import Form
from ..search.costs import Extents, Machine, Number, ceil, maximum, minimum, select
from ..search.h200 import H200, W4
from ..search.variants import Variant

_STEPS = 8  # WGMMAs of a warp group for 128 columns


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
    cycles: float  # of an SM for a CTA's stage, where all its CTAs are there
    resident: int  # CTAs
    overlap_us: float


@cache
def _tile(v: Variant, form_of: Callable[[Variant], Form]) -> _Tile:
    form = form_of(v)
    plan = Plan.of(v.options, form)
    return _Tile(
        plan.tile_m,
        plan.tile_n,
        plan.split_k,
        plan.cluster_n,
        plan.ctas_per_sm,
        plan.tile_k,
        plan.stages,
        (plan.codes_bytes + plan.scales_bytes) / (plan.tile_n * plan.tile_k),
        cycles_of_stage(plan),
        W4.resident(plan.split_k * plan.cluster_n, plan.ctas_per_sm),
        W4.overlap_us if plan.overlap != "serial" else 0.0,
    )


def cycles_of_stage(plan: Plan) -> float:
    """Cycles of an SM for the warp groups of a CTA to dequantise and multiply a stage.

    A warp group is at one of two stations, its schedulers' or the tensor cores', and the more there are, the less often
    a station waits: the throughput of a closed network of two queues. Alone it also waits for loads from shared memory.
    """
    depth = plan.tile_k / 128
    dequantise = (W4.issue_cycles[plan.weights.word] + W4.stage_cycles / depth) * depth
    multiply = _STEPS * depth * max(plan.tile_m / 2, W4.least_wgmma_cycles)
    groups = plan.consumers * plan.ctas_per_sm
    slower, ratio = max(dequantise, multiply), min(dequantise, multiply) / max(dequantise, multiply)
    busy = groups / (groups + 1) if ratio > 1 - 1e-6 else (1 - ratio**groups) / (1 - ratio ** (groups + 1))
    alone = (dequantise + multiply + W4.wait_cycles) / groups
    return plan.row_groups * max(slower / busy, alone)


def estimate_us(v: Variant, form_of: Callable[[Variant], Form], of: Extents, m: Number, machine: Machine = H200) -> Any:
    """A guess at the time in microseconds, good for putting the choices for one problem in order and for nothing else.

    The slowest of memory, L2 and the busiest SM, which loads and multiplies, a little of the other two, and the time to
    start, add up and store.
    """
    t, n, k = _tile(v, form_of), of.n, of.k
    larger = machine.multiprocessors / H200.multiprocessors
    tiles_m, tokens = ceil(m / t.tile_m), minimum(m, t.tile_m)
    tiles_n = ceil(n / (t.tile_n * t.cluster_n)) * t.cluster_n
    ctas = tiles_m * tiles_n * t.split_k
    stages = ceil(k / (t.depth * t.split_k))  # of a CTA

    b_bytes = n * k * t.weight_bytes
    memory_us = b_bytes * tiles_m / (machine.memory_gbps * (W4.memory_bytes_per_us / H200.memory_gbps))
    a_bytes = tiles_m * tiles_n * tokens * k * 2 / t.cluster_n
    l2_us = (b_bytes * tiles_m + a_bytes) / (larger * W4.l2_bytes_per_us)

    busiest = minimum(t.per_sm, ceil(ctas / machine.multiprocessors))
    multiply_us = stages * busiest * t.cycles / W4.cycles_per_us
    cta_us = maximum(stages * W4.latency_us / t.stages, multiply_us)
    waves = ctas / (larger * t.resident)
    sm_us = select(waves, 1, cta_us, (waves + W4.tail * (ceil(waves) - waves)) * cta_us)

    slowest = maximum(maximum(memory_us, l2_us), sm_us)
    flows = slowest + W4.rest * (memory_us + l2_us + sm_us - slowest)
    starts = W4.start_us + ceil(waves) * (W4.start_of_cta_us / t.per_sm)
    sums = tokens * t.tile_n
    split_us = W4.split_us + sums / W4.split_sums_per_us if t.split_k > 1 else 0
    return flows + starts + split_us + sums / W4.store_sums_per_us - t.overlap_us
