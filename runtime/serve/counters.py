"""What a library counts as it serves, made to cost next to nothing where it launches.

Knows nothing of what the names and words mean. `runtime.serve.stats` makes them readable.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

from ..native import _native

# Signatures that were refused are kept apart up to so many; whoever asks for ever new ones must not fill the memory.
MAX_REFUSALS = 1024
OTHERS = ("(others)", "too many to list")


class Counter:
    """A count that any number of threads add to, and that loses none: `_native.Counter` in Python."""

    def __init__(self) -> None:
        self.add = itertools.count().__next__  # one step of the interpreter, so no lock is needed
        self._reads = 0
        self._lock = threading.Lock()

    def read(self) -> int:
        """How often `add` was called; reading takes a step as well, which is taken off again."""
        with self._lock:
            self._reads += 1
            return self.add() - self._reads + 1


def _counter() -> Any:
    return Counter() if _native is None else _native.Counter()


class Refusals:
    """How often one signature was refused for one reason, and how often torch computed it instead."""

    __slots__ = ("fallbacks", "misses")

    def __init__(self) -> None:
        self.misses = self.fallbacks = 0


class Counters:
    """All that one library counts, over every archive it serves or served. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.launches: dict[str, Any] = {}  # a counter for each function that was loaded
        self.refusals: dict[tuple[str, str], Refusals] = {}  # by signature and reason
        self._torch_refused: set[str] = set()  # signatures
        self.plans = self.loads = self.reloads = 0
        self.given_to_torch = _counter()
        self.load_seconds = self.longest_load_seconds = 0.0

    def launches_of(self, name: str) -> Any:
        """The counter of calls that launched the function `name`, of whichever archive."""
        with self._lock:
            found = self.launches.get(name)
            if found is None:
                found = self.launches[name] = _counter()
        return found

    def planned(self) -> None:
        """Count a plan."""
        with self._lock:
            self.plans += 1

    def loaded(self, seconds: float) -> None:
        """Count a cubin that was loaded, checked and is ready, and how long that took."""
        with self._lock:
            self.loads += 1
            self.load_seconds += seconds
            self.longest_load_seconds = max(self.longest_load_seconds, seconds)

    def reloaded(self) -> None:
        """Count a reload that changed something."""
        with self._lock:
            self.reloads += 1

    def torch_refused(self, signature: str) -> bool:
        """Whether this is the first time that torch does not take a GEMM that it was measured to be faster at."""
        with self._lock:
            first = signature not in self._torch_refused and len(self._torch_refused) < MAX_REFUSALS
            if first:
                self._torch_refused.add(signature)
        return first

    def refused(self, signature: str, reason: str, fell_back: bool) -> int:
        """Count a call that no kernel served; how many of its kind fell back to torch so far."""
        with self._lock:
            key = signature, reason
            if key not in self.refusals and len(self.refusals) >= MAX_REFUSALS:
                key = OTHERS
            found = self.refusals.setdefault(key, Refusals())
            found.misses += 1
            found.fallbacks += fell_back
            return found.fallbacks
