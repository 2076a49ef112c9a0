"""Runs a tuning: which entries, in what order, over which workers; what is known is written now and then."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.device.gpus import Gpu
from runtime.errors import AotError, DeviceError
from runtime.program.record import Record
from runtime.tables.dispatch import Capability, Dispatch, Entry, preference, serves

from ..pack import build_table, tables
from . import forms, points, session
from .executor import Executor, LocalExecutor
from .jobs import Answer, Job
from .journal import Journal
from .operation import is_tuned, tuning
from .options import TuneError, TuneOptions
from .pool import Pool
from .worker import Setup
from .write import Key, Results, TuneReport, Writer

_WRITE_EVERY_S = 60.0
_BACKEND = "aot.tune.gpu:GpuBackend"

Progress = Callable[[int, int, str], None]
_Task = Entry | forms.Task


class Machine(NamedTuple):
    """The GPUs to measure on, all of one kind: what they are, and what runs jobs on them for an archive."""

    capability: Capability
    gpu: Gpu
    executor: Callable[[Setup], Executor]


def tune_archive(
    source: Path,
    destination: Path,
    options: TuneOptions | None = None,
    progress: Progress | None = None,
    machine: Machine | None = None,
) -> TuneReport:
    """Tune the entries of `source` that the GPUs of `machine` run, by default this one's, and write `destination`.

    Entries without candidates were tuned before, and stay as they are; where they are for another kind of GPU, and none
    is left that waits, entries for this kind are made beside them. Forms that were checked on another kind, such as
    those of a base, are tuned once no entry is left to tune. What is known is written once a minute and in the end,
    and every answer goes to a journal beside the output, so that the same command goes on where one was killed.

    Raises:
        TuneError: no entry is for this GPU, or all of them are tuned.
        AotError: the archive cannot be read, there is no GPU, or measuring fails with no function to blame.
    """
    options, machine = options or TuneOptions(), machine or this_machine()
    with Archive.open(source) as archive, source.open("rb") as held:
        dispatch = Dispatch(tables.operation_entries(archive))
        every = forms.to_tune(archive, machine.capability, machine.gpu, again=True)
        served = any(serves(entry.target, machine.capability) for entry in dispatch.entries)
        if not served and not every and forms.are_for(archive, machine.capability):
            raise TuneError(f"{source}: its forms were tuned on this kind of GPU; build it again to tune it again")
        entries = entries_to_tune(source, dispatch, machine, every)
        tasks = forms.to_tune(archive, machine.capability, machine.gpu) if entries else every
        # The very file, though another takes its name: the output may be the input.
        by_number = Path(f"/proc/{os.getpid()}/fd/{held.fileno()}")
        here = by_number if by_number.exists() else source
        with contextlib.closing(machine.executor(Setup(here, options))) as executor:
            report = TuneReport(
                executor.environment(),
                unknown=unknown(dispatch, machine.capability),
                forms_left=len(every) - len(tasks),
            )
            of = {"archive": _digest(here), "options": asdict(options), "gpu": list(machine.gpu)}
            journal = Journal(Path(f"{destination}.tuning"), of | {"environment": _lasting(report.environment)})
            seen = build_table.traffic(build_table.read(archive))
            course = _Course(entries, tasks, _pools(archive, dispatch, entries), executor, journal, seen)
            writer = Writer(archive, dispatch, course.pools, machine.gpu, options, seen)
            return _tuned(course, writer, report, destination, progress or (lambda done, total, what: None))


def _tuned(course: _Course, writer: Writer, report: TuneReport, destination: Path, progress: Progress) -> TuneReport:
    """Measure, and write what is known whatever comes in between; the journal stays where something is left to do.
    While a tuning that goes on has not taken up all that the output has by now, the output stays as it is.
    """
    results = Results()

    def write(last: bool) -> bool:
        known = results.known()
        if destination.exists() and not course.journal.written <= known:
            return False
        with _undisturbed() as interrupts:
            writer.write(results, report, destination, last)
            course.journal.wrote(known)
        return bool(interrupts)

    try:
        _run(course, report, results, progress, write, lambda entry: writer.prepare(entry, results, report))
        _glance(course, writer.glances(results, report.rejected), results, report)
    except KeyboardInterrupt:
        report.interrupted = True
    except AotError:
        write(True)
        raise
    write(True)
    course.journal.close(remove=not report.interrupted)
    return report


def _lasting(environment: dict[str, Any]) -> dict[str, Any]:
    """What of an environment must be the same for times to be compared: GPUs of one kind may take turns."""
    return {name: value for name, value in environment.items() if name != "gpu_id"}


def this_machine(backend: str = _BACKEND) -> Machine:
    """The GPUs of this machine that are of the first one's kind, each with a process of its own that has `backend`.

    Raises:
        AotError: there is none.
        ModuleNotFoundError: torch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    try:
        first = Driver(0)
        capability, gpu, count = first.compute_capability, first.gpu, first.device_count
    except (DeviceError, ImportError) as error:
        raise TuneError(f"no CUDA GPU is available to measure on ({error}); run on a machine with one") from None
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = [name.strip() for name in names] if len(names) >= count and names[0] else [str(i) for i in range(count)]
    alike = [names[i] for i in range(count) if Driver(i).gpu.same_kind(gpu)]
    return Machine(capability, gpu, lambda setup: LocalExecutor(alike, backend, setup))


