"""What tuning saw, as a table of the archive: finalists with their spreads, what was screened, what was rejected.

No server reads it. `docs/records.md` has its fields; unknown ones are ignored.
Functions go by their place in a list of names, and times are integers of 10 ns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import zstandard

from runtime.container import canonical
from runtime.container.archive import Archive
from runtime.container.fields import require_schema
from runtime.errors import RecordError

from ..pack.tuning_table import HISTORY
from ..search.operation import FIRST
from .halving import Measured
from .session import Tuned
from .timing import Timing

SCHEMA = 1  # raised when what a field means changes
MOST_SHARE = 0.25  # of the file
_ROW, _POINT = {"signature", "target", "gpu", "names", "points", "rejected"}, {"m", "baseline", "finalists", "screened"}
_LEVEL = 19
_TICKS_PER_US = 100


class Kind(NamedTuple):
    """What a tuning was for: a target, and the name of the GPU."""

    target: str
    gpu: str


def table(tuned: Iterable[tuple[Kind, Tuned]], before: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The table of what was tuned now, and of the tunings that the archive had `before`."""
    return {"schema": SCHEMA, "tunings": [*before, *(_tuning(kind, one) for kind, one in tuned)]}


def operation_of(row: Mapping[str, Any]) -> str:
    """The operation of which a row of `tunings` is."""
    found: str = row.get("operation", FIRST)
    return found


def tunings(archive: Archive, signature: str | None = None) -> list[dict[str, Any]]:
    """What the table says, one row for each signature that was tuned, or those of one alone, by key; [] where there is
    none.

    Raises:
        RecordError: it is not what `table` makes.
    """
    if HISTORY not in archive.tables:
        return []
    where = f"{archive.path}: table {HISTORY}"
    obj = archive.table(HISTORY)
    require_schema(obj, SCHEMA, where)
    found = obj.get("tunings")
    if not isinstance(found, list):
        _fail(where, "'tunings' must be a list")
    if signature is not None:
        found = [row for row in found if isinstance(row, dict) and row.get("signature") == signature]
    for i, row in enumerate(found):
        here = f"{where}: tunings[{i}]"
        if not isinstance(row, dict) or not row.keys() >= _ROW:
            _fail(here, f"needs the fields {', '.join(sorted(_ROW))}")
        if not all(isinstance(row[field], str) for field in ("signature", "target", "gpu")):
            _fail(here, "signature, target and gpu must be words")
        if not isinstance(row["names"], list) or not all(isinstance(name, str) for name in row["names"]):
            _fail(here, "names must be a list of words")
        _require_pairs(row["rejected"], len(row["names"]), str, f"{here}: rejected")
        if not isinstance(row["points"], list):
            _fail(here, "points must be a list")
        for j, point in enumerate(row["points"]):
            _require_point(point, len(row["names"]), f"{here}: points[{j}]")
    return found


def measured(names: Sequence[str], point: Mapping[str, Any]) -> Measured:
    """What was found at a point of a tuning, as `tunings` gives both, as far as it was kept."""

    def timing(us: int, spread: int, _: int, bimodal: int) -> Timing:
        return Timing(us / _TICKS_PER_US, spread / 1000, bimodal=bool(bimodal))

    finalists = {names[i]: numbers for i, *numbers in point["finalists"]}
    baseline, *of_baseline = point["baseline"]
    loads = {name: load for name, (_, _, load, _) in {**finalists, baseline: of_baseline}.items() if load}
    times = tuple((name, timing(*numbers)) for name, numbers in finalists.items())
    screened = {names[i]: us / _TICKS_PER_US for i, us in point["screened"]} | {name: t.us for name, t in times}
    sustained = {name: Timing(load / _TICKS_PER_US, 0.0) for name, load in loads.items()}
    return Measured(point["m"], times, baseline, timing(*of_baseline), len(screened), sustained, screened)


