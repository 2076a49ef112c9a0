"""How one signature is tuned: which functions are checked, where they are timed, and when that is enough.

A session asks for jobs and is sent their answers; who does them, where, and whether they were done before, it does not
know. The same answers lead to the same jobs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runtime.tables.dispatch import Entry

from . import choose, points
from .calibrate import Calibration, Observation, Predictions
from .halving import Measured
from .jobs import Answer, Job
from .operation import tuning
from .pool import Pool
from .roofline import power_bound

# Every candidate is checked at these M besides those it is ranked for: one row, fewer than any tile, and ragged.
CHECK_TOKENS = (1, 3, 17, 333)
# By what share the times of a look may be off together, as a standard deviation: by the clock, where power bounds, else
# by how brief they are (`scripts/study_screening.py`: 5.4% and 1.1%).
_CLOCK, _BRIEF = 0.05, 0.01
_ROUNDS = 2  # of looks between the points; in the later one, where what is predicted to be the best was not looked at
_LIKELY_USUAL = 1  # as so many measurements that load slows a function down as it does others
_MANIFEST = 0.5  # of the longest row of candidates: a build ranks fewer at M that no manifest names


@dataclass
class Tuned:
    """What was found for a signature: measurements by M, ascending, functions that were checked for it, and those that
    may not serve, with reasons."""

    signature: Any  # of any operation
    names: list[str]
    measured: list[Measured] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)
    # Brief times between the points, of few functions and of the baseline, by M: while it was tuned, of those that
    # might be the best there, and then of what serves.
    looks: dict[int, Mapping[str, float]] = field(default_factory=dict)
    glances: dict[int, Mapping[str, float]] = field(default_factory=dict)

    def predictions(self, pool: Pool) -> Predictions:
        """Predictions from all that was measured of the functions that may serve, but for `glances`."""
        seen, slower = list[Observation](), self._slower()
        under_load = min((found.m for found in self.measured if found.sustained), default=math.inf)
        for found in self.measured:
            guess = not found.sustained and found.m > under_load
            for name, us in found.all_scores().items():
                if name not in self.rejected:
                    us *= slower.get(name, 1.0) if guess else 1.0
                    seen.append(Observation(self.signature, found.m, name, us))
        predictions = Calibration(seen, pool.estimates, pool.relatives).of(self.signature)
        looks = list[Observation]()
        for m, times in self.looks.items():
            nearest = min(self.measured, key=lambda found: abs(math.log(found.m / m)))
            scale = nearest.scale()
            for name, us in times.items():
                if name in self.names and name not in self.rejected:
                    longer = slower.get(name, 1.0) if m > under_load else 1.0
                    looks.append(Observation(self.signature, m, name, us * scale * longer))
        return predictions.looked_at(looks, self._off) if looks else predictions

    def _off(self, m: int) -> float:
        """By what share all times of a look may be off together, as a standard deviation."""
        return _CLOCK if power_bound(self.signature, m) else _BRIEF

    def _slower(self) -> dict[str, float]:
        """By what the score of each function that was timed under load is longer than its short time, beside those of
        the other finalists there, as a mean that is drawn to 1: what is taken for M at which none was timed so."""
        logs: dict[str, list[float]] = {}
        for found in self.measured:
            slowdowns = found.slowdowns()
            for name, slowdown in slowdowns.items():
                logs.setdefault(name, []).append(slowdown - math.fsum(slowdowns.values()) / len(slowdowns))
        return {name: math.exp(math.fsum(of) / (len(of) + _LIKELY_USUAL) / 2) for name, of in logs.items()}

    def between(self, rejected: Collection[str] = ()) -> dict[int, Mapping[str, float]]:
        """The brief times between the points, by M, of functions that may serve and of the baseline; at an M of both
        `looks` and `glances`, those of the latter."""
        gone = {*rejected, *self.rejected}
        every = {**self.looks, **self.glances}
        return {m: {name: us for name, us in times.items() if name not in gone} for m, times in every.items()}

    def is_looked_at(self) -> bool:
        """Whether functions are looked at between the points: those that a baseline came near to, of an operation whose
        `Tuning` says `looks_between`."""
        return tuning(self.signature).looks_between and any(found.baseline_is_near() for found in self.measured)

    def right(self) -> list[str]:
        """The functions that may serve, once they are checked."""
        return [name for name in self.names if name not in self.rejected]


def tokens_of(entry: Entry) -> list[int]:
    """The M values that an entry was asked for: those with long rows of candidates; of those it was timed at before the
    first, the last and powers of two, which tuning begins with.

    Where all rows are as long, as with one candidate each, nothing tells them apart: the first and the last.
    """
    if not entry.candidates:
        ms = sorted({t["m"] for t in entry.timings}) or [m for m, _ in entry.ranges if m is not None] or [1]
        return [m for m in ms if m in (ms[0], ms[-1]) or m.bit_count() == 1]  # others were mostly added by tuning
    longest = max(len(names) for _, names in entry.candidates)
    ms = [m for m, _ in entry.candidates]
    told_apart = any(len(names) < longest for _, names in entry.candidates)
    asked = (m for m, names in entry.candidates if told_apart and len(names) > _MANIFEST * longest)
    return sorted({ms[0], ms[-1], *asked})


def candidates_at(ranked: Sequence[tuple[int, Sequence[str]]], m: int) -> list[str]:
    """The candidates for `m`: those ranked for it, and for M values within a factor of two, the nearest first."""
    near = sorted((max(m, tokens) / min(m, tokens), tokens) for tokens, _ in ranked)
    names = dict(ranked)
    kept = [tokens for factor, tokens in near if factor <= 2] or [near[0][1]]
    return list(dict.fromkeys(name for tokens in kept for name in names[tokens]))


def _to_screen(ranked: Sequence[str], predictions: Predictions, right: Sequence[str], m: int) -> list[str]:
    """What is timed at one of the first points: what was ranked for it, then what may be best by what is known; fewer
    of both where launches are long."""
    likely = points.plausible(predictions, right, m)
    wanted = [name for pair in itertools.zip_longest(ranked, likely) for name in pair if name is not None]
    return list(dict.fromkeys(wanted))[: points.at_most(predictions.us(likely[0], m))]


def tune(entry: Entry, pool: Pool, seen: Mapping[int, int] | None = None) -> Generator[Job, Answer, Tuned]:
    """Tune one signature; jobs come one after the other. `seen` has calls that servers made of it, by M.

    All candidates are checked first, and functions that were compiled for something else before they are timed. Under
    sustained load functions are timed at the first points alone, since that takes longer than the rest of a point.
    What is predicted between the points is looked at where a baseline came near at one of them. What is predicted to be
    the best anywhere is checked in the end.
    """
    signature = entry.signature
    candidates = entry.candidates or ((1, tuple(pool.suited(entry))),)
    tuned = Tuned(signature, pool.suited(entry))
    begun = points.first(tokens_of(entry))

    def check(names: Sequence[str]) -> Generator[Job, Answer, None]:
        new = tuple(n for n in dict.fromkeys(names) if n not in tuned.checked)
        tuned.checked.update(new)
        if new:
            answer = yield Job(signature, new, CHECK_TOKENS)
            tuned.rejected |= answer.rejected

    def time(m: int, names: Sequence[str], sustained: bool) -> Generator[Job, Answer, None]:
        yield from check(names)
        right = tuple(n for n in names if n not in tuned.rejected)
        if not right:
            return
        answer = yield Job(signature, right, () if m in CHECK_TOKENS else (m,), m, sustained)
        tuned.rejected |= answer.rejected
        if answer.measured is not None:
            tuned.measured.append(answer.measured)
            tuned.measured.sort(key=lambda found: found.m)

    yield from check([name for _, names in candidates for name in names])
    for m in begun:
        if right := tuned.right():
            yield from time(m, _to_screen(candidates_at(candidates, m), tuned.predictions(pool), right, m), True)
    looked_at = set(begun)
    while tuned.measured and tuned.right() and len(looked_at) < points.budget(len(begun), tuned.is_looked_at()):
        point = points.following(tuned.predictions(pool), tuned.right(), looked_at, seen)
        if point is None:
            break
        looked_at.add(point.m)
        yield from time(point.m, point.names, False)
    if tuned.is_looked_at():
        yield from _look(tuned, pool, check)
    while new := _unchecked(tuned, pool):
        yield from check(new)
    return tuned


def _unchecked(tuned: Tuned, pool: Pool) -> list[str]:
    """The functions that are predicted to be the best where an entry serves, and were not checked for its signature."""
    if not (tuned.measured and tuned.right()):
        return []
    last = max(found.m for found in tuned.measured)
    times = choose.predicted(tuned.right(), tuned.predictions(pool).curve, choose.BEYOND * last)
    return sorted({min(us, key=lambda name: us[name]) for us in times.us} - tuned.checked)


def _look(
    tuned: Tuned, pool: Pool, check: Callable[[Sequence[str]], Generator[Job, Answer, None]]
) -> Generator[Job, Answer, None]:
    """Look briefly at what may be the best between the points, beside each other. What was predicted to be the best of
    many is mostly predicted too well, which a look sets right, and so finds what is."""
    ms = points.between([found.m for found in tuned.measured])
    for _ in range(_ROUNDS):
        wanted = points.to_look_at(tuned.predictions(pool), tuned.right(), ms, tuned.looks) if tuned.right() else ()
        names = tuple(dict.fromkeys(name for _, of in wanted for name in of))
        if not names:
            return
        yield from check(names)
        job = Job(tuned.signature, names, glances=wanted).without(tuned.rejected)
        if job.names:
            answer = yield job
            tuned.rejected |= answer.rejected
            for m, us in answer.glances.items():
                tuned.looks[m] = _beside(tuned.looks.get(m, {}), us, tuned.measured[0].baseline)


def _beside(before: Mapping[str, float], us: Mapping[str, float], baseline: str) -> Mapping[str, float]:
    """Times of two looks at the same M, those of the second on the scale of the first, by the baseline of both."""
    both = baseline in before and baseline in us
    scale = before[baseline] / us[baseline] if both else 1.0
    return {name: t * scale for name, t in us.items()} | dict(before)
