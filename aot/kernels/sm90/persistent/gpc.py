"""Which clusters are neighbours on the chip: those of one GPC, whose reads of the same lines L2 serves once.

Requests of SMs of one GPC for a line that is already asked for are merged on their way to L2, up to four of them
(counters lrc__* of ncu; docs/kernels/sm90_persistent.md has what it gains). What a cluster multicasts is not merged any
more, so it is the other operand that four clusters should read together.

In which order a GPU gives clusters to its GPCs was seen on H200s (`aot.kernels.sm90.h200`). Where the order is another,
tiles are still taken once each, and four that should be neighbours are not.

Knows of numbers of clusters and of work, not of tiles.
"""

from typing import Any, NamedTuple

import cutlass

from ..h200 import QUAD, ROUNDS


class GpcShift(NamedTuple):
    """How far a cluster moves along the work of each full wave, and its last item of work in a full wave."""

    by: Any
    last: Any


def gpc_shift(cluster: Any, clusters: Any, count: Any) -> GpcShift:
    """How cluster `cluster` of `clusters` moves, of `count` items in all, so that those of a GPC take four that follow
    each other.

    Without it a cluster has the items `cluster`, `cluster + clusters` and so on. One to one for any numbers.
    """
    by = cutlass.Int32(0)
    begin = QUAD
    for gpcs in ROUNDS:
        end = begin + gpcs * QUAD
        nth = (cluster - begin) // gpcs
        target = begin + (cluster - begin - nth * gpcs) * QUAD + nth
        inside = (cluster >= begin) & (cluster < end) & (clusters >= end)
        by = cutlass.select_(inside, target - cluster, by)
        begin = end
    return GpcShift(by, count - clusters + cluster)


def shifted(index: Any, shift: GpcShift) -> Any:
    """Item `index` of a cluster's, moved as `shift` says."""
    return index + cutlass.select_(index <= shift.last, shift.by, cutlass.Int32(0))
