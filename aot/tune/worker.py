"""A measuring process: takes jobs from a connection, one at a time, and says before each launch what it will launch.

`aot.tune.executor` starts it, one for each GPU. If it dies or hangs, what it said last is to blame. What measures is a
backend, imported by name once the process knows its GPU. Imports no torch itself.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from runtime.errors import AotError

from ..compile.worker import end_with, last_line
from . import halving
from .jobs import Answer, Job
from .options import TuneOptions


@dataclass(frozen=True)
class Setup:
    """What a backend is made of: the archive, how to measure, and what the caller of an executor gives besides."""

    archive: Path
    options: TuneOptions
    details: Any = None


class Backend(Protocol):
    """What measures, in a process that has one GPU. It says by `announce` what it launches, "" for several at once.

    An `AotError` ends the tuning; any other exception the process, and is the fault of what was announced.
    """

    careful: bool  # time one function after the other, so that what fails is known

    def environment(self) -> dict[str, Any]:
        """What is measured on, as `aot.tune.measure.environment` has it."""
        ...

    def check(self, signature: Any, m: int, names: Sequence[str]) -> dict[str, str]:
        """The functions that compute something wrong at `m`, with what is wrong."""
        ...

    def bench(self, signature: Any, m: int) -> contextlib.AbstractContextManager[halving.Bench]:
        """What takes times at `m`."""
        ...


Announce = Callable[[str, int], None]
MakeBackend = Callable[[Setup, Announce], Backend]


@dataclass(frozen=True)
class Ready:
    """The first message: the process has its GPU, which is `environment`."""

    environment: dict[str, Any]


@dataclass(frozen=True)
class Launching:
    """The function that is launched next, and for how many rows; "" where a failure would be nobody's in particular."""

    name: str
    m: int


@dataclass(frozen=True)
class Failure:
    """Why the job was not done: `fatal` where no other would be either, else this process is of no more use. What was
    announced is to blame, if it `blames` that."""

    reason: str
    fatal: bool
    blames: bool = True


Message = Ready | Launching | Failure | Answer


def serve(connection: Connection, device: str | None, backend: str, setup: Setup, parent: int) -> None:
    """Do jobs until there are no more; `backend`, "module:name", names a `MakeBackend`, `device` what CUDA may see."""
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device

    def announce(name: str, m: int) -> None:
        connection.send(Launching(name, m))

    try:
        module, _, name = backend.partition(":")
        made: Backend = getattr(importlib.import_module(module), name)(setup, announce)
        connection.send(Ready(made.environment()))
        while (asked := connection.recv()) is not None:
            job, made.careful = asked
            connection.send(do(made, job, setup.options))
    except EOFError:  # the parent is gone
        return
    except AotError as error:
        connection.send(Failure(str(error), fatal=True))
    except Exception as error:  # CUDA's errors are torch's RuntimeError, after which the context is of no use
        reason = f"{type(error).__name__}: {last_line(str(error)) or 'no message'}"
        # torch's; the functions' own workspaces raise an `AotError`.
        connection.send(Failure(reason, fatal=False, blames=type(error).__name__ != "OutOfMemoryError"))


def do(backend: Backend, job: Job, options: TuneOptions) -> Answer:
    """Check what is to be checked, then time what is left of it."""
    rejected: dict[str, str] = {}

    def right() -> Collection[str]:
        return [name for name in job.names if name not in rejected]

    for m in job.check:
        for name, reason in backend.check(job.signature, m, list(right())).items():
            rejected[name] = f"{job.at(m)}: {reason}"
    if job.glances:
        return Answer(rejected, None, dict(_glances(backend, job.without(rejected))))
    if not job.m or not right():
        return Answer(rejected)
    options = replace(options, sustained=options.sustained and job.sustained)
    with backend.bench(job.signature, job.m) as bench:
        return Answer(rejected, halving.measure(bench, job.m, list(right()), options))


def _glances(backend: Backend, job: Job) -> Iterator[tuple[int, dict[str, float]]]:
    for m, names in job.glances:
        with backend.bench(job.signature, m) as bench:
            us = halving.glance(bench, names)
        if us:
            yield m, us
