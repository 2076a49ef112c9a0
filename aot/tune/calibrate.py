"""How long each function takes at any M: its family's estimate, set right by what was measured. Pure.

The logarithm of measured over estimated time is taken for a sum of effects, from what all functions share down to what
is one function's own for one signature. An effect is known at the M where something was measured; between them it is
interpolated over log M, and away from them it fades, sooner where it is more particular, so that a function that was
measured nowhere near is taken for the mean of its relatives. Knows nothing of GPUs, archives or how points are chosen.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from runtime import native

Estimate = Callable[[Any], Callable[[str, int], float]]  # for a signature, microseconds of a function at M
Relatives = Callable[[str], Sequence[Hashable]]  # groups that a function is of, the widest first
_Key = tuple[str, Hashable]  # a level, and what of it


class Observation(NamedTuple):
    """A time in microseconds that was measured."""

    signature: Any  # of any operation
    m: int
    name: str
    us: float


class _Level(NamedTuple):
    """How far effects of a level reach along M, in octaves, and as how many observations of none they begin."""

    octaves: float
    doubts: float


# Tried on 84 signatures with up to 600 functions at M = 128..8192, powers of two (one short sample each, of which noise
# is 2%): calibrated at 128, 512, 2048 and 8192, the choice at 256, 1024 and 4096 is 3.2% behind the best of all, and
# with the estimate alone 4.6%; for N and K that were not measured 2.3%, and 3.3%.
_LEVELS = {
    "all": _Level(math.inf, 0.0),  # functions, of all signatures
    "related": _Level(4.0, 3.0),
    "function": _Level(4.0, 1.0),
    "one": _Level(0.5, 0.0),  # function, for one signature
}
# What log ratios of the best functions scatter by in the same trial: as far as M are from each other that is known of
# none (5%), and of one measurement (1%).
_SCATTER, _NOISE = 0.05, 0.01
_SCATTER_OCTAVES = 1.5
# Standard deviations that a choice is on the safe side by. On an H200's times of 214 functions (five N x K in bf16, 26
# random M from 65, those at seven known and one function at a time looked at, up to four, at seven more), with trees,
# the choice at the latter is 0.9% behind the best, without caution 1.1%, without looks 1.7%, and elsewhere 1.4% in
# each; with 1.5 in place of 0.5 it is 0.8%, and elsewhere 1.7%. Not tried again with looks at several.
_CAUTION = 0.5


class Calibration:
    """Predicts times of functions from observations of some of them, for one signature or several of one form.

    `estimate` gives a family's guess in microseconds, `relatives` the groups that a function is of, the widest first.
    At an M where a function was measured, the prediction is what was measured.
    """

    def __init__(self, observations: Iterable[Observation], estimate: Estimate, relatives: Relatives) -> None:
        found = list(observations)
        self._estimate, self._relatives = estimate, relatives
        self._places = {signature: i for i, signature in enumerate(dict.fromkeys(o.signature for o in found))}
        self._keys_of: dict[tuple[int, str], list[_Key]] = {}
        estimates = [estimate(signature) for signature in self._places]
        seen: list[tuple[float, list[_Key]]] = []
        rest: list[float] = []
        for signature, m, name, us in found:
            place = self._places[signature]
            seen.append((math.log2(m), self._keys(place, name)))
            rest.append(math.log(us / estimates[place](name, m)))
        self._effects: dict[_Key, _Effect] = {}
        for depth in range(max((len(keys) for _, keys in seen), default=0)):
            rest = self._take_out(depth, seen, rest)

    def _take_out(self, depth: int, seen: Sequence[tuple[float, list[_Key]]], rest: Sequence[float]) -> list[float]:
        """Find the effects at a depth of the observations' keys; what of their log ratios these leave."""
        places = [(keys[depth], x) if depth < len(keys) else None for x, keys in seen]
        sums: dict[tuple[_Key, float], tuple[float, int]] = {}
        for at, of in zip(places, rest, strict=True):
            if at is not None:
                total, count = sums.get(at, (0.0, 0))
                sums[at] = total + of, count + 1
        means = {at: total / (count + _LEVELS[at[0][0]].doubts) for at, (total, count) in sums.items()}
        known: dict[_Key, list[tuple[float, float]]] = {}
        for (key, x), mean in means.items():
            known.setdefault(key, []).append((x, mean))
        self._effects |= {key: _Effect(sorted(at), _LEVELS[key[0]].octaves) for key, at in known.items()}
        return [of - (0.0 if at is None else means[at]) for at, of in zip(places, rest, strict=True)]

    def _keys(self, place: int, name: str) -> list[_Key]:
        """What a function's ratio is the sum of, for the signature at a place; -1 is one that was not measured."""
        if (place, name) not in self._keys_of:
            related = [("related", group) for group in self._relatives(name)]
            self._keys_of[place, name] = [("all", None), *related, ("function", name), ("one", (place, name))]
        return self._keys_of[place, name]

    def of(self, signature: Any) -> Predictions:
        """The predictions for one signature."""
        return Predictions(signature, self)


