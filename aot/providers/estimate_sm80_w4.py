"""How long sm80_w4 takes: a guess from its tiles, for putting the choices for a problem in order. Nothing of it was
measured.

It stands apart from the kernels, whose sources name what is compiled, so that a better guess compiles nothing anew.
Imports no compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from ..kernels.sm80.w4.plan import Plan
from ..kernels.w4.form import Form
from ..search.a100 import MMA_SYNC
from ..search.costs import Extents, Machine, Number, ceil, maximum, minimum
from ..search.h200 import H200
from ..search.variants import Variant

_BLOCK_MACS = 16 * 8 * 64  # of a slab's block and eight tokens: four instructions
_INSTRUCTIONS_OF_TOKENS = 2  # ldmatrix, for eight tokens and a block
_TOKENS_BYTES, _CODES_BYTES = 8 * 64 * 2, 512  # of shared memory, for eight tokens or a slab, and a block
_OTHER_REGISTERS = 80  # of a thread besides its sums
_RESERVED_BYTES = 1 << 10  # of an SM's shared memory, of each CTA


class Tile(NamedTuple):
    """What of a plan does not depend on the problem."""

    tile_m: int
    tile_n: int
    tile_k: int
    weight_bytes: float  # of a weight, with its share of a scale
    busy_cycles: float  # of an SM for a CTA's stage, where others hide what it waits for
    alone_cycles: float  # of a CTA alone
    resident: int  # CTAs of an SM
    slices: int


def tile_of(plan: Plan, target: str, more: int = 0) -> Tile:
    """That of a plan on a target, whose threads have so many `more` registers."""
    rates = MMA_SYNC
    warps, tiles, slabs = plan.threads // 32, plan.token_tiles, plan.warp_slabs
    products = 4 * tiles * slabs  # instructions of a warp for a block
    instructions = products + _INSTRUCTIONS_OF_TOKENS * tiles + slabs * rates.dequantise_instructions[plan.weights.word]
    blocks = warps * plan.warp_blocks  # of all warps
    busy = blocks * max(
        instructions / rates.schedulers,
        tiles * slabs * _BLOCK_MACS / rates.macs_per_cycle,
        (tiles * _TOKENS_BYTES + slabs * _CODES_BYTES) / rates.shared_bytes_per_cycle,
    )
    of_warp = plan.warp_blocks * max(rates.block_cycles, instructions * max(1, warps / rates.schedulers))
    alone = max(rates.stage_cycles + of_warp, rates.latency_cycles / (plan.stages - 1))
    resident = min(
        rates.shared_bytes[target] // (plan.shared_bytes + _RESERVED_BYTES),
        rates.warps // warps,
        rates.registers // (plan.threads * (plan.accumulators + _OTHER_REGISTERS + more)),
    )
    weight_bytes = (plan.codes_bytes + plan.scales_bytes) / (plan.tile_n * plan.tile_k)
    return Tile(
        plan.tile_m, plan.tile_n, plan.tile_k, weight_bytes, busy, max(busy, alone), max(1, resident), plan.sliced_k
    )


@cache
def _tile(v: Variant, form_of: Callable[[Variant], Form]) -> Tile:
    return tile_of(Plan.of(v.options, form_of(v)), v.target)


def estimate_us(v: Variant, form_of: Callable[[Variant], Form], of: Extents, m: Number, machine: Machine = H200) -> Any:
    """A guess at the time in microseconds, good for putting the choices for one problem in order and for nothing
    else."""
    t, n, k, rates = _tile(v, form_of), of.n, of.k, MMA_SYNC
    tiles_m, tokens = ceil(m / t.tile_m), minimum(m, t.tile_m)
    tiles_n, stages = ceil(n / t.tile_n), ceil(k / t.tile_k)
    ctas = tiles_m * tiles_n
    b_bytes = n * k * t.weight_bytes
    memory_us = b_bytes / (machine.memory_gbps * (1e3 * rates.memory_share))
    loaded_bytes = tiles_m * (b_bytes + tiles_n * tokens * k * 2)
    l2_us = loaded_bytes / (machine.multiprocessors * rates.l2_bytes_per_us_of_sm)
    # Waves of CTAs of which an SM has several at once: they hide each other's waits.
    of_sm = ceil(ctas / machine.multiprocessors)
    at_once = minimum(of_sm, t.resident)
    cycles = stages * of_sm * maximum(t.busy_cycles, t.alone_cycles / at_once)
    return whole_us(t, memory_us, l2_us, cycles, of_sm, tokens)


def whole_us(t: Tile, memory_us: Any, l2_us: Any, cycles: Any, tiles_of_sm: Any, tokens: Any) -> Any:
    """The slowest of memory, L2 and the busiest SM, which multiplies for so many cycles, a little of the other two, and
    the time to start and to store its tiles of so many tokens."""
    rates = MMA_SYNC
    sm_us = cycles / rates.cycles_per_us
    slowest = maximum(maximum(memory_us, l2_us), sm_us)
    flows = slowest + rates.rest * (memory_us + l2_us + sm_us - slowest)
    return flows + rates.start_us + tiles_of_sm * (tokens * t.tile_n * t.slices) / rates.store_sums_per_us
