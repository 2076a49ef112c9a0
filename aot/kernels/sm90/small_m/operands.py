"""A and B as the kernel sees them: order of their modes, layouts of stages for TMA and for WGMMA, the tiled MMA.

Knows nothing of who loads or multiplies.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ..sizes import SWIZZLE_ATOM_BYTES, SWIZZLE_ATOM_ROWS, WGMMA_ROWS
from .plan import Plan

_WGMMA_BYTES = 32  # of K in an instruction


def batch_last(plan: Plan, tensor: cute.Tensor | None) -> cute.Tensor | None:
    """(rows, columns, batch) for (batch, rows, columns)."""
    if tensor is None or not plan.form.batched:
        return tensor
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [1, 2, 0]))


def tiled_mma(plan: Plan, element: Any) -> cute.TiledMma:
    """WGMMA, the rows on its M side spread over the consumer warp groups."""
    majors = [OperandMajorMode.K, OperandMajorMode.K]
    if plan.form.b_major == "n":
        majors[0 if plan.swapped else 1] = OperandMajorMode.MN
    shape = (WGMMA_ROWS, plan.sides.n, _WGMMA_BYTES * 8 // element.width)
    source = warpgroup.OperandSource.SMEM
    if element.width == 8:
        op: Any = warpgroup.MmaF8Op(element, element, cutlass.Float32, shape, source, *majors)
    else:
        op = warpgroup.MmaF16BF16Op(element, cutlass.Float32, shape, source, *majors)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (plan.consumers, 1, 1))


def m_side_layouts(plan: Plan, element: Any) -> tuple[Any, Any]:
    """See `_layouts`."""
    return _layouts(plan, element, plan.sides.m, plan.mma_rows, plan.swapped)


def n_side_layout(plan: Plan, element: Any) -> Any:
    """(rows, tile_k, stages) of the operand on WGMMA's N side in shared memory."""
    layout, _ = _layouts(plan, element, plan.sides.n, plan.sides.n, not plan.swapped)
    return layout


def _layouts(plan: Plan, element: Any, rows: int, mma_rows: int, of_weights: bool) -> tuple[Any, Any]:
    """(rows, tile_k, stages) of an operand in shared memory: as TMA writes it, and as WGMMA reads `mma_rows` of it.

    WGMMA wants whole atoms of 64 rows on its M side, which reach into what follows.
    """
    kinds = warpgroup.SmemLayoutAtomKind
    if of_weights and plan.form.b_major == "n":
        atom = warpgroup.make_smem_layout_atom(kinds.MN_SW128, element)
        layout = cute.tile_to_shape(atom, (rows, plan.tile_k, plan.stages), (1, 0, 2))
        return layout, layout
    atom = warpgroup.make_smem_layout_atom(kinds.K_SW128, element)
    layout = cute.tile_to_shape(atom, (rows, plan.tile_k, plan.stages), (0, 1, 2))
    by_row, by_k = _atoms(plan, element, mma_rows, rows)
    outer = cute.make_layout(
        (by_row.shape, by_k.shape, plan.stages), stride=(by_row.stride, by_k.stride, rows * plan.tile_k)
    )
    return layout, cute.make_composed_layout(layout.inner, 0, outer)


def box_layout(plan: Plan, element: Any) -> Any:
    """(rows, tile_k, boxes, stages) of A in shared memory, in the TMA boxes that are loaded at a time."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, element)
    atom_k = SWIZZLE_ATOM_BYTES * 8 // element.width
    by_row, by_k = _atoms(plan, element, plan.box_tokens, plan.tile_m)
    outer = cute.make_layout(
        (by_row.shape, by_k.shape, plan.boxes, plan.stages),
        stride=(by_row.stride, by_k.stride, plan.box_tokens * atom_k, plan.tile_m * plan.tile_k),
    )
    return cute.make_composed_layout(atom.inner, 0, outer)


def _atoms(plan: Plan, element: Any, rows: int, stage_rows: int) -> tuple[Any, Any]:
    """Rows and K of swizzle atoms for so many rows, of a stage of `stage_rows`."""
    atom_k = SWIZZLE_ATOM_BYTES * 8 // element.width
    by_row = cute.make_layout(
        (SWIZZLE_ATOM_ROWS, rows // SWIZZLE_ATOM_ROWS), stride=(atom_k, SWIZZLE_ATOM_ROWS * atom_k)
    )
    return by_row, cute.make_layout((atom_k, plan.tile_k // atom_k), stride=(1, stage_rows * atom_k))
