"""Time the candidates of one point: all of them briefly, the better half longer, and the last few against torch. Pure.

What takes times is given; it may be a GPU or something that pretends to be one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..search.h200 import LOAD
from .options import TuneOptions
from .timing import Timing, in_turns

_SCREEN_REPEATS, _LOADED_REPEATS, _SCREEN_GRAPH_US, _LONGEST_SCREEN_US = 2, 3, 100.0, 400.0
_FINAL_GRAPH_US = 1_000.0
_GLANCE_REPEATS = 4
# Of load before times are taken where power bounds: before a screening; again, less, before finals, which follow at
# once; and before a look, which follows another one. On H100s at the limit of their power five turns after a pause,
# 30 ms, are off what a function takes over torch later on by 4.3%, and by 2.0% on average; the next five by 1.7%, and
# the five after these by 1.0%.
_SETTLE_US, _FINAL_SETTLE_US, _GLANCE_SETTLE_US = 50e3, 10e3, 25e3
_HOPELESS = 1.15  # of the second best time of a screening, whatever its place
_NEAR = 1.15  # of a function's time: torch, where it takes longer at all measured M, is not looked at between them
_LOOKS = 2  # at finalists of whom none leads clearly
# Finalists that are timed under load, the quickest: with a fourth, the best at 117 points on H200s and an H100 was
# better by 0.02%, by 0.6% at most.
_LOADED = 3


class Bench(Protocol):
    """What can take times for one signature at one M, of functions by name and of the baseline."""

    baseline: str
    power_bound: bool

    def time(self, names: Collection[str], repeats: int, graph_us: float, settle_us: float = 0.0) -> dict[str, Timing]:
        """Time launches in turn, where power bounds after so long a load; what cannot be launched at this shape is left
        out."""
        ...

    def sustained(self, us: Mapping[str, float]) -> dict[str, Timing]:
        """Time launches, which take about so many microseconds, for long enough to meet the clock that their power
        leaves them."""
        ...


@dataclass(frozen=True)
class Measured:
    """What was found for one signature at one M; `times` has the finalists, best first, without the baseline.

    `sustained` has times under sustained load of the finalists and the baseline by name, where they were taken. Best is
    then the least product of both times: a server may be busy for milliseconds or for minutes. `screened` has the
    microseconds of every function that was launched when it was looked at last before the finals, on the scale of the
    last look.
    """

    m: int
    times: tuple[tuple[str, Timing], ...]
    baseline: str
    baseline_time: Timing
    candidates: int
    sustained: Mapping[str, Timing] = field(default_factory=dict)
    screened: Mapping[str, float] = field(default_factory=dict)

    def slowdowns(self) -> dict[str, float]:
        """The logarithm of how many times as long each finalist takes under load, of those that were timed so."""
        return {n: math.log(self.sustained[n].us / t.us) for n, t in self.times if n in self.sustained}

    def scores(self) -> dict[str, float]:
        """What finalists are compared by, in microseconds: the geometric mean of both times, where there are two.

        What was not timed under load, being too far behind, is taken to be slowed down as the others are.
        """
        slower = self.slowdowns().values()
        if not slower:
            return {n: t.us for n, t in self.times}
        usual = math.exp(math.fsum(slower) / len(slower) / 2)
        return {
            n: math.sqrt(t.us * self.sustained[n].us) if n in self.sustained else t.us * usual for n, t in self.times
        }

    def all_scores(self) -> dict[str, float]:
        """The same of all functions that were launched: what was only screened is brought to the finalists' scale."""
        return self._beside(self.scores())

    def short_us(self) -> dict[str, float]:
        """Microseconds of all functions that were launched, without sustained load, on the scale of the finals."""
        return self._beside({n: t.us for n, t in self.times})

    def baseline_is_near(self) -> bool:
        """Whether the baseline took no longer than `_NEAR` of the best function."""
        return self.baseline_time.us < _NEAR * min(t.us for _, t in self.times)

    def scale(self) -> float:
        """How many times as long as by brief looks functions take by their scores."""
        return _ratio(self.scores(), self.screened)

    def _beside(self, finalists: Mapping[str, float]) -> dict[str, float]:
        scale = _ratio(finalists, self.screened)
        return {n: us * scale for n, us in self.screened.items()} | dict(finalists)


