"""The producer warp: keeps every stage full of A and B by TMA, and of scales of A's blocks where there are such; of B
alone where others quantise A (`quantiser`).

Knows nothing of what consumers do with a stage but that they release it.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from ..sizes import WARP
from . import weight_tiles
from .pipeline import EMPTY_READY, Pipeline, Work
from .plan import Plan

EARLY_STAGES = 2  # loads of B that go ahead of those of A, while the cluster meets
EVICT_FIRST = 0x12F0000000000000  # what createpolicy makes of L2::evict_first for everything


class TmaOperand(NamedTuple):
    """An operand: its TMA atom, its tensor, and its stages in shared memory."""

    atom: Any
    tensor: Any
    shared: Any


class TokenScales(NamedTuple):
    """Scales of A's blocks, (M, K / 128), and room for (tokens, stages) of them in shared memory."""

    scale_a: Any
    shared: Any


class _LoadA(NamedTuple):
    """How A comes: from (box, boxes of M, K tiles) to (box, boxes, stages), how many boxes of the tile are inside M,
    and to which CTAs."""

    atom: Any
    source: Any
    target: Any
    boxes: Any
    mask: Any
    scales: TokenScales


class _LoadB(NamedTuple):
    """How B comes: from (box, K tiles) to (box, stages)."""

    atom: Any
    source: Any
    target: Any
    policy: Any


@cute.jit
def produce(
    plan: cutlass.Constexpr, a: Any, b: TmaOperand, scales: TokenScales, pipeline: Pipeline, work: Work
) -> None:
    """Load the operands of a CTA's slice of K. `a` is a TmaOperand, or None."""
    load_a, load_b, stage_bytes = _loads(plan, a, b, scales, work)
    full, empty = pipeline
    first_k, count_k = work.k_tiles
    # The first stages need no barrier but `full`. Their weights wait for nobody: neither for the kernel before
    # this one, which may still be writing A, nor for the other CTAs of the cluster, whose barriers A arrives at.
    if cutlass.const_expr(plan.overlap == "launch"):
        cute.arch.griddepcontrol_wait()
    apart = plan.overlap == "weights" or plan.cluster_n > 1
    depth = plan.stages if plan.cluster_n == 1 or plan.overlap == "weights" else EARLY_STAGES
    early = cutlass.min(count_k, depth)
    for i in cutlass.range(early, unroll=1):
        _begin_stage(load_b, first_k + i, i, full + i, stage_bytes)
        if cutlass.const_expr(not apart):
            _issue_a(plan, load_a, work, first_k + i, i, full + i)
    if cutlass.const_expr(plan.cluster > 1):
        cute.arch.cluster_wait()
    else:
        cute.arch.barrier(barrier_id=EMPTY_READY, number_of_threads=plan.threads)
    if cutlass.const_expr(plan.overlap == "weights"):
        cute.arch.griddepcontrol_wait()
    if cutlass.const_expr(apart):
        for i in cutlass.range(early, unroll=1):
            _issue_a(plan, load_a, work, first_k + i, i, full + i)

    stage, phase = early, cutlass.Int32(1)
    if stage == plan.stages:
        stage, phase = cutlass.Int32(0), cutlass.Int32(0)
    for i in cutlass.range(early, count_k, unroll=1):
        cute.arch.mbarrier_wait(empty + stage, phase)
        _begin_stage(load_b, first_k + i, stage, full + stage, stage_bytes)
        _issue_a(plan, load_a, work, first_k + i, stage, full + stage)
        stage += 1
        if stage == plan.stages:
            stage = cutlass.Int32(0)
            phase ^= 1


