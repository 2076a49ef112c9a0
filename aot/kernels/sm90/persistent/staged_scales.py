"""Scales of blocks by way of shared memory: two warps of the producer warp group load them, multiply those of A and B,
and put the products into the stage whose sums they scale.

So consumers, which have no registers to spare, read all that a stage needs of them at once, and wait for nothing but
the stage. Knows nothing of what is done with the products.
"""

from typing import Any

import cutlass
from cutlass import cute

from ..sizes import WARP, WARP_GROUP
from .epilogue_operands import EpilogueOperands
from .pipeline import Pipeline, PipelineState, advance
from .plan import CONSUMERS, Plan
from .promotion import BlockScales
from .scheduler import TileScheduler, this_cluster

_QUAD = 4  # threads that have the same rows of WGMMA's accumulators
_VECTOR_BYTES = 8  # two rows' products, 8 apart


def allocate_stages(plan: Plan, smem: cutlass.memory.SmemAllocator) -> Any:
    """Room for the products of scales, (of a thread, quad of threads, consumer warp group, stage), or None."""
    if not plan.staged_scales:
        return None
    layout = cute.make_layout((plan.staged_scales, WARP_GROUP // _QUAD, CONSUMERS, plan.stages))
    alignment = 16 if plan.staged_scales % 4 == 0 else _VECTOR_BYTES
    pointer = smem.allocate_array(cutlass.Float32, cute.cosize(layout), byte_alignment=alignment)
    return cute.make_tensor(pointer, layout)


def of_thread(staged: Any, group: Any, thread: Any) -> Any:
    """What thread `thread` of consumer warp group `group` reads, (products, stage), or None."""
    return None if staged is None else staged[None, thread // _QUAD, group, None]


@cute.jit
def produce_scales(
    plan: cutlass.Constexpr,
    staged: cute.Tensor,
    pipeline: Pipeline,
    scheduler: TileScheduler,
    operands: EpilogueOperands,
) -> None:
    """Fill every stage of consumer warp group `operands.group` with its scales, as a warp of which each thread stands
    for a quad of that group: `operands` are those of its first one."""
    mine = staged[None, operands.thread // _QUAD, operands.group, None]
    cluster = this_cluster(plan)
    state = PipelineState(cutlass.Int32(0), cutlass.Int32(1))  # the first round finds every stage empty
    for index in cutlass.range(cluster.number, scheduler.grid.work, cluster.count, unroll=1):
        scales = BlockScales.of(plan, operands, scheduler.tile_coord(index))
        first, count = scheduler.k_tiles
        scales.fetch(first)
        for k in cutlass.range(first, first + count, unroll=1):
            scales.take_over()
            scales.fetch(k + 1)
            stage, phase = state
            cute.arch.mbarrier_wait(pipeline.empty + stage, phase)
            (products,) = scales.products
            cute.autovec_copy(cute.make_tensor(products.iterator, plan.staged_scales), mine[None, stage])
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(pipeline.full + stage)
            state = advance(plan, state)


def first_thread_of_quad(lane: Any, group: Any) -> Any:
    """The consumer thread that thread `lane` of a warp stands for, of warp group `group`."""
    return group * WARP_GROUP + lane % WARP * _QUAD
