"""What timing one launch over and over found. Imports no torch: whoever reads times need not be able to take them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_FEWEST_OF_TWO_SPEEDS = 5  # samples, of which each speed must have two; `aot tune` takes so many
_APART = 0.02  # two speeds differ by this share at least: less is noise that nobody would mind
_CLEARLY = 2.0  # and by so many times the spread within either
_FEWEST_OF_A_MEDIAN = 4  # samples, to say how far off it may be


@dataclass(frozen=True)
class Timing:
    """Microseconds of one launch, and (largest - smallest) / median of the samples they are from.

    `us` is the samples' median; where they have two speeds (`bimodal`) it is their mean, since a median would be either
    of the two by chance. `samples` may be left out by what does not need them.
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
    """The timings of contenders that took turns, without what was so for all of a turn, such as the clock.

    A GPU at the limit of its power changes its clock by a tenth within milliseconds. Each sample is brought to what it
    had been if the others of its turn had taken what is usual for them, by their geometric mean. In problems that two
    H100s were given (231 of M = 512 to 8192, 162 of M = 65 to 511) five turns say what one function takes over another
    with an error of 2.5% and 1.3% (root mean square), where medians of samples as they are have 3.0% and 1.5%.
    """
    logs = {name: [math.log(sample) for sample in timing.samples] for name, timing in times.items()}
    turns = {len(of) for of in logs.values()}
    if len(logs) < 2 or len(turns) != 1 or turns == {0}:
        return dict(times)
    off = {name: [x - statistics.median(of) for x in of] for name, of in logs.items()}
    all_off = [math.fsum(turn) for turn in zip(*off.values(), strict=True)]
    others = len(logs) - 1
    return {
        name: Timing.of(
            [math.exp(x - (all_of - own) / others) for x, own, all_of in zip(of, off[name], all_off, strict=True)]
        )
        for name, of in logs.items()
    }


def deviation(timing: Timing) -> float:
    """By about what share a median of such samples is off, as a standard deviation; infinite where they are few.

    That of a median of normal noise is 1.25 times that of a mean, and the noise's is taken from the middle half of the
    samples, which is 1.35 of it wide.
    """
    if len(timing.samples) < _FEWEST_OF_A_MEDIAN:
        return math.inf
    low, middle, high = statistics.quantiles(timing.samples)
    return 1.25 * (high - low) / 1.35 / middle / math.sqrt(len(timing.samples))


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
