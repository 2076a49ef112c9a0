"""Where in D a cluster's tiles are, without dividing: three divisions one after another take as long as a stage.

Tiles are taken a band at a time, down its rows or along its columns (`persistent_choices`), and by clusters of one GPC
in fours with "quads" (`persistent_gpc`).
"""

from typing import Any

import cutlass

from .persistent_choices import Plan
from .persistent_gpc import shifted


class Places:
    """The order of a grid's tiles, as one CTA sees it.

    `tiles` counts clusters' tiles along rows and columns, `member` is the CTA's place in its cluster, and `moved`, with
    "quads", what `persistent_gpc.shift` says of the cluster.
    """

    def __init__(self, plan: Plan, tiles: tuple[Any, Any], member: tuple[Any, Any], moved: Any, batched: bool) -> None:
        self.plan, self.tiles, self.member, self.moved, self.batched = plan, tiles, member, moved, batched
        self.along, self.others = tiles[::-1] if plan.along_columns else tiles
        # Where K is split a CTA has few tiles, and no registers to keep these in.
        self.of_band = self.of_last = None
        if plan.split_k == 1:
            self.of_band = _reciprocal(plan.band * self.others)
            self.of_last = _reciprocal(self.along - (self.along - 1) // plan.band * plan.band)


def place_of(places: Places, index: Any) -> tuple[Any, Any, Any]:
    """The CTA's tile of D as (rows, columns, batch), in the cluster's tile number `index`."""
    plan = places.plan
    if plan.quads:
        index = shifted(index, *places.moved)
    batch = cutlass.Int32(0)
    if places.batched:
        per_batch = places.tiles[0] * places.tiles[1]
        batch = index // per_batch
        index -= batch * per_batch
    row, column = _in_band(places, index)[:: -1 if plan.along_columns else 1]
    return row * plan.cluster_rows + places.member[0], column * plan.cluster_columns + places.member[1], batch


def _in_band(places: Places, index: Any) -> tuple[Any, Any]:
    """Tile `index` of those of a batch, a band at a time, whose tiles change first."""
    band, of_band = places.plan.band, places.plan.band * places.others
    before = _quotient(index, of_band, places.of_band)
    index -= before * of_band
    height = cutlass.min(places.along - before * band, band)
    of_height = None
    if places.of_last is not None:
        of_height = cutlass.select_(height == band, cutlass.Float32(1.0 / band), places.of_last)
    other = _quotient(index, height, of_height)
    return before * band + index - other * height, other


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
