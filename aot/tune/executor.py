"""Runs measuring jobs: an interface that a cluster could implement, and processes of this machine, one for each GPU.

A function that ends its process, or that does not end, costs that process: it is rejected with the reason, and the rest
of its job goes to a fresh one. Imports no torch, and knows nothing of what jobs are for.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from runtime.errors import AotError

from .jobs import Answer, Job
from .worker import Failure, Launching, Message, Ready, Setup, serve

TIMEOUT_S = 300.0  # between two messages; to import torch, or to compile the baseline's epilogue, takes the longest
_END_S = 5.0  # for a process without work to end by itself


class MeasuringFailed(AotError):
    """A job cannot be done, and no function is to blame."""


class Executor(Protocol):
    """What does jobs, several at a time."""

    width: int  # jobs that it does at a time

    def submit(self, job: Job) -> None:
        """Take a job; those of one signature are best done by one worker, one after the other."""
        ...

    def answers(self) -> Iterator[tuple[Job, Answer]]:
        """Wait for one job or more to be done. A function to blame for a failure is among its answer's rejected.

        Raises:
            AotError: a job cannot be done.
        """
        ...

    def environment(self) -> dict[str, Any]:
        """What is measured on; may wait for a worker to begin."""
        ...

    def close(self) -> None:
        """End at once; what is not done is lost."""
        ...


@dataclass
class _Task:
    """A job, what of it was rejected on the way, and how often its process failed with nobody to blame."""

    job: Job
    rejected: dict[str, str] = field(default_factory=dict)
    failures: int = 0

    def left(self) -> Job:
        return self.job.without(self.rejected)


class _Process:
    """A worker process, seen from its parent."""

    def __init__(self, device: str | None, backend: str, setup: Setup) -> None:
        self.device = device
        self.environment: dict[str, Any] | None = None
        self.task: _Task | None = None
        self.launching = Launching("", 0)
        self.heard = time.monotonic()
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        arguments = theirs, device, backend, setup, os.getpid()
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def give(self, task: _Task) -> None:
        self.task, self.launching, self.heard = task, Launching("", 0), time.monotonic()
        with contextlib.suppress(OSError):  # a process that is gone says so when its answer is read
            self.connection.send((task.left(), task.failures > 0))

    def hear(self) -> Message:
        """The message that has arrived, or the way the process ended."""
        self.heard = time.monotonic()
        try:
            found: Message = self.connection.recv()
            return found
        except (EOFError, OSError):
            self._process.join()
            status = self._process.exitcode or 0
            how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
            return Failure(f"its process {how}", fatal=False)

    def stop(self) -> None:
        """End it; one that waits for work ends by itself, and with it what torch.compile started."""
        self.connection.close()
        if self.task is None:
            self._process.join(_END_S)
        self._process.kill()
        self._process.join()


class LocalExecutor:
    """A process for each of `devices`, as CUDA_VISIBLE_DEVICES names them; None leaves that as it is.

    `backend` is what `aot.tune.worker.serve` takes. Of GPUs that jobs of one signature may go to, they stay with one.
    """

    def __init__(self, devices: Sequence[str | None], backend: str, setup: Setup, timeout_s: float = TIMEOUT_S) -> None:
        self.width = len(devices)
        self._backend, self._setup, self._timeout_s = backend, setup, timeout_s
        self._processes = [_Process(device, backend, setup) for device in devices]
        self._waiting: deque[_Task] = deque()
        self._homes: dict[Any, int] = {}  # of signatures, the process that has their weights

    def submit(self, job: Job) -> None:
        """Take a job."""
        self._waiting.append(_Task(job))
        self._give_out()

    def answers(self) -> Iterator[tuple[Job, Answer]]:
        """Wait for one job or more to be done.

        Raises:
            MeasuringFailed: a process failed twice with no function to blame, or before it began.
            AotError: what a process reports for all jobs.
        """
        while self._waiting or any(p.task for p in self._processes):
            done = [found for place in range(self.width) if (found := self._attend(place))]
            if done:
                self._give_out()
                return iter(done)
            self._wait()
        return iter(())

    def environment(self) -> dict[str, Any]:
        """What the first process runs on."""
        while self._processes[0].environment is None:
            self._wait()
            self._attend(0)
        return self._processes[0].environment

    def close(self) -> None:
        """End every process."""
        for process in self._processes:
            process.stop()

    def _wait(self) -> None:
        deadline = min(p.heard for p in self._processes if p.task or p.environment is None) + self._timeout_s
        wait([p.connection for p in self._processes], timeout=max(0.0, deadline - time.monotonic()))

    def _give_out(self) -> None:
        for task in list(self._waiting):
            home = self._homes.get(task.job.signature)
            idle = [i for i, p in enumerate(self._processes) if p.task is None]
            if not idle:
                return
            place = home if home in idle else idle[0]
            self._homes = {s: i for s, i in self._homes.items() if i != place} | {task.job.signature: place}
            self._waiting.remove(task)
            self._processes[place].give(task)

    def _attend(self, place: int) -> tuple[Job, Answer] | None:
        """Take what a process has to say; the answer if it has one."""
        process = self._processes[place]
        while _has_news(process.connection):
            message = process.hear()
            if isinstance(message, Ready):
                process.environment = message.environment
            elif isinstance(message, Launching):
                process.launching = message
            elif isinstance(message, Failure):
                self._failed(place, message)
                return None
            else:
                task, process.task = process.task, None
                assert task is not None
                return task.job, replace(message, rejected={**task.rejected, **message.rejected})
        busy = process.task or process.environment is None
        if busy and time.monotonic() - process.heard >= self._timeout_s:
            self._failed(place, Failure(f"no result after {self._timeout_s:g} s", fatal=False))
        return None

    def _failed(self, place: int, failure: Failure) -> None:
        """Put a fresh process in the place of one that failed, and give it what is left to do of its job."""
        process = self._processes[place]
        process.stop()
        if failure.fatal:
            raise AotError(failure.reason)
        if process.environment is None:
            raise MeasuringFailed(f"a measuring process failed before it began: {failure.reason}")
        self._processes[place] = fresh = _Process(process.device, self._backend, self._setup)
        task = process.task
        if task is None:
            return
        job = task.job
        name, m = process.launching.name, process.launching.m
        if name in job.names and failure.blames:
            task.rejected[name] = f"{job.at(m)}: {failure.reason}"
        elif task.failures:
            what = job.at(m or job.m)
            raise MeasuringFailed(f"measuring failed twice at {what}: {failure.reason}; look at this GPU, then go on")
        else:
            task.failures += 1
        fresh.give(task)


def _has_news(connection: Connection) -> bool:
    try:
        return connection.poll()
    except OSError:  # the other end is gone, which reading it says
        return True
