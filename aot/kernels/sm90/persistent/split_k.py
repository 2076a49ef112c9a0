"""How the CTAs of a cluster that multiplied slices of K of one tile reduce their accumulators.

The epilogue tiles of each warp group's part of D fall to the slices in turn. The same thread of every CTA has the same
accumulators, so they go from registers straight to where their reader finds them, 16 bytes a thread, and are added in
the order of slices. Knows nothing of what the epilogue does with the sums.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from ..sizes import WARP_GROUP
from .epilogue_operands import EpilogueOperands
from .pipeline import CONSUMER_THREADS, arrive_reduced
from .plan import Plan


class SplitK(NamedTuple):
    """What the reduction needs of a CTA: its stages, where partial sums come, the mbarrier that counts their bytes, the
    number of its slice, and that of its tile in the cluster."""

    stages: Any
    arrived: Any
    slice_k: Any
    tile: Any


def _received(plan: Plan, stages: cute.Pointer) -> cute.Tensor:
    """What others pushed, in place of the stages: (4 values, threads, vectors of an epilogue tile, senders, epilogue
    tiles of this CTA)."""
    vectors, tiles = plan.epilogue_tile_accumulators // 4, plan.epilogue_tiles // plan.split_k
    shape = (4, CONSUMER_THREADS, vectors, plan.split_k - 1, tiles)
    return cute.make_tensor(cute.recast_ptr(stages, dtype=cutlass.Float32), cute.make_layout(shape))


@cute.jit
def exchange(
    plan: cutlass.Constexpr,
    accumulators: cute.Tensor,
    split: Any,
    phase: cutlass.Int32,
    thread: cutlass.Int32,
) -> Any:
    """Where K is split, push the partial sums of others' epilogue tiles and wait for one's own; return the next phase.
    Stages are where they go, so no CTA of the cluster may have any left. `split` is a `SplitK`, or None."""
    if cutlass.const_expr(plan.split_k > 1):
        if thread == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(split.arrived, plan.pushed_bytes)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        _push(plan, accumulators, split, thread)
        cute.arch.mbarrier_wait(split.arrived, phase)
    return phase ^ 1


@cute.jit
def _push(plan: cutlass.Constexpr, accumulators: cute.Tensor, split: SplitK, thread: cutlass.Int32) -> None:
    """Send the partial sums of others' epilogue tiles to them."""
    received, slice_k = _received(plan, split.stages), split.slice_k
    values = cute.make_rmem_tensor((4,), cutlass.Float32)
    words = cute.recast_tensor(values, cutlass.Int32)
    for number in cutlass.range_constexpr(plan.epilogue_tiles):
        owner = number % plan.split_k
        if slice_k != owner:
            sender = slice_k - 1 if slice_k > owner else slice_k
            for vector in cutlass.range_constexpr(plan.epilogue_tile_accumulators // 4):
                for i in cutlass.range_constexpr(4):
                    values[i] = accumulators[number * plan.epilogue_tile_accumulators + 4 * vector + i]
                cute.arch.store_async_dsmem(
                    received[None, thread, vector, sender, number // plan.split_k].iterator,
                    (words[0], words[1], words[2], words[3]),
                    split.arrived,
                    owner * plan.cluster_tiles + split.tile,
                )


def reduce(plan: Plan, accumulators: cute.Tensor, split: SplitK, number: int, operands: EpilogueOperands) -> None:
    """Add what others pushed to the accumulators of epilogue tile `number`, one of this CTA's."""
    thread = operands.group * WARP_GROUP + operands.thread
    received = _received(plan, split.stages)
    load = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=128)
    owner = number % plan.split_k
    for vector in range(plan.epilogue_tile_accumulators // 4):
        terms = []
        for sender in range(plan.split_k - 1):
            values = cute.make_rmem_tensor((4,), cutlass.Float32)
            cute.copy(load, received[None, thread, vector, sender, number // plan.split_k], values)
            terms.append(values)
        for i in range(4):
            at = number * plan.epilogue_tile_accumulators + 4 * vector + i
            ordered = [term[i] for term in terms]
            ordered.insert(owner, accumulators[at])
            total = ordered[0]
            for term in ordered[1:]:
                total = total + term
            accumulators[at] = total


def end_reduction(plan: Plan) -> None:
    """All that others pushed has been read: let the producer warp have the stages back."""
    if plan.split_k > 1:
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive_reduced()