class Predictions:
    """Times of functions for one signature, as a calibration has them."""

    def __init__(self, signature: Any, calibration: Calibration) -> None:
        self._signature, self._calibration = signature, calibration
        self._estimate = calibration._estimate(signature)
        self._known: dict[str, _Bearing] = {}
        self._looked: dict[str, _Effect] = {}

    def looked_at(
        self, observations: Iterable[Observation], off: Callable[[int], float] = lambda m: 0.0
    ) -> Predictions:
        """These, set right by times of a few functions, at M where no others were timed.

        How far such a time is from its prediction is taken for that function's own, but for what all times at that M
        are likely to be off by together, such as by the clock, if `off` is the standard deviation of that as a share;
        at M where functions were measured beside each other it is nothing.
        """
        found = Predictions(self._signature, self._calibration)
        at_m: dict[int, dict[str, float]] = {}
        for _, m, name, us in observations:
            at_m.setdefault(m, {})[name] = math.log(us / self.us(name, m))
        ratios: dict[str, dict[float, float]] = {}
        for m, of in at_m.items():
            together = self._together(m, of, off(m))
            for name, ratio in of.items():
                ratios.setdefault(name, {})[math.log2(m)] = ratio - together
        for name, at in ratios.items():
            known = dict.fromkeys(self._of(name).known_at, 0.0) | at
            found._looked[name] = _Effect(sorted(known.items()), _LEVELS["one"].octaves)
        return found

    def _together(self, m: int, ratios: Mapping[str, float], off: float) -> float:
        """The log ratio at `m` that is likely to be of all these: the mean of a normal variable of deviation `off`,
        where each is its sum with one of the deviation of a prediction."""
        of_all = len(ratios) * off**2
        own = math.fsum(self.uncertainty(name, m) ** 2 for name in ratios) / len(ratios)
        return math.fsum(ratios.values()) / len(ratios) * of_all / (of_all + own)

    def _of(self, name: str) -> _Bearing:
        """The effects that bear on a function."""
        if name not in self._known:
            c = self._calibration
            *wide, function, one = c._keys(c._places.get(self._signature, -1), name)
            effects = [c._effects[key] for key in (*wide, function, one) if key in c._effects]
            known_at = c._effects[one].known_at if one in c._effects else []
            if name in self._looked:
                effects.append(self._looked[name])
                known_at = self._looked[name].known_at
            self._known[name] = _Bearing.of(effects, known_at)
        return self._known[name]

    def us(self, name: str, m: int) -> float:
        """Microseconds of a function at `m`."""
        return self.times(name, [m])[0]

    def times(self, name: str, ms: Sequence[int]) -> list[float]:
        """Microseconds of a function at each of `ms`."""
        estimate = self._estimate
        return self._of(name).times([estimate(name, m) for m in ms], [math.log2(m) for m in ms])

    def curve(self, name: str, ms: Sequence[int]) -> list[float]:
        """Microseconds of a function at each of `ms`, to choose by: where functions were looked at, those that are less
        well known take longer, as the best of many predictions is mostly too good."""
        times = self.times(name, ms)
        if not self._looked:
            return times
        known_at, last = self._of(name).known_at, len(_CAUTIOUS) - 1
        away = (min(_away(known_at, math.log2(m)) * _STEPS_OF_AN_OCTAVE, last) for m in ms)
        return [us * _CAUTIOUS[int(steps)] for us, steps in zip(times, away, strict=True)]

    def uncertainty(self, name: str, m: int) -> float:
        """By what share of it the prediction at `m` may be off, as a standard deviation."""
        return _uncertainty(_away(self._of(name).known_at, math.log2(m)))


