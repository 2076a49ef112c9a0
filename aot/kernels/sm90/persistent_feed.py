"""How `persistent.Persistent` brings A and B to shared memory: operands' TMA atoms and stages, and the loading warp.

An operand is its TMA atom, its tensor and its stages. Rows and columns are WGMMA's, as in `persistent`.
"""

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
) -> Any:
    """The TMA atom, the tensor and the stages in shared memory of an operand that `sharers` CTAs load together."""
    element = x.element_type
    tile_k = STAGE_BYTES_OF_K * 8 // element.width
    kinds = warpgroup.SmemLayoutAtomKind
    k_major = major == OperandMajorMode.K
    atom = warpgroup.make_smem_layout_atom(kinds.K_SW128 if k_major else kinds.MN_SW128, element)
    shape = (extent, tile_k, plan.stages)
    layout = cute.tile_to_shape(atom, shape, (0, 1, 2) if k_major else (1, 0, 2))
    load = cpasync.CopyBulkTensorTileG2SMulticastOp() if sharers > 1 else cpasync.CopyBulkTensorTileG2SOp()
    tma_atom, tma = cpasync.make_tiled_tma_atom(load, x, cute.select(layout, [0, 1]), (extent, tile_k), sharers)
    return tma_atom, tma, layout


@cute.jit
def feed(
    plan: cutlass.Constexpr, load_rows: Any, load_columns: Any, barriers: Any, tiles: Any, member: Any, places: Any
) -> None:
    """The loading warp: keep every stage full. `tiles` are those of the CTA's work, `member` its place in its
    cluster."""
    rows_atom, rows, shared_rows = load_rows
    columns_atom, columns, shared_columns = load_columns
    tile_k = cute.size(shared_rows, mode=[1])
    tail_modes = (None,) * (cute.rank(rows) - 2)
    tiled_rows = cute.local_tile(rows, (plan.rows, tile_k), (None, None, *tail_modes))
    tiled_columns = cute.local_tile(columns, (plan.columns, tile_k), (None, None, *tail_modes))
    to_rows, from_rows = cpasync.tma_partition(
        rows_atom,
        member[1],
        cute.make_layout(plan.cluster_columns),
        cute.group_modes(shared_rows, 0, 2),
        cute.group_modes(tiled_rows, 0, 2),
    )
    to_columns, from_columns = cpasync.tma_partition(
        columns_atom,
        member[0],
        cute.make_layout(plan.cluster_rows),
        cute.group_modes(shared_columns, 0, 2),
        cute.group_modes(tiled_columns, 0, 2),
    )
    # Who shares these rows is in the same row of the cluster's grid of CTAs, which counts rows first.
    rows_mask, columns_mask = None, None
    if cutlass.const_expr(plan.cluster_columns > 1):
        every = sum(1 << (other * plan.cluster_rows) for other in range(plan.cluster_columns))
        rows_mask = cutlass.Int16(every) << cutlass.Int16(member[0])
    if cutlass.const_expr(plan.cluster_rows > 1):
        every = (1 << plan.cluster_rows) - 1
        columns_mask = cutlass.Int16(every) << cutlass.Int16(member[1] * plan.cluster_rows)

    operands = (rows_atom, from_rows, to_rows, rows_mask), (columns_atom, from_columns, to_columns, columns_mask)
    block, _, _ = cute.arch.block_idx()
    blocks, _, _ = cute.arch.grid_dim()
    stage = cutlass.Int32(0)
    phase = cutlass.Int32(1)  # the first round finds every stage empty
    for index in cutlass.range(block // plan.cluster, tiles[2], blocks // plan.cluster, unroll=1):
        tile, first_k, count_k, _ = item(plan, index, tiles)
        row, column, batch = place_of(places, tile)
        tail = (batch,) if cutlass.const_expr(cute.rank(rows) == 3) else ()
        for k in cutlass.range(count_k + (plan.spare if plan.split_k > 1 else 0), unroll=1):
            at = (row, column, first_k + k, *tail)
            stage, phase = _load(plan, operands, barriers, (stage, phase), at)
        if cutlass.const_expr(plan.split_k > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
            await_gathered()
    if cutlass.const_expr(plan.split_k == 1):
        for _ in cutlass.range_constexpr(plan.spare):
            tail = (0,) if cutlass.const_expr(cute.rank(rows) == 3) else ()
            stage, phase = _load(plan, operands, barriers, (stage, phase), (0, 0, _BEYOND, *tail))


@cute.jit
def _load(plan: cutlass.Constexpr, operands: Any, barriers: Any, at: Any, place: Any) -> Any:
    """Fill a stage with what `place` (rows, columns, K[, batch]) counts in tiles; return the next one."""
    (rows_atom, from_rows, to_rows, rows_mask), (columns_atom, from_columns, to_columns, columns_mask) = operands
    full, empty = barriers
    stage, phase = at
    row, column, *rest = place
    cute.arch.mbarrier_wait(empty + stage, phase)
    bar = full + stage
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(bar, (plan.rows + plan.columns) * STAGE_BYTES_OF_K)
    source = from_rows[(None, row, *rest)]
    cute.copy(rows_atom, source, to_rows[None, stage], tma_bar_ptr=bar, mcast_mask=rows_mask)
    source = from_columns[(None, column, *rest)]
    cute.copy(columns_atom, source, to_columns[None, stage], tma_bar_ptr=bar, mcast_mask=columns_mask)
    return next_stage(plan, stage, phase)


def next_stage(plan: Plan, stage: Any, phase: Any) -> tuple[Any, Any]:
    """The stage after this one, without a branch."""
    stage = stage + 1
    around = stage == plan.stages
    return cutlass.select_(around, cutlass.Int32(0), stage), cutlass.select_(around, phase ^ 1, phase)
