"""The tile scheduler of a grouped GEMM: tiles of D by groups, whose ends only the device knows.

Tiles of one group follow each other, and of these the ones that read the same rows of B. Where a group's rows and tiles
begin is added up by one warp of each CTA, into shared memory; ends that fall, or exceed A's rows, are taken as the
largest end so far, or as A's last, so that whatever they are nothing is written outside D or twice with different bits.
Of masked rows each group's begin at the first of its own, and a count is taken as none or all where it is neither.

Knows nothing of what is done with a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from ..persistent.pipeline import ClusterCta
from ..persistent.plan import Plan
from ..persistent.scheduler import KTiles, TileCoord, WorkTile
from ..sizes import WARP
from .plan import MOST_GROUPS


class Groups(NamedTuple):
    """Where each group's rows, and its tiles, begin; and behind the last one where it ends. (groups + 1) in shared
    memory each. Of masked rows `rows` has, one further on, where each group's end."""

    rows: Any
    tiles: Any


class GroupedGrid(NamedTuple):
    """What there is to do: how many groups, clusters' tiles along N, items of work in all, and K tiles."""

    groups: Any
    tiles_along_n: Any
    work: Any


def allocate(smem: cutlass.memory.SmemAllocator) -> Groups:
    """Room for the most groups that there may be."""
    layout = cute.make_layout(MOST_GROUPS + 1)
    return Groups(*(smem.allocate_tensor(cutlass.Int32, layout, 16) for _ in Groups._fields))


@cute.jit
def add_up(
    plan: cutlass.Constexpr, groups: Groups, ends: cute.Tensor, m: cutlass.Int32, tiles_along_n: cutlass.Int32
) -> None:
    """One warp: fill `groups` from the end of each group in A's `m` rows, or from its count of them if masked."""
    lane = cute.arch.lane_idx()
    count = cute.size(ends)
    row, tile = cutlass.Int32(0), cutlass.Int32(0)  # where the groups of this round begin
    if lane == 0:
        groups.rows[0], groups.tiles[0] = row, tile
    for first in cutlass.range(0, count, WARP, unroll=1):
        group = first + lane
        end = row
        if group < count:
            end = cutlass.max(cutlass.min(ends[group], m), row)
        begin = row
        if cutlass.const_expr(not plan.form.masked):
            for step in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(end, 1 << step)
                if lane >= 1 << step:
                    end = cutlass.max(end, other)
            begin = cute.arch.shuffle_sync_up(end, 1)
            begin = cutlass.select_(lane == 0, row, begin)
        tiles = (end - begin + plan.tokens - 1) // plan.tokens * tiles_along_n
        for step in cutlass.range_constexpr(5):
            before = cute.arch.shuffle_sync_up(tiles, 1 << step)
            if lane >= 1 << step:
                tiles += before
        if group < count:
            groups.rows[group + 1], groups.tiles[group + 1] = end, tile + tiles
        if cutlass.const_expr(not plan.form.masked):
            row = cute.arch.shuffle_sync(end, WARP - 1)
        tile += cute.arch.shuffle_sync(tiles, WARP - 1)


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
        plan, groups = self.plan, self.groups
        group = cutlass.Int32(0)  # the last one that begins at this tile or before
        for step in (1 << bit for bit in reversed(range((MOST_GROUPS - 1).bit_length()))):
            later = cutlass.min(group + step, self.grid.groups - 1)
            group = cutlass.select_(groups.tiles[later] <= index, later, group)
        begin, end = (0 if plan.form.masked else groups.rows[group]), groups.rows[group + 1]
        along_m = (end - begin + plan.tokens - 1) // plan.tokens
        index -= groups.tiles[group]
        across = index // along_m
        first = begin + (index - across * along_m) * plan.tokens
        # Whole tiles end where the group does.
        first = cutlass.max(cutlass.min(first, end - plan.tokens), begin)
        across = across * plan.cluster_along_n + (self.cta.row if plan.swap else self.cta.column)
        row, column = (across, 0) if plan.swap else (0, across)
        return TileCoord(row, column, group, -first, end)
