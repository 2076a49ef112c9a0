"""From predicted times to ranges of M: few functions, and no more changes between them than predictions can tell.

Pure, and ignorant of where predictions come from.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

# Every M up to the first is looked at, and above it what ends a tile: tiles have multiples of 8 rows. From 1,024 rows,
# where one tile more or less is not much, so many to an octave of M: ends are 64 rows apart beyond 8,192.
_EVERY_M, _ROWS, _OF_AN_OCTAVE = 64, 8, 128
_COARSE = 1 / 12  # octaves; first all functions are looked at in these steps
_CONTENDERS = 0.15  # then between two of them those that are behind the best by no more than this at either
# What a change of function must save, in shares of the time by octaves of M: 1% over 1/25 of an octave. Below that a
# prediction, 1 to 3% off, cannot tell; more ranges than 100 are rare with it.
_CHANGE = 0.0004
# Where a change saves less, a function may serve on up to this share behind the best, and no more.
_BEHIND = 0.02

BEYOND = 2  # times the largest M that was measured, to where predictions go; what serves there serves all larger M

Curve = Callable[[str, Sequence[int]], list[float]]  # of a function, predicted microseconds at each of these M
Ranges = list[tuple["int | None", str]]


class Times(NamedTuple):
    """Predicted times of one signature: at each of `ms`, which is the largest M of a group that behaves alike, those of
    the functions that may be chosen there; and calls that servers made of it, by M, where they were counted."""

    ms: list[int]
    us: list[dict[str, float]]
    seen: Mapping[int, int] = {}

    def widths(self) -> list[float]:
        """The octaves of M that each group has."""
        before = [self.ms[0] / 2, *self.ms[:-1]]
        return [math.log2(m / b) for b, m in zip(before, self.ms, strict=True)]

    def weights(self) -> list[float]:
        """What each group counts: its octaves, or, of calls that were seen, half of that and half its share of their
        time; as much in all."""
        widths, times = self.widths(), [0.0] * len(self.ms)
        for m, count in self.seen.items():
            place = min(bisect.bisect_left(self.ms, m), len(self.ms) - 1)
            times[place] += count * min(self.us[place].values())
        if not (whole := math.fsum(times)):
            return widths
        octaves = math.fsum(widths)
        return [width / 2 + octaves / 2 * time / whole for width, time in zip(widths, times, strict=True)]

    def among(self, names: Collection[str], curve: Curve, tolerance: float) -> Times:
        """The times of `names` alone, as far as they are here; where those within `tolerance` of the best of them are
        too far behind the best of all to be, `curve` gives what all of them take."""
        of = set(names)
        found = [{name: us for name, us in at.items() if name in of} for at in self.us]
        far = [
            place
            for place, (own, at) in enumerate(zip(found, self.us, strict=True))
            if min(own.values(), default=math.inf) * (1 + tolerance) > min(at.values()) * (1 + _CONTENDERS)
        ]
        for name in names if far else ():
            for place, us in zip(far, curve(name, [self.ms[place] for place in far]), strict=True):
                found[place][name] = us
        return self._replace(us=found)


def group_ends(most: int) -> list[int]:
    """The largest M of each group of M that need not be told apart, up to the first that has `most`."""
    ends = list(range(1, _EVERY_M + 1))
    while ends[-1] < most:
        rows = max(_ROWS, 2 ** (ends[-1].bit_length() - 1) // _OF_AN_OCTAVE)
        ends.append(ends[-1] + rows)
    return ends


def predicted(names: Sequence[str], curve: Curve, most: int, tolerance: float = 0.0) -> Times:
    """The times at every M up to `most`, of the functions of `names` that come near the best somewhere near there, or
    within `tolerance` of it."""
    ms = group_ends(most)
    coarse = sorted(
        {min(range(len(ms)), key=lambda i: abs(ms[i] - wanted)) for wanted in _steps(ms[-1])} | {len(ms) - 1}
    )
    at_coarse = {name: curve(name, [ms[i] for i in coarse]) for name in names}
    near = []
    for place in range(len(coarse)):
        limit = min(us[place] for us in at_coarse.values()) * (1 + max(_CONTENDERS, tolerance))
        near.append({name for name, us in at_coarse.items() if us[place] <= limit})
    found: list[dict[str, float]] = [{} for _ in ms]
    for name in sorted(names):
        wanted: set[int] = {coarse[0]} if name in near[0] else set()
        for place, (first, last) in enumerate(itertools.pairwise(coarse)):
            if name in near[place] or name in near[place + 1]:
                wanted.update(range(first + (place > 0), last + 1))
        places = sorted(wanted)
        for i, us in zip(places, curve(name, [ms[i] for i in places]), strict=True):
            found[i][name] = us
    return Times(ms, found)


def _steps(most: int) -> list[float]:
    return [2 ** (i * _COARSE) for i in range(math.ceil(math.log2(most) / _COARSE) + 1)]


def cover(all_times: Sequence[Times], tolerance: float, kept: Collection[str] = ()) -> set[str]:
    """Functions of which at every M one takes no more than 1 + `tolerance` of the least time: few in all.

    `kept` are had in any case, and those of them that are of use here are in the answer. Greedy: what will do for the
    most octaves, or the most time of calls that were seen, comes first, as cover is approximated (Chvatal, 1979); ties
    go by name.
    """
    widths: defaultdict[frozenset[str], float] = defaultdict(float)
    for times in all_times:
        for us, width in zip(times.us, times.weights(), strict=True):
            limit = min(us.values()) * (1 + tolerance)
            widths[frozenset(name for name, t in us.items() if t <= limit)] += width
    chosen = {name for names in widths for name in names if name in kept}
    while left := {names: width for names, width in widths.items() if not names & chosen}:
        use: defaultdict[str, float] = defaultdict(float)
        for names, width in left.items():
            for name in names:
                use[name] += width
        chosen.add(min(use, key=lambda name: (-round(use[name], 9), name)))
    return chosen


def ranges(times: Times, chosen: Collection[str], tolerance: float) -> Ranges:
    """The (largest M, function) pairs that lose least, where each change of function counts as a loss of `_CHANGE`.

    `chosen` has a function within `tolerance` at every M, as `cover` finds it. The last range has no largest M.
    """
    names = _path(times, chosen, 1 + max(tolerance, _BEHIND))
    ends = [m for m, (name, after) in zip(times.ms, itertools.pairwise([*names, ""]), strict=True) if name != after]
    found: Ranges = [(m, names[times.ms.index(m)]) for m in ends]
    return [*found[:-1], (None, found[-1][1])]


def _path(times: Times, chosen: Collection[str], limit: float) -> list[str]:
    """The function for each group, by dynamic programming from the first group to the last."""
    losses: dict[str, float] = {}  # of the best path that ends in each function
    came: list[dict[str, str]] = []
    for us, width in zip(times.us, times.widths(), strict=True):
        least = min(us.values())
        here = {name: t for name, t in us.items() if name in chosen and t <= least * limit}
        if not here:  # what was within the tolerance is no contender here
            name = min((n for n in us if n in chosen), key=lambda n: us[n], default=min(us, key=lambda n: us[n]))
            here = {name: us[name]}
        cheapest = min(losses, key=lambda n: (losses[n], n)) if losses else ""
        steps, now = {}, {}
        for name, t in here.items():
            stay, change = losses.get(name, math.inf), losses[cheapest] + _CHANGE if losses else 0.0
            steps[name] = name if stay <= change else cheapest
            now[name] = min(stay, change) + width * math.log(t / least)
        came.append(steps)
        losses = now
    path = [min(losses, key=lambda n: (losses[n], n))]
    for steps in reversed(came[1:]):
        path.append(steps[path[-1]])
    return path[::-1]


def serving(found: Ranges, m: int) -> str:
    """The function that serves `m`."""
    return next(name for m_max, name in found if m_max is None or m <= m_max)


def best_class(
    all_times: Times, classes: Iterable[Sequence[str]], curve: Curve, kept: Collection[str], others: float
) -> Sequence[str]:
    """Of classes of functions the one that is least behind the best predicted, in the geometric mean over octaves of M,
    if the best of the class serves each M. Functions that are not `kept` count as `others`, a share, slower."""
    by_m = dict(zip(all_times.ms, all_times.us, strict=True))
    octaves = (2**i for i in range(math.ceil(math.log2(all_times.ms[-1])) + 1))
    ms = sorted({min(by_m, key=lambda m: abs(m - wanted)) for wanted in octaves})

    def behind(names: Sequence[str]) -> float:
        curves = [[us if name in kept else us * (1 + others) for us in curve(name, ms)] for name in names]
        best = (min(us) for us in zip(*curves, strict=True))
        return math.fsum(math.log(us / min(by_m[m].values())) for us, m in zip(best, ms, strict=True))

    return min(classes, key=behind, default=())


def completed(
    baseline: str,
    scores: Mapping[int, float],
    glances: Mapping[int, Mapping[str, float]],
    predicted_us: Callable[[str, int], float],
) -> dict[int, float]:
    """What a baseline is compared by, at more M than its `scores` have: at each glance, the predicted times of the
    functions there times by how much longer it took than they."""
    found = dict(scores)
    for m, us in glances.items():
        logs = [math.log(predicted_us(name, m) / t) for name, t in us.items() if name != baseline]
        if logs and baseline in us:
            found[m] = us[baseline] * math.exp(math.fsum(logs) / len(logs))
    return found


def where_faster(
    baseline: Mapping[int, float], predicted_us: Callable[[str, int], float], found: Ranges, tolerance: float
) -> list[tuple[int, int | None]]:
    """The ranges of M, as (smallest, largest) with no largest where they have no end, where a baseline may win over
    what serves; `baseline` has its measured microseconds by M.

    That is at each M where it was measured to win by more than half of `tolerance`, and between two M if it does at
    either: the baseline is another library's, which changes kernels at M that nobody knows, and two kernels' steps of
    tiles are at different M. Below the first M nothing is known; what it is at the last holds for all larger M.
    """
    ms = sorted(baseline)
    wins = [predicted_us(serving(found, m), m) > baseline[m] * (1 + tolerance / 2) for m in ms]
    spans = [(m, m, is_faster) for m, is_faster in zip(ms, wins, strict=True)]
    spans += [(ms[i] + 1, ms[i + 1] - 1, wins[i] or wins[i + 1]) for i in range(len(ms) - 1) if ms[i] + 1 < ms[i + 1]]
    where = list[tuple[int, int | None]]()
    for is_faster, of in itertools.groupby(sorted(spans), key=lambda span: span[2]):
        run = list(of)
        if is_faster:
            last = run[-1][1]
            where.append((run[0][0], None if last == ms[-1] else last))
    return where
