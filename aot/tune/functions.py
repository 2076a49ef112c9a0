"""Checks functions of a spec on a GPU, and writes the archive without those that are wrong.

Each is checked in a process that it may take with it, as functions of GEMMs are (`aot.tune.executor`). Which were right
on which kind of GPU, and as which cubin, is in the table "tuning". Imports no torch.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.container import canonical
from runtime.container.archive import Archive
from runtime.program import arguments
from runtime.tables.dispatch import serves

from ..pack import tuning_table
from ..pack.write import Package
from ..providers import spec_file
from ..spec import Function
from .jobs import Job
from .options import TuneError, TuneOptions
from .run import Machine, Progress, this_machine
from .worker import Setup

BACKEND = "aot.tune.function_gpu:FunctionBackend"


@dataclass(frozen=True)
class _Subject:
    """What a job is of, where that is no signature."""

    name: str

    def key(self) -> str:
        """Its name, for messages."""
        return self.name


@dataclass(frozen=True)
class FunctionJob(Job):
    """One function to check at its cases, which `check` numbers; `extents` says what they are, for messages."""

    extents: tuple[str, ...] = ()

    def at(self, m: int) -> str:
        """Where the function is launched, for messages."""
        return f"{self.names[0]} at {self.extents[m]}" if m < len(self.extents) else self.names[0]


@dataclass
class CheckReport:
    """What was found: functions that were right, with the number of cases; wrong, with the reason; `unchecked`, which
    have no reference; and, by target, `elsewhere`, that this GPU does not run."""

    environment: dict[str, Any]
    right: dict[str, int] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)


def check_archive(
    source: Path,
    destination: Path,
    spec: spec_file.Spec,
    options: TuneOptions | None = None,
    progress: Progress | None = None,
    machine: Machine | None = None,
) -> CheckReport:
    """Check the functions of `spec` that `source` has and the GPUs of `machine` run, by default this one's, against
    their references, and write `destination` without those that are wrong.

    Raises:
        TuneError: the archive has none of them for this GPU or with a reference, has one of another spec, or none is
            left.
        SpecError: a reference fails.
        AotError: the archive cannot be read, there is no GPU, or checking fails with no function to blame.
    """
    options = options or TuneOptions()
    progress = progress or (lambda done, total, what: None)
    with Archive.open(source) as archive:
        known = _known(archive, spec)  # before a GPU is asked for
        if all(f.reference is None for f in known.values()):
            raise TuneError(f"{spec.path}: none of its functions has a reference to check against; give them one")
        machine = machine or this_machine(BACKEND)
        mine = {n: f for n, f in known.items() if serves(archive.functions[n].target, machine.capability)}
        if not mine:
            there = ", ".join(sorted({archive.functions[n].target for n in known}))
            major, minor = machine.capability
            raise TuneError(
                f"{source}: its functions of the spec are for {there}, and this GPU has compute capability "
                f"{major}.{minor}; build them for this GPU's target"
            )
        setup = Setup(source, options, str(spec.path))
        with contextlib.closing(machine.executor(setup)) as executor:
            report = CheckReport(executor.environment())
            report.elsewhere = [n for n in known if n not in mine]
            report.unchecked = [n for n, f in mine.items() if f.reference is None]
            jobs = [_job(n, f) for n, f in mine.items() if f.reference is not None]
            for job in jobs:
                executor.submit(job)
            while (done := len(report.right) + len(report.wrong)) < len(jobs):
                for asked, answer in executor.answers():
                    (name,) = asked.names
                    progress(done, len(jobs), name)
                    if name in answer.rejected:
                        report.wrong[name] = answer.rejected[name]
                    else:
                        report.right[name] = len(asked.check)
        _write(archive, report, destination)
    return report


def _known(archive: Archive, spec: spec_file.Spec) -> dict[str, Function]:
    """The archive's functions of the spec, by name."""
    found = {}
    for function in spec.functions:
        tree, symbols = function.record()
        described = canonical.dumps([arguments.to_json(tree), arguments.symbols_to_json(symbols)])
        for target in archive.targets:
            for base in function.names().values():
                name = f"{base}.{target}"
                if name not in archive.functions:
                    continue
                record = archive.record(name)
                if canonical.dumps([record["arguments"], record["symbols"]]) != described:
                    raise TuneError(
                        f"{archive.path}: {name} takes other arguments than {spec.path} says; build it again with that"
                    )
                found[name] = function
    if not found:
        names = ", ".join(f.name for f in spec.functions)
        raise TuneError(f"{archive.path}: has no function of {spec.path} ({names}); build it with --spec {spec.path}")
    return found


def _job(name: str, function: Function) -> FunctionJob:
    said = tuple(", ".join(f"{n} = {v}" for n, v in case.items()) or "its extents" for case in function.checked_at())
    subject: Any = _Subject(name)
    return FunctionJob(subject, (name,), check=tuple(range(len(said))), extents=said)


def _write(archive: Archive, report: CheckReport, destination: Path) -> None:
    keep = [name for name in archive.functions if name not in report.wrong]
    if not keep:
        (name, reason), *_ = report.wrong.items()
        raise TuneError(f"{archive.path}: no function of it is right, so nothing was written; the first: {reason}")
    package = Package()
    package.add_archive(archive, keep)
    for name in archive.tables:
        if name != tuning_table.TABLE:
            package.set_table(name, archive.table(name))
    right = {name: archive.record(name)["cubin"] for name in report.right}
    row = report.environment | {"candidates": archive.digest}
    row |= {"rejected": dict(sorted(report.wrong.items())), "right": dict(sorted(right.items()))}
    package.set_table(tuning_table.TABLE, tuning_table.write([*tuning_table.read(archive), row]))
    package.write(destination)
