"""Processes that start at once and then measure in turn, so that none disturbs another and what changes with time, such
as a GPU's clock, changes for all alike."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

FLAG = "--turns"  # of a command that takes turns; what follows it is for `Turns`
_POLL_S = 0.2


class Turns:
    """The turns of this process, by what follows FLAG; without it, it has no others to wait for."""

    def __init__(self, given: str | None = None) -> None:
        self._ends = [int(word) for word in given.split(",")] if given else None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for one. It ends where the next is asked for, or the process ends."""
        if self._ends:
            read, write = self._ends
            os.write(write, b".")
            if not os.read(read, 1):
                raise SystemExit("turns: what gave them has ended")
        yield


@dataclass(frozen=True)
class _Taker:
    process: subprocess.Popen[bytes]
    read: int
    write: int

    def asks(self, end: float) -> bool:
        """Wait until it asks for a turn; False if it ends first, by itself or because it is too late."""
        while True:
            ready, _, _ = select.select([self.read], [], [], _POLL_S)
            if ready:
                return bool(os.read(self.read, 1))
            if self.process.poll() is not None:
                kill(self.process)  # what it left, which would disturb the others
                return False
            if time.monotonic() > end:
                kill(self.process)
                return False


def run(commands: Mapping[str, Sequence[str]], timeout_s: float) -> dict[str, int]:
    """Start the commands at once, give each a turn, in their order, as long as they ask for one, and return the exit
    statuses. The first turn is given when all have asked. What has not ended after `timeout_s` is ended, with the
    processes that it started: a status below 0."""
    takers: dict[str, _Taker] = {}
    try:
        for name, command in commands.items():
            takers[name] = _started(command)
        _give(takers, time.monotonic() + timeout_s)
        return {name: each.process.wait() for name, each in takers.items()}
    finally:
        for each in takers.values():
            kill(each.process)
            os.close(each.read)
            os.close(each.write)


def _give(takers: Mapping[str, _Taker], end: float) -> None:
    asking = [name for name in takers if takers[name].asks(end)]
    while asking:
        for name in list(asking):
            with contextlib.suppress(BrokenPipeError):  # it ended after it had asked
                os.write(takers[name].write, b".")
            if not takers[name].asks(end):
                asking.remove(name)
    for each in takers.values():
        try:
            each.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            kill(each.process)


def _started(command: Sequence[str]) -> _Taker:
    (its_read, write), (read, its_write) = os.pipe(), os.pipe()
    try:
        words = [*command, FLAG, f"{its_read},{its_write}"]
        return _Taker(subprocess.Popen(words, pass_fds=(its_read, its_write), start_new_session=True), read, write)
    finally:
        os.close(its_read)
        os.close(its_write)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End it, if it has not, and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
