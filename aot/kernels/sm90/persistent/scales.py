"""What scales the accumulators of a tile: fetched while the mainloop runs, used in the epilogue.

A thread's scales along WGMMA's M side are two for each atom of 64 rows and stay in registers. Those along its N side
are more than there is room for: each warp group has them copied to shared memory. Knows nothing of scales of blocks,
which the mainloop applies (`promotion`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from ..sizes import WARP_GROUP
from .epilogue_operands import EpilogueOperands
from .pipeline import meet_in_epilogue
from .plan import CONSUMERS, MAXIMA, Plan
from .scheduler import TileCoord


def allocate(plan: Plan, smem: cutlass.memory.SmemAllocator) -> Any:
    """Room for all warp groups' scales along columns, or for what they tell each other to make D's, or None."""
    count = MAXIMA if plan.form.quantises else CONSUMERS * plan.shared_scales
    return smem.allocate_array(cutlass.Float32, count, byte_alignment=16) if count else None


@dataclass(frozen=True)
class Scales:
    """The scales of a tile, on their way; nothing where there are none, or where accumulators have theirs before.

    `of_rows` has for each atom of 64 rows that is stored a pair, or one for gates and one for their partners;
    `of_columns` is (column of the warp group's part of D, 1, or gate and partner) in shared memory.
    """

    of_rows: list[list[list[Any]]]
    of_columns: Any

    @classmethod
    def of(cls, plan: Plan, operands: EpilogueOperands, coord: TileCoord) -> Scales:
        """Begin to fetch those of the tile `coord`."""
        if plan.form.scaling == "tensor":
            return cls([[[operands.scale_a[0] * operands.scale_b[0]] * 2] * 2] * plan.m_atoms, None)
        if plan.form.scaling != "row_column":
            return cls([], None)
        if plan.swap:
            of_rows = [operands.channels_of_rows(operands.scale_b, coord, atom) for atom in range(plan.out_atoms)]
        else:
            rows = [operands.first_row(coord, atom) + operands.row for atom in range(plan.m_atoms)]
            of_rows = [[operands.of_tokens(row, 8)] * 2 for row in rows]
        return cls(of_rows, _copy(plan, operands, coord))

    def arrive(self, group: Any) -> None:
        """Wait until all threads of consumer warp group `group` find them."""
        if self.of_columns is not None:
            cute.arch.cp_async_wait_group(0)
            meet_in_epilogue(group)

    def of_pair(self, number: Any) -> list[list[Any]]:
        """Those of columns 2 `number` and 2 `number` + 1, for their sums, or for their gates and then partners."""
        load = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=64)
        found = []
        for lane in range(cute.size(self.of_columns, mode=[1])):
            pairs = cute.zipped_divide(self.of_columns[None, lane], (2,))
            values = cute.make_rmem_tensor((2,), cutlass.Float32)
            cute.copy(load, pairs[None, number], values)
            found.append([values[0], values[1]])
        return found


@cute.jit
def _copy(plan: cutlass.Constexpr, operands: EpilogueOperands, coord: TileCoord) -> cute.Tensor:
    """Begin to copy the scales of a warp group's columns to shared memory, and say where they will be."""
    lanes = 2 if plan.form.gated and not plan.swap else 1
    width = plan.shared_scales // lanes
    everything = cute.make_tensor(operands.shared_scales, cute.make_layout((width, lanes, CONSUMERS)))
    mine = everything[None, None, operands.group]
    scales = operands.scale_a if plan.swap else operands.scale_b
    last = cute.size(scales) - 1
    first = operands.first_column(coord, 0)
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), cutlass.Float32, num_bits_per_copy=32)
    for start in cutlass.range_constexpr(0, plan.shared_scales, WARP_GROUP):
        at = operands.thread + start
        if at < plan.shared_scales:
            lane, column = at // width, at % width
            number = first + column
            if cutlass.const_expr(lanes > 1 and operands.parts.interleaved):
                number = 2 * number + lane
            elif cutlass.const_expr(lanes > 1):
                number = operands.n // 2 * lane + number
            source = cute.local_tile(scales, (1,), (cutlass.min(number, last),))
            cute.copy(atom, source, cute.local_tile(mine, (1, 1), (column, lane))[None, 0])
    cute.arch.cp_async_commit_group()
    return mine
