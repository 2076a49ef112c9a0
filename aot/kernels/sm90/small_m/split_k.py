"""How the CTAs of a cluster that multiplied slices of K of one tile reduce them, a share of the tokens each.

Accumulators are in shared memory, a row a token (`Plan.staging_pitch`). Those of others' tokens go to others, and what
comes from them is added in the order of the slices. Knows nothing of what the epilogue does with the sums.
"""

from typing import Any

import cutlass
from cutlass import cute

from .pipeline import Work
from .plan import Plan


def pushed_bytes(plan: Plan, work: Work) -> cutlass.Int32:
    """How many bytes of partial sums a CTA gets from the others."""
    mine = cutlass.min(cutlass.max(work.tokens - work.slice_k * plan.token_share, 0), plan.token_share)
    return mine * ((plan.split_k - 1) * plan.tile_n * 4)


@cute.jit
def exchange(
    plan: cutlass.Constexpr, staging: cute.Pointer, arrived: cute.Pointer, work: Work, thread: cutlass.Int32
) -> None:
    """Push to each other CTA of the cluster the sums of its share of the tokens; return when one's own are here."""
    tokens, slice_k = work.tokens, work.slice_k
    vectors = plan.tile_n // 4
    layout = cute.make_layout((4, vectors, plan.tile_m), stride=(1, 4, plan.staging_pitch))
    mine, theirs = cute.make_tensor(staging, layout), cute.make_tensor(staging + plan.partial_offset, layout)
    load = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=128)
    values = cute.make_rmem_tensor((4,), cutlass.Float32)
    words = cute.recast_tensor(values, cutlass.Int32)
    items = vectors * plan.tile_m
    for step in cutlass.range_constexpr(-(-items // plan.consumer_threads)):
        item = thread + step * plan.consumer_threads
        vector, token = item % vectors, item // vectors
        receiver = token // plan.token_share
        if item < items and token < tokens and receiver != slice_k:
            cute.copy(load, mine[None, vector, token], values)
            slot = slice_k - 1 if slice_k > receiver else slice_k
            cute.arch.store_async_dsmem(
                theirs[None, vector, slot * plan.token_share + token % plan.token_share].iterator,
                (words[0], words[1], words[2], words[3]),
                arrived,
                work.cta_n * plan.split_k + receiver,
            )
    cute.arch.mbarrier_wait(arrived, 0)


@cute.jit
def reduce(
    plan: cutlass.Constexpr,
    total: cute.Tensor,
    staging: cute.Pointer,
    slice_k: Any,
    token: Any,
    vector: Any,
) -> None:
    """Add up the sums of `token` of this CTA's share over all slices of K, in their order: those of columns `vector`
    times the size of `total` and following."""
    width = cute.size(total)
    load = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=128)
    part = cute.make_rmem_tensor((width,), cutlass.Float32)
    own = slice_k * plan.token_share * plan.staging_pitch
    for other in cutlass.range_constexpr(plan.split_k):
        slot = other - 1 if other > slice_k else other
        at = own if other == slice_k else plan.partial_offset + slot * plan.token_share * plan.staging_pitch
        if cutlass.const_expr(plan.split_k == 1):
            at = 0
        row = cute.make_tensor(
            staging + cute.assume(at + token * plan.staging_pitch + vector * width, divby=4), cute.make_layout((width,))
        )
        cute.copy(load, cute.zipped_divide(row, (4,)), cute.zipped_divide(part, (4,)))
        if cutlass.const_expr(other == 0):
            total.store(part.load())
        else:
            total.store(total.load() + part.load())
