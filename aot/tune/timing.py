"""In what order launches are timed, and what timing them over and over found.

Imports no torch: whoever plans or reads times need not be able to take them.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

_FEWEST_OF_TWO_SPEEDS = 5  # samples, of which each speed must have two; `aot tune` takes so many
_APART = 0.02  # two speeds differ by this share at least: less is noise that nobody would mind
_CLEARLY = 2.0  # and by so many times the spread within either
_FEWEST_OF_A_MEDIAN = 4  # samples, to say how far off it may be


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch, and (largest - smallest) / median of the samples that were taken.

    `us` is the median of `samples`; where these have two speeds it is their mean, since a median would be either of the
    two by chance. `bimodal` says whether those that were taken have two. `samples` may be left out by what does not
    need them; from `in_turns` they are without what turns share.
    """

    us: float
    spread: float
    samples: tuple[float, ...] = ()
    bimodal: bool = False

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """The timing that these samples, in microseconds, make."""
        median, two = statistics.median(samples), _has_two_speeds(samples)
        us = statistics.fmean(samples) if two else median
        return cls(us, (max(samples) - min(samples)) / median, tuple(samples), two)


def in_turns(times: Mapping[str, Timing]) -> dict[str, Timing]:
    """The same, where contenders took turns: each time without what was so for all of a turn, such as the clock.

    A GPU at the limit of its power changes its clock by a tenth within milliseconds. Samples of a turn are divided by
    how much longer than usual its contenders took, by their median, so what one took over another in a turn stays.
    Spreads, and whether there are two speeds, stay those of the samples as they are. Of problems that two H100s were
    given (231 of M = 512 to 8192, 162 of M = 65 to 511) five turns of five contenders say what one took over another
    with an error of 2.5% and 1.3% (root mean square), where medians of samples as they are have 3.0% and 1.5%.

    Where they did not all take as many samples, or there are not two, times are returned as they are.
    """
    counts = {len(timing.samples) for timing in times.values()}
    if len(times) < 2 or len(counts) != 1 or counts == {0}:
        return dict(times)
    off = []
    for timing in times.values():
        usual = statistics.median(timing.samples)
        off.append([sample / usual for sample in timing.samples])
    shared = [statistics.median(turn) for turn in zip(*off, strict=True)]
    found = {}
    for name, timing in times.items():
        turned = Timing.of([sample / of for sample, of in zip(timing.samples, shared, strict=True)])
        found[name] = replace(timing, us=turned.us, samples=turned.samples)
    return found


def turns(count: int, repeats: int) -> Iterator[list[int]]:
    """The order of `count` contenders in each repeat: A B C, C B A, B C A, A C B and so on.

    Each leaves the next a clock: in one fixed order cuBLAS in its second place took 1.02 of its time in the first, over
    40 large problems on an H200.
    """
    for repeat in range(repeats):
        order = [(repeat // 2 + i) % count for i in range(count)]
        yield order[::-1] if repeat % 2 else order


def whole_turns(count: int, least: int) -> int:
    """The fewest repeats, `least` or more, in which `turns` gives each of `count` contenders each place as often."""
    return -(-least // (2 * count)) * 2 * count


def deviation(samples: Sequence[float]) -> float:
    """By about what share a median of such samples is off, as a standard deviation; infinite where they are few.

    That of a median of normal noise is 1.25 times that of a mean, and the noise's is taken from the middle half of the
    samples, which is 1.35 of it wide.
    """
    if len(samples) < _FEWEST_OF_A_MEDIAN:
        return math.inf
    low, middle, high = statistics.quantiles(samples)
    return 1.25 * (high - low) / 1.35 / middle / math.sqrt(len(samples))


def _has_two_speeds(samples: Sequence[float]) -> bool:
    """Whether samples fall into two groups of two or more, further apart than either is wide."""
    if len(samples) < _FEWEST_OF_TWO_SPEEDS:
        return False
    ordered = sorted(samples)
    gaps = [b - a for a, b in itertools.pairwise(ordered)]
    cut = max(range(1, len(gaps) - 1), key=lambda i: gaps[i])
    low, high = ordered[: cut + 1], ordered[cut + 1 :]
    wide = max(low[-1] - low[0], high[-1] - high[0])
    return gaps[cut] > _APART * statistics.median(ordered) and gaps[cut] > _CLEARLY * wide
