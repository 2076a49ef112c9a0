"""Rows of A that indices name, gathered into stages by warps of the producer warp group, 16 bytes a thread.

TMA cannot gather rows on Hopper, so `cp.async` puts each 16 bytes where TMA's swizzle would (`swizzled`). These are
writes of the generic proxy, and WGMMA reads by the async proxy: each thread waits until its own copies into a stage
have come (`cp.async.wait_group`), makes them visible by a proxy fence, and then its warp arrives at the stage's full
barrier. It does so `Plan.gather_lag` stages later than it began to load, so that several are on their way. (An arrival
that `cp.async` makes by itself would come before any fence of the thread that wrote.)

A row number from `indices` is taken as A's first row or last where it is outside A; rows of a tile behind the end of
its group are the group's last row again, and columns behind K are zeros. So nothing outside A or `indices` is read.

Knows nothing of what consumers do with a stage but that they release it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import nvvm

from ..sizes import SWIZZLE_ATOM_ROWS, WARP
from .pipeline import Pipeline, PipelineState, advance
from .plan import STAGE_BYTES_OF_K, Plan
from .scheduler import TileCoord, TileScheduler, this_cluster

COPY_BYTES = 16  # that a thread loads at a time
_COPIES = STAGE_BYTES_OF_K // COPY_BYTES  # of a row in a stage, by neighbouring threads
_ROWS = WARP // _COPIES  # that a warp loads at a time


class GatheredOperand(NamedTuple):
    """A (T, K) in memory, the row of it that each row of D is made of (M), and (rows, K, stages) in shared memory."""

    tensor: Any
    indices: Any
    shared: Any


class _Thread(NamedTuple):
    """What a thread loads of a stage: from which 16 bytes of 128 bytes of a row, of which of the rows that its warp
    loads at a time, and where the first of these goes, in bytes from the stage's beginning."""

    copy: Any
    row: Any
    target: Any


@cute.jit
def gather(
    plan: cutlass.Constexpr,
    operand: GatheredOperand,
    pipeline: Pipeline,
    scheduler: TileScheduler,
    warp: cutlass.Int32,
) -> None:
    """Load the rows of A of every tile that falls to this CTA, as number `warp` of `Plan.gather_warps`."""
    cluster = this_cluster(plan)
    lane = cute.arch.lane_idx()
    thread = _thread(warp, lane)
    state = PipelineState(cutlass.Int32(0), cutlass.Int32(1))  # the first round finds every stage empty
    under_way = cutlass.Int32(0)  # stages that are loaded and not handed over, `gather_lag` at most
    for index in cutlass.range(cluster.number, scheduler.grid.work, cluster.count, unroll=1):
        work = scheduler.work_tile(index)
        addresses = _addresses(plan, operand, scheduler.tile_coord(work.index), warp, lane)
        for k in cutlass.range(work.k_tiles.count, unroll=1):
            cute.arch.mbarrier_wait(pipeline.empty + state.stage, state.phase)
            _load_stage(plan, operand, addresses, thread, work.k_tiles.first + k, state.stage)
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(plan.gather_lag)
            _make_visible()
            if under_way == plan.gather_lag:
                _hand_over(plan, pipeline, state.stage, plan.gather_lag)
            else:
                under_way += 1
            state = advance(plan, state)
    cute.arch.cp_async_wait_group(0)
    _make_visible()
    for back in cutlass.range_constexpr(plan.gather_lag, 0, -1):
        if under_way >= back:
            _hand_over(plan, pipeline, state.stage, back)


def _thread(warp: Any, lane: Any) -> _Thread:
    """What thread `lane` of warp `warp` loads."""
    copy, row = lane % _COPIES, lane // _COPIES
    return _Thread(copy, row, swizzled(warp * _ROWS + row, copy))


