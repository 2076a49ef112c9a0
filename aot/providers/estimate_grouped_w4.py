"""How long sm90_grouped_w4 takes: a guess from its tiles, for putting the choices for a problem in order.

Rates are those of an H200's sm90_w4 (`aot.search.h200`); nothing here was fitted to this kernel, which nobody has
timed. Rows are taken to be spread over groups as `estimate_grouped` has it. Imports no compiler.
"""

from __future__ import annotations

import math

from runtime.grouped_gemm import Signature, active_groups

from ..kernels.sm90.grouped_w4.plan import Plan
from ..search.h200 import MULTIPROCESSORS, W4
from .estimate_grouped import tiles_of_group
from .estimate_w4 import cycles_of_stage


def estimate_us(plan: Plan, signature: Signature, m: int) -> float:
    """Microseconds on an H200 at `m` rows of `signature`, weights not in L2: the slowest of memory, L2 and the busiest
    SM, which loads, multiplies and stores, a little of the other two, and the time to start."""
    s, per_sm = signature, plan.ctas_per_sm
    across = math.ceil(s.n / plan.tile_n)
    tiles = s.groups * tiles_of_group(m / s.groups, plan.tile_m) * across
    tokens = min(m * across / tiles, plan.tile_m)
    weight_bytes = (plan.codes_bytes + plan.scales_bytes) / (plan.tile_n * plan.tile_k)
    memory_us = active_groups(s.groups, m) * s.n * s.k * weight_bytes / W4.memory_bytes_per_us
    l2_us = tiles * s.k * (plan.tile_n * weight_bytes + 2 * tokens) / W4.l2_bytes_per_us

    slots = MULTIPROCESSORS * per_sm
    whole, rest = divmod(tiles, slots)
    busiest = whole * per_sm + min(per_sm, math.ceil(rest / MULTIPROCESSORS))
    rounds, stages = math.ceil(tiles / slots), math.ceil(s.k / plan.tile_k)
    multiply_us = busiest * stages * cycles_of_stage(plan) / W4.cycles_per_us
    load_us = rounds * stages * W4.latency_us / plan.stages
    sm_us = max(multiply_us, load_us) + rounds * tokens * plan.tile_n / W4.store_sums_per_us

    slowest = max(memory_us, l2_us, sm_us)
    overlap_us = W4.overlap_us if plan.overlap != "serial" else 0.0
    start_us = W4.start_us + W4.start_of_cta_us / per_sm - overlap_us
    return start_us + slowest + W4.rest * (memory_us + l2_us + sm_us - slowest)
