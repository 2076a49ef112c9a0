"""Which rows of B make up a tile, and in what order, as TMA loads them.

Plainly, a tile is `tile_n` rows one after another. Where the epilogue is gated it is groups of 16, eight gates and then
the eight ups that go with them, so that both are at hand where columns of D are made. TMA loads that order by itself
from a view of B with one more mode for gate or up. Knows nothing of stages beyond their layout.
"""

from typing import Any

import cutlass
from cutlass import cute

from .plan import HALF_GROUP as _HALF
from .plan import Plan


def view(plan: Plan, b: cute.Tensor) -> cute.Tensor:
    """B as TMA is to see it: (N, K), or (8, 2, N / 16, K) where gated, and perhaps a batch."""
    if not plan.form.gated:
        return b
    n, row = b.shape[0], b.stride[0]
    steps = (2 * row, row, 2 * _HALF * row) if plan.form.parts.interleaved else (row, n // 2 * row, _HALF * row)
    layout = cute.make_layout((_HALF, 2, n // (2 * _HALF), *b.shape[1:]), stride=(*steps, *b.stride[1:]))
    return cute.make_tensor(b.iterator, layout)


def tiler(plan: Plan) -> tuple[int, ...]:
    """The shape of a tile of `view`."""
    groups = plan.tile_n // (2 * _HALF)
    return (_HALF, 2, groups, plan.tile_k) if plan.form.gated else (plan.tile_n, plan.tile_k)


def shared(plan: Plan, layout: cute.ComposedLayout) -> cute.ComposedLayout:
    """Where a tile of `view` goes in one stage of shared memory, (tile_n, tile_k, stages)."""
    if not plan.form.gated:
        return cute.select(layout, [0, 1])
    atom_k = cute.size(layout.outer, mode=[1, 0])
    by_row = (atom_k, _HALF * atom_k, 2 * _HALF * atom_k)
    outer = cute.make_layout(
        (*tiler(plan)[:3], (atom_k, plan.tile_k // atom_k)), stride=(*by_row, (1, plan.tile_n * atom_k))
    )
    return cute.make_composed_layout(layout.inner, 0, outer)


def tiles(plan: Plan, b: cute.Tensor, tile: cutlass.Int32, batch: tuple[Any, ...]) -> cute.Tensor:
    """(rows and K, K tiles) of one tile of the TMA tensor of `view`, at `batch` if it has one."""
    if not plan.form.gated:
        return cute.group_modes(cute.local_tile(b, tiler(plan), (tile, None, *batch)), 0, 2)
    return cute.group_modes(cute.local_tile(b, tiler(plan), (0, 0, tile, None, *batch)), 0, 4)
