"""What `persistent.Persistent` does with the partial sums of 8-bit products: f32 registers take them over.

Hopper's tensor core keeps about 14 bits of a sum of 8-bit products, so it sums up a few stages only.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from runtime.signature import SCALE_BLOCK

from .persistent_choices import WGMMA_ROWS, Plan


class Blocks:
    """The scales of one block of K for a thread's rows and columns, where scaling is "block"; else nothing."""

    def __init__(self, plan: Plan, fused: Any, place: Any, block_k: Any) -> None:
        self.of_rows: list[list[Any]] = []
        self.of_columns: list[Any] = []
        if plan.form.scaling == "block":
            self.of_rows, self.of_columns = _load(plan, fused, place, block_k)


def _load(plan: Plan, fused: Any, place: Any, block_k: Any) -> tuple[list[list[Any]], list[Any]]:
    """Scales of a thread's two rows of each block of 64, and of each block of B that the tile has.

    A tile's columns lie within one block of B, or are whole blocks. With gates concatenated before what they gate
    there are two: the gates' block, and the other one.
    """
    rows = []
    for block in range(plan.blocks):
        first = fused.first_row(place, block)
        rows.append([fused.scale_a_of_block(first + 8 * half, block_k) for half in range(2)])
    columns = []
    first = place[1] * plan.columns
    if plan.form.gated and "_interleaved" not in plan.form.epilogue:
        first = place[1] * plan.out_columns
        columns = [fused.scale_b_of_block(start, block_k) for start in (first, fused.extents[1] // 2 + first)]
    else:
        for start in range(0, plan.columns, SCALE_BLOCK):
            columns.append(fused.scale_b_of_block(first + start, block_k))
    return rows, columns


def promote(plan: Plan, total: cute.Tensor, partial: cute.Tensor, scales: Blocks, first: bool) -> None:
    """Add partial sums to the total, each times its scales if there are any, or begin the total with them."""
    add = _add_here if plan.sets > 1 else _add
    if not scales.of_rows:
        for i in range(cute.size(total)):
            total[i] = partial[i] if first else add(total[i], partial[i], None)
        return
    by_gate = plan.form.gated and "_interleaved" not in plan.form.epilogue
    width = plan.columns // plan.parts[1]
    each = WGMMA_ROWS * width // 128
    for block in range(plan.blocks):
        both = [[row * column for column in scales.of_columns] for row in scales.of_rows[block]]
        for i in range(each):
            column = i // 4 % 2 if by_gate else i // 4 * 8 // SCALE_BLOCK
            at, scale = block * each + i, both[i // 2 % 2][column]
            total[at] = partial[at] * scale if first else add(total[at], partial[at], scale)


def _add(total: Any, partial: Any, scale: Any) -> Any:
    """A partial sum, perhaps times a scale, added to the total."""
    return total + (partial if scale is None else partial * scale)


def _add_here(total: Any, partial: Any, scale: Any) -> Any:
    """The same, and before any WGMMA that follows: else the compiler moves it behind those that reuse the registers of
    `partial`, copies these for it, and ptxas lets no products overlap."""
    operands = [cutlass.Float32(x).ir_value() for x in (total, partial, scale) if x is not None]
    code = "add.f32 $0, $1, $2;" if scale is None else "fma.rn.f32 $0, $2, $3, $1;"
    constraints = ",".join(["=f"] + ["f"] * len(operands))
    return cutlass.Float32(llvm.inline_asm(T.f32(), operands, code, constraints, has_side_effects=True))
