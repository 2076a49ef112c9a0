"""Variants to kernels: from the build cache, or else compiled in worker processes that never see a GPU.

A worker is told its architecture before it imports the DSL, which keeps it, so each compiles for one target; it takes
one variant at a time, so that a slow one holds up no other. What it prints goes to a file, and is read when it dies.
Whatever goes wrong with one variant (an exception, a crash, a hang) is that variant's failure and nobody else's; one
whose worker was killed is given to another once.
Every kernel enters the cache as it arrives: a build that is interrupted continues where it was.

Knows nothing of manifests, rankings or archives, and imports neither torch nor the DSL.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any

from runtime.errors import AotError
from runtime.program.record import Record

from .. import files
from ..search.provider import Compilable, home, source_digest
from ..search.variants import Variant
from . import cubin, lower
from .cache import SCHEMA_VERSION, Cache, Entry, KeyFields, ToolFields, cache_key
from .host import ir
from .toolchain import Toolchain, python, require_compiler, toolchain
from .worker import Compiled, Failed, last_line

LOWERING = "aot.compile.lower"
TIMEOUT_S = 300.0

# A worker needs about 2 s before its first kernel (imports), and then about 0.5 s a kernel: another one pays where
# those that are running have more than this many kernels each to go.
_START_UP_KERNELS = 4

_SCRATCH = "aot-build-"  # how the names of folders begin that compilers write to
_ROOT = Path(__file__).resolve().parents[2]
# This project's files that `aot.compile.lower` runs; a provider's own digests cover the provider. A test follows the
# imports.
SOURCES = (
    "aot/compile/cubin.py",
    "aot/compile/host/expressions.py",
    "aot/compile/host/ir.py",
    "aot/compile/host/text.py",
    "aot/compile/host/types.py",
    "aot/compile/lower.py",
    "aot/search/provider.py",
    "aot/search/targets.py",
    "aot/search/variants.py",
    "aot/suggest.py",
    "runtime/program/arguments.py",
    "runtime/program/arithmetic.py",
    "runtime/container/canonical.py",
    "runtime/numbers/dtypes.py",
    "runtime/numbers/epilogue.py",
    "runtime/numbers/scaling.py",
    "runtime/numbers/weights.py",
    "runtime/program/entry_points.py",
    "runtime/program/evaluator.py",
    "runtime/device/launch.py",
    "runtime/limits.py",
    "runtime/native/__init__.py",
    "runtime/program/nodes.py",
    "runtime/program/poison.py",
    "runtime/program/operation.py",
    "runtime/program/program.py",
    "runtime/container/fields.py",
    "runtime/program/record.py",
    "runtime/program/geometry.py",
    "runtime/gemm/signature.py",
    "runtime/named_tuple.py",
)


class CompileError(AotError):
    """Compiling cannot even start, or there is no room for it to go on."""


@dataclass(frozen=True)
class Kernel:
    """A compiled variant; `encoded` is its record as canonical JSON, empty where nobody has encoded it yet."""

    variant: Compilable
    record: dict[str, Any]
    cubin: bytes
    encoded: bytes = field(default=b"", compare=False, repr=False)


@dataclass(frozen=True)
class Event:
    """What happened to a variant: "cached" or "compiled", with its `record`, or "failed", with `detail` saying why."""

    variant: Compilable
    outcome: str
    detail: str = ""
    record: dict[str, Any] | None = None


@dataclass(frozen=True)
class BuildReport:
    """The kernels and the failures with their reasons, both in the order of the variants given; and what made them:
    `tools`, and of each provider's families the digest of their sources."""

    kernels: dict[Compilable, Kernel]
    failures: dict[Compilable, str]
    tools: dict[str, str]
    compiled: int
    cached: int
    seconds: float
    sources: Mapping[tuple[str, str], str] = field(default_factory=dict)


