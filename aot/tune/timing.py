"""What timing one launch over and over found. Imports no torch: whoever reads times need not be able to take them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_FEWEST_OF_TWO_SPEEDS = 5  # samples, of which each speed must have two; `aot tune` takes so many
_APART = 0.02  # two speeds differ by this share at least: less is noise that nobody would mind
_CLEARLY = 2.0  # and by so many times the spread within either
_FEWEST_OF_A_MEDIAN = 4  # turns, to say how far off it may be


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


def over(samples: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """How many times as long as others' samples these took, by the median of the turns in which both were taken, and
    by about what share that is off, as a standard deviation.

    What changes the clock for a few milliseconds changes both of a turn. The deviation of a median of normal noise is
    1.25 times that of a mean, and that of the noise is taken from the middle half of the turns, which is 1.35 wide.
    """
    ratios = sorted(a / b for a, b in zip(samples, others, strict=True))
    if len(ratios) < _FEWEST_OF_A_MEDIAN:
        return statistics.median(ratios), math.inf
    low, middle, high = statistics.quantiles(ratios)
    return middle, 1.25 * (high - low) / 1.35 / middle / math.sqrt(len(ratios))


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
