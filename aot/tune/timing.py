"""What timing one launch over and over found. Imports no torch: whoever reads times need not be able to take them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_FEWEST_OF_TWO_SPEEDS = 5  # samples, of which each speed must have two; `aot tune` takes so many
_APART = 0.02  # two speeds differ by this share at least: less is noise that nobody would mind
_CLEARLY = 2.0  # and by so many times the spread within either


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
