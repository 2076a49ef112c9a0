"""Which rows of B make up a tile of `small_m.SmallM`, and in what order.

Plainly, a tile is `tile_n` rows one after another. Where the epilogue is gated it is groups of 16, eight gates and then
the eight ups that go with them, so that both are at hand where columns of D are made. TMA loads that order by itself
from a view of B with one more mode for gate or up.
"""

from typing import Any

import cutlass
from cutlass import cute

from runtime.gemm.signature import Epilogue

from .choices import HALF_GROUP as _HALF
from .choices import Form


class Rows:
    """The rows of tiles of `tile_n`."""

    def __init__(self, tile_n: int, form: Form) -> None:
        self.tile_n, self.gated = tile_n, form.gated
        self.interleaved = Epilogue.of(form.epilogue).interleaved
        self.groups = tile_n // (2 * _HALF)

    def view(self, b: cute.Tensor) -> cute.Tensor:
        """B as TMA is to see it: (N, K), or (8, 2, N / 16, K) where gated, and perhaps a batch."""
        if not self.gated:
            return b
        n, row = b.shape[0], b.stride[0]
        steps = (2 * row, row, 2 * _HALF * row) if self.interleaved else (row, n // 2 * row, _HALF * row)
        layout = cute.make_layout((_HALF, 2, n // (2 * _HALF), *b.shape[1:]), stride=(*steps, *b.stride[1:]))
        return cute.make_tensor(b.iterator, layout)

    def tiler(self, tile_k: int) -> tuple[int, ...]:
        """The shape of a tile of `view`."""
        return (_HALF, 2, self.groups, tile_k) if self.gated else (self.tile_n, tile_k)

    def shared(self, layout: cute.ComposedLayout, tile_k: int) -> cute.ComposedLayout:
        """Where a tile of `view` goes in one stage of shared memory, (tile_n, tile_k, stages)."""
        if not self.gated:
            return cute.select(layout, [0, 1])
        atom_k = cute.size(layout.outer, mode=[1, 0])
        by_row = (atom_k, _HALF * atom_k, 2 * _HALF * atom_k)
        outer = cute.make_layout(
            (*self.tiler(tile_k)[:3], (atom_k, tile_k // atom_k)), stride=(*by_row, (1, self.tile_n * atom_k))
        )
        return cute.make_composed_layout(layout.inner, 0, outer)

    def tiles(self, b: cute.Tensor, tile_k: int, tile: cutlass.Int32, batch: tuple[Any, ...]) -> cute.Tensor:
        """(rows and K, tiles of K) of one tile of the TMA tensor of `view`, at `batch` if it has one."""
        if not self.gated:
            return cute.group_modes(cute.local_tile(b, (self.tile_n, tile_k), (tile, None, *batch)), 0, 2)
        return cute.group_modes(cute.local_tile(b, self.tiler(tile_k), (0, 0, tile, None, *batch)), 0, 4)
