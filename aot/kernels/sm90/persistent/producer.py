"""The producer warp: keeps every stage full of A and B, by TMA.

A TMA box that hangs over the end of a tensor takes longer to load than one that does not. So a tile that would hang
over M begins earlier, and its last row is the last of A: it makes rows of D that the tile before it makes too, and both
store the same bits, since a row of D depends on its own row of A alone. Where M is less than a tile there is nothing
before, and tiles of `stream_k` stay where they are (`Plan.moved_up`).

Rows of A that are gathered come another way (`gather`), and this warp loads B alone.

Rows and columns are WGMMA's. Knows nothing of what consumers do with a stage but that they release it.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from .pipeline import ClusterCta, Pipeline, PipelineState, advance, await_reduced
from .plan import Plan
from .scheduler import TileCoord, TileScheduler, this_cluster


class TmaOperand(NamedTuple):
    """An operand: its TMA atom, None where it is gathered, its tensor, and (extent, K, stages) in shared memory."""

    atom: Any
    tensor: Any
    shared: Any


class _Load(NamedTuple):
    """How this CTA loads its share of an operand's tiles: the TMA atom, from (its box, tiles, K tiles[, batch]) to (its
    box, stages), the mask of the CTAs that share them, and of how many that load whole stages in turn it is which."""

    atom: Any
    source: Any
    target: Any
    mask: Any
    turns: int
    turn: Any


class _Halves(NamedTuple):
    """The shares of an operand that two CTAs load together, or each all of its own: how each is loaded, and whether by
    this CTA."""

    loads: list[tuple[Any, Any]]


class _Stage(NamedTuple):
    """What goes to a stage: the numbers of the tile's rows and columns, the K tile, and the batch of the operands that
    have one."""

    row: Any
    column: Any
    k_tile: Any
    batch_of_rows: tuple[Any, ...]
    batch_of_columns: tuple[Any, ...]


@cute.jit
def produce(
    plan: cutlass.Constexpr, rows: TmaOperand, columns: TmaOperand, pipeline: Pipeline, scheduler: TileScheduler
) -> None:
    """Load the operands of every tile that falls to this CTA."""
    cluster = this_cluster(plan)
    state = PipelineState(cutlass.Int32(0), cutlass.Int32(1))  # the first round finds every stage empty
    for index in cutlass.range(cluster.number, scheduler.grid.work, cluster.count, unroll=1):
        work = scheduler.work_tile(index)
        coord = scheduler.tile_coord(work.index)
        loads = _loads(plan, rows, columns, scheduler.cta, coord)
        batches = _batch(rows, coord.batch), _batch(columns, coord.batch)
        for k in cutlass.range(work.k_tiles.count, unroll=1):
            what = _Stage(coord.row, coord.column, work.k_tiles.first + k, *batches)
            state = _load_stage(plan, loads, pipeline, state, what)
        if cutlass.const_expr(plan.split_k > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
            await_reduced()


def _batch(operand: TmaOperand, batch: Any) -> tuple[Any, ...]:
    """Which batch of an operand is loaded, if it has batches."""
    return (batch,) if cute.rank(operand.tensor) == 3 else ()


def _loads(
    plan: Plan, rows: TmaOperand, columns: TmaOperand, cta: ClusterCta, coord: TileCoord
) -> tuple[_Load | None, _Load | _Halves | None]:
    """How each operand of a tile is loaded, None where it is gathered. Who loads the same rows is in the same row of
    the cluster's grid of CTAs, which counts rows first."""
    rows_mask, columns_mask = None, None
    if plan.cluster_columns > 1:
        every = sum(1 << (other * plan.cluster_rows) for other in range(plan.cluster_columns))
        rows_mask = cutlass.Int16(every) << cutlass.Int16(cta.rank(plan, cta.row, 0))
    if plan.cluster_rows > 1:
        every = (1 << plan.cluster_rows) - 1
        columns_mask = cutlass.Int16(every) << cutlass.Int16(cta.rank(plan, 0, cta.column))
    of_rows, of_columns = (None, coord.moved_up) if plan.swap else (coord.moved_up, None)
    rows_in_turn, columns_in_turn = plan.loads_in_turn
    load_rows = _load(rows, of_rows, plan.box_rows, (cta.column, plan.cluster_columns), rows_mask, rows_in_turn)
    if plan.pairs_tiles:
        own = cutlass.Int16(1) << cutlass.Int16(cta.row)
        mask = cutlass.Int16(cutlass.select_(coord.alone, own, cutlass.Int16(columns_mask)))
        shares = range(plan.cluster_rows)
        halves = [_load(columns, None, plan.columns, (share, plan.cluster_rows), mask, False) for share in shares]
        return load_rows, _Halves([(half, coord.alone | (cta.row == share)) for share, half in enumerate(halves)])
    load_columns = _load(columns, of_columns, plan.columns, (cta.row, plan.cluster_rows), columns_mask, columns_in_turn)
    return load_rows, load_columns


