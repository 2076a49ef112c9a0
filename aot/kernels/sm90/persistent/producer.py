"""The producer warp: keeps every stage full of A and B, by TMA.

A TMA box that hangs over the end of a tensor takes longer to load than one that does not. So with `skip_oob` the
operand that holds tokens has a second TMA atom whose boxes are 16 or 8 rows (`Plan.box_tokens`). A tile that is all
inside M is loaded by the first one. Of a tile that hangs over, the boxes with a row inside are loaded by the second,
and each CTA that gets them counts on as many bytes less. Stages keep what they held in the rows that are left out,
which reach rows of D past M only: each row of a product has its own row of A, the epilogue puts no two rows of D
together, and TMA stores none past M.

Rows and columns are WGMMA's. Knows nothing of what consumers do with a stage but that they release it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from .pipeline import ClusterCta, Pipeline, PipelineState, advance, await_reduced
from .plan import Plan
from .scheduler import TileScheduler, this_cluster

_BEYOND = 1 << 20  # a K tile that no K has


class TmaBoxes(NamedTuple):
    """The boxes of an operand: its TMA atom, its tensor, and (rows, K, boxes of all stages) in shared memory."""

    atom: Any
    tensor: Any
    shared: Any


class TmaOperand(NamedTuple):
    """An operand: its TMA atom, its tensor, (extent, K, stages) in shared memory, and its boxes if it has any."""

    atom: Any
    tensor: Any
    shared: Any
    boxes: TmaBoxes | None

    @classmethod
    def of(cls, atom: Any, tensor: Any, shared: cute.Tensor, boxes: Sequence[Any]) -> "TmaOperand":
        """An operand whose stages are `shared`; `boxes` are nothing, or their atom, tensor and layout."""
        if not boxes:
            return cls(atom, tensor, shared, None)
        box_atom, boxed, layout = boxes
        return cls(atom, tensor, shared, TmaBoxes(box_atom, boxed, cute.make_tensor(shared.iterator, layout.outer)))


class _Copy(NamedTuple):
    """A TMA atom, from where, (its box, tiles, K tiles[, batch]), and to where, (its box, places in shared memory)."""

    atom: Any
    source: Any
    target: Any


class _Load(NamedTuple):
    """How this CTA loads an operand: by whole tiles, by boxes if it has any, as which of the CTAs that load it
    together, and the mask of these."""

    tiles: _Copy
    boxes: Any
    rank: Any
    mask: Any


class _Stage(NamedTuple):
    """What goes to a stage: the numbers of the tile's rows and columns, its batch if it has one, and the K tile."""

    row: Any
    column: Any
    batch: tuple[Any, ...]
    k_tile: Any


