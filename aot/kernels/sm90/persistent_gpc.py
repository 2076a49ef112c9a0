"""Which clusters are neighbours on the chip: those of one GPC, whose reads of the same lines L2 serves once.

Requests of SMs of one GPC for a line that is already asked for are merged on their way to L2, up to four of them
(counters lrc__* of ncu; docs/kernels/sm90_persistent.md has what it gains). What a cluster multicasts is not merged any
more, so it is the other operand that four clusters should read together.

The order in which an H200 gives clusters of two to its GPCs, as it was seen on two of them ("SMs of a GPC" in
benchmarks/results/studies_h200.json): four to one of them, then one to each of eight, four times, then one to each of
seven, four times, and two. Chips differ in a few clusters. Where the order is another altogether, tiles are still taken
once each, and four that should be neighbours are not.
"""

from typing import Any

import cutlass

_QUAD = 4
_ROUNDS = (8, 7)  # GPCs that take turns, `_QUAD` times


def shift(cluster: Any, clusters: Any, count: Any) -> tuple[Any, Any]:
    """How far cluster `cluster` of `clusters` moves along the items of each full wave, so that those of a GPC take four
    that follow each other, and its last item in a full wave, of `count` items in all.

    Without it a cluster has the items `cluster`, `cluster + clusters` and so on. One to one for any numbers.
    """
    by = cutlass.Int32(0)
    begin = _QUAD
    for gpcs in _ROUNDS:
        end = begin + gpcs * _QUAD
        turn = (cluster - begin) // gpcs
        place = begin + (cluster - begin - turn * gpcs) * _QUAD + turn
        inside = (cluster >= begin) & (cluster < end) & (clusters >= end)
        by = cutlass.select_(inside, place - cluster, by)
        begin = end
    return by, count - clusters + cluster


def shifted(index: Any, by: Any, last: Any) -> Any:
    """Item `index` of a cluster's, moved as `shift` says."""
    return index + cutlass.select_(index <= last, by, cutlass.Int32(0))
