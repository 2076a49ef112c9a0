"""The mainloop of the consumer warp groups: WGMMA over a slice of K, each stage released once it has been read.

8-bit products are accumulated by the tensor cores for `Plan.promotion_interval` stages, and then in f32 registers.
Knows nothing of the epilogue.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

from runtime.numbers.scaling import SCALE_BLOCK

from ..sizes import WARP, WARP_GROUP, WGMMA_ROWS
from .pipeline import Pipeline, Work, release
from .plan import row_of_b


class BlockScales(NamedTuple):
    """Scales of blocks: of A, (tokens, stages) in shared memory, of B, (N / 128, K / 128) if it has them by blocks, and
    B's extent N."""

    shared: Any
    scale_b: Any
    n: Any


class _Block(NamedTuple):
    """A block of K: the number of the tile along rows of B, the K tile, and the stage that holds it."""

    tile_column: Any
    k_tile: Any
    stage: Any


@cute.jit
def multiply(
    plan: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    m_side: cute.Tensor,
    n_side: cute.Tensor,
    pipeline: Pipeline,
    work: Work,
    scales: BlockScales,
    thread: cutlass.Int32,
) -> cute.Tensor:
    """The accumulators of this slice of K in registers, in WGMMA's layout."""
    full, empty = pipeline
    first_k, count_k = work.k_tiles
    # Descriptors are the warp group's, so its first thread stands for all.
    mine = tiled_mma.get_slice(cute.arch.make_warp_uniform(thread // WARP_GROUP) * WARP_GROUP)
    a = tiled_mma.make_fragment_A(mine.partition_A(m_side))
    b = tiled_mma.make_fragment_B(mine.partition_B(n_side))
    shape = tiled_mma.partition_shape_C((plan.mma_rows, plan.sides.n))
    accumulators = cute.make_rmem_tensor(shape, cutlass.Float32)
    accumulators.fill(0.0)
    partial = accumulators
    if cutlass.const_expr(plan.promotion_interval > 0):
        partial = cute.make_rmem_tensor(shape, cutlass.Float32)
        partial.fill(0.0)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    stage = cutlass.Int32(0)
    phase = cutlass.Int32(0)
    previous = cutlass.Int32(0)
    for i in cutlass.range(count_k, unroll=1):
        cute.arch.mbarrier_wait(full + stage, phase)
        warpgroup.fence()
        for k_atom in cutlass.range_constexpr(cute.size(a, mode=[2])):
            at = (None, None, k_atom, stage)
            if cutlass.const_expr(plan.promotion_interval == 1):
                tiled_mma.set(warpgroup.Field.ACCUMULATE, k_atom > 0)
            elif cutlass.const_expr(plan.promotion_interval > 1 and k_atom == 0):
                tiled_mma.set(warpgroup.Field.ACCUMULATE, i % plan.promotion_interval != 0)
            elif cutlass.const_expr(plan.promotion_interval > 1):
                tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            cute.gemm(tiled_mma, partial, a[at], b[at], partial)
        warpgroup.commit_group()
        if cutlass.const_expr(plan.promotion_interval == 1):
            warpgroup.wait_group(0)
            _promote(plan, partial, accumulators, scales, _Block(work.tile_column, first_k + i, stage), thread)
            if i + plan.stages < count_k:
                release(plan, empty + stage, work.slice_k)
        else:
            warpgroup.wait_group(1)
            # The stage before this one is free. Say so only where it is filled again: who no longer waits may be gone.
            if i > 0 and i - 1 + plan.stages < count_k:
                release(plan, empty + previous, work.slice_k)
            if cutlass.const_expr(plan.promotion_interval > 1):
                last = i % plan.promotion_interval == plan.promotion_interval - 1 or i == count_k - 1
                if last:
                    warpgroup.wait_group(0)
                    _promote(plan, partial, accumulators, scales, _Block(work.tile_column, first_k + i, stage), thread)
        previous = stage
        stage += 1
        if stage == plan.stages:
            stage = cutlass.Int32(0)
            phase ^= 1
    warpgroup.wait_group(0)
    return accumulators


@cute.jit
def _promote(
    plan: cutlass.Constexpr,
    partial: cute.Tensor,
    accumulators: cute.Tensor,
    scales: BlockScales,
    block: _Block,
    thread: cutlass.Int32,
) -> None:
    """Add what tensor cores accumulated to the f32 registers, times the scales of its blocks if there are any."""
    if cutlass.const_expr(not plan.form.scaled_by_stage):
        for i in cutlass.range_constexpr(cute.size(accumulators)):
            accumulators[i] += partial[i]
    else:
        groups = plan.tile_m // 8
        shared = cute.make_tensor(scales.shared, cute.make_layout((2, 4, groups, plan.stages)))
        pair = thread % 4
        for atom in cutlass.range_constexpr(cute.size(accumulators, mode=[1])):
            for half in cutlass.range_constexpr(2):
                row = thread // WARP * 16 + thread % WARP // 4 + half * 8 + atom * (WGMMA_ROWS * plan.consumers)
                at = row_of_b(plan.tile_n, plan.form, block.tile_column, row, scales.n)
                at = cutlass.min(at, scales.n - 1) // SCALE_BLOCK
                of_weights = cutlass.Float32(1.0)  # where the epilogue scales them
                if cutlass.const_expr(not plan.form.scales_of_rows):
                    of_weights = scales.scale_b[at, block.k_tile]
                for group in cutlass.range_constexpr(groups):
                    for token in cutlass.range_constexpr(2):
                        i = token + 2 * (half + 2 * (group + groups * atom))
                        accumulators[i] += partial[i] * (of_weights * shared[token, pair, group, block.stage])
