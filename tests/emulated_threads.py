"""The threads of a block as Python's, one at a time: their turns, barriers, warps and what they share.

Knows nothing of kernels, or of the DSL.
"""

from __future__ import annotations

import _thread
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

WARP = 32


class Turns:
    """Lets one thread of a block run at a time, until it waits for others or ends; which is next is drawn, with a fixed
    seed. A thread that has not begun begins on the system's thread of one that has ended, if there is one."""

    def __init__(self, threads: int, body: Callable[[int], None]) -> None:
        self._body = body
        self._ready, self._left = list(range(threads)), threads
        self._gates: dict[int, Any] = {}  # locks, of threads that have begun
        self._random = random.Random(threads)
        self._failed: BaseException | None = None
        self._done = threading.Lock()

    def run(self) -> None:
        """Run `body` of every thread; what the first that fails raises is raised."""
        self._done.acquire()
        self._pass_on()
        self._done.acquire()
        if self._failed is not None:
            raise self._failed

    def wait(self) -> None:
        """Let others run until `ready` names this thread and its turn comes."""
        gate = self._gates[HERE.thread]
        self._pass_on()
        gate.acquire()
        if self._failed is not None:
            raise SystemExit  # ends a thread of a block in which another failed

    def ready(self, threads: list[int]) -> None:
        """These wait no longer."""
        self._ready += threads

    def _pass_on(self) -> None:
        thread = self._next()
        if thread is not None:
            _thread.start_new_thread(self._work, (thread,))

    def _next(self) -> int | None:
        """The thread whose turn it is, if it has not begun; one that has goes on where it waits."""
        if not self._ready:
            self._fail(AssertionError("all threads that have not ended are at barriers that others never reach"))
            return None
        place = self._random.randrange(len(self._ready))
        self._ready[place], self._ready[-1] = self._ready[-1], self._ready[place]
        thread = self._ready.pop()
        if thread not in self._gates:
            return thread
        self._gates[thread].release()
        return None

    def _work(self, thread: int | None) -> None:
        while thread is not None:
            self._gates[thread] = threading.Lock()
            self._gates[thread].acquire()
            try:
                self._body(thread)
            except BaseException as error:
                self._fail(error)
                return
            self._left -= 1
            if not self._left:
                self._done.release()
                return
            thread = self._next()

    def _fail(self, error: BaseException) -> None:
        if self._failed is None:
            self._failed = error
            self._done.release()
            for gate in self._gates.values():
                if gate.locked():
                    gate.release()


class Barrier:
    """Where so many threads wait for each other."""

    def __init__(self, turns: Turns, size: int) -> None:
        self._turns, self._size = turns, size
        self._arrived: list[int] = []

    def wait(self) -> None:
        if len(self._arrived) + 1 < self._size:
            self._arrived.append(HERE.thread)
            self._turns.wait()
        else:
            arrived, self._arrived = self._arrived, []
            self._turns.ready(arrived)


class _Meeting:
    """What the threads of a warp bring once, and what is made of it."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.made: Any = None


class Warp:
    """Where 32 threads meet and see what each brought."""

    def __init__(self, turns: Turns) -> None:
        self.barrier = Barrier(turns, WARP)
        self._meeting = _Meeting()

    def exchange(self, lane: int, value: Any) -> list[Any]:
        """What each lane brings, in the order of lanes."""
        return list(self.together(lane, value, list))

    def together(self, lane: int, value: Any, make: Callable[[list[Any]], Any]) -> Any:
        """What `make`, which is asked once, makes of what all bring."""
        meeting = self._meeting
        meeting.values[lane] = value
        if len(meeting.values) == WARP:
            self._meeting = _Meeting()
            meeting.made = make([meeting.values[of] for of in range(WARP)])
        self.barrier.wait()
        return meeting.made


class _Here(threading.local):
    """The thread that runs: its number, its block's, what it shares, and its copies that may still be under way: those
    of each group, the last of which is open."""

    thread: int
    block: tuple[int, int, int]
    shared: Any
    allocated: int
    copies: list[list[Callable[[], None]]]

    @property
    def lane(self) -> int:
        return self.thread % WARP

    @property
    def warp(self) -> Warp:
        found: Warp = self.shared.warps[self.thread // WARP]
        return found


HERE = _Here()


class Shared:
    """What the threads of a block share."""

    def __init__(self, threads: int, turns: Turns) -> None:
        self.barrier = Barrier(turns, threads)
        self.warps = [Warp(turns) for _ in range(threads // WARP)]
        self.memory: dict[int, np.ndarray[Any, Any]] = {}
        self.random = random.Random(threads)
