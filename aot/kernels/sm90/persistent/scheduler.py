"""The tile scheduler: which tiles of D a cluster takes, in which raster order, and which slice of K of them.

Coordinates come without dividing, as three divisions one after another take as long as a stage. Tiles follow each other
`Plan.raster_swizzle` at a time, down rows or along columns, and clusters of one GPC take fours of them with "quads"
(`gpc`). With `stream_k`, tiles of the last wave are cut along K (`stream_k`).

Knows nothing of what is done with a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from .gpc import GpcShift, gpc_shift, shifted
from .pipeline import ClusterCta
from .plan import Plan


class TileCoord(NamedTuple):
    """A CTA's tile of D: its numbers along rows and columns, its batch, by how many rows of A it begins before its
    place (`Plan.moved_up`), where the rows of A end that it makes D of, None where that is A's end, where those begin
    that no tile before it makes, None where nobody asks, and of `Plan.pairs_tiles` whether the cluster's other tile has
    other rows of B."""

    row: Any
    column: Any
    batch: Any
    moved_up: Any
    end: Any = None
    begin: Any = None
    alone: Any = None


class KTiles(NamedTuple):
    """A slice of K: its first K tile (a stage's columns), and how many there are."""

    first: Any
    count: Any


class Cluster(NamedTuple):
    """This cluster's number in the grid, and how many there are."""

    number: Any
    count: Any


class TileSlice(NamedTuple):
    """Which of the tiles that clusters share, which slice of its K, and of how many."""

    tile: Any
    number: Any
    slices: Any


class WorkTile(NamedTuple):
    """An item of a cluster's work: its tile's number in raster order, its slice of K, and where clusters share tiles,
    which slice that is."""

    index: Any
    k_tiles: KTiles
    shared: TileSlice | None


class StreamK(NamedTuple):
    """How the tiles of the last wave are shared: how many are not, and the slices of K of each other one."""

    whole_tiles: Any
    slices: Any


class Grid(NamedTuple):
    """What there is to do: M, clusters' tiles along rows and columns of D, items of work in all, and multiples of K
    tiles along K (`Plan.k_tile_multiple`)."""

    m: Any
    tile_rows: Any
    tile_columns: Any
    work: Any
    k_multiples: Any
    stream_k: StreamK | None


class _Reciprocals(NamedTuple):
    """Of the tiles that follow each other along one swizzle of the raster order: of a full swizzle's, and of the
    swizzle's own extent where it is the last one."""

    of_tiles: Any
    of_last: Any


@dataclass(frozen=True)
class TileScheduler:
    """The work of a grid, as one CTA sees it."""

    plan: Plan
    grid: Grid
    cta: ClusterCta
    k_tiles: KTiles  # of the CTA's slice
    shift: GpcShift | None  # with "quads"
    batched: bool
    reciprocals: _Reciprocals | None

    @classmethod
    def of(cls, plan: Plan, grid: Grid, block: Any, cta: ClusterCta, slice_k: Any, batched: bool) -> TileScheduler:
        """The scheduler of CTA `block` of the grid and `cta` of its cluster, which multiplies slice `slice_k` of K."""
        k_tiles = slice_of(plan, grid.k_multiples, slice_k)
        shift = gpc_shift(*_cluster_of(plan, block), grid.work) if plan.quads else None
        return cls(plan, grid, cta, k_tiles, shift, batched, _reciprocals(plan, grid))

    def work_tile(self, index: Any) -> WorkTile:
        """Item `index` of the grid's work.

        Neighbours have the same slice of different tiles, so that they read the same rows of A or B at the same time.
        """
        if self.grid.stream_k is None:
            return WorkTile(index, self.k_tiles, None)
        (whole, slices), count = self.grid.stream_k, self.k_tiles.count
        rest = cutlass.max(index - whole, 0)
        each = cutlass.max((self.grid.work - whole) // slices, 1)
        here = rest // each
        shared = rest - here * each
        cut = cutlass.select_(index >= whole, slices, cutlass.Int32(1))
        first = count * here // cut
        tile = cutlass.min(index, whole) + shared
        return WorkTile(tile, KTiles(first, count * (here + 1) // cut - first), TileSlice(shared, here, cut))

    def tile_coord(self, index: Any) -> TileCoord:
        """The CTA's tile of D, in the cluster's tile number `index` in raster order."""
        plan = self.plan
        if self.shift is not None:
            index = shifted(index, self.shift)
        batch = cutlass.Int32(0)
        if self.batched:
            per_batch = self.grid.tile_rows * self.grid.tile_columns
            batch = index // per_batch
            index -= batch * per_batch
        row, column = self._in_raster_order(index)[:: -1 if plan.raster_along_n else 1]
        row, column = row * plan.cluster_rows + self.cta.row, column * plan.cluster_columns + self.cta.column
        moved_up = plan.moved_up(column if plan.swap else row, self.grid.m, cutlass.min, cutlass.max)
        return TileCoord(row, column, batch, moved_up)

    def _in_raster_order(self, index: Any) -> tuple[Any, Any]:
        """Tile `index` of those of a batch: its number along the swizzled mode, which changes first, and the other."""
        along, others = _raster_extents(self.plan, self.grid)
        swizzle, tiles = self.plan.raster_swizzle, self.plan.raster_swizzle * others
        before = _quotient(index, tiles, self.reciprocals.of_tiles if self.reciprocals else None)
        index -= before * tiles
        extent = cutlass.min(along - before * swizzle, swizzle)
        reciprocal = None
        if self.reciprocals:
            full = extent == swizzle
            reciprocal = cutlass.select_(full, cutlass.Float32(1.0 / swizzle), self.reciprocals.of_last)
        other = _quotient(index, extent, reciprocal)
        return before * swizzle + index - other * extent, other


def this_cluster(plan: Plan) -> Cluster:
    """Which cluster of the grid runs this."""
    block, _, _ = cute.arch.block_idx()
    return _cluster_of(plan, block)


def _cluster_of(plan: Plan, block: Any) -> Cluster:
    """The cluster of CTA `block`."""
    blocks, _, _ = cute.arch.grid_dim()
    return Cluster(block // plan.cluster, blocks // plan.cluster)


def slice_of(plan: Plan, k_multiples: Any, slice_k: Any) -> KTiles:
    """Slice `slice_k` of K of `plan.split_k`, where K has `k_multiples` times `plan.k_tile_multiple` K tiles."""
    split, multiple = plan.split_k, plan.k_tile_multiple
    if split == 1:
        return KTiles(0, k_multiples * multiple)
    first = k_multiples * slice_k // split
    count = k_multiples * (slice_k + 1) // split - first
    return KTiles(count=count * multiple, first=first * multiple)


def share_last_wave(plan: Plan, tiles: Any, clusters: Any, k_tiles: Any) -> tuple[Any, StreamK]:
    """Items of work that so many tiles make on so many clusters, and how clusters share the tiles of the last wave."""
    whole = tiles // clusters * clusters
    rest = tiles - whole
    most = cutlass.min(clusters // cutlass.max(rest, 1), k_tiles // plan.least_slice)
    slices = cutlass.Int32(1)
    for count in plan.slices:
        slices = cutlass.select_(most >= count, cutlass.Int32(count), slices)
    return whole + rest * slices, StreamK(whole, slices)


def _raster_extents(plan: Plan, grid: Grid) -> tuple[Any, Any]:
    """Clusters' tiles along the mode that is swizzled, and along the other."""
    return (grid.tile_columns, grid.tile_rows) if plan.raster_along_n else (grid.tile_rows, grid.tile_columns)


def _reciprocals(plan: Plan, grid: Grid) -> _Reciprocals | None:
    """None where K is split: a CTA then has few tiles, and no registers to keep these in."""
    if plan.split_k > 1:
        return None
    along, others = _raster_extents(plan, grid)
    swizzle = plan.raster_swizzle
    return _Reciprocals(_reciprocal(swizzle * others), _reciprocal(along - (along - 1) // swizzle * swizzle))


def _reciprocal(x: Any) -> Any:
    return cutlass.Float32(1.0) / cutlass.Int32(x).to(cutlass.Float32)


def _quotient(x: Any, divisor: Any, reciprocal: Any) -> Any:
    """`x` // `divisor`, by its reciprocal for x from 0 and quotients up to 2^21: x times that is off by less than 1."""
    if reciprocal is None:
        return x // divisor
    found = (cutlass.Int32(x).to(cutlass.Float32) * reciprocal).to(cutlass.Int32)
    rest = x - found * divisor
    found = cutlass.select_(rest < 0, found - 1, found)
    return cutlass.select_(rest >= divisor, found + 1, found)
