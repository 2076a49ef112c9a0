"""The consumer warp groups: mainloop and epilogue of every tile that falls to one.

Knows the order of these, and what two warp groups or several CTAs agree on between them; not how either works.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

from runtime.numbers.scaling import SCALE_BLOCK

from ..sizes import WARP_GROUP
from .epilogue import store_tile
from .epilogue_operands import EpilogueOperands
from .mainloop import Mainloop, accumulators_of
from .output import Output
from .pipeline import HandOver, OrderedBarrier, Pipeline, PipelineState
from .plan import Plan
from .promoted_mainloop import OrderedMainloop, partial_accumulators
from .scales import Scales
from .scheduler import TileScheduler, this_cluster
from .split_k import SplitK, end_reduction, exchange
from .staged_mainloop import StagedMainloop
from .staged_scales import first_column, of_thread
from .stream_k import Workspace, finish_tile


class ConsumerStorage(NamedTuple):
    """What consumers use: (rows, K, stages) and (columns, K, stages) in shared memory, D, the barriers of the stages,
    products of scales (`staged_scales`) or None, and what slices of K need to be reduced, or None."""

    rows: Any
    columns: Any
    output: Output
    pipeline: Pipeline
    staged_scales: Any
    split: SplitK | None
    workspace: Workspace | None


@cute.jit
def consume(
    plan: cutlass.Constexpr,
    storage: ConsumerStorage,
    scheduler: TileScheduler,
    operands: EpilogueOperands,
    thread: cutlass.Int32,
) -> None:
    """A consumer warp group: every tile that falls to it."""
    group = cute.arch.make_warp_uniform(thread // WARP_GROUP)
    mainloop = Mainloop.of(plan, storage.pipeline, scheduler.cta, storage.rows, storage.columns, group)
    accumulators = accumulators_of(plan, mainloop.element, plan.rows)
    order = OrderedBarrier(group)
    if cutlass.const_expr(plan.promotion_interval == 0):
        _consume(plan, mainloop, accumulators, storage, scheduler, operands, order, thread)
    else:
        _consume_promoted(plan, mainloop, accumulators, storage, scheduler, operands, order)
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def _consume(
    plan: cutlass.Constexpr,
    mainloop: Mainloop,
    accumulators: cute.Tensor,
    storage: ConsumerStorage,
    scheduler: TileScheduler,
    operands: EpilogueOperands,
    order: OrderedBarrier,
    thread: cutlass.Int32,
) -> None:
    """Where the tensor core accumulates all along. With "pingpong", every other tile of the cluster."""
    first, step = this_cluster(plan)
    work_tiles, per_tile = scheduler.grid.work, scheduler.k_tiles.count
    state = PipelineState(cutlass.Int32(0), cutlass.Int32(0))
    phase = cutlass.Int32(0)  # of the exchange
    if cutlass.const_expr(plan.pingpong):
        if order.group == 1:
            OrderedBarrier(1).arrive()
            state = PipelineState(per_tile % plan.stages, (per_tile // plan.stages) & 1)
        first += order.group * step
        step *= 2
    for index in cutlass.range(first, work_tiles, step, unroll=1):
        work = scheduler.work_tile(index)
        # A stage's barrier tells two rounds apart and no more, so nobody may wait for one out of order.
        hand_over: Any = None
        if cutlass.const_expr(plan.pingpong):
            hand_over = HandOver(order.other, index + step // 2 < work_tiles)
            order.wait()
        state = mainloop.multiply(accumulators, state, work.k_tiles.count, hand_over)
        mainloop.finish(state.stage)
        phase = exchange(plan, accumulators, storage.split, phase, thread)
        coord = scheduler.tile_coord(work.index)
        of_tile = operands.of_group(coord)
        scales = Scales.of(plan, of_tile, coord)
        if cutlass.const_expr(plan.stream_k):
            finish_tile(plan, accumulators, storage.output, coord, of_tile, scales, work.shared, storage.workspace)
        else:
            store_tile(plan, accumulators, storage.output, coord, of_tile, scales, storage.split)
        end_reduction(plan)
        if cutlass.const_expr(plan.pingpong):
            state = _pass_over(plan, state, per_tile)


def _pass_over(plan: Plan, state: PipelineState, count: Any) -> PipelineState:
    """The state behind the other warp group's tile, of `count` stages."""
    stage = state.stage + count
    phase = state.phase ^ ((stage // plan.stages) & 1)
    return PipelineState(stage % plan.stages, phase)


@cute.jit
def _consume_promoted(
    plan: cutlass.Constexpr,
    mainloop: Mainloop,
    accumulators: cute.Tensor,
    storage: ConsumerStorage,
    scheduler: TileScheduler,
    operands: EpilogueOperands,
    order: OrderedBarrier,
) -> None:
    """Where f32 registers take over what the tensor core accumulates. A tile's first products are under way while the
    tile before is stored, if the partial accumulators are registers that the epilogue does without."""
    first, step = this_cluster(plan)
    work_tiles = scheduler.grid.work
    partial = partial_accumulators(plan, mainloop.element)
    staged = of_thread(storage.staged_scales, order.group, operands.thread)
    promoted: Any = OrderedMainloop(mainloop, order, partial)
    if cutlass.const_expr(staged is not None):
        promoted = StagedMainloop.of(mainloop, partial, staged)
    state = PipelineState(cutlass.Int32(0), cutlass.Int32(0))
    phase = cutlass.Int32(0)  # of the exchange
    thread = order.group * WARP_GROUP + operands.thread
    if cutlass.const_expr(plan.staged_scales == 0):  # noqa: SIM102  # the other is of run time
        if order.group == 1:
            OrderedBarrier(1).arrive()
    if cutlass.const_expr(plan.begins_early and plan.form.grouped):
        if first < work_tiles:
            state = promoted.begin_tile(state)
    elif cutlass.const_expr(plan.begins_early):
        state = promoted.begin_tile(state)
    for index in cutlass.range(first, work_tiles, step, unroll=1):
        coord = scheduler.tile_coord(index)
        of_tile = operands.of_group(coord)
        scales = Scales.of(plan, of_tile, coord)
        makes_rows = operands.makes_rows(coord) if cutlass.const_expr(plan.passes_over) else True
        if cutlass.const_expr(not plan.begins_early):
            partial.fill(0.0)
            state = promoted.begin_tile(state)
        if cutlass.const_expr(staged is None):
            state = promoted.multiply(accumulators, state, scheduler.k_tiles)
        else:
            start = first_column(plan, operands, coord) % SCALE_BLOCK
            if cutlass.const_expr(plan.passes_over):
                if makes_rows:
                    state = promoted.multiply(accumulators, state, scheduler.k_tiles, start)
                else:
                    state = promoted.pass_over(state, scheduler.k_tiles)
            else:
                state = promoted.multiply(accumulators, state, scheduler.k_tiles, start)
        if cutlass.const_expr(plan.begins_early):  # noqa: SIM102  # the other is of run time
            if index + step < work_tiles:
                state = promoted.begin_tile(state)
        phase = exchange(plan, accumulators, storage.split, phase, thread)
        if cutlass.const_expr(plan.passes_over):
            if makes_rows:
                store_tile(plan, accumulators, storage.output, coord, of_tile, scales, storage.split)
        else:
            store_tile(plan, accumulators, storage.output, coord, of_tile, scales, storage.split)
        end_reduction(plan)
    warpgroup.wait_group(0)
    if cutlass.const_expr(plan.staged_scales == 0):  # noqa: SIM102
        if order.group == 0:  # what the other one let through last
            OrderedBarrier(0).wait()