def entries_to_tune(
    source: Path, dispatch: Dispatch, machine: Machine, tasks: Collection[forms.Task] = ()
) -> list[Entry]:
    """For each signature the entry to tune: one that waits for it, else one that was tuned on another kind of GPU.

    Where there are `tasks` besides, there need be no such entry.

    Raises:
        TuneError: there is no entry for this GPU's target, or all are tuned for its kind.
    """
    mine = [e for e in dispatch.entries if serves(e.target, machine.capability)]
    known = [e for e in mine if is_tuned(e.signature)]
    if mine and not known and not tasks:
        tuning(mine[0].signature)  # says what is missing
    mine = known
    capability = f"{machine.capability[0]}.{machine.capability[1]}"
    if not mine and not tasks:
        there = ", ".join(sorted({e.target for e in dispatch.entries})) or "nothing"
        raise TuneError(
            f"{source}: this GPU has compute capability {capability}, the archive has {there}; "
            "build it for this GPU's target"
        )
    best = {e.signature: e for e in sorted(mine, key=lambda e: preference(e.target)) if e.candidates}
    if best:
        return [e for e in mine if best.get(e.signature) is e]
    here = {e.signature for e in mine if e.gpu is None or e.gpu.same_kind(machine.gpu)}
    elsewhere = {e.signature: e for e in sorted(mine, key=lambda e: preference(e.target)) if e.signature not in here}
    if not elsewhere and not tasks:
        raise TuneError(f"{source}: its {len(mine)} entries for this GPU are tuned; build it again to tune it again")
    return list(elsewhere.values())


def unknown(dispatch: Dispatch, capability: Capability) -> list[str]:
    """The entries for such a GPU that wait to be tuned, and that nobody here knows how to check: key and target."""
    return [
        f"{e.signature.key()} on {e.target}"
        for e in dispatch.entries
        if e.candidates and serves(e.target, capability) and not is_tuned(e.signature)
    ]


def _pools(archive: Archive, dispatch: Dispatch, entries: Sequence[Entry]) -> dict[str, Pool]:
    targets = archive.functions.targets_by_name()

    def record(name: str) -> Record:
        return Record.from_json(archive.record(name))

    return {
        target: Pool(target, [n for n in archive.functions if targets[n] == target], record, dispatch.entries)
        for target in {e.target for e in entries}
    }


