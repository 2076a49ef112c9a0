"""The tile scheduler of a grouped GEMM: tiles of D by groups, whose ends only the device knows.

Where a group's rows and tiles begin is added up by one warp of each CTA (`groups`), which takes hostile ends so that
nothing is written outside D, or twice with different bits.

Knows nothing of what is done with a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass

from ...groups import Groups, Pair, tile_at
from ..persistent.pipeline import ClusterCta
from ..persistent.plan import Plan
from ..persistent.scheduler import KTiles, TileCoord, WorkTile


class GroupedGrid(NamedTuple):
    """What there is to do: how many groups, clusters' tiles along N, items of work in all, and K tiles."""

    groups: Any
    tiles_along_n: Any
    work: Any


@dataclass(frozen=True)
class GroupedScheduler:
    """The work of a grid, as one CTA sees it; what `aot.kernels.sm90.persistent.scheduler.TileScheduler` is to the
    persistent GEMM."""

    plan: Plan
    grid: GroupedGrid
    cta: ClusterCta
    k_tiles: KTiles
    groups: Groups

    def work_tile(self, index: Any) -> WorkTile:
        """Item `index` of the grid's work, a tile with all of K."""
        return WorkTile(index, self.k_tiles, None)

    def tile_coord(self, index: Any) -> TileCoord:
        """The CTA's tile of D, in the cluster's tile number `index`."""
        plan = self.plan
        pair = Pair(self.cta.row, self.grid.tiles_along_n) if plan.pairs_tiles else None
        tile = tile_at(plan.tokens, plan.form.masked, self.groups, self.grid.groups, index, pair)
        begin = tile.begin + tile.along_m * plan.tokens
        # Whole tiles end where the group does.
        first = cutlass.max(cutlass.min(begin, tile.end - plan.tokens), tile.begin)
        across = tile.along_n * plan.cluster_along_n + (self.cta.row if plan.swap else self.cta.column)
        row, column = (across, 0) if plan.swap else (0, across)
        return TileCoord(row, column, tile.group, -first, tile.end, begin, tile.alone)
