"""Why a layer is as fast as it is at one M, as plain data: behind `aot explain`. Times are microseconds.

Which function serves and by what it was chosen; its time, against the floor of the GPU and against torch; the
functions behind it, and those that were rejected. Of what nothing serves, the nearest entries and what to do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from runtime.container.archive import Archive
from runtime.device.gpus import Gpu
from runtime.gemm.universal import PREDICTED, AnyEntry, PredictedEntry
from runtime.tables.table import Entry

from ..pack.fields import naming
from .digests import digests, short_names
from .entries import described, intervals, is_in, models_of, names_of
from .floor import floor
from .missing import missing
from .serving import Place, Serving
from .times import Time, Times
from .variants import described as variant
from .variants import words

RUNNERS_UP = 5
_UNKNOWN: dict[str, Any] = dict.fromkeys(Time._fields)


class Where(NamedTuple):
    """Of which target or kind of GPU a question is; all that the archive has for the layer where both are None."""

    target: str | None = None
    gpu: str | None = None


def explain(archive: Archive, serving: Serving, signatures: list[Any], m: int, where: Where) -> list[dict[str, Any]]:
    """One answer for each signature on each GPU that something serves it on, or that is named.

    `state` is that of the entry, "predicted" where a form serves, and None where nothing does; then `nearest` and
    `advice` say what else there is. Times and the floor are of the kind of GPU that the entry was tuned on, which may
    be another (`of_another_kind`). `time` is what the function that serves takes: `how` is "measured" or "predicted".
    `floor` is `aot.inspect.floor.Floor` with the `share` of the time that it is; `torch` has the `ratio` of its time to
    ours, and whether a library loaded with `on_slower="torch"` leaves this M to it. `behind_fastest` is by what share
    the function takes longer than the fastest that is known there, `near` what was measured at the M, else at the
    nearest on either side, `measured_at` every such M. `runners_up` are of the functions
    that tuning timed, or that the form has, whether the archive kept them or not; where no time is known, of those that
    a build ranked.

    Raises:
        UnknownGpu: `where` names no kind that is known.
        RecordError: a table is malformed.
    """
    return [
        _answer(archive, serving, signature, place, m)
        for signature in signatures
        for place in _places(serving, signature, where)
    ]


def _places(serving: Serving, signature: Any, where: Where) -> list[Place]:
    """Where to look: as is asked, or wherever something serves the signature, else in the first place that there is."""
    found = serving.places(signature, where.target, where.gpu)
    if where.target is not None or where.gpu is not None:
        return found
    return [place for place in found if serving.find(signature, place) is not None] or found[:1]


def _answer(archive: Archive, serving: Serving, signature: Any, place: Place, m: int) -> dict[str, Any]:
    names, entry, short = names_of(archive), serving.find(signature, place, m), short_names(archive)
    found = described(signature, names) | {
        "models": models_of(archive).get(signature.key(), []),
        "m": m,
        "gpu": place.gpu._asdict(),
        "assumed_gpu": place.assumed,
        "compute_capability": "{}.{}".format(*place.capability),
    }
    if entry is None:
        return found | {"state": None, "target": None} | missing(archive, serving, signature, place, names)
    of = Times(archive, entry) if isinstance(entry, Entry) else None
    with naming(archive):  # a cost program is read when it is first asked
        name, predicted = entry.best(m), {} if of else _predicted(entry, m)
    times = of.all(m) if of else predicted
    time = times.get(name)
    return found | {
        "state": entry.state,
        "target": entry.target,
        "tuned_on": None if entry.gpu is None else entry.gpu._asdict(),
        "of_another_kind": entry.gpu is not None and not entry.gpu.same_kind(place.gpu),
        "function": {
            "name": name,
            "digest": digests(archive)[name],
            "short_name": short[name],
            "variant": variant(name),
        },
        "range": _range(entry, m),
        "time": None if time is None else time._asdict(),
        "floor": _floor(signature, m, entry.gpu or place.gpu, time),
        "torch": _torch(of, entry, m, time),
        "behind_fastest": None if time is None else round(time.us / next(iter(times.values())).us - 1, 4),
        "measured_at": [row["m"] for row in of.rows] if of else [],
        "near": [_near(short, row) for row in of.near(m)] if of else [],
        "runners_up": _runners_up(short, name, entry, m, times),
        "functions": len(times) or len(entry.names),
        "rejected": [{"name": name, "reason": reason} for name, reason in of.rejected.items()] if of else [],
        "equal_bits": _equal_bits(serving.find(signature, place), m),
        "checked_on": list(entry.checked_on) if isinstance(entry, PredictedEntry) else [],
    }


def _equal_bits(entry: AnyEntry | None, m: int) -> str | None:
    """What serves callers who want equal bits at every M: the table's entry, also where another gives way to a form."""
    return None if entry is None or entry.invariant is None else entry.only_invariant().best(m)


def _predicted(entry: AnyEntry, m: int) -> dict[str, Time]:
    """The time of each function of a form at `m`, the fastest first; of those that the cost program gives one."""
    assert isinstance(entry, PredictedEntry)
    found = {name: us for name, us in entry.us(m).items() if 0 < us < math.inf}
    return {name: Time(us, PREDICTED) for name, us in sorted(found.items(), key=lambda item: item[1])}


def _range(entry: AnyEntry, m: int) -> dict[str, Any] | None:
    """The range of M that the function serves; None where each M is predicted."""
    found = next((row for row in intervals(entry.ranges) if is_in(row, m)), None)
    return None if found is None else {"m_min": found["m_min"], "m_max": found["m_max"]}


def _near(short: Mapping[str, str], row: dict[str, Any]) -> dict[str, Any]:
    """A timing with what is short to say of its function."""
    name = row["function"]
    return row | {"short_name": short.get(name), "words": words(name)}


def _floor(signature: Any, m: int, gpu: Gpu, time: Time | None) -> dict[str, Any] | None:
    found = floor(signature, m, gpu)
    if found is None:
        return None
    return found._asdict() | {"share": None if time is None else round(found.us / time.us, 4)}


def _torch(of: Times | None, entry: AnyEntry, m: int, time: Time | None) -> dict[str, Any] | None:
    found = of.torch(m) if of else None
    if found is None:
        return None
    faster = next((pair for pair in entry.torch_faster if pair[0] <= m and (pair[1] is None or m <= pair[1])), None)
    return found | {
        "ratio": None if time is None else round(found["us"] / time.us, 3),
        "is_faster": faster is not None,
        "faster_at": None if faster is None else {"m_min": faster[0], "m_max": faster[1]},
    }


def _runners_up(
    short: Mapping[str, str], serving: str, entry: AnyEntry, m: int, times: Mapping[str, Time]
) -> list[dict[str, Any]]:
    """The fastest functions besides the one that serves, with what share they take longer than it; where no time is
    known, those that were ranked after it."""
    best = times.get(serving)
    others: dict[str, Time | None] = dict(times) if times else dict.fromkeys(entry.functions(m))
    others.pop(serving, None)
    return [
        {
            "name": name,
            "short_name": short.get(name),
            "words": words(name),
            "kept": name in short,
            "longer_by": None if best is None or time is None else round(time.us / best.us - 1, 4),
            **(_UNKNOWN if time is None else time._asdict()),
        }
        for name, time in itertools.islice(others.items(), RUNNERS_UP)
    ]
