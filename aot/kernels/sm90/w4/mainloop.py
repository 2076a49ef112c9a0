"""The mainloop of the consumer warp groups: codes to bf16 in registers, and WGMMA from there, over a slice of K.

While the tensor cores multiply a block of 64 columns, the warps dequantise the next into other registers. Knows nothing
of the epilogue.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

from runtime.numbers.weights import LANES, WORDS

from ...w4.dequantise import factors_of_words, weights_of_word, words_of_column
from ...w4.form import BLOCK_K, SCALE_WORDS
from ..sizes import WARP, WARP_GROUP
from ..small_m.pipeline import DRAINED, Pipeline
from .plan import Plan

_REGISTERS = 4  # of a WGMMA's operand A, 64 x 16
_LANES_OF_ROW = 4  # lanes that have the same rows


class Weights(NamedTuple):
    """Codes (words, lanes, slabs, blocks of K, stages) and scales (words of rows, blocks, stages) in shared memory."""

    codes: Any
    scales: Any


class Slice(NamedTuple):
    """Which stages of a tile a slice of warp groups takes: the first of its K tiles, of which every `sliced_k`th is
    its, the stage that holds it, and the phase of that stage's full barrier."""

    first: Any
    stage: Any
    phase: Any


@cute.jit
def multiply(
    plan: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    weights: Weights,
    n_side: cute.Tensor,
    pipeline: Pipeline,
    count_k: cutlass.Int32,
    of_slice: Slice,
    thread: cutlass.Int32,
) -> cute.Tensor:
    """The accumulators of this thread's slices of `count_k` K tiles in registers, in WGMMA's layout. `thread` is its
    number among those that multiply a stage."""
    first, stage, phase = of_slice
    full, empty = pipeline
    mine = tiled_mma.get_slice(cute.arch.make_warp_uniform(thread // WARP_GROUP) * WARP_GROUP)
    tokens = tiled_mma.make_fragment_B(mine.partition_B(n_side))
    shape = tiled_mma.partition_shape_C((plan.mma_rows, plan.tile_m))
    accumulators = cute.make_rmem_tensor(shape, cutlass.Float32)
    accumulators.fill(0.0)
    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    previous = stage
    for i in cutlass.range(first, count_k, plan.sliced_k, unroll=1):
        cute.arch.mbarrier_wait(full + stage, phase)
        codes, scales = _load(plan, weights, stage, thread)
        for block in cutlass.range_constexpr(plan.blocks_k):
            # The registers of the block before last are free, and after the first block the stage before this one.
            warpgroup.wait_group(1)
            if cutlass.const_expr(block == 1):
                # Say so only where it is filled again: who no longer waits may be gone.
                before = i - plan.sliced_k
                again = before >= first
                if cutlass.const_expr(not plan.persistent):
                    again = before >= 0 and before + plan.stages < count_k
                _release(plan, empty + previous, again and thread % WARP == 0)
            operand = _dequantise(plan, tiled_mma, codes, scales, block)
            warpgroup.fence()
            for step in cutlass.range_constexpr(WORDS):
                at = (None, None, block * WORDS + step, stage)
                cute.gemm(tiled_mma, accumulators, operand[None, None, step], tokens[at], accumulators)
            warpgroup.commit_group()
        previous = stage
        stage += plan.sliced_k
        if stage >= plan.stages:
            stage -= plan.stages
            phase ^= 1
    warpgroup.wait_group(0)
    if cutlass.const_expr(plan.persistent):
        _release(plan, empty + previous, first < count_k and thread % WARP == 0)
    for i in cutlass.range_constexpr(cute.size(accumulators)):
        accumulators[i] = accumulators[i] * float(2**plan.weights.exponent)
    return accumulators


@cute.jit
def add_slices(
    plan: cutlass.Constexpr,
    accumulators: cute.Tensor,
    sums: cute.Pointer,
    first: cutlass.Int32,
    thread: cutlass.Int32,
) -> None:
    """Add to the accumulators of the first slice those of the others, in their order, by way of shared memory."""
    each = cute.size(accumulators)
    others = cute.make_tensor(sums, cute.make_layout((plan.slice_threads, each, max(plan.sliced_k - 1, 1))))
    if first > 0:
        for i in cutlass.range_constexpr(each):
            others[thread, i, first - 1] = accumulators[i]
    cute.arch.barrier(barrier_id=DRAINED, number_of_threads=plan.consumer_threads)
    if first == 0:
        for other in cutlass.range_constexpr(plan.sliced_k - 1):
            for i in cutlass.range_constexpr(each):
                accumulators[i] = accumulators[i] + others[thread, i, other]


def _release(plan: Plan, empty: Any, who: Any) -> None:
    """A thread `who` of each consumer warp: a stage may be filled again. The producer says so to other CTAs.

    By a predicate: where WGMMA is under way, a branch makes ptxas wait for each instruction.
    """
    arrive = f"mbarrier.arrive.shared.b64 _, [{{$r0}}], {plan.cluster_n};"  # as many as `SmallM` initialises it for
    cute.arch.inline_ptx(arrive, read_only_args=[empty.toint()], predicate=who)


def _load(plan: Plan, weights: Weights, stage: Any, thread: Any) -> tuple[cute.Tensor, cute.Tensor]:
    """A thread's codes (words, blocks of K) and words of scales of a stage, in registers.

    Warps whose rows are past the tile take others', whose products nobody looks at.
    """
    slab = cutlass.min(cute.arch.make_warp_uniform(thread // WARP), plan.slabs - 1)
    lane = thread % LANES
    codes = cute.make_rmem_tensor((WORDS, plan.blocks_k), cutlass.Int32)
    scales = cute.make_rmem_tensor((plan.scale_blocks,), cutlass.Int32)
    load = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Int32, num_bits_per_copy=128)
    for block in range(plan.blocks_k):
        cute.copy(load, weights.codes[None, lane, slab, block, stage], codes[None, block])
    for block in range(plan.scale_blocks):
        scales[block] = weights.scales[slab * SCALE_WORDS + lane // _LANES_OF_ROW, block, stage]
    return codes, scales


def _dequantise(plan: Plan, tiled_mma: cute.TiledMma, codes: cute.Tensor, scales: cute.Tensor, block: int) -> Any:
    """A block of K as WGMMA's operand A: (registers of a step, 1, steps)."""
    form = plan.weights
    found = cute.make_rmem_tensor((_REGISTERS, WORDS), cutlass.Uint32)
    for step in range(WORDS):
        column = block * BLOCK_K + step * (BLOCK_K // WORDS)
        words = [cutlass.Uint32(scales[at]) for at in words_of_column(form, column)]
        factors = factors_of_words(form, words, column)
        for j, value in enumerate(weights_of_word(form, cutlass.Uint32(codes[step, block]), factors, here=True)):
            found[j, step] = value
    shape = tiled_mma.partition_shape_A((plan.mma_rows, BLOCK_K))
    pointer = cute.recast_ptr(found.iterator, dtype=cutlass.BFloat16)
    return cute.make_tensor(pointer, cute.make_layout(shape))
