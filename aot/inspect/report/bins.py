"""Columns of M for tables that show layers which were measured at different M: powers of two, what lies between two of
them, and all above. Knows nothing of archives."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Bin(NamedTuple):
    """The M values from `first` to `last`, which is None where every larger M is meant."""

    first: int
    last: int | None

    def has(self, m: int) -> bool:
        """Whether an M is one of them."""
        return self.first <= m and (self.last is None or m <= self.last)

    def meets(self, first: int, last: int | None) -> bool:
        """Whether a range of M, without end where `last` is None, has one of them."""
        return (last is None or self.first <= last) and (self.last is None or first <= self.last)

    def meets_any(self, ranges: Sequence[tuple[int, int | None]]) -> bool:
        """Whether one of the ranges, ascending and disjoint, has one of them."""
        at = bisect.bisect_right(ranges, self.first, key=operator.itemgetter(0))
        return any(self.meets(*pair) for pair in ranges[max(at - 1, 0) : at + 1])


def bins(measured: Iterable[int], ranges: Iterable[Sequence[tuple[int, int | None]]] = ()) -> list[Bin]:
    """Columns for layers that were measured at these M, and of which something is known in the `ranges` of each: each
    power of two from the first to the last that is not past them, M between two of them where one was measured or a
    range has some, and what is above all."""
    ms, known = sorted(set(measured)), list(ranges)
    if not ms:
        return []
    found, power = [Bin(1, ms[0] - 1)] if ms[0] > 1 else [], 1
    while power <= ms[-1]:
        if power >= ms[0]:
            found.append(Bin(power, power))
        first, last = max(power + 1, ms[0]), min(2 * power - 1, ms[-1])
        between = Bin(first, last)
        if first <= last and (any(map(between.has, ms)) or any(map(between.meets_any, known))):
            found.append(between)
        power *= 2
    return [*found, Bin(ms[-1] + 1, None)]
