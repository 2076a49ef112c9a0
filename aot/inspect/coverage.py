"""Which of a model's layers an archive serves at which M, and how well that is known, as plain data: behind `aot
coverage`.

Knows of a model only its manifest, which `aot.problem` makes of a config too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from runtime.gemm.universal import PREDICTED, AnyEntry
from runtime.tables.table import Entry

from ..pack import timings
from ..problem.manifest import Gemm, Manifest, Use
from ..search.targets import target_for
from .missing import served_by_package
from .serving import Place, Serving

TUNED, BEYOND, RANKED, MISSING = "tuned", "beyond", "ranked", "missing"
STATES = (TUNED, BEYOND, RANKED, PREDICTED, MISSING)


def coverage(serving: Serving, of: Manifest, places: Iterable[Place]) -> list[dict[str, Any]]:
    """For each place every layer of the manifest, with the M values that it asks for by state.

    States are "tuned"; "beyond", tuned but for an M larger than any that was measured; "ranked"; "predicted", by a
    form; and "missing". A place's `target` is the one to build for. A layer's `tuned_on` is the kind of GPU that its
    entry is for, where that is another than is asked for. `package` says of a layer that is missing whether the archive
    in the package has a form for it.

    Raises:
        RecordError: a table is malformed.
    """
    return [
        {
            "gpu": place.gpu._asdict(),
            "assumed_gpu": place.assumed,
            "compute_capability": "{}.{}".format(*place.capability),
            "target": target_for(place.capability),
            "layers": _layers(serving, of, place),
        }
        for place in places
    ]


def _layers(serving: Serving, of: Manifest, place: Place) -> list[dict[str, Any]]:
    entries = {item.signature: serving.find(item.signature, place) for item in of.items()}
    by_package = served_by_package([s for s, entry in entries.items() if entry is None], place)
    return [
        _layer(item, entries[item.signature], place) | {"package": item.signature in by_package} for item in of.items()
    ]


def _layer(item: Gemm | Use, entry: AnyEntry | None, place: Place) -> dict[str, Any]:
    last = _last_measured(entry)
    found: dict[str, list[int]] = {state: [] for state in STATES}
    for m in item.tokens:
        found[_state(entry, m, last)].append(m)
    elsewhere = entry is not None and entry.gpu is not None and not entry.gpu.same_kind(place.gpu)
    return {
        "name": item.name,
        "signature": item.signature.key(),
        "operation": item.signature.operation,
        "m": found,
        "tuned_on": entry.gpu._asdict() if entry is not None and entry.gpu is not None and elsewhere else None,
    }


def _last_measured(entry: AnyEntry | None) -> int | None:
    """The largest M that an entry was measured at; None where nothing says."""
    rows = timings.read(entry) if isinstance(entry, Entry) and entry.state == TUNED else []
    return rows[-1]["m"] if rows else None


def _state(entry: AnyEntry | None, m: int, last: int | None) -> str:
    if entry is None:
        return MISSING
    return BEYOND if last is not None and m > last else entry.state
