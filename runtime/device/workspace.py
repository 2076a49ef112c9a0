"""Device memory that kernels need besides their operands, one set for each stream: launches there follow each other.

Streams of a CUDA graph have sets of their own, for each capture: graphs captured on one stream may be replayed on
several at once. Where the caller says that they never are, captures share one pool: the first stream of each capture
that needs a set has the same one, the second another. Knows nothing of what kernels keep there.

- A stream is known by its identity (cuStreamGetId), which no later stream gets; within a capture, which does not
  survive that question, by the capture's identity and the stream's handle.
- A set is allocated by the first launch that needs it, under capture too, and kept until the library closes, since
  nobody knows how long a graph lives. `stream_k` of `aot.kernels.sm90.persistent` needs 9 to 11 MB where 132 CTAs run.
- The pool can be allocated ahead (`Workspaces.reserve`). Where it grows, captures that follow have the larger memory,
  and what graphs may hold is kept until `reloaded` and then `drop_outgrown` say that those are gone.
- What must be zero is trusted to be left zero: a function that breaks its word harms those after it on its stream.
- Not told apart, so not allowed at once: two replays of one graph that was instantiated twice, a captured graph that is
  a child of two nodes, and streams that one after the other had the same handle within a capture.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from ..errors import DeviceError, WorkspaceError
from ..limits import MAX_SHARED_WORKSPACE_BYTES
from ..named_tuple import NamedTuple
from .driver import NO_CAPTURE, Driver

_Key = tuple[int, int]  # see `Driver.stream_key`

# Whose the pool's memory is, as keys begin where those of streams have a capture: a number of a stream follows for the
# first. Outgrown memory may be held by graphs: captured since the last reload, or all before it.
_POOL, _OUTGROWN, _REPLACED = -2, -3, -4


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

    def __init__(self, driver: Driver, shared: bool = False) -> None:
        """`shared` says that no two graphs are replayed at the same time, so that captures share a pool."""
        self._driver, self._shared = driver, shared
        self._lock = threading.Lock()
        self._held: dict[tuple[_Key, bool, int], tuple[int, int]] = {}  # by use: address and bytes of the largest
        self._found: dict[tuple[_Key, tuple[Need, ...]], tuple[int, ...]] = {}
        self._allocated: dict[int, _Key] = {}  # every address, and whose it is
        self._sizes: dict[int, int] = {}  # in bytes, of every address
        self._streams: dict[int, list[int]] = {}  # of each capture that shares, in the order in which they needed any
        self._closed = False

    def pointers(self, stream: int, needs: tuple[Need, ...]) -> tuple[int, ...]:
        """The addresses of what a launch on `stream` needs, allocated if they are not there.

        Raises:
            WorkspaceError: there is not so much memory, or the pool may not have so much.
            DeviceError: the driver refused, or this was closed.
        """
        with self._driver.current():
            key = self._driver.stream_key(stream)
            found = self._found.get((key, needs))
            if found is None:
                with self._lock:
                    found = self._find(self._owner(key), needs)
                    self._found[key, needs] = found
        return found

    def beyond(self, needs: tuple[Need, ...]) -> str | None:
        """Why no capture can have what a launch needs; None if one can, or if each has its own."""
        size = sum(need.bytes for need in needs)
        if not self._shared or size <= MAX_SHARED_WORKSPACE_BYTES:
            return None
        return f"needs workspaces of {size} bytes, and captures share {MAX_SHARED_WORKSPACE_BYTES} at most"

    def reserve(self, every: Iterable[tuple[Need, ...]]) -> None:
        """Allocate the pool now, for captures that launch on one stream: what serves each of these launches. The
        context is current; nothing happens where captures do not share.

        Raises:
            WorkspaceError: there is not so much memory, or the pool may not have so much.
            DeviceError: the driver refused, or this was closed.
        """
        if not self._shared:
            return
        largest: dict[tuple[bool, int], Need] = {}
        for needs in every:
            if self.beyond(needs) is None:
                for use, need in _uses(needs):
                    largest[use] = max(need, largest.get(use, need))
        with self._lock:
            self._find((_POOL, 0), tuple(largest[use] for use in sorted(largest)))

    def _owner(self, key: _Key) -> _Key:
        """Whose memory a launch on the stream of this key takes."""
        capture, stream = key
        if not self._shared or capture == NO_CAPTURE:
            return key
        streams = self._streams.setdefault(capture, [])
        if stream not in streams:
            streams.append(stream)
        return _POOL, streams.index(stream)

    def _find(self, owner: _Key, needs: tuple[Need, ...]) -> tuple[int, ...]:
        """The addresses, allocated if they are not there; the caller holds the lock."""
        if self._closed:
            raise DeviceError("the library whose kernels these are was closed; load the archive again")
        pointers, of_pool = [], owner[0] == _POOL
        for (zeroed, number), need in _uses(needs):
            use = owner, zeroed, number
            before, size = self._held.get(use, (0, 0))
            pointer = before
            if size < need.bytes:
                if of_pool:
                    self._refuse_beyond(need.bytes)
                pointer = self._driver.allocate(need.bytes, zeroed)
                self._allocated[pointer], self._sizes[pointer] = owner, need.bytes
                self._held[use] = pointer, need.bytes
                if of_pool and before:
                    self._allocated[before] = _OUTGROWN, 0
                    self._found = {where: found for where, found in self._found.items() if where[0][0] == NO_CAPTURE}
            pointers.append(pointer)
        return tuple(pointers)

    def _refuse_beyond(self, more: int) -> None:
        held = self._of_pool()
        if held + more > MAX_SHARED_WORKSPACE_BYTES:
            raise WorkspaceError(
                f"captures share {MAX_SHARED_WORKSPACE_BYTES} bytes of workspaces at most, of which {held} are held, "
                f"and a launch needs {more} more; preload before you capture, launch on fewer streams within a "
                "capture, or load the library without capture_workspaces='shared'"
            )

    def _of_pool(self) -> int:
        return sum(self._sizes[pointer] for pointer, (whose, _) in self._allocated.items() if whose <= _POOL)

    def held(self) -> tuple[int, int, int]:
        """How many there are, their bytes, and those of them that captures share."""
        with self._lock:
            return len(self._sizes), sum(self._sizes.values()), self._of_pool()

    def reloaded(self) -> None:
        """What was outgrown so far is for graphs captured before now."""
        with self._lock:
            for pointer in [pointer for pointer, (whose, _) in self._allocated.items() if whose == _OUTGROWN]:
                self._allocated[pointer] = _REPLACED, 0

    def drop_outgrown(self) -> None:
        """Free what only graphs from before the last `reloaded` hold, which are never replayed again."""
        with self._lock:
            self._free(lambda key: key[0] == _REPLACED)

    def forget_captures(self) -> None:
        """Free those of captures, whose graphs are never replayed again; none may be under way. What they share stays
        for captures to come, but for what was outgrown."""
        with self._lock:
            self._streams.clear()
            self._free(lambda key: key[0] not in (NO_CAPTURE, _POOL))

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


def _uses(needs: tuple[Need, ...]) -> Iterator[tuple[tuple[bool, int], Need]]:
    """Each need with what it is for: whether it is zeroed, and how many such there are before it."""
    for number, need in enumerate(needs):
        yield (need.zeroed, sum(other.zeroed == need.zeroed for other in needs[:number])), need