def _load(
    operand: TmaOperand, moved_up: Any, extent: Any, sharer: tuple[Any, int], mask: Any, in_turn: bool
) -> _Load | None:
    """How CTA `sharer`, its number and of how many, loads an operand whose tiles have `extent` rows and begin so many
    before their place."""
    atom, tensor, shared = operand
    if atom is None:
        return None
    batch_modes = (None,) * (cute.rank(tensor) - 2)
    if moved_up is not None:
        tensor = cute.domain_offset((-moved_up, 0, *(0 for _ in batch_modes)), tensor)
    tiled = cute.local_tile(tensor, (extent, cute.size(shared, mode=[1])), (None, None, *batch_modes))
    if isinstance(extent, tuple):  # of gates and of what they gate, a tile has both
        tiled = tiled[(None, None, (None, 0), None, *batch_modes)]
    rank, multicast = sharer
    turns, turn = (multicast, rank) if in_turn else (1, 0)
    if in_turn:
        rank, multicast = 0, 1
    ctas = cute.make_layout(multicast)
    grouped = cute.group_modes(shared, 0, 2), cute.group_modes(tiled, 0, 2)
    target, source = cpasync.tma_partition(atom, rank, ctas, *grouped)
    return _Load(atom, source, target, mask, turns, turn)


@cute.jit
def _load_stage(
    plan: cutlass.Constexpr, loads: Any, pipeline: Pipeline, state: PipelineState, what: _Stage
) -> PipelineState:
    """Fill a stage once it is empty; return the next state."""
    stage = state.stage
    cute.arch.mbarrier_wait(pipeline.empty + stage, state.phase)
    full = pipeline.full + stage
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, plan.stage_bytes)
    of_rows, of_columns = loads
    if cutlass.const_expr(of_rows is not None):
        _issue_in_turn(of_rows, (what.row, what.k_tile, *what.batch_of_rows), stage, full)
    if cutlass.const_expr(isinstance(of_columns, _Halves)):
        for half, loads_it in of_columns.loads:
            if loads_it:
                _issue(half, (what.column, what.k_tile, *what.batch_of_columns), stage, full)
    elif cutlass.const_expr(of_columns is not None):
        _issue_in_turn(of_columns, (what.column, what.k_tile, *what.batch_of_columns), stage, full)
    return advance(plan, state)


@cute.jit
def _issue_in_turn(load: _Load, coord: Any, stage: cutlass.Int32, full: cute.Pointer) -> None:
    """Load what of an operand's tile falls to this CTA; those that share it count K tiles alike."""
    if cutlass.const_expr(load.turns > 1):
        _, k_tile, *_ = coord
        if k_tile % load.turns == load.turn:
            _issue(load, coord, stage, full)
    else:
        _issue(load, coord, stage, full)


@cute.jit
def _issue(load: _Load, coord: Any, stage: cutlass.Int32, full: cute.Pointer) -> None:
    """Load this CTA's share of an operand's tile at (tile, K tile[, batch]), for all that share it."""
    cute.copy(load.atom, load.source[(None, *coord)], load.target[None, stage], tma_bar_ptr=full, mcast_mask=load.mask)
