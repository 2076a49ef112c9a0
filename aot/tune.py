"""Choose the fastest correct function for every signature and M range of an archive, on the GPU at hand.

Reads a candidate archive and writes a tuned one; needs torch and a GPU of one of the archive's targets, and no
compiler. Every candidate is checked before it is timed. Entries for other targets pass through as they are, so that
one archive can be tuned on one machine after the other.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from runtime.archive import Archive
from runtime.dispatch import Dispatch, Entry
from runtime.driver import Driver
from runtime.library import Library
from runtime.signature import Signature

from . import measure, tables
from .baseline import baseline
from .measure import Launch, Timing
from .operands import OperandSet, Weights
from .pack import Package
from .select import fewest, points, ranges
from .tune_options import TuneError, TuneOptions

# Every candidate is checked at these M besides those it is timed at: one row, fewer than any tile, and ragged.
CHECK_TOKENS = (1, 3, 17, 333)
_SCREEN_REPEATS, _SCREEN_GRAPH_US = 2, 200.0
_FINAL_GRAPH_US = 1_000.0
_WRITE_EVERY_S = 60.0


@dataclass(frozen=True)
class Measured:
    """What was found for one signature at one M; `times` has the finalists, best first, without the baseline.

    `sustained` has times under sustained load of the finalists and the baseline by name, where they were taken. Best is
    then the least product of both times: a server may be busy for milliseconds or for minutes.
    """

    m: int
    times: tuple[tuple[str, Timing], ...]
    baseline: str
    baseline_time: Timing
    candidates: int
    sustained: Mapping[str, Timing] = field(default_factory=dict)

    def scores(self) -> dict[str, float]:
        """What finalists are compared by, in microseconds: the geometric mean of both times, where there are two."""
        return {n: math.sqrt(t.us * self.sustained[n].us) if self.sustained else t.us for n, t in self.times}


@dataclass
class TuneReport:
    """What tuning did: (signature key, measured) pairs in order, and functions that computed something wrong.

    `speedups` has the baseline's time over that of the function that serves, for each of `measured` that has one.
    `unserved` has signatures with no correct function left, which are no longer in the archive; `interrupted` is set
    where Ctrl-C came first: what was measured by then is written, and tuning the result goes on with the rest.
    """

    environment: dict[str, Any]
    measured: list[tuple[str, Measured]] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    unserved: list[str] = field(default_factory=list)
    speedups: list[float] = field(default_factory=list)
    interrupted: bool = False


Progress = Callable[[int, int, str], None]
Results = dict[tuple[Signature, str], list[Measured]]  # by signature and target


def tune_archive(
    source: Path, destination: Path, options: TuneOptions | None = None, progress: Progress | None = None
) -> TuneReport:
    """Tune the entries of `source` that this GPU runs and write the result to `destination`.

    Entries without candidates were tuned before, and stay as they are. What is known is written once a minute and in
    the end, so that a process that is killed loses little.

    Raises:
        TuneError: no entry is for this GPU, or all of them are tuned.
        AotError: the archive cannot be read, there is no GPU, or a launch fails.
    """
    options = options or TuneOptions()
    with Archive.open(source) as archive:
        report = TuneReport(measure.environment())
        targets = archive.functions.targets_by_name()
        dispatch = Dispatch.from_json(archive.table("gemm"), targets)
        entries = _entries_to_tune(source, dispatch)
        tuner = _Tuner(Library(archive, Driver()), report, options)
        results: Results = {}

        def write() -> bool:
            report.unserved.clear()
            with _undisturbed() as interrupts:
                _write(archive, dispatch, results, report, options.tolerance, destination)
            return bool(interrupts)

        try:
            _measure_all(tuner, entries, results, progress or (lambda done, total, what: None), write)
        except KeyboardInterrupt:
            report.interrupted = True
        write()
    return report


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


def _entries_to_tune(source: Path, dispatch: Dispatch) -> list[Entry]:
    capability = torch.cuda.get_device_capability()
    entries = dispatch.entries_for(capability)
    if not entries:
        there = ", ".join(sorted({e.target for e in dispatch.entries})) or "nothing"
        raise TuneError(
            f"{source}: this GPU has compute capability {capability[0]}.{capability[1]}, the archive has {there}; "
            "build it for this GPU's target"
        )
    waiting = [e for e in entries if e.candidates]
    if not waiting:
        raise TuneError(f"{source}: its {len(entries)} entries for this GPU are tuned; build it again to tune it again")
    return waiting


def _measure_all(
    tuner: _Tuner, entries: Sequence[Entry], results: Results, progress: Progress, write: Callable[[], bool]
) -> None:
    """Check and measure entry after entry; one is in `results` when it is complete, and written now and then.

    `write` says whether it was interrupted.
    """
    written = time.monotonic()
    total = sum(len(points([m for m, _ in e.candidates])) for e in entries)
    done = 0
    for entry in entries:
        tuner.check(entry)
        measured = []
        for m in points([m for m, _ in entry.candidates]):
            progress(done, total, f"{entry.signature.key()} M={m}")
            found = tuner.measure(entry, m)
            if found:
                measured.append(found)
            done += 1
        results[entry.signature, entry.target] = measured
        if time.monotonic() - written > _WRITE_EVERY_S:
            if write():
                raise KeyboardInterrupt
            written = time.monotonic()
    progress(done, total, "writing")


def candidates_at(ranked: Sequence[tuple[int, Sequence[str]]], m: int) -> list[str]:
    """The candidates for `m`: those ranked for it, and for M values within a factor of two, the nearest first."""
    near = sorted((max(m, tokens) / min(m, tokens), tokens) for tokens, _ in ranked)
    names = dict(ranked)
    kept = [tokens for factor, tokens in near if factor <= 2] or [near[0][1]]
    return list(dict.fromkeys(name for tokens in kept for name in names[tokens]))


class _Tuner:
    def __init__(self, library: Library, report: TuneReport, options: TuneOptions) -> None:
        self.library, self.report, self.options = library, report, options
        self.l2_bytes = report.environment["l2_bytes"]
        self.baselines: dict[Signature, tuple[str, Launch]] = {}  # the last: to compile one takes seconds

    def _launches(self, names: Iterable[str]) -> dict[str, Launch]:
        return {name: self._launch(name) for name in dict.fromkeys(names) if name not in self.report.rejected}

    def _launch(self, name: str) -> Launch:
        function = self.library.functions[name]

        def launch(o: OperandSet) -> None:
            function(*o.tensors(), stream=torch.cuda.current_stream())

        return launch

    def check(self, entry: Entry) -> None:
        """Reject every candidate that is wrong, at `CHECK_TOKENS` or where it is timed, from the whole archive."""
        signature, names = entry.signature, [name for _, ranked in entry.candidates for name in ranked]
        for m in sorted({*CHECK_TOKENS, *(m for m, _ in entry.candidates)}):
            weights = Weights(signature, m, 0, self.options.seed + m)
            launches = self._launches(names if m in CHECK_TOKENS else candidates_at(entry.candidates, m))
            for name, result in measure.check(signature, m, weights, launches).items():
                if isinstance(result, str):
                    self.report.rejected[name] = f"{signature.key()} M={m}: {result}"

    def measure(self, entry: Entry, m: int) -> Measured | None:
        """Time all candidates briefly, then the best in turn with the baseline; None if none can be launched."""
        signature, launches = entry.signature, self._launches(candidates_at(entry.candidates, m))
        operands = Weights(signature, m, self.l2_bytes, self.options.seed).operands(m)
        floor = measure.expected_us(signature, m)
        if signature not in self.baselines:
            self.baselines = {signature: baseline(signature, operands[0])}
        name, launch = self.baselines[signature]
        screen = measure.time_interleaved(launches, operands, floor, _SCREEN_REPEATS, _SCREEN_GRAPH_US)
        best = sorted(screen, key=lambda n: screen[n].us)[: self.options.finalists]
        if not best:
            return None
        final = {n: launches[n] for n in best} | {name: launch}
        times = measure.time_interleaved(final, operands, floor, self.options.repeats, _FINAL_GRAPH_US)
        sustained: dict[str, Timing] = {}
        if self.options.sustained and measure.power_bound(signature, m):
            sustained = measure.time_sustained(final, operands, floor)
        found = Measured(m, tuple((n, times[n]) for n in best), name, times[name], len(launches), sustained)
        scores = found.scores()
        found = replace(found, times=tuple(sorted(found.times, key=lambda of: scores[of[0]])))
        self.report.measured.append((signature.key(), found))
        self.library.forget_captures()  # their graphs are gone
        return found


def _write(
    archive: Archive,
    dispatch: Dispatch,
    results: Results,
    report: TuneReport,
    tolerance: float,
    destination: Path,
) -> None:
    """Keep the winners, what the other entries name, and every function that is no candidate of a GEMM."""
    entries = []
    tuned_before = (_untouched(e, report.rejected) for e in dispatch.entries if not e.candidates)
    served = {name for row in tuned_before if row is not None for name in _names(row)}
    results = _as_served(results, report.rejected, tolerance, served)
    every = itertools.chain.from_iterable(results.values())
    report.speedups = [found.baseline_time.us / found.times[0][1].us for found in every]
    for entry in dispatch.entries:
        measured = results.get((entry.signature, entry.target))
        row = _untouched(entry, report.rejected) if measured is None else _tuned_entry(entry, measured)
        if row is None:
            report.unserved.append(f"{entry.signature.key()} on {entry.target}")
        else:
            entries.append(row)
    of_gemms = {n for e in dispatch.entries for n in _names(_as_json(e))}
    keep = {n for entry in entries for n in _names(entry)} | (set(archive.functions) - of_gemms)
    package = Package()
    package.add_archive(archive, sorted(keep))
    for name in archive.tables:
        if name not in ("gemm", "tuning"):
            package.set_table(name, archive.table(name))
    package.set_table("gemm", tables.gemm_table(entries, archive.functions.targets_by_name()))
    environment = report.environment | {"rejected": report.rejected, "tolerance": tolerance}
    package.set_table("tuning", {"environments": [*tables.environments(archive), environment]})
    package.write(destination)


def _names(entry: tables.GemmRow) -> set[str]:
    return entry.names()


def _as_json(entry: Entry) -> tables.GemmRow:
    return tables.GemmRow.of(entry)


def _untouched(entry: Entry, rejected: Mapping[str, str]) -> tables.GemmRow | None:
    """An entry that was not measured, without the functions that turned out wrong; None if that leaves nothing."""
    row = _as_json(entry)
    if not _names(row) & rejected.keys():
        return row
    candidates = [(m, [n for n in names if n not in rejected]) for m, names in entry.candidates]
    if not candidates or not all(names for _, names in candidates):
        return None
    invariant = None if entry.invariant in rejected else entry.invariant
    serving = ranges([(m, names[0]) for m, names in candidates])
    return replace(row, candidates=candidates, ranges=serving, invariant=invariant)


def _as_served(results: Results, rejected: Collection[str], tolerance: float, served: Collection[str]) -> Results:
    """`results` with the function that is to serve first among the finalists of each M.

    Without rejected functions, and without an M that has no other. `served` are functions that the archive has anyway.
    """
    right = {
        key: [replace(m, times=times) for m in ms if (times := tuple(t for t in m.times if t[0] not in rejected))]
        for key, ms in results.items()
    }
    first = iter(fewest([m.scores() for ms in right.values() for m in ms], tolerance, served))

    def ordered(m: Measured) -> Measured:
        name = next(first)
        return replace(m, times=tuple(sorted(m.times, key=lambda of: of[0] != name)))

    return {key: [ordered(m) for m in ms] for key, ms in right.items()}


def _tuned_entry(entry: Entry, measured: Sequence[Measured]) -> tables.GemmRow | None:
    """The entry with what serves; None if no M has a function that is right everywhere."""
    best: list[tuple[int, str]] = []
    timings = []
    for found in measured:
        (winner, time), *others = found.times
        best.append((found.m, winner))
        timings.append(
            {
                "m": found.m,
                "function": winner,
                "us": round(time.us, 3),
                "spread": round(time.spread, 4),
                "baseline": found.baseline,
                "baseline_us": round(found.baseline_time.us, 3),
                "baseline_spread": round(found.baseline_time.spread, 4),
                "runner_up": others[0][0] if others else None,
                "runner_up_us": round(others[0][1].us, 3) if others else None,
                "candidates": found.candidates,
            }
            | _sustained(found, winner)
        )
    if not best:
        return None
    gpu = Driver().gpu
    return tables.GemmRow(entry.signature, entry.target, gpu, "tuned", ranges(best), timings=timings)


def _sustained(found: Measured, winner: str) -> dict[str, float]:
    """The sustained times of a row of timings, if they were taken."""
    if not found.sustained:
        return {}
    ours, theirs = found.sustained[winner], found.sustained[found.baseline]
    return {"sustained_us": round(ours.us, 3), "baseline_sustained_us": round(theirs.us, 3)}