def fitted(history: dict[str, Any], most_bytes: int) -> dict[str, Any] | None:
    """The table with as many screened functions at each M, the fastest first, as let it compress to `most_bytes`; None
    where not even the finalists fit."""
    longest = max((len(p["screened"]) for t in history["tunings"] for p in t["points"]), default=0)
    keep = longest
    while True:
        found = {"schema": SCHEMA, "tunings": [_shortened(tuning, keep) for tuning in history["tunings"]]}
        if len(zstandard.ZstdCompressor(level=_LEVEL).compress(canonical.dumps(found))) <= most_bytes:
            return found
        if not keep:
            return None
        keep = keep * 3 // 4


def _tuning(kind: Kind, one: Tuned) -> dict[str, Any]:
    seen = {name for found in one.measured for name in (*found.screened, *(n for n, _ in found.times))}
    names = sorted(seen | one.rejected.keys())
    place = {name: i for i, name in enumerate(names)}
    operation = one.signature.operation
    return ({} if operation == FIRST else {"operation": operation}) | {
        "signature": one.signature.key(),
        "target": kind.target,
        "gpu": kind.gpu,
        "names": names,
        "rejected": [[place[name], reason] for name, reason in sorted(one.rejected.items())],
        "points": [_point(found, place) for found in one.measured],
    }


def _point(found: Measured, place: dict[str, int]) -> dict[str, Any]:
    """Finalists are [function, time, spread in thousandths, time under load or 0, 1 where it has two speeds]."""
    finalists = {name for name, _ in found.times}
    screened = sorted((us, name) for name, us in found.short_us().items() if name not in finalists)
    return {
        "m": found.m,
        "baseline": [found.baseline, *_numbers(found.baseline_time, found.sustained.get(found.baseline))],
        "finalists": [[place[name], *_numbers(t, found.sustained.get(name))] for name, t in found.times],
        "screened": [[place[name], _ticks(us)] for us, name in screened],
    }


def _numbers(timing: Timing, sustained: Timing | None) -> list[int]:
    load = _ticks(sustained.us) if sustained else 0
    return [_ticks(timing.us), round(timing.spread * 1000), load, int(timing.bimodal)]


def _ticks(us: float) -> int:
    return round(us * _TICKS_PER_US)


def _shortened(tuning: dict[str, Any], keep: int) -> dict[str, Any]:
    return tuning | {"points": [p | {"screened": p["screened"][:keep]} for p in tuning["points"]]}


def _require_point(point: Any, names: int, where: str) -> None:
    if not isinstance(point, dict) or not point.keys() >= _POINT:
        _fail(where, f"needs the fields {', '.join(sorted(_POINT))}")
    if not _are_counts([point["m"]]) or not point["m"]:
        _fail(where, f"m cannot be {point['m']!r:.50}")
    baseline = point["baseline"]
    if not isinstance(baseline, list) or len(baseline) != 5 or not isinstance(baseline[0], str):
        _fail(where, "baseline must be a name and four numbers")
    if not _are_counts(baseline[1:]):
        _fail(where, "baseline has a number that is none")
    for what, length in (("finalists", 5), ("screened", 2)):
        rows = point[what]
        if not isinstance(rows, list) or not all(isinstance(r, list) and len(r) == length for r in rows):
            _fail(where, f"{what} must be rows of {length} numbers")
        if not all(_are_counts(row) and row[0] < names for row in rows):
            _fail(where, f"{what} has a number that is none, or a function that is not there")


def _require_pairs(rows: Any, names: int, kind: type, where: str) -> None:
    if not isinstance(rows, list) or not all(isinstance(r, list) and len(r) == 2 for r in rows):
        _fail(where, "must be pairs")
    if not all(_are_counts(row[:1]) and row[0] < names and isinstance(row[1], kind) for row in rows):
        _fail(where, "names a function that is not there, or says nothing of one")


def _are_counts(values: Sequence[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _fail(where: str, what: str) -> NoReturn:
    raise RecordError(f"{where}: {what}; tune the archive again, or with --no-history")