def swizzled(row: Any, copy: Any) -> Any:
    """Where 16 bytes number `copy` of a row's 128 lie in a stage, in bytes from its beginning: rows follow each other,
    and within a swizzle atom of 8 rows the number of 16 bytes is combined with the row's by an exclusive or."""
    return row * STAGE_BYTES_OF_K + (copy ^ (row % SWIZZLE_ATOM_ROWS)) * COPY_BYTES


def _row_of(plan: Plan, warp: Any, number: Any) -> Any:
    """Which row of a tile is row `number` of those that warp `warp` loads: all warps' follow each other, each with as
    many as it loads at a time."""
    return (number // _ROWS * plan.gather_warps + warp) * _ROWS + number % _ROWS


def _addresses(plan: Plan, operand: GatheredOperand, coord: TileCoord, warp: Any, lane: Any) -> list[Any]:
    """Where the rows of A begin that a warp loads of a tile, as i64: lane l has rows l, l + 32 and so on of these."""
    tensor, indices, _ = operand
    first = (coord.column if plan.swap else coord.row) * plan.tokens - coord.moved_up
    row_bytes = cutlass.Int64(tensor.stride[0]) * (tensor.element_type.width // 8)
    rows_of_warp = plan.tokens // plan.gather_warps
    found = []
    for before in range(0, rows_of_warp, WARP):
        at = cutlass.min(first + _row_of(plan, warp, before + lane), coord.end - 1)
        row = cutlass.max(cutlass.min(indices[at], cute.size(tensor, mode=[0]) - 1), 0)
        found.append(tensor.iterator.toint() + cutlass.Int64(row) * row_bytes)
    return found


def _load_stage(
    plan: Plan, operand: GatheredOperand, addresses: list[Any], thread: _Thread, k_tile: Any, stage: Any
) -> None:
    """Begin to load this warp's rows of K tile `k_tile` into a stage; `addresses` are where they begin."""
    tensor, _, shared = operand
    k, element_bytes = cute.size(tensor, mode=[1]), tensor.element_type.width // 8
    piece = COPY_BYTES // element_bytes
    at = (k_tile * _COPIES + thread.copy) * piece
    size = cutlass.select_(at < k, cutlass.Int32(COPY_BYTES), cutlass.Int32(0))
    offset = cutlass.Int64(cutlass.min(at, k - piece)) * element_bytes
    target = shared.iterator.toint() + stage * (plan.tokens * STAGE_BYTES_OF_K) + thread.target
    for step in range(plan.tokens // plan.gather_warps // _ROWS):
        number = step * _ROWS
        row = cute.arch.shuffle_sync(addresses[number // WARP], number % WARP + thread.row)
        # All warps together load whole swizzle atoms at a time, so a thread's places lie evenly apart.
        to = target + step * (plan.gather_warps * _ROWS * STAGE_BYTES_OF_K)
        _copy(row + offset, to, size)


def _copy(source: Any, target: Any, size: Any) -> None:
    """Begin to copy `size` bytes, 0 or 16, from memory to shared memory, and write zeros up to 16."""
    from_memory = cute.make_ptr(cutlass.Uint8, source, cute.AddressSpace.gmem, assumed_align=COPY_BYTES)
    to_shared = cute.make_ptr(cutlass.Uint8, target, cute.AddressSpace.smem, assumed_align=COPY_BYTES)
    nvvm.cp_async_shared_global(
        to_shared.llvm_ptr,
        from_memory.llvm_ptr,
        COPY_BYTES,
        nvvm.LoadCacheModifierKind.CG,
        cp_size=cutlass.Int32(size).ir_value(),
    )


def _make_visible() -> None:
    """Let WGMMA see what this warp's threads have waited for."""
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()


@cute.jit
def _hand_over(plan: cutlass.Constexpr, pipeline: Pipeline, stage: Any, back: cutlass.Constexpr) -> None:
    """Arrive at the full barrier of the stage `back` stages before `stage`, as a warp."""
    at = stage - back
    at = at + plan.stages if at < 0 else at
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(pipeline.full + at)
