"""The producer warp: keeps every stage full of A, of codes and of their scales by TMA.

Knows nothing of what consumers do with a stage but that they release it.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from ..small_m.pipeline import EMPTY_READY, Pipeline, Work
from ..small_m.producer import EARLY_STAGES, EVICT_FIRST, TmaOperand, sharing_a
from .operands import codes_tiler, scales_tiler
from .plan import Plan


class Operands(NamedTuple):
    """What is loaded."""

    a: TmaOperand
    codes: TmaOperand
    scales: TmaOperand


class Load(NamedTuple):
    """How an operand comes: a TMA atom, from (box, K tiles) to (box, stages)."""

    atom: Any
    source: Any
    target: Any


class LoadA(NamedTuple):
    """How A comes: from (box, boxes of M, K tiles) to (box, boxes, stages), how many boxes of the tile are inside M,
    and to which CTAs."""

    atom: Any
    source: Any
    target: Any
    boxes: Any
    mask: Any


class Loads(NamedTuple):
    """All of them, and how many bytes of them a stage gets."""

    a: LoadA
    codes: Load
    scales: Load
    stage_bytes: Any


@cute.jit
def produce(plan: cutlass.Constexpr, operands: Operands, pipeline: Pipeline, ready: cute.Pointer, work: Work) -> None:
    """Load the operands of a CTA's slice of K. `ready` are mbarriers of stages: the producers of all CTAs that share A
    arrive there when their stage is free."""
    loads = loads_of(plan, operands, work)
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
        begin_stage(loads, first_k + i, i, full + i)
        if cutlass.const_expr(not apart):
            issue_a(plan, loads.a, work, first_k + i, i, full + i)
    if cutlass.const_expr(plan.cluster > 1):
        cute.arch.cluster_wait()
    else:
        cute.arch.barrier(barrier_id=EMPTY_READY, number_of_threads=plan.threads)
    if cutlass.const_expr(plan.overlap == "weights"):
        cute.arch.griddepcontrol_wait()
    if cutlass.const_expr(apart):
        for i in cutlass.range(early, unroll=1):
            issue_a(plan, loads.a, work, first_k + i, i, full + i)

    stage, phase = early, cutlass.Int32(1)
    if stage == plan.stages:
        stage, phase = cutlass.Int32(0), cutlass.Int32(0)
    for i in cutlass.range(early, count_k, unroll=1):
        cute.arch.mbarrier_wait(empty + stage, phase)
        begin_stage(loads, first_k + i, stage, full + stage)
        if cutlass.const_expr(plan.cluster_n > 1):
            _meet(plan, i, ready + stage, phase, work)
        issue_a(plan, loads.a, work, first_k + i, stage, full + stage)
        stage += 1
        if stage == plan.stages:
            stage = cutlass.Int32(0)
            phase ^= 1


@cute.jit
def _meet(plan: cutlass.Constexpr, i: cutlass.Int32, ready: cute.Pointer, phase: cutlass.Int32, work: Work) -> None:
    """Where K tile `i` fills a stage again, say to all CTAs that share A that this one's is free, and wait until theirs
    are."""
    if i >= plan.stages:
        with cute.arch.elect_one():
            for cta_n in cutlass.range_constexpr(plan.cluster_n):
                cute.arch.mbarrier_arrive(ready, work.slice_k + cta_n * plan.split_k)
        cute.arch.mbarrier_wait(ready, phase)


def loads_of(plan: Plan, operands: Operands, work: Work) -> Loads:
    """How A, codes and scales come, of a tile."""
    a, codes, scales = operands
    one = cute.make_layout(1)
    tiled_a = cute.local_tile(a.tensor, (plan.box_tokens, plan.tile_k), (None, None))
    to_a, from_a = cpasync.tma_partition(
        a.atom, 0, one, cute.group_modes(a.shared, 0, 2), cute.group_modes(tiled_a, 0, 2)
    )
    of_rows = (work.tile_column, 0) if plan.halves else (work.tile_column,)
    load_codes = _load(codes, codes_tiler(plan), (0, *of_rows, None, *work.batch))
    load_scales = _load(scales, scales_tiler(plan), (*of_rows, None, *work.batch))
    boxes = cutlass.min(cute.ceil_div(work.tokens, plan.box_tokens), plan.boxes)
    row_bytes = plan.tile_k * plan.form.element_bytes
    stage_bytes = boxes * (plan.box_tokens * row_bytes) + (plan.codes_bytes + plan.scales_bytes)
    return Loads(LoadA(a.atom, from_a, to_a, boxes, sharing_a(plan, work)), load_codes, load_scales, stage_bytes)


def _load(operand: TmaOperand, tiler: tuple[int, ...], tile: tuple[Any, ...]) -> Load:
    """How the K tiles of an operand come, of which `tile` says where they are; those of K are None there."""
    tiled = cute.group_modes(cute.local_tile(operand.tensor, tiler, tile), 0, len(tiler))
    shared = cute.group_modes(operand.shared, 0, len(tiler))
    target, source = cpasync.tma_partition(operand.atom, 0, cute.make_layout(1), shared, tiled)
    return Load(operand.atom, source, target)


@cute.jit
def begin_stage(loads: Loads, k: cutlass.Int32, stage: cutlass.Int32, full: cute.Pointer) -> None:
    """Say how many bytes a stage gets, and load K tile `k` of codes and scales."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, loads.stage_bytes)
    for load in (loads.codes, loads.scales):
        cute.copy(
            load.atom,
            load.source[None, k],
            load.target[None, stage],
            tma_bar_ptr=full,
            cache_policy=cutlass.Int64(EVICT_FIRST),
        )


@cute.jit
def issue_a(
    plan: cutlass.Constexpr, load: LoadA, work: Work, k: cutlass.Int32, stage: cutlass.Int32, full: cute.Pointer
) -> None:
    """Load this CTA's share of the boxes of K tile `k` of A, to all that multiply them."""
    share = plan.boxes // plan.cluster_n
    for i in cutlass.range_constexpr(share):
        at = work.cta_n * share + i
        if at < load.boxes:
            source = load.source[None, work.tile_row * plan.boxes + at, k]
            cute.copy(load.atom, source, load.target[None, at, stage], tma_bar_ptr=full, mcast_mask=load.mask)