def _away(known_at: Sequence[float], x: float) -> float:
    """How far the nearest of these is, in octaves."""
    after = bisect_left(known_at, x)
    to_next = known_at[after] - x if after < len(known_at) else math.inf
    return min(to_next, x - known_at[after - 1]) if after else to_next


def _uncertainty(away: float) -> float:
    """By what share of it a prediction may be off that is so many octaves from what was measured."""
    return math.hypot(_NOISE, _SCATTER * math.sqrt(1 - math.exp(-2 * away / _SCATTER_OCTAVES)))


# How much longer a function is taken to take by its distance from what was timed, up to where that says nothing.
_STEPS_OF_AN_OCTAVE, _OCTAVES = 32, 8
_CAUTIOUS = [
    1 + _CAUTION * (_uncertainty(step / _STEPS_OF_AN_OCTAVE) - _NOISE) for step in range(_OCTAVES * _STEPS_OF_AN_OCTAVE)
]


class _Bearing(NamedTuple):
    """What bears on a function: what gives its times from estimates and the log2 M of these, by its effects, and the
    log2 M at which it was measured, ascending."""

    times: Callable[[list[float], list[float]], list[float]]
    known_at: list[float]

    @classmethod
    def of(cls, effects: Sequence[_Effect], known_at: list[float]) -> _Bearing:
        """By native code, where it was built; in Python that takes ten times as long, and gives the same bits."""
        first, *rest = [effect.native for effect in effects] or [None]
        by = partial(with_effects, effects) if first is None else partial(first.times, tuple(rest))
        return cls(by, known_at)


def with_effects(effects: Sequence[_Effect], estimates: Sequence[float], xs: Sequence[float]) -> list[float]:
    """Each estimate times e to the sum of the effects at its place; in Python."""
    found = []
    for estimate, x in zip(estimates, xs, strict=True):
        total = 0.0
        for effect in effects:  # and not `sum`, which rounds as native code does on some Pythons alone
            total += effect.at(x)
        found.append(estimate * math.exp(total))
    return found


class _Effect:
    """A log ratio that is known at some log2 M, ascending, and guessed between them.

    The guess is the best one for a quantity of which what is known at one place tells e^(-distance / reach) at another
    (an Ornstein-Uhlenbeck process); where it reaches everywhere, that is linear interpolation.
    """

    def __init__(self, known: Sequence[tuple[float, float]], reach: float) -> None:
        self.known_at, self._values, self._reach = [x for x, _ in known], [value for _, value in known], reach
        self.native = native.effect and native.effect(self.known_at, self._values, reach)

    def at(self, x: float) -> float:
        """The log ratio at a log2 M."""
        xs, values, reach = self.known_at, self._values, self._reach
        after = bisect_left(xs, x)
        if after == len(xs):
            return values[-1] * math.exp(-(x - xs[-1]) / reach)
        if after == 0 or xs[after] == x:
            return values[after] * math.exp(-(xs[after] - x) / reach)
        a, b, left, right = *xs[after - 1 : after + 1], *values[after - 1 : after + 1]
        if math.isinf(reach):
            return left + (right - left) * (x - a) / (b - a)
        scale = 1 / math.sinh((b - a) / reach)
        return (left * math.sinh((b - x) / reach) + right * math.sinh((x - a) / reach)) * scale