@cute.jit
def produce(
    plan: cutlass.Constexpr,
    rows: TmaOperand,
    columns: TmaOperand,
    pipeline: Pipeline,
    scheduler: TileScheduler,
    m: Any,
) -> None:
    """Load the operands of every tile that falls to this CTA, of `m` tokens in all."""
    loads = _loads(plan, rows, columns, scheduler.cta)
    batched = cute.rank(rows.tensor) == 3
    cluster = this_cluster(plan)
    state = PipelineState(cutlass.Int32(0), cutlass.Int32(1))  # the first round finds every stage empty
    for index in cutlass.range(cluster.number, scheduler.grid.work, cluster.count, unroll=1):
        work = scheduler.work_tile(index)
        row, column, batch = scheduler.tile_coord(work.index)
        first = _Stage(row, column, (batch,) if cutlass.const_expr(batched) else (), work.k_tiles.first)
        count = work.k_tiles.count + (plan.spare_k_tiles if plan.split_k > 1 else 0)
        inside = plan.tokens  # known here and now where no rows are skipped, so that one of the loops below is left
        if cutlass.const_expr(plan.skip_oob):
            inside = plan.tokens_inside(column if plan.swap else row, m, cutlass.min, cutlass.max)
        if inside == plan.tokens:
            state = _load_tile(plan, loads, pipeline, state, first, count, None)
        else:
            state = _load_tile(plan, loads, pipeline, state, first, count, inside)
        if cutlass.const_expr(plan.split_k > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
            await_reduced()
    if cutlass.const_expr(plan.split_k == 1):
        for _ in cutlass.range_constexpr(plan.spare_k_tiles):
            spare = _Stage(0, 0, (0,) if cutlass.const_expr(batched) else (), _BEYOND)
            state = _load_stage(plan, loads, pipeline, state, spare, None)


def _loads(plan: Plan, rows: TmaOperand, columns: TmaOperand, cta: ClusterCta) -> tuple[_Load, _Load]:
    """Who loads the same rows is in the same row of the cluster's grid of CTAs, which counts rows first."""
    rows_mask, columns_mask = None, None
    if plan.cluster_columns > 1:
        every = sum(1 << (other * plan.cluster_rows) for other in range(plan.cluster_columns))
        rows_mask = cutlass.Int16(every) << cutlass.Int16(cta.row)
    if plan.cluster_rows > 1:
        every = (1 << plan.cluster_rows) - 1
        columns_mask = cutlass.Int16(every) << cutlass.Int16(cta.column * plan.cluster_rows)
    return (
        _load(rows, plan.rows, cta.column, plan.cluster_columns, rows_mask),
        _load(columns, plan.columns, cta.row, plan.cluster_rows, columns_mask),
    )


def _load(operand: TmaOperand, extent: int, rank: Any, multicast: int, mask: Any) -> _Load:
    """How CTA `rank` of `multicast` loads an operand whose tiles have `extent` rows."""
    tiles = _copy(operand.atom, operand.tensor, operand.shared, extent, rank, multicast)
    boxes = None
    if operand.boxes is not None:
        rows = cute.size(operand.boxes.shared, mode=[0])
        boxes = _copy(operand.boxes.atom, operand.boxes.tensor, operand.boxes.shared, rows, 0, 1)
    return _Load(tiles, boxes, rank, mask)


def _copy(atom: Any, tensor: cute.Tensor, shared: cute.Tensor, extent: int, rank: Any, multicast: int) -> _Copy:
    batch_modes = (None,) * (cute.rank(tensor) - 2)
    tiled = cute.local_tile(tensor, (extent, cute.size(shared, mode=[1])), (None, None, *batch_modes))
    ctas = cute.make_layout(multicast)
    grouped = cute.group_modes(shared, 0, 2), cute.group_modes(tiled, 0, 2)
    target, source = cpasync.tma_partition(atom, rank, ctas, *grouped)
    return _Copy(atom, source, target)


@cute.jit
def _load_tile(
    plan: cutlass.Constexpr,
    loads: tuple[_Load, _Load],
    pipeline: Pipeline,
    state: PipelineState,
    first: _Stage,
    count: Any,
    inside: Any,
) -> PipelineState:
    """Fill `count` stages from K tile `first` on; return the state behind them. `inside` is how many rows of A the tile
    has inside M, or None to load them all."""
    for k in cutlass.range(count, unroll=1):
        what = _Stage(first.row, first.column, first.batch, first.k_tile + k)
        state = _load_stage(plan, loads, pipeline, state, what, inside)
    return state


@cute.jit
def _load_stage(
    plan: cutlass.Constexpr,
    loads: tuple[_Load, _Load],
    pipeline: Pipeline,
    state: PipelineState,
    what: _Stage,
    inside: Any,
) -> PipelineState:
    """Fill a stage once it is empty; return the next state."""
    stage = state.stage
    cute.arch.mbarrier_wait(pipeline.empty + stage, state.phase)
    full = pipeline.full + stage
    boxes = plan.boxes if cutlass.const_expr(inside is None) else plan.boxes_inside(inside)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, plan.transaction_bytes(boxes))
    of_rows, of_columns = loads
    _issue(plan, of_rows, (what.row, what.k_tile, *what.batch), stage, full, inside)
    _issue(plan, of_columns, (what.column, what.k_tile, *what.batch), stage, full, inside)
    return advance(plan, state)


@cute.jit
def _issue(
    plan: cutlass.Constexpr, load: _Load, coord: Any, stage: cutlass.Int32, full: cute.Pointer, inside: Any
) -> None:
    """Load this CTA's share of an operand's tile at (tile, K tile[, batch]), for all that share it."""
    if cutlass.const_expr(load.boxes is None or inside is None):
        atom, source, target = load.tiles
        cute.copy(atom, source[(None, *coord)], target[None, stage], tma_bar_ptr=full, mcast_mask=load.mask)
    else:
        tile, *rest = coord
        atom, source, target = load.boxes
        boxes, mine = plan.boxes_inside(inside), plan.boxes_of(load.rank)
        for i in cutlass.range_constexpr(len(mine)):
            if mine[i] < boxes:
                box = source[(None, tile * plan.boxes + mine[i], *rest)]
                to = target[None, stage * plan.boxes + mine[i]]
                cute.copy(atom, box, to, tma_bar_ptr=full, mcast_mask=load.mask)
