"""Limits in seconds of a processor, for tests: they are of a usual machine, and a slower or busy one gets more."""

from __future__ import annotations

import time
from collections.abc import Callable

_USUAL_S = 0.05  # of the loop
_TURNS = 1_000_000
_SLOWEST = 3.0  # that limits follow
_ATTEMPTS = 3


def slowness() -> float:
    """How many times as long as usual this machine takes just now, from 1 to 3: by the least of 3 loops."""
    return min(_SLOWEST, max(1.0, min(_looped_s() for _ in range(3)) / _USUAL_S))


def assert_takes_less_than(
    seconds: float, work: Callable[[], object], spent: Callable[[], float] = time.process_time
) -> None:
    """Fail unless one of three runs of `work` takes less than `seconds` of a usual machine's processor.

    A run that a neighbour on the same core slows is not held against the code: how slow the machine is gets measured
    before and after each run. `spent` reads the clock in seconds.
    """
    taken = []
    for _ in range(_ATTEMPTS):
        slow, begun = slowness(), spent()
        work()
        taken.append((spent() - begun) / max(slow, slowness()))
        if taken[-1] < seconds:
            return
    raise AssertionError(f"{min(taken):.3f} s of a usual machine's processor, the limit is {seconds:.3f} s")


def _looped_s() -> float:
    begun, total = time.process_time(), 0
    for i in range(_TURNS):
        total += i * i % 7
    return time.process_time() - begun