class _Course(NamedTuple):
    """What a run needs: entries and forms in order, what is known of functions, what does jobs and has done them, and
    calls that servers made, by signatures' keys and M."""

    entries: Sequence[Entry]
    forms: Sequence[forms.Task]
    pools: dict[str, Pool]
    executor: Executor
    journal: Journal
    seen: Mapping[str, Mapping[int, int]]


def _run(
    course: _Course,
    report: TuneReport,
    results: Results,
    progress: Progress,
    write: Callable[[bool], bool],
    prepare: Callable[[Entry], None],
) -> None:
    """Tune entry after entry and form after form, one more at a time than there are workers, so that these measure
    while the next job of another is found; one is in `results` when it is complete, and `prepare` is told.

    Which are tuned at a time changes no answer: what one finds is not used for another before all is written. `write`
    says whether it was interrupted.
    """
    total = sum(points.budget(len(points.first(session.tokens_of(e)))) for e in course.entries)
    total += sum(map(forms.steps, course.forms))
    open_now: dict[Job, tuple[_Task, Generator[Job, Answer, Any]]] = {}
    waiting: list[_Task] = [*course.entries, *course.forms]
    complete = list[Entry]()
    done, written = 0, time.monotonic()

    def advance(task: _Task, steps: Generator[Job, Answer, Any], answer: Answer | None) -> None:
        """Send answers, those that are known already at once, until something is to be done or the entry is."""
        nonlocal done
        while True:
            try:
                job = next(steps) if answer is None else steps.send(answer)
            except StopIteration as end:
                results.keep(task, end.value)
                if isinstance(task, Entry):
                    complete.append(task)
                report.rejected |= {
                    name: reason for name, reason in end.value.rejected.items() if name not in report.rejected
                }
                return
            done += job.m > 0 or isinstance(task, forms.Task)
            progress(min(done, total), total, f"{job.signature.key()}" + (f" M={job.m}" if job.m else ""))
            answer = course.journal.answer(job)
            if answer is None:
                course.executor.submit(job)
                open_now[job] = task, steps
                return

    while waiting or open_now:
        while waiting and len(open_now) <= course.executor.width:
            task = waiting.pop(0)
            if isinstance(task, forms.Task):
                advance(task, forms.tune(task), None)
            else:
                seen = course.seen.get(task.signature.key())
                advance(task, session.tune(task, course.pools[task.target], seen), None)
        while complete:
            prepare(complete.pop())
        for job, answer in course.executor.answers() if open_now else ():
            course.journal.keep(job, answer)
            advance(*open_now.pop(job), answer)
        found = [results.entries[key] for e in course.entries if (key := (e.signature, e.target)) in results.entries]
        report.measured = [(tuned.signature.key(), at) for tuned in found for at in tuned.measured]
        report.forms = len(results.forms)
        results.all_forms = len(results.forms) == len(course.forms)
        if (results.entries or results.forms) and time.monotonic() - written > _WRITE_EVERY_S:
            if write(False):
                raise KeyboardInterrupt
            written = time.monotonic()
    progress(total, total, "what will serve")


def _glance(course: _Course, jobs: Mapping[Key, Job], results: Results, report: TuneReport) -> None:
    """Do jobs that look at what will serve. A function that fails only now stays in no table."""
    keys = {job: key for key, job in jobs.items()}
    done = {job: answer for job in keys if (answer := course.journal.answer(job)) is not None}
    for job in [job for job in keys if job not in done]:
        course.executor.submit(job)
    while len(done) < len(keys):
        for job, answer in course.executor.answers():
            course.journal.keep(job, answer)
            done[job] = answer
    for job, answer in done.items():
        one = results.entries[keys[job]]
        one.glances |= answer.glances
        one.rejected |= answer.rejected
        report.rejected |= {name: why for name, why in answer.rejected.items() if name not in report.rejected}


def _digest(path: Path) -> str:
    state = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            state.update(part)
    return state.hexdigest()


@contextlib.contextmanager
def _undisturbed() -> Iterator[list[int]]:
    """Note Ctrl-C in place of stopping for it, so that a second one does not lose what the first left to be written."""
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
