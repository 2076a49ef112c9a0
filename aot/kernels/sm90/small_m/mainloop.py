"""The mainloop of the consumer warp groups: WGMMA over a slice of K, each stage released once it has been read.

8-bit products are accumulated by the tensor cores for `Plan.promotion_interval` stages, and then in f32 registers.
Knows nothing of the epilogue.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

from runtime.numbers.scaling import SCALE_BLOCK

from ..in_order import here
from ..sizes import WARP, WARP_GROUP, WGMMA_ROWS
from .operands import tiled_mma as tiled_mma_of
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
    if cutlass.const_expr(plan.promotion_interval == 1):
        operands = _Operands(m_side.element_type, a, b, pipeline)
        if count_k > 0:
            _multiply_in_turn(plan, operands, accumulators, shape, work, scales, thread)
        return accumulators
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
            if cutlass.const_expr(plan.promotion_interval > 1 and k_atom == 0):
                tiled_mma.set(warpgroup.Field.ACCUMULATE, i % plan.promotion_interval != 0)
            elif cutlass.const_expr(plan.promotion_interval > 1):
                tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
            cute.gemm(tiled_mma, partial, a[at], b[at], partial)
        warpgroup.commit_group()
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


class _Operands(NamedTuple):
    """WGMMA's element type, its operands in all stages, and how these come and go."""

    element: Any
    a: Any
    b: Any
    pipeline: Pipeline


class _State(NamedTuple):
    """A stage, and the parity of its rounds over all stages."""

    stage: Any
    phase: Any


@cute.jit
def _multiply_in_turn(
    plan: cutlass.Constexpr,
    operands: _Operands,
    accumulators: cute.Tensor,
    shape: cutlass.Constexpr,
    work: Work,
    scales: BlockScales,
    thread: cutlass.Int32,
) -> None:
    """Where each stage is promoted: tensor cores multiply the next one meanwhile, into other registers."""
    _, count_k = work.k_tiles
    even, odd = (cute.make_rmem_tensor(shape, cutlass.Float32) for _ in range(2))
    even.fill(0.0)
    odd.fill(0.0)
    begun = _begin(plan, operands, even, _State(cutlass.Int32(0), cutlass.Int32(0)))
    at = cutlass.Int32(0)  # the stage that is promoted next
    pairs = (count_k - 1) // 2
    for pair in cutlass.range(pairs, unroll=1):
        begun = _begin(plan, operands, odd, begun)
        warpgroup.wait_group(1)
        at = _take(plan, operands, even, accumulators, work, scales, 2 * pair, at, thread)
        begun = _begin(plan, operands, even, begun)
        warpgroup.wait_group(1)
        at = _take(plan, operands, odd, accumulators, work, scales, 2 * pair + 1, at, thread)
    if count_k > 2 * pairs + 1:
        begun = _begin(plan, operands, odd, begun)
        warpgroup.wait_group(1)
        at = _take(plan, operands, even, accumulators, work, scales, 2 * pairs, at, thread)
        warpgroup.wait_group(0)
        at = _take(plan, operands, odd, accumulators, work, scales, 2 * pairs + 1, at, thread)
    else:
        warpgroup.wait_group(0)
        at = _take(plan, operands, even, accumulators, work, scales, 2 * pairs, at, thread)


@cute.jit
def _begin(plan: cutlass.Constexpr, operands: _Operands, partial: cute.Tensor, state: _State) -> _State:
    """Let tensor cores multiply a stage, once it has come; the next stage."""
    element, a, b, pipeline = operands
    stage, phase = state
    mma = tiled_mma_of(plan, element)  # whether it accumulates is a state of its own
    cute.arch.mbarrier_wait(pipeline.full + stage, phase)
    warpgroup.fence()
    for k_atom in cutlass.range_constexpr(cute.size(a, mode=[2])):
        mma.set(warpgroup.Field.ACCUMULATE, k_atom > 0)
        at = (None, None, k_atom, stage)
        cute.gemm(mma, partial, a[at], b[at], partial)
    warpgroup.commit_group()
    later = stage + 1 == plan.stages
    return _State(cutlass.select_(later, cutlass.Int32(0), stage + 1), phase ^ cutlass.Int32(later))


@cute.jit
def _take(
    plan: cutlass.Constexpr,
    operands: _Operands,
    partial: cute.Tensor,
    accumulators: cute.Tensor,
    work: Work,
    scales: BlockScales,
    k_tile: cutlass.Int32,
    stage: cutlass.Int32,
    thread: cutlass.Int32,
) -> cutlass.Int32:
    """Promote what a stage gave, and release it; the next stage."""
    first_k, count_k = work.k_tiles
    _promote(plan, partial, accumulators, scales, _Block(work.tile_column, first_k + k_tile, stage), thread)
    # Said only where it is filled again: who no longer waits may be gone.
    if k_tile + plan.stages < count_k:
        release(plan, operands.pipeline.empty + stage, work.slice_k)
    return cutlass.select_(stage + 1 == plan.stages, cutlass.Int32(0), stage + 1)


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
            accumulators[i] = here("add.f32 $0, $1, $2;", accumulators[i], partial[i])
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
                        scale = of_weights * shared[token, pair, group, block.stage]
                        accumulators[i] = here("fma.rn.f32 $0, $2, $3, $1;", accumulators[i], partial[i], scale)
