"""How the CTAs of a cluster that multiplied slices of K of one tile add up their sums, for `persistent.Persistent`.

The pieces of each warpgroup's part of D fall to the slices by turns. The same thread of every CTA has the same sums, so
they go from registers straight to where their reader finds them, 16 bytes a thread, and are added in the order of
slices.
"""

from typing import Any

import cutlass
from cutlass import cute

from .persistent_choices import WARPGROUPS, Plan

_THREADS = WARPGROUPS * 128
_LOADING_THREADS = 32
_GATHERED = 6  # a named barrier, the last one where K is split


def _received(plan: Plan, stages: cute.Pointer) -> cute.Tensor:
    """What others sent, in place of the stages: (4 values, threads, vectors of a piece, senders, pieces)."""
    shape = (4, _THREADS, plan.piece_sums // 4, plan.split_k - 1, plan.blocks * plan.pieces // plan.split_k)
    return cute.make_tensor(cute.recast_ptr(stages, dtype=cutlass.Float32), cute.make_layout(shape))


def _first_sum(plan: Plan, number: int) -> int:
    """Where a thread's sums for a piece begin; they are neighbours."""
    return number * plan.piece_sums


@cute.jit
def push(
    plan: cutlass.Constexpr,
    sums: cute.Tensor,
    stages: cute.Pointer,
    arrived: cute.Pointer,
    slice_k: cutlass.Int32,
    thread: cutlass.Int32,
) -> None:
    """Send the sums of others' pieces to them."""
    received = _received(plan, stages)
    values = cute.make_rmem_tensor((4,), cutlass.Float32)
    words = cute.recast_tensor(values, cutlass.Int32)
    for number in cutlass.range_constexpr(plan.blocks * plan.pieces):
        owner = number % plan.split_k
        if slice_k != owner:
            sender = slice_k - 1 if slice_k > owner else slice_k
            for vector in cutlass.range_constexpr(plan.piece_sums // 4):
                for i in cutlass.range_constexpr(4):
                    values[i] = sums[_first_sum(plan, number) + 4 * vector + i]
                cute.arch.store_async_dsmem(
                    received[None, thread, vector, sender, number // plan.split_k].iterator,
                    (words[0], words[1], words[2], words[3]),
                    arrived,
                    owner,
                )


def gather(plan: Plan, sums: cute.Tensor, stages: cute.Pointer, number: int, thread: Any) -> None:
    """Add what others sent to the sums of a piece of this CTA's."""
    received = _received(plan, stages)
    load = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=128)
    owner = number % plan.split_k
    for vector in range(plan.piece_sums // 4):
        terms = []
        for sender in range(plan.split_k - 1):
            values = cute.make_rmem_tensor((4,), cutlass.Float32)
            cute.copy(load, received[None, thread, vector, sender, number // plan.split_k], values)
            terms.append(values)
        for i in range(4):
            at = _first_sum(plan, number) + 4 * vector + i
            ordered = [term[i] for term in terms]
            ordered.insert(owner, sums[at])
            total = ordered[0]
            for term in ordered[1:]:
                total = total + term
            sums[at] = total


def end_gathering(plan: Plan) -> None:
    """All that others sent has been read: let the loading warp have the stages back."""
    if plan.split_k > 1:
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier_arrive(barrier_id=_GATHERED, number_of_threads=_THREADS + _LOADING_THREADS)


def await_gathered() -> None:
    """The loading warp: wait for that."""
    cute.arch.barrier(barrier_id=_GATHERED, number_of_threads=_THREADS + _LOADING_THREADS)
