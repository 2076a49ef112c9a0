"""How slow this machine is, for tests that hold code to seconds of a processor: such a limit is of a usual machine."""

from __future__ import annotations

import functools
import time

_USUAL_S = 0.05  # of the loop
_TURNS = 1_000_000
_SLOWEST = 3.0  # that limits follow


@functools.cache
def slowness() -> float:
    """How many times as long as usual this machine takes, from 1 to 3: by the least of three turns of a loop."""
    return min(_SLOWEST, max(1.0, min(_looped_s() for _ in range(3)) / _USUAL_S))


def _looped_s() -> float:
    begun, total = time.process_time(), 0
    for i in range(_TURNS):
        total += i * i % 7
    return time.process_time() - begun
