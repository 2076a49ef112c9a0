"""The M values to measure for one signature: a few to begin with, then where the choice is least certain. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ..search import traffic
from .calibrate import Predictions

_STEPS_PER_OCTAVE = 16
# What one more point must promise, as the expected share of the time at that M: below this the choice may stand.
_WORTH = 0.002
# Behind the best by this logarithm nothing promises as much: predictions are 5% off at most, as a standard deviation.
_TOO_FAR = 0.15
# Every so many M all functions are looked at, and between those what is at one of both neighbours no further behind.
_COARSE, _FAR = 4, 1.35
# Standard deviations that a function may be behind the best by, and how many functions there may be, to be timed at one
# of the first points, where little is known, and at an added one.
_FIRST, _ADDED = (3.0, 40), (2.0, 16)
# The same of a look between the points, and how many there are at least: of one alone the clock would tell as much.
_LOOKED_AT, _BESIDE = (2.0, 6), 2
# Where launches are long: as many as this time of screening is enough for, and no fewer than eight.
_SCREENING_US, _LAUNCHES, _LEAST = 60_000.0, 8, 8
_GLANCES_FROM, _SPARSE_FROM = 64, 1024  # no baseline was ever faster below the first


class Point(NamedTuple):
    """An M to measure, and the functions to time there."""

    m: int
    names: list[str]


def first(tokens: Sequence[int]) -> list[int]:
    """The M values to begin with: the given ones, and powers of two between the first and the last."""
    return sorted({*tokens, *(1 << i for i in range(31) if min(tokens) < 1 << i < max(tokens))})


def budget(begun_with: int, looks: bool = False) -> int:
    """How many points a signature may have in all, where `first` gave it so many: 27 for M of 1 to 8192, and 20 where
    `looks` between them follow, since a look is cheaper than a point."""
    return begun_with + max(1, (begun_with - 1) // (2 if looks else 1))


def grid(least: int, most: int) -> list[int]:
    """M values between two, ends left out, evenly spaced in log M; above 64 they are multiples of 8."""
    count = math.ceil(math.log2(most / least) * _STEPS_PER_OCTAVE)
    spaced = (least * 2 ** (i / _STEPS_PER_OCTAVE) for i in range(count))
    return [m for m in sorted({round(m) if m <= 64 else round(m / 8) * 8 for m in spaced}) if least < m < most]


def between(measured: Sequence[int]) -> tuple[int, ...]:
    """The M values to look at where functions were `measured` at these: 16 to an octave from 64, 8 from 1024.

    Another library's choice of kernel changes at M that nobody knows: for M = 65 to 511 cuBLAS was off interpolation
    between the points of tuning by over 16% in one case of twenty, on an H200 and an H100.
    """
    least, most = max(_GLANCES_FROM, min(measured)), max(measured)
    if most <= least:
        return ()
    every = grid(least, most)
    return tuple(m for i, m in enumerate(every) if m not in measured and (m < _SPARSE_FROM or i % 2 == 0))


def following(
    predictions: Predictions, names: Collection[str], measured: Collection[int], seen: Mapping[int, int] | None = None
) -> Point | None:
    """Where the choice is least certain between the smallest and the largest M that was measured; None where it is
    certain enough.

    That is where the time that some other function than the predicted best may save is largest, as an expectation. What
    was measured nearby settles it, so points go to where neighbours disagree and estimates change, such as where waves
    of tiles end. Where calls of servers were `seen`, by M, those that are worth it come in the order of what they save
    there.
    """
    best, worth = None, 0.0
    ms = grid(min(measured), max(measured))
    octaves = math.log2(max(measured) / min(measured))
    coarse = _times(predictions, [(m, names) for m in [*ms[::_COARSE], *ms[-1:]]])
    near = [_near(before) | _near(after) for before, after in itertools.pairwise(coarse)]
    left = [(m, near[place // _COARSE]) for place, m in enumerate(ms) if m not in measured]
    for (m, _), us in zip(left, _times(predictions, left), strict=True):
        gain = _gain(predictions, m, us)
        saved = gain * traffic.weight(seen or {}, m, octaves)
        if gain > _WORTH and saved > worth:
            best, worth = m, saved
    return None if best is None else Point(best, plausible(predictions, names, best, _ADDED))


def to_look_at(
    predictions: Predictions, names: Collection[str], ms: Sequence[int], looks: Mapping[int, Collection[str]]
) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """At each of `ms` the functions that may be the best, of those that `looks` has not; none where it has the one that
    is predicted to be, or one that is predicted to come as near as makes no difference."""
    deviations, most = _LOOKED_AT
    found = []
    for m, us in zip(ms, _times(predictions, [(m, names) for m in ms]), strict=True):
        seen, order = looks.get(m, ()), sorted(us, key=lambda name: (us[name], name))
        least = us[order[0]]
        if not any(name in us and us[name] <= least * (1 + _WORTH) for name in seen):
            limit = least * (1 + deviations * predictions.uncertainty(order[0], m))
            near = [name for name in order if us[name] <= limit or name in order[:_BESIDE]]
            found.append((m, tuple(name for name in near if name not in seen)[:most]))
    return tuple(found)


def _times(of: Predictions, wanted: Sequence[tuple[int, Collection[str]]]) -> list[dict[str, float]]:
    """The predicted times of functions at each M, which are asked for function by function."""
    places: dict[str, list[int]] = {}
    for place, (_, names) in enumerate(wanted):
        for name in names:
            places.setdefault(name, []).append(place)
    found: list[dict[str, float]] = [{} for _ in wanted]
    for name, at in places.items():
        for place, us in zip(at, of.times(name, [wanted[place][0] for place in at]), strict=True):
            found[place][name] = us
    return found


def _near(us: Mapping[str, float]) -> set[str]:
    """Those that may be worth a look where M is a little larger or smaller."""
    most = _FAR * min(us.values())
    return {name for name, t in us.items() if t <= most}


def plausible(
    predictions: Predictions, names: Collection[str], m: int, limits: tuple[float, int] = _FIRST
) -> list[str]:
    """The functions that may be best at `m`, the likeliest first."""
    deviations, most = limits
    us = {name: predictions.us(name, m) for name in names}
    least = min(us.values())
    near = [
        name
        for name in sorted(us, key=lambda n: (us[n], n))
        if us[name] <= least * (1 + deviations * predictions.uncertainty(name, m))
    ]
    return near[: min(most, at_most(least))]


def at_most(us: float) -> int:
    """How many functions are screened at a point where one takes `us`."""
    return max(_LEAST, int(_SCREENING_US / _LAUNCHES / us))


def _gain(of: Predictions, m: int, us: Mapping[str, float]) -> float:
    """The share of the time of the predicted best that another may save: of each, the mean of what is above zero of a
    normal variable."""
    winner = min(sorted(us), key=lambda name: us[name])
    least, off, gain = us[winner], of.uncertainty(winner, m), 0.0
    for name, t in us.items():
        behind = math.log(t / least)
        if name != winner and behind <= _TOO_FAR:
            sigma = math.hypot(of.uncertainty(name, m), off)
            z = behind / sigma
            density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
            gain = max(gain, sigma * density - behind * math.erfc(z / math.sqrt(2)) / 2)
    return gain
