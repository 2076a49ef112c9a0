"""Scales of blocks by way of shared memory: two warps of the producer warp group load them, multiply those of A and B,
and put the products into the stage whose sums they scale.

So consumers, which have no registers to spare, read all that a stage needs of them at once, and wait for nothing but
the stage. Knows nothing of what is done with the products.
"""

from typing import Any

import cutlass
from cutlass import cute

from runtime.numbers.scaling import SCALE_BLOCK

from ..sizes import WARP, WARP_GROUP
from .epilogue_operands import EpilogueOperands
from .pipeline import Pipeline, PipelineState, advance
from .plan import CONSUMERS, Plan
from .scheduler import TileCoord, TileScheduler, this_cluster

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
    for a quad of that group: `operands` are those of its first one. CTAs that split K meet after each tile."""
    mine = staged[None, operands.thread // _QUAD, operands.group, None]
    products = cute.make_rmem_tensor((plan.staged_scales,), cutlass.Float32)
    blocks = plan.scale_blocks.scales
    factors = cute.make_rmem_tensor((2 * plan.m_atoms + blocks,), cutlass.Float32)
    cluster = this_cluster(plan)
    state = PipelineState(cutlass.Int32(0), cutlass.Int32(1))  # the first round finds every stage empty
    for index in cutlass.range(cluster.number, scheduler.grid.work, cluster.count, unroll=1):
        coord = scheduler.tile_coord(index)
        of_rows, of_columns = _by_block(plan, operands.of_group(coord), coord)
        first, count = scheduler.k_tiles
        last = cute.size(of_rows[0]) - 1
        # A slice of K may be behind all blocks.
        _fetch(factors, of_rows, of_columns, cutlass.min(first, last) if plan.split_k > 1 else first)
        for k in cutlass.range(first, first + count, unroll=1):
            _multiply(products, factors, 2 * plan.m_atoms, blocks)
            _fetch(factors, of_rows, of_columns, cutlass.min(k + 1, last))
            stage, phase = state
            cute.arch.mbarrier_wait(pipeline.empty + stage, phase)
            cute.autovec_copy(products, mine[None, stage])
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(pipeline.full + stage)
            state = advance(plan, state)
        if cutlass.const_expr(plan.split_k > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()


def first_column(plan: Plan, operands: EpilogueOperands, coord: TileCoord) -> Any:
    """The first row of B that a warp group's part of a tile has, in the first lane of `Plan.scale_blocks`."""
    return operands.first_column(coord, 0) * (2 if operands.parts.interleaved else 1)


def _scaled_columns(plan: Plan, operands: EpilogueOperands, coord: TileCoord) -> list[Any]:
    """A row of B in each block of `Plan.scale_blocks`."""
    blocks, first = plan.scale_blocks, first_column(plan, operands, coord)
    firsts = [first] if blocks.lanes == 1 else [first, operands.n // 2 + first]
    return [lane + block * SCALE_BLOCK for lane in firsts for block in range(blocks.blocks)]


def _by_block(plan: Plan, operands: EpilogueOperands, coord: TileCoord) -> tuple[list[Any], list[Any]]:
    """The scales of a thread's rows of A, and of its blocks of B, each by blocks of K."""
    firsts = [operands.first_row(coord, atom) + operands.row for atom in range(plan.m_atoms)]
    rows = [cutlass.min(first + 8 * half, operands.m - 1) for first in firsts for half in range(2)]
    columns = [cutlass.min(column, operands.n - 1) for column in _scaled_columns(plan, operands, coord)]
    of_rows = [operands.scale_a[row, None] for row in rows]
    return of_rows, [operands.scale_b[column // SCALE_BLOCK, None] for column in columns]


def _fetch(factors: cute.Tensor, of_rows: list[Any], of_columns: list[Any], block_k: Any) -> None:
    """Begin to load the scales of a block of K."""
    for i, scales in enumerate((*of_rows, *of_columns)):
        factors[i] = scales[block_k]


def _multiply(products: cute.Tensor, factors: cute.Tensor, rows: int, blocks: int) -> None:
    """Multiply what was loaded: each row's scale by that of each block of B, which change first."""
    for row in range(rows):
        for block in range(blocks):
            products[row * blocks + block] = factors[row] * factors[rows + block]


def first_thread_of_quad(lane: Any, group: Any) -> Any:
    """The consumer thread that thread `lane` of a warp stands for, of warp group `group`."""
    return group * WARP_GROUP + lane % WARP * _QUAD
