"""How `persistent.Persistent` brings A and B to shared memory: operands' TMA atoms and stages, and the loading warp.

An operand is its TMA atom, its tensor and its stages. Rows and columns are WGMMA's, as in `persistent`.

A TMA box that hangs over the end of a tensor takes longer to load than one that does not. So with `skip_oob` the
operand that holds tokens has a second TMA atom whose boxes are 16 or 8 rows (`Plan.box_tokens`). A tile that is all
inside M is loaded by the first one. Of a tile that hangs over, the boxes with a row inside are loaded by the second,
and each CTA that gets them counts on as many bytes less. Stages keep what they held in the rows that are left out,
which reach rows of D past M only: each row of a product has its own row of A, the epilogue puts no two rows of D
together, and TMA stores none past M.
"""

from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from .persistent_choices import STAGE_BYTES_OF_K, Plan
from .persistent_places import place_of
from .persistent_split import await_gathered
from .persistent_stream import item

_BEYOND = 1 << 20  # a stage that no K has


@cute.jit
def operand(
    plan: cutlass.Constexpr,
    x: cute.Tensor,
    extent: cutlass.Constexpr,
    sharers: cutlass.Constexpr,
    major: cutlass.Constexpr,
    boxed: cutlass.Constexpr,
) -> Any:
    """The TMA atom, the tensor and the layout of stages of an operand that `sharers` CTAs load together.

    If `boxed`, the same three for its boxes follow: their layout counts those of all stages.
    """
    element = x.element_type
    tile_k = STAGE_BYTES_OF_K * 8 // element.width
    kinds = warpgroup.SmemLayoutAtomKind
    k_major = major == OperandMajorMode.K
    atom = warpgroup.make_smem_layout_atom(kinds.K_SW128 if k_major else kinds.MN_SW128, element)
    shape = (extent, tile_k, plan.stages)
    layout = cute.tile_to_shape(atom, shape, (0, 1, 2) if k_major else (1, 0, 2))
    load = cpasync.CopyBulkTensorTileG2SMulticastOp() if sharers > 1 else cpasync.CopyBulkTensorTileG2SOp()
    tma_atom, tma = cpasync.make_tiled_tma_atom(load, x, cute.select(layout, [0, 1]), (extent, tile_k), sharers)
    boxes: Any = ()
    if cutlass.const_expr(boxed):
        box = (plan.box_tokens, tile_k)
        box_layout = cute.tile_to_shape(atom, (*box, plan.boxes * plan.stages), (0, 1, 2))
        boxes = (*cpasync.make_tiled_tma_atom(load, x, cute.select(box_layout, [0, 1]), box), box_layout)
    return (tma_atom, tma, layout, *boxes)


def boxes_at(boxes: Sequence[Any], shared: cute.Tensor) -> Any:
    """The boxes of an operand, if it has any, in its stages, or None."""
    if not boxes:
        return None
    atom, tensor, layout = boxes
    return atom, tensor, cute.make_tensor(shared.iterator, layout.outer)


