"""Where rows of groups, and their tiles, begin: added up once by one warp of each CTA, from ends that only the device
knows.

Tiles of one group follow each other, and of these the ones that read the same rows of B. Ends that fall, or exceed A's
rows, are taken as the largest end so far, or as A's last, so that whatever they are nothing is written outside D. Of
masked rows each group's begin at the first of its own, and a count is taken as none or all where it is neither.

Knows nothing of what is done with a tile.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from .group_sizes import MOST_GROUPS

_WARP = 32
_GROUPS_OF_LANE = 4  # that a lane adds up before the warp does


class Groups(NamedTuple):
    """Where each group's rows, and its tiles, begin; and behind the last one where it ends. (groups + 1) in shared
    memory each. Of masked rows `rows` has, one further on, where each group's end."""

    rows: Any
    tiles: Any


class GroupTile(NamedTuple):
    """A tile: its group, the group's rows, and the tile's numbers along the group's rows and along N. With a `Pair`,
    whether the other CTA's has other rows of B."""

    group: Any
    begin: Any
    end: Any
    along_m: Any
    along_n: Any
    alone: Any = None


class Pair(NamedTuple):
    """A CTA of a pair, the first or the second, whose tiles are neighbours along a group's rows, or along N where these
    have a last tile without a neighbour; and how many tiles there are along N."""

    rank: Any
    tiles_along_n: Any


def allocate(smem: cutlass.memory.SmemAllocator) -> Groups:
    """Room for the most groups that there may be."""
    layout = cute.make_layout(MOST_GROUPS + 1)
    return Groups(*(smem.allocate_tensor(cutlass.Int32, layout, 16) for _ in Groups._fields))


@cute.jit
def add_up(
    tokens: cutlass.Constexpr,
    masked: cutlass.Constexpr,
    groups: Groups,
    ends: cute.Tensor,
    m: cutlass.Int32,
    tiles_along_n: cutlass.Int32,
    pairs: cutlass.Constexpr = False,
) -> None:
    """One warp: fill `groups` from the end of each group in A's `m` rows, or from its count of them if masked. A tile
    has `tokens` rows; if `pairs`, it is pairs of tiles that are counted."""
    lane = cute.arch.lane_idx()
    count = cute.size(ends)
    row, tile = cutlass.Int32(0), cutlass.Int32(0)  # where the groups of this round begin
    if lane == 0:
        groups.rows[0], groups.tiles[0] = row, tile
    for first in cutlass.range(0, count, _WARP * _GROUPS_OF_LANE, unroll=1):
        own = first + lane * _GROUPS_OF_LANE  # the lane's groups follow each other
        # All loads are under way before the first is used: a round takes as long as one.
        loaded = [ends[cutlass.min(own + i, count - 1)] for i in range(_GROUPS_OF_LANE)]
        found = [cutlass.max(cutlass.min(end, m), row) for end in loaded]
        begins = [row] * _GROUPS_OF_LANE
        if cutlass.const_expr(not masked):
            for i in cutlass.range_constexpr(1, _GROUPS_OF_LANE):
                found[i] = cutlass.max(found[i], found[i - 1])
            before = _scan(found[-1], lane, row, cutlass.max)
            found = [cutlass.max(end, before) for end in found]
            begins = [before, *found[:-1]]
        along_m = [(end - begin + tokens - 1) // tokens for begin, end in zip(begins, found, strict=True)]
        tiles = [_count(along, tiles_along_n, pairs) for along in along_m]
        for i in cutlass.range_constexpr(_GROUPS_OF_LANE):
            tiles[i] = cutlass.select_(own + i < count, tiles[i], cutlass.Int32(0))
            if cutlass.const_expr(i > 0):
                tiles[i] += tiles[i - 1]
        tile_before = _scan(tiles[-1], lane, cutlass.Int32(0), operator.add)
        for i in cutlass.range_constexpr(_GROUPS_OF_LANE):
            if own + i < count:
                groups.rows[own + i + 1], groups.tiles[own + i + 1] = found[i], tile + tile_before + tiles[i]
        if cutlass.const_expr(not masked):
            row = cute.arch.shuffle_sync(found[-1], _WARP - 1)
        tile += cute.arch.shuffle_sync(tile_before + tiles[-1], _WARP - 1)


def _count(along_m: Any, along_n: Any, pairs: bool) -> Any:
    """How many tiles a group has, or how many pairs of them."""
    if not pairs:
        return along_m * along_n
    return along_m // 2 * along_n + along_m % 2 * ((along_n + 1) // 2)


def tile_at(tokens: int, masked: bool, groups: Groups, count: Any, index: Any, pair: Pair | None = None) -> GroupTile:
    """Tile number `index` of those of `count` groups, which have `tokens` rows each; or a CTA's tile in pair number
    `index`."""
    group = cutlass.Int32(0)  # the last one that begins at this tile or before
    for step in (1 << bit for bit in reversed(range((MOST_GROUPS - 1).bit_length()))):
        later = cutlass.min(group + step, count - 1)
        group = cutlass.select_(groups.tiles[later] <= index, later, group)
    begin, end = (0 if masked else groups.rows[group]), groups.rows[group + 1]
    along_m = (end - begin + tokens - 1) // tokens
    index -= groups.tiles[group]
    if pair is None:
        along_n = index // along_m
        return GroupTile(group, begin, end, index - along_n * along_m, along_n)
    pairs = along_m // 2
    rest = index - pairs * pair.tiles_along_n
    alone = rest >= 0
    along_n = index // cutlass.max(pairs, 1)
    row = 2 * (index - along_n * pairs) + pair.rank
    row = cutlass.select_(alone, along_m - 1, row)
    along_n = cutlass.select_(alone, 2 * rest + pair.rank, along_n)
    return GroupTile(group, begin, end, row, along_n, alone)


def _scan(value: Any, lane: Any, first: Any, combine: Any) -> Any:
    """What `combine` makes of `first` and the values of the lanes before this one."""
    for step in range(5):
        other = cute.arch.shuffle_sync_up(value, 1 << step)
        value = cutlass.select_(lane >= 1 << step, combine(value, other), value)
    before = combine(cute.arch.shuffle_sync_up(value, 1), first)
    return cutlass.select_(lane == 0, first, before)
