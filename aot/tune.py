"""Choose the fastest correct function for every signature and M range of an archive, on the GPU at hand.

Reads a candidate archive and writes a tuned one; needs torch and a GPU of one of the archive's targets, and no
compiler. Every candidate is checked before it is timed. Entries for other targets pass through as they are, so that
one archive can be tuned on one machine after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from runtime.archive import Archive
from runtime.dispatch import Dispatch, Entry
from runtime.driver import Driver
from runtime.errors import AotError
from runtime.library import Library

from . import measure
from .measure import Launch, OperandSet, Timing, Weights
from .pack import Package
from .select import ranges

# Every function is checked at these M besides those it is timed at: one row, fewer than any tile, and ragged.
CHECK_TOKENS = (1, 3, 17, 333)
_SCREEN_REPEATS, _SCREEN_GRAPH_US = 2, 200.0
_FINAL_GRAPH_US = 1_000.0


class TuneError(AotError):
    """An archive cannot be tuned here; the message says why."""


@dataclass(frozen=True)
class TuneOptions:
    """How thoroughly to measure: functions that reach the interleaved comparison, and its repeats."""

    finalists: int = 4
    repeats: int = 5
    seed: int = 0


@dataclass(frozen=True)
class Measured:
    """What was found for one signature at one M; `times` has the finalists, best first, without the baseline."""

    m: int
    times: tuple[tuple[str, Timing], ...]
    baseline: str
    baseline_time: Timing
    candidates: int


@dataclass
class TuneReport:
    """What tuning did: (signature key, measured) pairs in order, and functions that computed something wrong."""

    environment: dict[str, Any]
    measured: list[tuple[str, Measured]] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)


Progress = Callable[[int, int, str], None]


def tune_archive(
    source: Path, destination: Path, options: TuneOptions | None = None, progress: Progress | None = None
) -> TuneReport:
    """Tune the entries of `source` that this GPU runs and write the result to `destination`.

    Raises:
        TuneError: no entry is for this GPU, or a signature has no correct function left.
        AotError: the archive cannot be read, there is no GPU, or a launch fails.
    """
    options = options or TuneOptions()
    report = TuneReport(measure.environment())
    with Archive.open(source) as archive:
        targets = {name: entry.target for name, entry in archive.functions.items()}
        dispatch = Dispatch.from_json(archive.table("gemm"), targets)
        capability = torch.cuda.get_device_capability()
        entries = dispatch.entries_for(capability)
        if not entries:
            there = ", ".join(sorted({e.target for e in dispatch.entries})) or "nothing"
            raise TuneError(
                f"{source}: this GPU has compute capability {capability[0]}.{capability[1]}, the archive has {there}; "
                "build it for this GPU's target"
            )
        library = Library(archive, Driver())
        tuner = _Tuner(library, report, options)
        total = sum(len(points([m for m, _ in e.candidates])) for e in entries)
        results: dict[int, list[Measured]] = {}
        done = 0
        for entry in entries:
            results[id(entry)] = []
            tuner.check(entry)
            for m in points([m for m, _ in entry.candidates]):
                if progress:
                    progress(done, total, f"{entry.signature.key()} M={m}")
                results[id(entry)].append(tuner.measure(entry, m))
                done += 1
        if progress:
            progress(done, total, "writing")
        _write(archive, dispatch, {e: results[id(e)] for e in entries}, report, destination)
    return report


def points(tokens: Sequence[int]) -> list[int]:
    """The M values to measure: the given ones, and powers of two and their 1.5-folds between the first and the last.

    A function serves the range below the M it was chosen at, and the right tile changes within a factor of two: on an
    H200, what is best at M = 1024 took 1.6 times as long as cuBLAS at M = 333.
    """
    between = {x for i in range(3, 31) for x in (1 << i, 3 << (i - 1) if i >= 6 else 1 << i)}
    return sorted({*tokens, *(x for x in between if min(tokens) < x < max(tokens))})


class _Tuner:
    def __init__(self, library: Library, report: TuneReport, options: TuneOptions) -> None:
        self.library, self.report, self.options = library, report, options
        self.l2_bytes = report.environment["l2_bytes"]

    def _launches(self, entry: Entry) -> dict[str, Launch]:
        names = dict.fromkeys(name for _, ranked in entry.candidates for name in ranked)
        return {name: self._launch(name) for name in names if name not in self.report.rejected}

    def _launch(self, name: str) -> Launch:
        function = self.library.functions[name]

        def launch(o: OperandSet) -> None:
            function(o.a, o.b, o.d, stream=torch.cuda.current_stream())

        return launch

    def check(self, entry: Entry) -> None:
        """Reject every candidate that is wrong at any M; what is rejected once is out of the whole archive."""
        signature = entry.signature
        for m in sorted({*CHECK_TOKENS, *(m for m, _ in entry.candidates)}):
            weights = Weights(signature, m, 0, self.options.seed + m)
            for name, result in measure.check(signature, m, weights, self._launches(entry)).items():
                if isinstance(result, str):
                    self.report.rejected[name] = f"{signature.key()} M={m}: {result}"

    def measure(self, entry: Entry, m: int) -> Measured:
        """Time all candidates briefly, then the best of them in turn with the baseline."""
        signature, launches = entry.signature, self._launches(entry)
        if not launches:
            raise TuneError(f"{signature.key()} on {entry.target}: no candidate computes the right result")
        operands = Weights(signature, m, self.l2_bytes, self.options.seed).operands(m)
        floor = measure.expected_us(signature, m)
        name, launch = measure.baseline(signature)
        screen = measure.time_interleaved(launches, operands, floor, _SCREEN_REPEATS, _SCREEN_GRAPH_US)
        best = sorted(screen, key=lambda n: screen[n].us)[: self.options.finalists]
        final = {n: launches[n] for n in best} | {name: launch}
        times = measure.time_interleaved(final, operands, floor, self.options.repeats, _FINAL_GRAPH_US)
        found = Measured(
            m,
            tuple(sorted(((n, times[n]) for n in best), key=lambda x: x[1].us)),
            name,
            times[name],
            len(launches),
        )
        self.report.measured.append((signature.key(), found))
        return found


def _write(
    archive: Archive,
    dispatch: Dispatch,
    tuned: dict[Entry, list[Measured]],
    report: TuneReport,
    destination: Path,
) -> None:
    """Keep the winners, what other targets' entries name, and every function that is no candidate of a GEMM."""
    entries = [_tuned_entry(e, tuned[e], report) if e in tuned else _untouched(e) for e in dispatch.entries]
    candidates = {n for e in dispatch.entries for n in _names(_untouched(e))}
    keep = {n for entry in entries for n in _names(entry)} | (set(archive.functions) - candidates)
    package = Package()
    package.add_archive(archive, sorted(keep))
    for name in archive.tables:
        if name not in ("gemm", "tuning"):
            package.set_table(name, archive.table(name))
    package.set_table("gemm", {"entries": entries})
    environments = archive.table("tuning")["environments"] if "tuning" in archive.tables else []
    environment = report.environment | {"rejected": report.rejected}
    package.set_table("tuning", {"environments": [*environments, environment]})
    package.write(destination)


def _names(entry: dict[str, Any]) -> set[str]:
    return {r["function"] for r in entry["ranges"]} | {n for _, names in entry["candidates"] for n in names}


def _untouched(entry: Entry) -> dict[str, Any]:
    return {
        "signature": entry.signature.to_json(),
        "target": entry.target,
        "state": entry.state,
        "ranges": [{"m_max": m_max, "function": function} for m_max, function in entry.ranges],
        "candidates": [[m, list(names)] for m, names in entry.candidates],
        "timings": list(entry.timings),
    }


def _tuned_entry(entry: Entry, measured: Sequence[Measured], report: TuneReport) -> dict[str, Any]:
    best: list[tuple[int, str]] = []
    timings = []
    for found in measured:
        times = [(n, t) for n, t in found.times if n not in report.rejected]
        if not times:
            raise TuneError(f"{entry.signature.key()} M={found.m}: every finalist turned out to be wrong elsewhere")
        (winner, time), *others = times
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
        )
    return {
        "signature": entry.signature.to_json(),
        "target": entry.target,
        "state": "tuned",
        "ranges": ranges(best),
        "candidates": [],
        "timings": timings,
    }
