"""What functions take for an entry at one M: measured, where tuning was there, else predicted as tuning predicts.

Times are microseconds of one launch, without sustained load. Needs no GPU.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from runtime.container.archive import Archive
from runtime.program.record import Record
from runtime.tables.table import Entry

from ..pack import timings, tuning_table
from ..tune import history
from ..tune.calibrate import Predictions
from ..tune.halving import Measured
from ..tune.pool import Pool
from ..tune.session import Tuned

MEASURED, PREDICTED = "measured", "predicted"


class Time(NamedTuple):
    """A time: `how` it is known, the spread of its samples over their median, and under sustained load. A predicted one
    has in place of a spread by what share it may be off, one standard deviation. What is not known is None."""

    us: float
    how: str
    spread: float | None = None
    sustained_us: float | None = None
    off_by: float | None = None


class Times:
    """The times of an entry that was tuned; of another there are none."""

    def __init__(self, archive: Archive, entry: Entry) -> None:
        """Raises RecordError where timings or the history are malformed."""
        self._entry, self._archive = entry, archive
        self.rows = timings.read(entry)
        self._tuning = self._of_history()
        self.points: list[Measured] = []
        if self._tuning is not None:
            names, points = self._tuning["names"], filter(_makes_sense, self._tuning["points"])
            self.points = [history.measured(names, point) for point in points]
        self._predictions: Predictions | None = None

    def _of_history(self) -> dict[str, Any] | None:
        """The last tuning of the entry's signature, target and kind of GPU."""
        entry, key = self._entry, self._entry.signature.key()
        if entry.gpu is None or not self.rows:
            return None
        of = entry.signature.operation
        found = [
            row
            for row in history.tunings(self._archive, key)
            if (row["target"], row["gpu"]) == (entry.target, entry.gpu.name) and history.operation_of(row) == of
        ]
        return found[-1] if found else None

    @property
    def rejected(self) -> dict[str, str]:
        """The functions that tuning found wrong, with reasons: for this entry, or, where the archive kept no history,
        for any that was tuned on its kind of GPU."""
        if self._tuning is None:
            gpu = "" if self._entry.gpu is None else self._entry.gpu.name
            of = [row for row in tuning_table.read(self._archive) if row["gpu"] == gpu]
            return {name: reason for row in of for name, reason in row.get("rejected", {}).items()}
        return {self._tuning["names"][place]: reason for place, reason in self._tuning["rejected"]}

    def all(self, m: int) -> dict[str, Time]:
        """What is known of each function at `m`, the fastest first: of all that tuning timed, if the archive kept that,
        else of those that the entry's own timings name."""
        found = self._measured(m)
        if not found and self.points:
            found = self._predicted(m)
        return dict(sorted(found.items(), key=lambda item: (item[1].us, item[0])))

    def _measured(self, m: int) -> dict[str, Time]:
        point = next((point for point in self.points if point.m == m), None)
        if point is None:
            row = next((row for row in self.rows if row["m"] == m), None)
            return {} if row is None else _of_row(row)
        found = {name: Time(us, MEASURED) for name, us in point.short_us().items()}
        for name, timing in point.times:
            load = point.sustained.get(name)
            found[name] = Time(timing.us, MEASURED, timing.spread, None if load is None else load.us)
        return found

    def _predicted(self, m: int) -> dict[str, Time]:
        if self._predictions is None:
            names = [name for point in self.points for name in point.screened]
            short = [dataclasses.replace(point, sustained={}) for point in self.points]
            tuned = Tuned(self._entry.signature, names, short, self.rejected)
            pool = Pool(self._entry.target, names, self._record, [self._entry])
            self._predictions = tuned.predictions(pool)
        known = dict.fromkeys(n for point in self.points for n in point.screened if n not in self.rejected)
        p = self._predictions
        return {name: Time(p.us(name, m), PREDICTED, off_by=p.uncertainty(name, m)) for name in known}

    def _record(self, name: str) -> Record:
        return Record.from_json(self._archive.record(name))

    def torch(self, m: int) -> dict[str, Any] | None:
        """What torch took: its kernel's name, and microseconds at `m`, `between` two M that were measured where it was
        not there, in proportion in log M; None beyond those."""
        at = {
            row["m"]: (row["baseline_us"], row.get("baseline") or "torch", row.get("baseline_spread"))
            for row in self.rows
        }
        if m in at:
            us, name, spread = at[m]
            return {"baseline": name, "us": us, "spread": spread, "between": None}
        below, above = max((x for x in at if x < m), default=None), min((x for x in at if x > m), default=None)
        if below is None or above is None:
            return None
        share = math.log(m / below) / math.log(above / below)
        us = at[below][0] ** (1 - share) * at[above][0] ** share
        return {"baseline": at[below][1], "us": us, "spread": None, "between": [below, above]}

    def near(self, m: int) -> list[dict[str, Any]]:
        """What was measured at `m`, else at the nearest M on either side."""
        exact = [row for row in self.rows if row["m"] == m]
        below, above = [r for r in self.rows if r["m"] < m], [r for r in self.rows if r["m"] > m]
        return exact or [*below[-1:], *above[:1]]


def _makes_sense(point: dict[str, Any]) -> bool:
    """Whether every time of a point of the history is one, and its M can be; predictions take their logarithms."""
    times = [point["baseline"][1], *(row[1] for row in (*point["finalists"], *point["screened"]))]
    return (
        point["m"] <= timings.MAX_TOKENS and all(0 < us <= timings.MAX_US for us in times) and point["finalists"] != []
    )


def _of_row(row: dict[str, Any]) -> dict[str, Time]:
    """The two functions of a timing, where the history says no more."""
    found = {row["function"]: Time(row["us"], MEASURED, row.get("spread"), row.get("sustained_us"))}
    if row.get("runner_up") and row.get("runner_up_us"):
        found[row["runner_up"]] = Time(row["runner_up_us"], MEASURED)
    return found
