"""A, B and D as a persistent kernel sees them: order of their modes, TMA atoms, layouts of stages and epilogue tiles.

Rows and columns are WGMMA's. Knows nothing of who loads or stores.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ..sizes import SWIZZLE_ATOM_ROWS, WGMMA_ROWS
from .plan import CONSUMERS, STAGE_BYTES_OF_K, Plan


def batch_last(x: Any) -> Any:
    """A tensor, if there is one, with its batch, if it has one, as the last mode."""
    if x is None or cute.rank(x) == 2:
        return x
    return cute.make_tensor(x.iterator, cute.select(x.layout, [1, 2, 0]))


def gate_beside_up(plan: Plan, b: cute.Tensor) -> cute.Tensor:
    """B with its rows in another order: some that make gates, then as many that make what they gate, and so on.

    WGMMA then leaves a gate and its partner to the same thread: 8 of each where columns of D are WGMMA's columns, and
    an atom of each where they are its rows. Where tiles are ragged, (all that make gates, 2), of which a tile takes a
    part of each.
    """
    row = b.stride[0]
    extent = cute.size(b, mode=[0])
    interleaved = "_interleaved" in plan.form.epilogue
    if plan.ragged:
        lanes = (2 * row, row) if interleaved else (row, extent // 2 * row)
        layout = cute.make_layout(((extent // 2, 2), *b.shape[1:]), stride=(lanes, *b.stride[1:]))
        return cute.make_tensor(b.iterator, layout)
    each = plan.gates_in_turn
    strides = (2 * row, row, 2 * each * row) if interleaved else (row, extent // 2 * row, each * row)
    shape = ((each, 2, extent // (2 * each)), *b.shape[1:])
    return cute.make_tensor(b.iterator, cute.make_layout(shape, stride=(strides, *b.stride[1:])))


def major_of_b(plan: Plan) -> OperandMajorMode:
    """How the operand on WGMMA's N side lies in memory."""
    return OperandMajorMode.MN if plan.form.b_major == "n" else OperandMajorMode.K


def row_operand(plan: Plan, x: cute.Tensor) -> Any:
    """What `_operand` says of the operand on WGMMA's M side."""
    in_turn, _ = plan.loads_in_turn
    return _operand(plan, x, plan.box_rows, plan.cluster_columns, OperandMajorMode.K, in_turn)


def column_operand(plan: Plan, x: cute.Tensor) -> Any:
    """What `_operand` says of the operand on WGMMA's N side."""
    _, in_turn = plan.loads_in_turn
    return _operand(plan, x, plan.columns, plan.cluster_rows, major_of_b(plan), in_turn)


@cute.jit
def _operand(
    plan: cutlass.Constexpr,
    x: cute.Tensor,
    extent: cutlass.Constexpr,
    multicast: cutlass.Constexpr,
    major: cutlass.Constexpr,
    in_turn: cutlass.Constexpr,
) -> Any:
    """The TMA atom, the tensor and the layout of stages, (extent, K, stages), of an operand whose tiles `multicast`
    CTAs load together, a share each or `in_turn`."""
    layout = stage_layout(plan, x.element_type, cute.size(extent), major)
    tile_k = STAGE_BYTES_OF_K * 8 // x.element_type.width
    load = cpasync.CopyBulkTensorTileG2SMulticastOp() if multicast > 1 else cpasync.CopyBulkTensorTileG2SOp()
    shares = 1 if in_turn else multicast
    tma_atom, tma = cpasync.make_tiled_tma_atom(load, x, cute.select(layout, [0, 1]), (extent, tile_k), shares)
    return tma_atom, tma, layout


def stage_layout(plan: Plan, element: Any, extent: int, major: OperandMajorMode = OperandMajorMode.K) -> Any:
    """The layout of an operand's stages in shared memory, (extent, K, stages), as TMA writes and WGMMA reads them."""
    kinds = warpgroup.SmemLayoutAtomKind
    k_major = major == OperandMajorMode.K
    atom = warpgroup.make_smem_layout_atom(kinds.K_SW128 if k_major else kinds.MN_SW128, element)
    shape = (extent, STAGE_BYTES_OF_K * 8 // element.width, plan.stages)
    return cute.tile_to_shape(atom, shape, (0, 1, 2) if k_major else (1, 0, 2))


def multiplied_rows(plan: Plan, rows: cute.Tensor) -> cute.Tensor:
    """Stages of rows, (rows, K, stages) in shared memory, as WGMMA reads them: those of a ragged tile by whole atoms,
    an atom of gates before the atom of what they gate, which reach into what follows."""
    if not plan.ragged:
        return rows
    k = cute.size(rows, mode=[1])
    of_atom, by_row = (SWIZZLE_ATOM_ROWS, WGMMA_ROWS // SWIZZLE_ATOM_ROWS), (k, SWIZZLE_ATOM_ROWS * k)
    parts = 2 if plan.pairs_atoms else 1
    atoms, by_atom = (parts, plan.rows // WGMMA_ROWS // parts), (plan.out_rows * k, WGMMA_ROWS * k)
    shape, stride = ((*of_atom, *atoms), k, plan.stages), ((*by_row, *by_atom), 1, plan.loaded_rows * k)
    return cute.make_tensor(rows.iterator, cute.make_layout(shape, stride=stride))


def gathered_operand(plan: Plan, a: cute.Tensor, indices: cute.Tensor) -> Any:
    """What stands for A where its rows are gathered: no TMA atom, A in memory, the layout of stages, and the indices
    that say which row of A each row of D is made of."""
    return None, a, stage_layout(plan, a.element_type, plan.tokens), indices


def output(plan: Plan, d: cute.Tensor) -> Any:
    """The TMA atom, the tensor and the layout of epilogue tiles of D, (rows, columns, buffers of all warp groups)."""
    tile = (WGMMA_ROWS, plan.epilogue_tile_columns)
    layout = _epilogue_tile_layout(tile, d.element_type, plan.swap, CONSUMERS * plan.output_buffers)
    store = cpasync.CopyBulkTensorTileS2GOp()
    return *cpasync.make_tiled_tma_atom(store, d, cute.select(layout, [0, 1]), tile), layout


def _epilogue_tile_layout(tile: tuple[int, int], element: Any, transposed: bool, buffers: int) -> cute.ComposedLayout:
    kinds = warpgroup.SmemLayoutAtomKind
    contiguous_bytes = tile[0 if transposed else 1] * element.width // 8
    if contiguous_bytes // 16 % 2:
        shape = (*tile, buffers)
        plain = cute.make_layout(shape, stride=(tile[1], 1, tile[0] * tile[1]))
        return cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, plain)
    swizzles = {128: (kinds.K_SW128, kinds.MN_SW128), 64: (kinds.K_SW64, kinds.MN_SW64), 32: (kinds.K_SW32, None)}
    atom = warpgroup.make_smem_layout_atom(swizzles[contiguous_bytes][transposed], element)
    return cute.tile_to_shape(atom, (*tile, buffers), (0, 1, 2))
