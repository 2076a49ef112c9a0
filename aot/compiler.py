"""Variants to kernels: from the build cache, or else compiled in worker processes that never see a GPU.

A worker is told its architecture before it imports the DSL, which keeps it, so each compiles for one target; it takes
one variant at a time, so that a slow one holds up no other. What it prints goes to a file, and is read when it dies.
Whatever goes wrong with one variant (an exception, a crash, a hang) is that variant's failure and nobody else's.
Every kernel enters the cache as it arrives: a build that is interrupted continues where it was.

Knows nothing of manifests, rankings or archives, and imports neither torch nor the DSL.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib import metadata
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any

from runtime.errors import AotError

from . import host_ir, lower
from .cache import SCHEMA_VERSION, Cache, DamagedEntry, Entry, KeyFields, cache_key
from .providers import provider
from .variants import Variant
from .worker import Compiled, Failed, last_line

LOWERING = "aot.lower"
TIMEOUT_S = 300.0

# A worker needs about 2 s before its first kernel (imports), and then about 0.5 s a kernel: another one pays where
# those that are running have more than this many kernels each to go.
_START_UP_KERNELS = 4

_ROOT = Path(__file__).resolve().parents[1]
# This project's files that `aot.lower` runs; a provider's own digest covers the provider. A test follows the imports.
SOURCES = (
    "aot/cubin.py",
    "aot/expressions.py",
    "aot/host_ir.py",
    "aot/host_text.py",
    "aot/host_types.py",
    "aot/lower.py",
    "aot/targets.py",
    "aot/variants.py",
    "runtime/arithmetic.py",
    "runtime/canonical.py",
    "runtime/dtypes.py",
    "runtime/evaluator.py",
    "runtime/launch.py",
    "runtime/limits.py",
    "runtime/native.py",
    "runtime/poison.py",
    "runtime/program.py",
    "runtime/reading.py",
    "runtime/record.py",
    "runtime/signature.py",
    "runtime/tuples.py",
)


class CompileError(AotError):
    """Compiling cannot even start."""


@dataclass(frozen=True)
class Kernel:
    """A compiled variant."""

    variant: Variant
    record: dict[str, Any]
    cubin: bytes


@dataclass(frozen=True)
class Event:
    """What happened to a variant: one of "cached", "compiled" and "failed"; before it perhaps "damaged", its entry.

    `record` is there for the first two, `detail` for the others.
    """

    variant: Variant
    outcome: str
    detail: str = ""
    record: dict[str, Any] | None = None


@dataclass(frozen=True)
class BuildReport:
    """The kernels and the failures with their reasons, both in the order of the variants given."""

    kernels: dict[Variant, Kernel]
    failures: dict[Variant, str]
    compiled: int
    cached: int
    seconds: float


def usable_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def toolchain() -> dict[str, str]:
    """The version of every installed distribution that the DSL's code generation lives in.

    Raises:
        CompileError: there is none.
    """
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name.startswith("nvidia-cutlass-dsl"):
            found.setdefault(name, distribution.version)
    if not found:
        raise CompileError("nvidia-cutlass-dsl is not installed; pip install 'cute-aot[build]'")
    return dict(sorted(found.items()))


def compile_variants(
    variants: Iterable[Variant],
    cache: Cache,
    jobs: int | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    *,
    on_start: Callable[[int, int], None] = lambda kernels, processes: None,
    timeout_s: float = TIMEOUT_S,
    lowering: str = LOWERING,
) -> BuildReport:
    """Compile each variant that is not in `cache`, in up to `jobs` processes (default: one for each usable core).

    `on_start` hears once how many kernels are to be compiled, in how many processes at most, if there are any;
    `timeout_s` bounds one variant. `lowering` names the module whose `lower(variant)` workers call.

    Raises:
        CompileError: the DSL is not installed, or no worker can be started.
        CacheError: the cache directory cannot be used.
    """
    begun = time.monotonic()
    wanted = list(dict.fromkeys(variants))
    key = _key_maker()
    keys = {v: key(v) for v in wanted}
    kernels: dict[Variant, Kernel] = {}
    for variant in wanted:
        try:
            entry = cache.get(keys[variant])
        except DamagedEntry as error:
            on_event(Event(variant, "damaged", str(error)))
            continue
        if entry is not None:
            kernels[variant] = Kernel(variant, *entry)
            on_event(Event(variant, "cached", record=entry.record))
    cached = len(kernels)
    failures: dict[Variant, str] = {}
    missing = [v for v in wanted if v not in kernels]
    processes = min(jobs or usable_cores(), len(missing))
    if missing:
        on_start(len(missing), processes)
    with contextlib.closing(_compile_all(missing, processes, timeout_s, lowering)) as answers:
        for variant, answer in answers:
            if isinstance(answer, Compiled):
                cache.put(keys[variant], Entry(answer.record, answer.cubin))
                kernels[variant] = Kernel(variant, answer.record, answer.cubin)
                on_event(Event(variant, "compiled", record=answer.record))
            else:
                failures[variant] = answer.reason
                on_event(Event(variant, "failed", answer.reason))
    return BuildReport(
        {v: kernels[v] for v in wanted if v in kernels},
        {v: failures[v] for v in wanted if v in failures},
        len(kernels) - cached,
        cached,
        time.monotonic() - begun,
    )


def _key_maker() -> Callable[[Variant], str]:
    """A function from variants to cache keys; everything but the variant is read once."""
    wheels = toolchain()
    sources = {name: sha256((_ROOT / name).read_bytes()).hexdigest() for name in SOURCES}

    @cache
    def provider_digest(name: str) -> str:
        return provider(name).source_digest()

    def key(variant: Variant) -> str:
        return cache_key(
            KeyFields(
                schema=SCHEMA_VERSION,
                variant=variant.to_json(),
                name=variant.name(),
                target=variant.target,
                python=".".join(map(str, sys.version_info[:2])),  # the DSL rewrites the syntax tree of kernels
                wheels=wheels,
                provider=provider_digest(variant.provider),
                extraction=host_ir.EXTRACTION_VERSION,
                options=lower.COMPILE_OPTIONS,
                sources=sources,
            )
        )

    return key


# --- worker processes ---


class _Worker:
    """A worker process, seen from its parent."""

    def __init__(self, target: str, lowering: str, scratch: Path, timeout_s: float) -> None:
        self.target = target
        self.variant: Variant | None = None
        self.answered = 0
        self.deadline = 0.0
        self._timeout_s = timeout_s
        self._scratch = scratch
        descriptor, name = tempfile.mkstemp(prefix="worker-", suffix=".log", dir=scratch)
        os.close(descriptor)
        self._log = open(name, "a+b")  # noqa: SIM115  # appending, so that it can be emptied between variants
        self.connection, theirs = Pipe()
        # The parent's path, so that the child finds the same modules; by -c, so that no folder is put before it.
        code = f"import sys; sys.path[:] = {sys.path!r}; from aot.worker import serve; "
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{code}serve({theirs.fileno()}, {lowering!r})"],
                env=_environment(target, scratch),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        except OSError as error:
            raise CompileError(f"cannot start a compile worker ({error.strerror}); use fewer jobs") from None
        finally:
            theirs.close()

    def give(self, variant: Variant) -> None:
        self.variant = variant
        self.deadline = time.monotonic() + self._timeout_s
        self._log.truncate(0)
        with contextlib.suppress(OSError):  # a process that is gone says so when its answer is read
            self.connection.send(variant)

    def take(self) -> Compiled | Failed:
        """The answer that has arrived, or the way the process ended without one."""
        try:
            answer: Compiled | Failed = self.connection.recv()
        except (EOFError, OSError):
            return Failed(self._explain(f"its worker {_ending(self._process.wait())}"), reusable=False)
        self.answered += 1
        if isinstance(answer, Failed):
            return Failed(answer.reason.replace(str(self._scratch), "..."), answer.reusable)
        return answer

    def overdue(self) -> Failed | None:
        """What to say where the time for the variant has passed without an answer."""
        if time.monotonic() < self.deadline or self.connection.poll():
            return None
        return Failed(self._explain(f"no result after {self._timeout_s:g} s"), reusable=False)

    def stop(self) -> None:
        """End the process at once; what it was doing is lost."""
        self.connection.close()
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _explain(self, what: str) -> str:
        self._log.seek(0)
        said = last_line(self._log.read().decode(errors="replace")).replace(str(self._scratch), "...")
        return f"{what}; its last words: {said}" if said else what


def _environment(target: str, scratch: Path) -> dict[str, str]:
    """The parent's environment with the architecture, without GPUs, and without DSL settings that change the code."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_DSL_")}
    return kept | {"CUTE_DSL_ARCH": target, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(scratch)}


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _compile_all(
    variants: list[Variant], jobs: int, timeout_s: float, lowering: str
) -> Generator[tuple[Variant, Compiled | Failed], None, None]:
    """Each variant with its answer, as they come. Closing this ends every worker at once."""
    queues: dict[str, deque[Variant]] = {}
    for variant in variants:
        queues.setdefault(variant.target, deque()).append(variant)
    workers: list[_Worker] = []
    with tempfile.TemporaryDirectory(prefix="aot-build-", ignore_cleanup_errors=True) as directory:
        try:
            while True:
                _dismiss(workers, queues)
                while len(workers) < jobs and (target := _understaffed(queues, workers)):
                    workers.append(_Worker(target, lowering, Path(directory), timeout_s))
                    workers[-1].give(queues[target].popleft())
                if not workers:
                    return
                yield from _answers(workers, queues)
        finally:
            for worker in workers:
                worker.stop()