@cute.jit
def feed(
    plan: cutlass.Constexpr, load_rows: Any, load_columns: Any, barriers: Any, work: Any, member: Any, places: Any
) -> None:
    """The loading warp: keep every stage full. An operand is its TMA atom, its tensor, its stages and its boxes; `work`
    is the CTA's tiles and M, `member` its place in its cluster."""
    tiles, m = work
    # Who shares these rows is in the same row of the cluster's grid of CTAs, which counts rows first.
    rows_mask, columns_mask = None, None
    if cutlass.const_expr(plan.cluster_columns > 1):
        every = sum(1 << (other * plan.cluster_rows) for other in range(plan.cluster_columns))
        rows_mask = cutlass.Int16(every) << cutlass.Int16(member[0])
    if cutlass.const_expr(plan.cluster_rows > 1):
        every = (1 << plan.cluster_rows) - 1
        columns_mask = cutlass.Int16(every) << cutlass.Int16(member[1] * plan.cluster_rows)
    operands = (
        (*_partition(load_rows, plan.rows, (member[1], plan.cluster_columns)), rows_mask),
        (*_partition(load_columns, plan.columns, (member[0], plan.cluster_rows)), columns_mask),
    )
    batched = cute.rank(load_rows[1]) == 3
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    stage = cutlass.Int32(0)
    phase = cutlass.Int32(1)  # the first round finds every stage empty
    for index in cutlass.range(block // plan.cluster, tiles[2], blocks // plan.cluster, unroll=1):
        tile, first_k, count_k, _ = item(plan, index, tiles)
        row, column, batch = place_of(places, tile)
        place = (row, column, (batch,) if cutlass.const_expr(batched) else ())
        count = count_k + (plan.spare if plan.split_k > 1 else 0)
        inside = plan.tokens  # known here and now where no rows are skipped, so that one of the loops below is left
        if cutlass.const_expr(plan.skip_oob):
            inside = plan.tokens_inside((row, column)[plan.swap], m, cutlass.min, cutlass.max)
        if inside == plan.tokens:
            stage, phase = _load_tile(plan, operands, barriers, (stage, phase), (place, first_k, count), None)
        else:
            stage, phase = _load_tile(plan, operands, barriers, (stage, phase), (place, first_k, count), inside)
        if cutlass.const_expr(plan.split_k > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
            await_gathered()
    if cutlass.const_expr(plan.split_k == 1):
        for _ in cutlass.range_constexpr(plan.spare):
            place = (0, 0, (0,) if cutlass.const_expr(batched) else ())
            stage, phase = _load(plan, operands, barriers, (stage, phase), (place, _BEYOND), None)


def _partition(load: Any, extent: int, sharer: tuple[Any, int]) -> tuple[Any, Any, Any]:
    """An operand as `_bring` takes it: its TMA atom, from where and to where; its boxes in the same way, or None; and
    which of the CTAs that load it together this one is."""
    atom, tensor, shared, boxes = load
    number, sharers = sharer
    whole = (atom, *_tiles(atom, tensor, shared, extent, (number, cute.make_layout(sharers))))
    boxed = None
    if boxes is not None:
        box_atom, boxed_tensor, shared_boxes = boxes
        rows = cute.size(shared_boxes, mode=[0])
        boxed = (box_atom, *_tiles(box_atom, boxed_tensor, shared_boxes, rows, (0, cute.make_layout(1))))
    return whole, boxed, number


def _tiles(atom: Any, tensor: cute.Tensor, shared: cute.Tensor, extent: int, sharer: Any) -> tuple[Any, Any]:
    """From where and to where a TMA atom copies: (its box, tiles of `extent` rows, stages of K[, batch]), (its box,
    places in shared memory)."""
    tail_modes = (None,) * (cute.rank(tensor) - 2)
    tiled = cute.local_tile(tensor, (extent, cute.size(shared, mode=[1])), (None, None, *tail_modes))
    to, source = cpasync.tma_partition(atom, *sharer, cute.group_modes(shared, 0, 2), cute.group_modes(tiled, 0, 2))
    return source, to


@cute.jit
def _load_tile(plan: cutlass.Constexpr, operands: Any, barriers: Any, at: Any, of: Any, inside: Any) -> Any:
    """Fill as many stages as a tile has; return the next one. `of` is the tile, its first stage along K and how many,
    `inside` how many rows of A it has inside M, or None to load them all."""
    stage, phase = at
    place, first_k, count = of
    for k in cutlass.range(count, unroll=1):
        stage, phase = _load(plan, operands, barriers, (stage, phase), (place, first_k + k), inside)
    return stage, phase


@cute.jit
def _load(plan: cutlass.Constexpr, operands: Any, barriers: Any, at: Any, of: Any, inside: Any) -> Any:
    """Fill a stage with one of a tile's; return the next one."""
    full, empty = barriers
    stage, phase = at
    (row, column, batch), k = of
    cute.arch.mbarrier_wait(empty + stage, phase)
    bar = full + stage
    boxes = plan.boxes if cutlass.const_expr(inside is None) else plan.boxes_inside(inside)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bar, plan.stage_bytes(boxes))
    _bring(plan, operands[0], (row, k, *batch), (stage, bar), inside)
    _bring(plan, operands[1], (column, k, *batch), (stage, bar), inside)
    return next_stage(plan, stage, phase)


@cute.jit
def _bring(plan: cutlass.Constexpr, operand: Any, source: Any, target: Any, inside: Any) -> None:
    """Load this CTA's share of an operand's tile, for all that share it."""
    (atom, tiles, to), boxed, sharer, mask = operand
    stage, bar = target
    if cutlass.const_expr(boxed is None or inside is None):
        cute.copy(atom, tiles[(None, *source)], to[None, stage], tma_bar_ptr=bar, mcast_mask=mask)
    else:
        tile, *rest = source
        box_atom, from_boxes, to_boxes = boxed
        boxes, mine = plan.boxes_inside(inside), plan.boxes_of(sharer)
        for i in cutlass.range_constexpr(len(mine)):
            if mine[i] < boxes:
                part = from_boxes[(None, tile * plan.boxes + mine[i], *rest)]
                place = to_boxes[None, stage * plan.boxes + mine[i]]
                cute.copy(box_atom, part, place, tma_bar_ptr=bar, mcast_mask=mask)


def next_stage(plan: Plan, stage: Any, phase: Any) -> tuple[Any, Any]:
    """The stage after this one, without a branch."""
    stage = stage + 1
    around = stage == plan.stages
    return cutlass.select_(around, cutlass.Int32(0), stage), cutlass.select_(around, phase ^ 1, phase)