def _loads(plan: Plan, a: Any, b: TmaOperand, scales: TokenScales, work: Work) -> tuple[Any, _LoadB, Any]:
    """How A, if it is not None, and B come, and how many bytes of them a stage gets."""
    one = cute.make_layout(1)
    tiled_b = weight_tiles.tiles(plan, b.tensor, work.tile_column, work.batch)
    to_b, from_b = cpasync.tma_partition(b.atom, 0, one, cute.group_modes(b.shared, 0, 2), tiled_b)
    load_b = _LoadB(b.atom, from_b, to_b, cutlass.Int64(EVICT_FIRST))
    row_bytes = plan.tile_k * b.shared.element_type.width // 8
    stage_bytes = plan.tile_n * row_bytes
    if a is None:
        return None, load_b, stage_bytes
    tiled_a = cute.local_tile(a.tensor, (plan.box_tokens, plan.tile_k), (None, None, *work.batch))
    to_a, from_a = cpasync.tma_partition(
        a.atom, 0, one, cute.group_modes(a.shared, 0, 2), cute.group_modes(tiled_a, 0, 2)
    )
    boxes = cutlass.min(cute.ceil_div(work.tokens, plan.box_tokens), plan.boxes)
    stage_bytes = boxes * (plan.box_tokens * row_bytes) + stage_bytes
    return _LoadA(a.atom, from_a, to_a, boxes, sharing_a(plan, work), scales), load_b, stage_bytes


def sharing_a(plan: Any, work: Work) -> Any:
    """The CTAs of the cluster that this one's loads of A go to, a bit each; None where it shares them with nobody.
    `plan` has `cluster_n` and `split_k`."""
    if plan.cluster_n == 1:
        return None
    every_cta = sum(1 << (other * plan.split_k) for other in range(plan.cluster_n))
    return cutlass.Int16(every_cta) << cutlass.Int16(work.slice_k)


@cute.jit
def _begin_stage(load: _LoadB, k: cutlass.Int32, stage: cutlass.Int32, full: cute.Pointer, stage_bytes: Any) -> None:
    """Say how many bytes a stage gets, and load K tile `k` of B."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, stage_bytes)
    cute.copy(load.atom, load.source[None, k], load.target[None, stage], tma_bar_ptr=full, cache_policy=load.policy)


@cute.jit
def _issue_a(
    plan: cutlass.Constexpr, load: Any, work: Work, k: cutlass.Int32, stage: cutlass.Int32, full: cute.Pointer
) -> None:
    """Load this CTA's share of the boxes of K tile `k` of A, to all that multiply them, and its scales; nothing if
    `load` is None, and else it is a _LoadA."""
    if cutlass.const_expr(load is not None):
        share = plan.boxes // plan.cluster_n
        for i in cutlass.range_constexpr(share):
            at = work.cta_n * share + i
            if at < load.boxes:
                source = load.source[None, work.tile_row * plan.boxes + at, k]
                cute.copy(load.atom, source, load.target[None, at, stage], tma_bar_ptr=full, mcast_mask=load.mask)
        _issue_scales(plan, load.scales, work, k, stage, full)


@cute.jit
def _issue_scales(
    plan: cutlass.Constexpr, scales: TokenScales, work: Work, k: cutlass.Int32, stage: cutlass.Int32, full: cute.Pointer
) -> None:
    """Load the scales of K tile `k` of A, a token a lane. Nothing for other scalings."""
    if cutlass.const_expr(plan.form.scaling == "block"):
        scale_a = scales.scale_a
        lane = cute.arch.lane_idx()
        load = cute.make_copy_atom(cpasync.CopyG2SOp(), cutlass.Float32, num_bits_per_copy=32)
        shared = cute.make_tensor(scales.shared, cute.make_layout((1, plan.tile_m, plan.stages)))
        for step in cutlass.range_constexpr(-(-plan.tile_m // WARP)):
            slot = step * WARP + lane
            token = work.tile_row * plan.tile_m + slot
            if slot < plan.tile_m and token < cute.size(scale_a, mode=[0]):
                source = cute.domain_offset((token, k), scale_a).iterator
                cute.copy(load, cute.make_tensor(source, cute.make_layout(1)), shared[None, slot, stage])
        cute.arch.cp_async_mbarrier_arrive_noinc(full)