def _answers(workers: list[_Worker], queues: dict[str, deque[Variant]]) -> Iterator[tuple[Variant, Compiled | Failed]]:
    """Wait for one or more answers; give each worker that can go on its next variant, and drop the others."""
    patience_s = max(0.0, min(w.deadline for w in workers) - time.monotonic())
    ready = wait([w.connection for w in workers], timeout=patience_s)
    for worker in list(workers):
        answer = worker.take() if worker.connection in ready else worker.overdue()
        if answer is None:
            continue
        variant = worker.variant
        assert variant is not None
        worker.variant = None
        if isinstance(answer, Failed) and not answer.reusable:
            workers.remove(worker)
            worker.stop()
        elif queues[worker.target]:
            worker.give(queues[worker.target].popleft())
        yield variant, answer


def _dismiss(workers: list[_Worker], queues: dict[str, deque[Variant]]) -> None:
    """End the workers that have nothing to do, which makes room for other targets."""
    for worker in [w for w in workers if w.variant is None]:
        workers.remove(worker)
        worker.stop()


def _understaffed(queues: dict[str, deque[Variant]], workers: list[_Worker]) -> str | None:
    """The target that most wants another worker, or None where none would gain from it."""
    staff = Counter(w.target for w in workers)
    warm = Counter(w.target for w in workers if w.answered)
    wanting = [t for t, queue in queues.items() if queue and len(queue) > _START_UP_KERNELS * warm[t]]
    return max(wanting, key=lambda t: len(queues[t]) / (staff[t] + 1), default=None)
