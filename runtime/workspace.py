"""Device memory that kernels need besides their operands, one set for each stream: launches there follow each other.

Streams of a CUDA graph have sets of their own, for each capture: graphs captured on one stream may be replayed on
several at once. Knows nothing of what kernels keep there.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from .driver import Driver

_Key = tuple[int, int]  # see `Driver.stream_key`


class Need(NamedTuple):
    """One workspace of a function: see `runtime.record.WorkspaceArgument`."""

    bytes: int
    zeroed: bool


class Workspaces:
    """The workspaces of a library. All methods may be called from any thread.

    Functions share them: one that may hold anything is of no use to the next launch, and one that is left zero is zero.
    A function that needs more than there is gets another; what launches or graphs may still use is kept until `close`.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._held: dict[tuple[_Key, bool, int], tuple[int, int]] = {}  # by use: address and bytes of the largest
        self._found: dict[tuple[_Key, tuple[Need, ...]], tuple[int, ...]] = {}
        self._allocated: list[int] = []

    def pointers(self, stream: int, needs: tuple[Need, ...]) -> tuple[int, ...]:
        """The addresses of what a launch on `stream` needs, allocated if they are not there."""
        with self._driver.current():
            key = self._driver.stream_key(stream)
            found = self._found.get((key, needs))
            if found is None:
                with self._lock:
                    found = self._find(key, needs)
                    self._found[key, needs] = found
        return found

    def _find(self, key: _Key, needs: tuple[Need, ...]) -> tuple[int, ...]:
        pointers = []
        for number, need in enumerate(needs):
            use = key, need.zeroed, sum(other.zeroed == need.zeroed for other in needs[:number])
            pointer, size = self._held.get(use, (0, 0))
            if size < need.bytes:
                pointer = self._driver.allocate(need.bytes, need.zeroed)
                self._allocated.append(pointer)
                self._held[use] = pointer, need.bytes
            pointers.append(pointer)
        return tuple(pointers)

    def close(self) -> None:
        """Free them all; nothing that uses them may be running, launched or replayed again."""
        with self._lock:
            for pointer in self._allocated:
                self._driver.free(pointer)
            self._allocated.clear()
            self._held.clear()
            self._found.clear()
