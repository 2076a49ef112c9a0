"""From what was measured to rows of operations' tables, and to the archive with them and what they name."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.container.archive import Archive
from runtime.device.gpus import Gpu
from runtime.program.operation import Signature, is_operation
from runtime.tables.dispatch import Dispatch, Entry

from ..pack import ranges, tables, tuning_table
from ..pack.forms import TABLE as FORMS
from ..pack.forms import names as names_of_forms
from ..pack.tables import Row
from ..pack.timings import TimingRow
from ..pack.write import Package
from . import choose, forms, history, points
from .forms import Task, TunedForm
from .halving import Measured
from .jobs import Job
from .operation import tuning
from .options import TuneOptions
from .pool import Pool
from .session import Tuned

# What a function counts as slower that would be kept for callers who want equal bits alone. On kept times of an H200
# (bf16, 15 N and K, M = 128 to 8192) 43 functions serve the others, and 3 more these, who are 1.7% behind the best of
# all; with 0.01 it is 11 more, and 1.3%. Simulated tunings of Llama's five signatures have 82 to 92, and 3 to 7 more.
FOR_EQUAL_BITS = 0.05

Key = tuple[Signature, str]  # a signature and a target


@dataclass
class TuneReport:
    """What tuning did: (signature key, measured) pairs in order, and functions that computed something wrong.

    `speedups` has the baseline's time over that of the function that serves, for each of `measured` that has one.
    `forms` counts those of a universal table that were checked and timed, and `forms_left` those checked only on
    another kind of GPU, which wait for entries. `unserved` has signatures with no correct
    function left, which are no longer in the archive, and `unknown` has entries that stay as they were, since nobody
    here knows how functions of their operation are checked. `interrupted` is set where Ctrl-C came first: what is
    complete by then is written, or more was before, and tuning the result goes on with the rest.
    """

    environment: dict[str, Any]
    measured: list[tuple[str, Measured]] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    unserved: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    forms: int = 0
    forms_left: int = 0
    speedups: list[float] = field(default_factory=list)
    interrupted: bool = False


@dataclass
class Results:
    """What is known: what was found of entries, and of forms by their place; and whether that is all of the forms."""

    entries: dict[Key, Tuned] = field(default_factory=dict)
    forms: dict[int, TunedForm] = field(default_factory=dict)
    all_forms: bool = False

    def known(self) -> frozenset[str]:
        """What is complete, in words that are the same in another run of the same tuning."""
        entries = (f"{target} {signature.operation} {signature.key()}" for signature, target in self.entries)
        return frozenset((*entries, *(f"form {place}" for place in self.forms)))

    def keep(self, task: Entry | Task, found: Any) -> None:
        """Keep what was found of a task that is complete."""
        if isinstance(task, Task):
            self.forms[task.place] = found
        else:
            self.entries[task.signature, task.target] = found


class Writer:
    """Writes archives of what is known so far; `entries` are those that are tuned, the rest stays as it is.

    An entry with candidates, or for this kind of GPU, gives way to its tuned row. Another, which was tuned on another
    kind, stays, and the row for this kind comes after it. `seen` has calls that servers made, by keys of
    signatures and M.
    """

    def __init__(
        self,
        archive: Archive,
        dispatch: Dispatch,
        pools: Mapping[str, Pool],
        gpu: Gpu,
        options: TuneOptions,
        seen: Mapping[str, Mapping[int, int]],
    ) -> None:
        self._archive, self._dispatch, self._pools, self._gpu, self._options = archive, dispatch, pools, gpu, options
        self._seen = seen
        # Predicted at every M, of some functions for each signature.
        self._times: dict[tuple[Key, frozenset[str]], choose.Times] = {}

    def write(self, found: Results, report: TuneReport, destination: Path, last: bool) -> None:
        """Write the archive; fills in what of `report` follows. The history is written the `last` time."""
        rejected, results = report.rejected, found.entries
        rows, report.unserved, report.speedups = self._rows(results, rejected)
        universal = forms.table(self._archive, found.forms if found.all_forms else {}, rejected, self._gpu)
        of_entries = {name for e in self._dispatch.entries for name in e.names} | names_of_forms(self._archive)
        keep = {name for row in rows for name in row.names()} | (set(self._archive.functions) - of_entries)
        keep |= {name for row in universal["forms"] for name, *_ in row["functions"]} if universal else set()
        package = Package()
        package.add_archive(self._archive, sorted(keep))
        for name in self._archive.tables:
            kept = name != tuning_table.HISTORY or (self._options.history and not last)  # the output may be the input
            if kept and name not in (tuning_table.TABLE, FORMS) and not is_operation(name):
                package.set_table(name, self._archive.table(name))
        if universal is not None:
            package.set_table(FORMS, universal)
        for name, table in tables.operation_tables(rows, self._archive.functions.targets_by_name()).items():
            package.set_table(name, table)
        environment = report.environment | {
            "candidates": self._archive.digest,
            "rejected": dict(sorted(rejected.items())),
            "tolerance": self._options.tolerance,
        }
        package.set_table(tuning_table.TABLE, tuning_table.write([*tuning_table.read(self._archive), environment]))
        package.write(destination)
        if last and self._options.history:
            order = dict.fromkeys((e.signature, e.target) for e in self._dispatch.entries)
            tuned = [(history.Kind(key[1], self._gpu.name), results[key]) for key in order if key in results]
            tuned += [(history.Kind(t, self._gpu.name), one) for t, one in forms.tunings(self._archive, found.forms)]
            seen = history.table(tuned, history.tunings(self._archive))
            share = history.MOST_SHARE / (1 - history.MOST_SHARE)
            if fits := history.fitted(seen, int(destination.stat().st_size * share)):
                package.set_table(tuning_table.HISTORY, fits)
                package.write(destination)

    def prepare(self, entry: Entry, found: Results, report: TuneReport) -> None:
        """Predict the times of an entry that is complete, which takes a second, before they are written."""
        key = entry.signature, entry.target
        if _right(found.entries[key], report.rejected):
            self._predicted(key, found.entries[key], report.rejected)

    def glances(self, found: Results, rejected: Mapping[str, str]) -> dict[Key, Job]:
        """For each entry that a library may leave to torch, and that torch came near somewhere, a job that glances at
        what will serve, between the points that were measured, where it was not looked at."""
        times, chosen, _ = self._chosen(found.entries, rejected)
        jobs = {}
        for key, of in times.items():
            one = found.entries[key]
            if tuning(key[0]).torch_serves(key[0]) and any(at.baseline_is_near() for at in one.measured):
                serves = choose.ranges(of, chosen, self._options.tolerance)
                ms = points.between([at.m for at in one.measured])
                at_m = tuple(
                    (m, (name,)) for m in ms if (name := choose.serving(serves, m)) not in one.looks.get(m, {})
                )
                jobs[key] = Job(key[0], tuple(dict.fromkeys(name for _, (name,) in at_m)), glances=at_m)
        return {key: job for key, job in jobs.items() if job.glances}

    def _rows(
        self, results: Mapping[Key, Tuned], rejected: Mapping[str, str]
    ) -> tuple[list[Row], list[str], list[float]]:
        """The rows, the signatures that nothing serves any more, and the speedups."""
        untouched = {id(e): _untouched(e, rejected) for e in self._dispatch.entries}
        times, chosen, served = self._chosen(results, rejected)
        equal = self._equal_bits(results, times, chosen | served, rejected)
        rows, unserved, speedups = list[Row](), list[str](), list[float]()
        for entry in self._dispatch.entries:
            key = entry.signature, entry.target
            replaced = key in results and (entry.candidates or _is_of(entry.gpu, self._gpu))
            if not replaced and (row := untouched[id(entry)]):
                rows.append(row)
            elif not replaced or key not in times:
                unserved.append(f"{entry.signature.key()} on {entry.target}")
            if key in times and not any((r.signature, r.target) == key and _is_of(r.gpu, self._gpu) for r in rows):
                row, ratios = self._tuned_row(key, results[key], times[key], chosen, rejected)
                rows.append(replace(row, invariant=equal.get(key)))
                speedups += ratios
        return rows, unserved, speedups

    def _chosen(
        self, results: Mapping[Key, Tuned], rejected: Mapping[str, str]
    ) -> tuple[dict[Key, choose.Times], set[str], set[str]]:
        """Predicted times of each entry that was tuned, the functions that are to serve, and those that do already."""
        rows = (_untouched(e, rejected) for e in self._dispatch.entries if not e.candidates)
        served = {name for row in rows if row for name in row.names()}
        order = dict.fromkeys((e.signature, e.target) for e in self._dispatch.entries)  # whoever was complete first
        known = [key for key in order if key in results and _right(results[key], rejected)]
        times = {key: self._predicted(key, results[key], rejected) for key in known}
        return times, choose.cover(list(times.values()), self._options.tolerance, served), served

    def _predicted(self, key: Key, one: Tuned, rejected: Mapping[str, str]) -> choose.Times:
        """What the functions that may serve take at every M; computed once for all that were rejected."""
        at = key, frozenset(name for name in one.names if name in rejected)
        if at not in self._times:
            most = choose.BEYOND * max(found.m for found in one.measured)
            curve = one.predictions(self._pools[key[1]]).curve
            found = choose.predicted(_right(one, rejected), curve, most, self._options.tolerance)
            self._times[at] = found._replace(seen=self._seen.get(key[0].key(), {}))
        return self._times[at]

    def _tuned_row(
        self, key: Key, one: Tuned, times: choose.Times, chosen: set[str], rejected: Mapping[str, str]
    ) -> tuple[Row, list[float]]:
        """The row of one signature, and its speedups at the M that were measured."""
        signature, target = key
        tolerance, predictions = self._options.tolerance, one.predictions(self._pools[target])
        found = choose.ranges(times, chosen, tolerance)
        timings, ratios = [], list[float]()
        for measured in one.measured:
            name = choose.serving(found, measured.m)
            us = dict(measured.times)[name].us if name in dict(measured.times) else predictions.us(name, measured.m)
            timings.append(_timing(measured, name, us, rejected))
            ratios.append(measured.baseline_time.us / us)
        served = tuning(signature).torch_serves(signature)
        by_torch = [found for found in one.measured if served and _is_one_call(found.baseline)]
        scores = {found.m: _baseline_us(found) for found in by_torch}
        between = one.between(rejected)
        baselines = choose.completed(one.measured[0].baseline, scores, between, predictions.us) if scores else {}
        row = Row(
            signature,
            target,
            self._gpu,
            "tuned",
            found,
            torch_faster=choose.where_faster(baselines, predictions.us, found, tolerance),
            timings=timings,
            tuned_to=max(measured.m for measured in one.measured),
        )
        return row, ratios

    def _equal_bits(
        self,
        results: Mapping[Key, Tuned],
        times: Mapping[Key, choose.Times],
        kept: Collection[str],
        rejected: Mapping[str, str],
    ) -> dict[Key, choose.Ranges]:
        """What serves callers who want equal bits at every M, of each signature that has such functions: those of the
        best class of functions that give equal bits, and few that are not `kept` anyway."""
        tolerance, found = max(self._options.tolerance, FOR_EQUAL_BITS), dict[Key, choose.Times]()
        for key, of in times.items():
            pool, one, classes = self._pools[key[1]], results[key], dict[str, list[str]]()
            for name in _right(one, rejected):
                if (word := pool.summation(name, key[0])) is not None:
                    classes.setdefault(word, []).append(name)
            curve = one.predictions(pool).curve
            if names := choose.best_class(of, classes.values(), curve, kept, FOR_EQUAL_BITS):
                found[key] = of.among(names, curve, tolerance)
        chosen = choose.cover(list(found.values()), tolerance, kept)
        return {key: choose.ranges(of, chosen, tolerance) for key, of in found.items()}


def _right(one: Tuned, rejected: Mapping[str, str]) -> list[str]:
    """The functions that may serve, if any was measured: they were checked for the signature."""
    names = [name for name in one.names if name in one.checked and name not in rejected]
    launched = {name for found in one.measured for name in found.screened}
    return names if launched & set(names) else []


def _is_of(gpu: Gpu | None, kind: Gpu) -> bool:
    """Whether an entry is for a kind of GPU."""
    return gpu is not None and gpu.same_kind(kind)


def _untouched(entry: Entry, rejected: Mapping[str, str]) -> Row | None:
    """An entry that was not measured, without the functions that turned out wrong; None if that leaves nothing."""
    row = Row.of(entry)
    if not row.names() & rejected.keys():
        return row
    if not entry.candidates:
        left = ranges.without(row.ranges, rejected)
        timings = [t for t in row.timings if rejected.keys().isdisjoint((t["function"], t.get("runner_up")))]
        invariant = ranges.without(row.invariant or (), rejected)
        return None if left is None else replace(row, ranges=left, invariant=invariant, timings=timings)
    candidates = [(m, [n for n in names if n not in rejected]) for m, names in entry.candidates]
    if not all(names for _, names in candidates):
        return None
    serving = ranges.ranges([(m, names[0]) for m, names in candidates])
    invariant = ranges.without(row.invariant or (), rejected)
    return replace(row, candidates=candidates, ranges=serving, invariant=invariant)


def _is_one_call(baseline: str) -> bool:
    """Whether a baseline, by its name, is a product alone, which a server can run in place of a function."""
    return baseline.startswith("torch.") and "torch.compile" not in baseline and "eager" not in baseline


def _baseline_us(found: Measured) -> float:
    sustained = found.sustained.get(found.baseline)
    return math.sqrt(found.baseline_time.us * sustained.us) if sustained else found.baseline_time.us


def _timing(found: Measured, name: str, us: float, rejected: Iterable[str]) -> dict[str, Any]:
    """A row of timings: what serves at an M that was measured, with its spread if it was a finalist there, else with
    its predicted time; and the best other finalist."""
    finalists = dict(found.times)
    others = ((n, t) for n, t in found.times if n != name and n not in set(rejected))
    runner_up, runner_up_time = next(others, (None, None))
    row = TimingRow(
        found.m,
        name,
        round(us, 3),
        round(found.baseline_time.us, 3),
        baseline=found.baseline,
        baseline_spread=round(found.baseline_time.spread, 4),
        runner_up=runner_up,
        runner_up_us=round(runner_up_time.us, 3) if runner_up_time else None,
        candidates=found.candidates,
    )
    ours = finalists.get(name)
    if ours is not None:
        row = row._replace(spread=round(ours.spread, 4), bimodal=ours.bimodal or None)
    if name in found.sustained and found.baseline in found.sustained:
        load, of_baseline = (round(found.sustained[one].us, 3) for one in (name, found.baseline))
        row = row._replace(sustained_us=load, baseline_sustained_us=of_baseline)
    return row.to_json()
