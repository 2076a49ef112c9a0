"""What a thread has of an epilogue tile, over scales that both consumer warp groups make together.

128 columns of D share a scale of each row. Each warp group has 64 of them: it finds the largest magnitude of its rows,
tells the other by shared memory, and both take the larger one. Knows nothing of how values are computed or stored.
"""

from typing import Any

import cutlass
from cutlass import cute

from ...amax import inverse_of, over_threads, scale_of
from ..sizes import WGMMA_ROWS
from .epilogue_operands import EpilogueOperands
from .output import EpilogueTile
from .pipeline import meet_to_scale
from .plan import CONSUMERS
from .scheduler import TileCoord

_QUAD = 4  # threads that have the same rows
_ROWS_APART = 8  # a thread's two rows


def quantised(operands: EpilogueOperands, computed: list[Any], tile: EpilogueTile) -> list[Any]:
    """The f32 values `computed` of an epilogue tile, in the order of WGMMA's accumulators, over their scales, which are
    written where rows are the tile's to store."""
    told = cute.make_tensor(operands.shared_scales, cute.make_layout((WGMMA_ROWS, CONSUMERS)))
    rows = [operands.row + _ROWS_APART * half for half in range(2)]
    for half, row in enumerate(rows):
        largest = cutlass.Float32(0.0)
        for i, x in enumerate(computed):
            if i // 2 % 2 == half:
                largest = cute.arch.fmax(largest, cute.math.absf(x))
        _tell(operands, told, row, over_threads(largest, _QUAD))
    meet_to_scale()
    both = [cute.arch.fmax(told[row, 0], told[row, 1]) for row in rows]
    meet_to_scale()  # the next tile's are written there
    first = operands.first_row(tile.coord, tile.atom)
    for row, amax in zip(rows, both, strict=True):
        _write_scale(operands, tile.coord, first + row, amax)
    inverses = [inverse_of(amax) for amax in both]
    return [x * inverses[i // 2 % 2] for i, x in enumerate(computed)]


@cute.jit
def _tell(operands: EpilogueOperands, told: cute.Tensor, row: cutlass.Int32, largest: cutlass.Float32) -> None:
    """Say what this warp group's largest magnitude of a row of the tile is; one thread of a quad does."""
    group, is_first = operands.group, operands.column == 0
    if is_first:
        told[row, group] = largest


@cute.jit
def _write_scale(operands: EpilogueOperands, coord: TileCoord, row: cutlass.Int32, amax: cutlass.Float32) -> None:
    """Write the scale of a row of D; one thread does, of those of both warp groups that have the row. The last tile of
    a cluster may be behind all columns."""
    scales, column = operands.scale_d, coord.column
    is_mine = (operands.group == 0) & (operands.column == 0)
    is_there = (row < coord.end) & (column < cute.size(scales, mode=[1]))
    if is_mine & is_there:
        scales[row, column] = scale_of(amax)
