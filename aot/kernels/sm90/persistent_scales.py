"""What multiplies the sums of a tile in `persistent.Persistent`: fetched while they are summed up, used at its end.

A thread's scales along WGMMA's M side are two for each block of 64 rows and stay in registers. Those along its N side
are more than there is room for: each warpgroup has them copied to shared memory.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from .persistent_choices import WARPGROUPS, Plan

_WARPGROUP = 128


def allocate(plan: Plan, smem: cutlass.memory.SmemAllocator) -> Any:
    """Room for all warpgroups' scales along columns, or None."""
    if not plan.shared_scales:
        return None
    return smem.allocate_array(cutlass.Float32, WARPGROUPS * plan.shared_scales, byte_alignment=16)


class Scales:
    """The scales of a tile, on their way; nothing where there are none, or where sums have theirs before.

    `of_rows` has a pair for each block of 64 rows, `of_columns` is (column of the warpgroup's part of D, 1, or gate and
    partner) in shared memory.
    """

    def __init__(self, plan: Plan, fused: Any, place: Any) -> None:
        self.of_rows: list[list[Any]] = []
        self.of_columns: Any = None
        if plan.form.scaling == "tensor":
            self.of_rows = [[fused.scale_a[0] * fused.scale_b[0]] * 2] * plan.blocks
        if plan.form.scaling == "row_column":
            rows = [fused.first_row(place, block) for block in range(plan.blocks)]
            self.of_rows = [
                fused.of_channels(fused.scale_b, row, 8) if plan.swap else fused.of_tokens(row, 8) for row in rows
            ]
            self.of_columns = _copy(plan, fused, place)

    def arrive(self, barrier: Any) -> None:
        """Wait until all threads of a warpgroup find them."""
        if self.of_columns is not None:
            cute.arch.cp_async_wait_group(0)
            cute.arch.barrier(barrier_id=barrier, number_of_threads=_WARPGROUP)

    def of_pair(self, number: Any) -> list[list[Any]]:
        """Those of the columns 2 `number` and 2 `number` + 1, for their sums, or for their gates and then partners."""
        load = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=64)
        found = []
        for lane in range(cute.size(self.of_columns, mode=[1])):
            pairs = cute.zipped_divide(self.of_columns[None, lane], (2,))
            values = cute.make_rmem_tensor((2,), cutlass.Float32)
            cute.copy(load, pairs[None, number], values)
            found.append([values[0], values[1]])
        return found


@cute.jit
def _copy(plan: cutlass.Constexpr, fused: Any, place: Any) -> cute.Tensor:
    """Begin to copy the scales of a warpgroup's columns to shared memory, and say where they will be."""
    lanes = 2 if plan.form.gated else 1
    width = plan.shared_scales // lanes
    everything = cute.make_tensor(fused.shared, cute.make_layout((width, lanes, WARPGROUPS)))
    mine = everything[None, None, fused.group]
    scales = fused.scale_a if plan.swap else fused.scale_b
    last = cute.size(scales) - 1
    first = fused.piece_column(place, 0) * plan.piece_columns
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), cutlass.Float32, num_bits_per_copy=32)
    for start in cutlass.range_constexpr(0, plan.shared_scales, _WARPGROUP):
        at = fused.thread + start
        if at < plan.shared_scales:
            lane, column = at // width, at % width
            number = first + column
            if cutlass.const_expr(fused.parts.interleaved):
                number = 2 * number + lane
            elif cutlass.const_expr(lanes > 1):
                number = fused.extents[1] // 2 * lane + number
            source = cute.local_tile(scales, (1,), (cutlass.min(number, last),))
            cute.copy(atom, source, cute.local_tile(mine, (1, 1), (column, lane))[None, 0])
    cute.arch.cp_async_commit_group()
    return mine
