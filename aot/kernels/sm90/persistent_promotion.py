"""What `persistent.Persistent` does with the partial sums of 8-bit products: f32 registers take them over.

Hopper's tensor core keeps about 14 bits of a sum of 8-bit products, so it sums up a few stages only.
"""

from typing import Any

from cutlass import cute

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
    if not scales.of_rows:
        for i in range(cute.size(total)):
            total[i] = partial[i] if first else total[i] + partial[i]
        return
    by_gate = plan.form.gated and "_interleaved" not in plan.form.epilogue
    width = plan.columns // plan.parts[1]
    each = WGMMA_ROWS * width // 128
    for block in range(plan.blocks):
        both = [[row * column for column in scales.of_columns] for row in scales.of_rows[block]]
        for i in range(each):
            column = i // 4 % 2 if by_gate else i // 4 * 8 // SCALE_BLOCK
            scaled = partial[block * each + i] * both[i // 2 % 2][column]
            total[block * each + i] = scaled if first else total[block * each + i] + scaled