def usable_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def compile_variants(
    variants: Iterable[Compilable],
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
        ToolchainError: the DSL is not installed, or knows a target not.
        UntrustedCache: others may write to the cache directory.
        CompileError: no worker can be started, or the folder for temporary files has no room for its work.
    """
    begun = time.monotonic()
    with contextlib.suppress(CompileError):  # nothing may be left to compile
        files.collect(_temporary_folder(), _SCRATCH)
    wanted = list(dict.fromkeys(variants))
    tools = toolchain(cache)
    digests: dict[Any, str] = {}
    key = _key_maker(tools, digests)
    keys = {v: key(v) for v in wanted}
    kernels: dict[Compilable, Kernel] = {}
    for variant in wanted:
        entry = cache.get(keys[variant], partial(_require_kernel, variant))
        if entry is not None:
            kernels[variant] = Kernel(variant, entry.record, entry.cubin, entry.encoded)
            on_event(Event(variant, "cached", record=entry.record))
    cached = len(kernels)
    failures: dict[Compilable, str] = {}
    missing = [v for v in wanted if v not in kernels]
    require_compiler(tools, (v.target for v in missing))
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
        tools.versions,
        len(kernels) - cached,
        cached,
        time.monotonic() - begun,
        {of: digest for of, digest in digests.items() if isinstance(of, tuple)},
    )


def _key_maker(tools: Toolchain, digests: dict[Any, str]) -> Callable[[Compilable], str]:
    """A function from variants to cache keys; everything but the variant is read once.

    It adds to `digests` that of the sources of a variant's provider and family, or of what is no `Variant` itself.
    """
    sources = {name: sha256((_ROOT / name).read_bytes()).hexdigest() for name in SOURCES}
    common = cache_key(
        ToolFields(
            schema=SCHEMA_VERSION,
            python=python(),
            wheels=tools.wheels,
            extraction=ir.EXTRACTION_VERSION,
            options=lower.COMPILE_OPTIONS,
            sources=sources,
        )
    )

    def key(variant: Compilable) -> str:
        of = (variant.provider, variant.family) if isinstance(variant, Variant) else variant
        if of not in digests:
            digests[of] = source_digest(variant)
        digest = digests[of]
        return cache_key(KeyFields(common, variant.to_json(), variant.name(), variant.target, digest))

    return key


def _require_kernel(variant: Compilable, entry: Entry) -> None:
    """Raise an AotError or ValueError where `entry` is no compiled kernel of `variant`."""
    record = Record.from_json(entry.record)
    said = record.name, record.target, record.family, record.cubin
    family = f"{variant.provider}.{variant.family}"
    if said != (variant.name(), variant.target, family, sha256(entry.cubin).hexdigest()):
        raise ValueError(f"does not hold {variant.name()}")
    if set(cubin.kernels(entry.cubin)) != {kernel.symbol for kernel in record.kernels}:
        raise ValueError(f"does not hold the kernels that the record of {variant.name()} names")


# --- worker processes ---

_Queue = tuple[str, str]  # what may share a worker: a target, and `home`


def _queue(variant: Compilable) -> _Queue:
    return variant.target, home(variant)


class _Worker:
    """A worker process, seen from its parent."""

    def __init__(self, queue: _Queue, lowering: str, scratch: Path, timeout_s: float) -> None:
        self.queue = queue
        self.variant: Compilable | None = None
        self.answered = 0
        self.deadline = 0.0
        self._timeout_s = timeout_s
        self._scratch = scratch
        try:
            descriptor, name = tempfile.mkstemp(prefix="worker-", suffix=".log", dir=scratch)
        except OSError as error:
            raise _no_room(error.strerror) from None
        os.close(descriptor)
        self._log = open(name, "a+b")  # noqa: SIM115  # appending, so that it can be emptied between variants
        self.connection, theirs = Pipe()
        # The parent's path, so that the child finds the same modules; by -c, so that no folder is put before it.
        code = f"import sys; sys.path[:] = {sys.path!r}; from aot.compile.worker import serve; "
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{code}serve({theirs.fileno()}, {lowering!r}, {os.getpid()})"],
                env=_environment(queue[0], scratch),
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

    def give(self, variant: Compilable) -> None:
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
            status = self._process.wait()
            return Failed(self._explain(f"its worker {_ending(status)}"), False, killed=status == -signal.SIGKILL)
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


def _temporary_folder() -> Path:
    """Where temporary files go: where TMPDIR says, though others could be written to, or else where Python finds room.

    Raises:
        CompileError: nowhere.
    """
    try:
        return Path(os.path.abspath(os.environ.get("TMPDIR") or tempfile.gettempdir()))
    except OSError as error:
        raise CompileError(f"{error.strerror}; set TMPDIR to a folder that has room") from None


def _require_room(folder: Path) -> None:
    """Refuse to go on where a compiler could not write what it makes, which it does not always say."""
    if reason := files.refusal(folder, _SCRATCH):
        raise _no_room(reason)


def _no_room(reason: str | None) -> CompileError:
    folder = _temporary_folder()
    left = ""
    with contextlib.suppress(OSError):
        left = f"; {shutil.disk_usage(folder).free:,} bytes are left there"
    return CompileError(
        f"{folder}: a file of {files.PROBE_BYTES:,} bytes cannot be written to compile in ({reason}{left}); "
        "set TMPDIR to a folder that takes it"
    )


def _compile_all(
    variants: list[Compilable], jobs: int, timeout_s: float, lowering: str
) -> Generator[tuple[Compilable, Compiled | Failed], None, None]:
    """Each variant with its answer, as they come. Closing this ends every worker at once."""
    queues: dict[_Queue, deque[Compilable]] = {}
    for variant in variants:
        queues.setdefault(_queue(variant), deque()).append(variant)
    workers: list[_Worker] = []
    given_again: set[Compilable] = set()
    if not variants:
        return
    _require_room(_temporary_folder())
    with files.folder(_temporary_folder(), _SCRATCH) as scratch:
        try:
            while True:
                _dismiss(workers, queues)
                while len(workers) < jobs and (queue := _understaffed(queues, workers)):
                    workers.append(_Worker(queue, lowering, scratch, timeout_s))
                    workers[-1].give(queues[queue].popleft())
                if not workers:
                    return
                for variant, answer in _answers(workers, queues):
                    if isinstance(answer, Failed):
                        _require_room(scratch)
                        if answer.killed and variant not in given_again:
                            given_again.add(variant)
                            queues[_queue(variant)].append(variant)
                            continue
                    yield variant, answer
        finally:
            for worker in workers:
                worker.stop()


def _answers(
    workers: list[_Worker], queues: dict[_Queue, deque[Compilable]]
) -> Iterator[tuple[Compilable, Compiled | Failed]]:
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
        elif queues[worker.queue]:
            worker.give(queues[worker.queue].popleft())
        yield variant, answer


def _dismiss(workers: list[_Worker], queues: dict[_Queue, deque[Compilable]]) -> None:
    """End the workers that have nothing to do, which makes room for other targets."""
    for worker in [w for w in workers if w.variant is None]:
        workers.remove(worker)
        worker.stop()


def _understaffed(queues: dict[_Queue, deque[Compilable]], workers: list[_Worker]) -> _Queue | None:
    """The queue that most wants another worker, or None where none would gain from it."""
    staff = Counter(w.queue for w in workers)
    warm = Counter(w.queue for w in workers if w.answered)
    wanting = [q for q, queue in queues.items() if queue and len(queue) > _START_UP_KERNELS * warm[q]]
    return max(wanting, key=lambda q: len(queues[q]) / (staff[q] + 1), default=None)