def _ratio(us: Mapping[str, float], before: Mapping[str, float]) -> float:
    """The geometric mean of new over old times, of those that have both: longer looks find the GPU at a lower clock."""
    both = [math.log(t / before[n]) for n, t in us.items() if n in before]
    return math.exp(math.fsum(both) / len(both)) if both else 1.0


def measure(bench: Bench, m: int, names: Sequence[str], options: TuneOptions) -> Measured | None:
    """Find the best of `names` at `m`; None if none can be launched."""
    screened: dict[str, float] = {}
    left, graph_us, settle_us = list(names), _SCREEN_GRAPH_US, _SETTLE_US
    repeats = _LOADED_REPEATS if bench.power_bound else _SCREEN_REPEATS
    while True:
        us = {n: t.us for n, t in in_turns(bench.time(left, repeats, graph_us, settle_us)).items()}
        if not us:
            return None
        clock = _ratio(us, screened)
        screened = {n: t * clock for n, t in screened.items()} | us
        order = sorted(us, key=lambda n: (us[n], n))
        second = us[order[min(1, len(order) - 1)]]  # a first place may be luck
        hopeful = [n for n in order if us[n] <= _HOPELESS * second]
        left = hopeful[: max(options.finalists, math.ceil(len(hopeful) / 2))]
        if len(left) <= options.finalists:
            break
        graph_us, settle_us = min(2 * graph_us, _LONGEST_SCREEN_US), 0.0
    times = _finals(bench, left, options)
    finalists = [n for n in left if n in times]
    if not finalists:
        return None
    sustained: dict[str, Timing] = {}
    if options.sustained and bench.power_bound:
        least = min(times[n].us for n in finalists)
        quickest = sorted(finalists, key=lambda n: times[n].us)[:_LOADED]
        near = [n for n in quickest if times[n].us <= LOAD.may_win * least]
        if len(near) > 1:  # else nothing is to be decided
            sustained = bench.sustained({n: times[n].us for n in (*near, bench.baseline)})
    found = Measured(
        m,
        tuple((n, times[n]) for n in finalists),
        bench.baseline,
        times[bench.baseline],
        len(screened),
        sustained,
        screened,
    )
    scores = found.scores()
    ordered = tuple(sorted(found.times, key=lambda of: (scores[of[0]], of[0])))
    return Measured(m, ordered, found.baseline, found.baseline_time, found.candidates, sustained, screened)


def glance(bench: Bench, names: Sequence[str]) -> dict[str, float]:
    """Microseconds of a few functions and of the baseline, taken briefly in turns; {} if none can be launched."""
    taken = bench.time([*names, bench.baseline], _GLANCE_REPEATS, _SCREEN_GRAPH_US, _GLANCE_SETTLE_US)
    us = {n: t.us for n, t in in_turns(taken).items()}
    return us if len(us) > 1 else {}


def _finals(bench: Bench, finalists: Sequence[str], options: TuneOptions) -> dict[str, Timing]:
    """The finalists' times in turns with the baseline; again while none leads by more than its noise.

    Noise of less than the tolerance decides nothing.
    """
    samples: dict[str, tuple[float, ...]] = {}
    times: dict[str, Timing] = {}
    for _ in range(_LOOKS):
        everyone = [*finalists, bench.baseline]
        for name, timing in bench.time(everyone, options.repeats, _FINAL_GRAPH_US, _FINAL_SETTLE_US).items():
            samples[name] = samples.get(name, ()) + (timing.samples or (timing.us,))
        times = in_turns({name: Timing.of(taken) for name, taken in samples.items()})
        ours = sorted((times[n] for n in finalists if n in times), key=lambda t: t.us)
        noise = max(map(_noise, ours[:2]), default=0.0)
        if len(ours) < 2 or noise < options.tolerance or ours[1].us / ours[0].us - 1 > noise:
            break
    return times


def _noise(timing: Timing) -> float:
    """By about what share a time may be off: how far its samples differ over the root of how many there are."""
    if not timing.samples:
        return timing.spread
    return (max(timing.samples) - min(timing.samples)) / timing.us / math.sqrt(len(timing.samples))
