"""Device memory that kernels need besides their operands, one set for each stream: launches there follow each other.

Streams of a CUDA graph have sets of their own, for each capture: graphs captured on one stream may be replayed on
several at once. Knows nothing of what kernels keep there.

- A stream is known by its identity (cuStreamGetId), which no later stream gets; within a capture, which does not
  survive that question, by the capture's identity and the stream's handle.
- A set is allocated by the first launch that needs it, under capture too, and kept until the library closes, since
  nobody knows how long a graph lives. `stream_k` of `aot.kernels.sm90.persistent` needs 9 to 11 MB where 132 CTAs run.
- What must be zero is trusted to be left zero: a function that breaks its word harms those after it on its stream.
- Not told apart, so not allowed at once: two replays of one graph that was instantiated twice, a captured graph that is
  a child of two nodes, and streams that one after the other had the same handle within a capture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..errors import DeviceError
from ..named_tuple import NamedTuple
from .driver import NO_CAPTURE, Driver

_Key = tuple[int, int]  # see `Driver.stream_key`


class Need(NamedTuple):
    """One workspace of a function: see `runtime.program.record.WorkspaceArgument`."""

    bytes: int
    zeroed: bool


class Workspaces:
    """The workspaces of a library. All methods may be called from any thread.

    Functions share them: one that may hold anything is of no use to the next launch, and one that is left zero is zero.
    A function that needs more than there is gets another; what launches or graphs may still use is kept until `close`,
    or until `forget_captures`.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._held: dict[tuple[_Key, bool, int], tuple[int, int]] = {}  # by use: address and bytes of the largest
        self._found: dict[tuple[_Key, tuple[Need, ...]], tuple[int, ...]] = {}
        self._allocated: dict[int, _Key] = {}  # every address, and whose it is
        self._sizes: dict[int, int] = {}  # in bytes, of every address
        self._closed = False

    def pointers(self, stream: int, needs: tuple[Need, ...]) -> tuple[int, ...]:
        """The addresses of what a launch on `stream` needs, allocated if they are not there.

        Raises:
            WorkspaceError: there is not so much memory.
            DeviceError: the driver refused, or this was closed.
        """
        with self._driver.current():
            key = self._driver.stream_key(stream)
            found = self._found.get((key, needs))
            if found is None:
                with self._lock:
                    if self._closed:
                        raise DeviceError("the library whose kernels these are was closed; load the archive again")
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
                self._allocated[pointer], self._sizes[pointer] = key, need.bytes
                self._held[use] = pointer, need.bytes
            pointers.append(pointer)
        return tuple(pointers)

    def held(self) -> tuple[int, int]:
        """How many there are, and their bytes."""
        with self._lock:
            return len(self._sizes), sum(self._sizes.values())

    def forget_captures(self) -> None:
        """Free those of captures, whose graphs are never replayed again; none may be under way."""
        with self._lock:
            self._free(lambda key: key[0] != NO_CAPTURE)

    def close(self) -> None:
        """Free them all; nothing that uses them may be running, launched or replayed again."""
        with self._lock:
            self._closed = True
            self._free(lambda key: True)

    def _free(self, chosen: Callable[[_Key], bool]) -> None:
        """Free what belongs to these keys, all of it; then raise what the driver said of the first that failed."""
        self._found = {where: found for where, found in self._found.items() if not chosen(where[0])}
        self._held = {use: held for use, held in self._held.items() if not chosen(use[0])}
        failure: DeviceError | None = None
        for pointer in [pointer for pointer, key in self._allocated.items() if chosen(key)]:
            del self._allocated[pointer], self._sizes[pointer]
            try:
                self._driver.free(pointer)
            except DeviceError as error:
                failure = failure or error
        if failure is not None:
            raise failure
