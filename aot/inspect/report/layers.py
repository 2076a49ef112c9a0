"""What an archive serves of each layer on a kind of GPU, by columns of M: measured times against torch and the floor of
the GPU, and what serves where nothing was measured. Times are microseconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from runtime.container.archive import Archive
from runtime.device.gpus import Gpu
from runtime.gemm.universal import AnyEntry, PredictedEntry
from runtime.tables.table import Entry

from ...pack import build_table, timings
from .. import predictions
from ..digests import short_names
from ..entries import gpu, intervals, measured, models_of, names_of
from ..floor import floor
from ..serving import Place, Serving
from ..signatures import of_key
from .bins import Bin, bins

MEASURED, TORCH_FASTER, TUNED, BEYOND = "measured", "torch_faster", "tuned", "beyond"
MISSING = "missing"


class _Names(NamedTuple):
    """What layers, and functions for short, are called, by signature and by name."""

    layers: Mapping[str, list[str]]
    models: Mapping[str, list[str]]
    functions: Mapping[str, str]


def places(archive: Archive, serving: Serving) -> list[dict[str, Any]]:
    """For each kind of GPU that the archive has something for its layers: those of models in their order, then others.

    `bins` are columns of M, with `last` None where there is no end. A layer's `points` are what was measured; `cells`
    has for each column its `state`, the `worst` ratio of torch's time to ours that was measured there, and the
    functions that serve; `ranges` are all that dispatch has, in M. A layer that was tuned `elsewhere`, on another kind
    of GPU alone, has the times and floors of that, `tuned_on`.

    States of cells are "measured"; "torch_faster", found so between points that were measured; "tuned", by what was
    measured at other M; "beyond" all that was measured; "ranked"; "predicted", by a form; and "missing".

    Raises:
        RecordError: a table is malformed.
    """
    names = _Names(names_of(archive), models_of(archive), short_names(archive))
    signatures = _signatures(archive, serving)
    return [_place(serving, signatures, names, place) for place in serving.everywhere()]


def _signatures(archive: Archive, serving: Serving) -> list[Any]:
    """Those that models ask for, in their order, then those of other entries; each once."""
    entries = {entry.signature.key(): entry.signature for entry in serving.entries}
    asked = [problem.signature for model in build_table.read(archive).models for problem in model.problems]
    found = {key: entries.get(key) or of_key(key) for key in [*asked, *entries]}
    return [signature for signature in found.values() if signature is not None]


def _place(serving: Serving, signatures: list[Any], names: _Names, place: Place) -> dict[str, Any]:
    entries = [serving.find(signature, place) for signature in signatures]
    ms = [row["m"] for entry in entries if isinstance(entry, Entry) for row in timings.read(entry)]
    faster = [entry.torch_faster for entry in entries if entry is not None]
    columns = bins(ms or predictions.ROWS, faster)
    return {
        "gpu": place.gpu._asdict(),
        "assumed_gpu": place.assumed,
        "compute_capability": "{}.{}".format(*place.capability),
        "bins": [column._asdict() for column in columns],
        "layers": [_layer(serving, signature, names, place, columns) for signature in signatures],
    }


def _layer(serving: Serving, signature: Any, names: _Names, place: Place, columns: Sequence[Bin]) -> dict[str, Any]:
    entry = serving.find(signature, place)
    key, gpu_of_times = signature.key(), place.gpu
    if isinstance(entry, Entry) and entry.gpu is not None:
        gpu_of_times = entry.gpu
    ranges = intervals(entry.ranges) if isinstance(entry, Entry) else []
    points = (
        [_point(signature, row, gpu_of_times, names) for row in timings.read(entry)] if isinstance(entry, Entry) else []
    )
    found = {
        "label": ", ".join(names.layers.get(key, [])) or key,
        "signature": key,
        "operation": signature.operation,
        "names": names.layers.get(key, []),
        "models": names.models.get(key, []),
        "state": MISSING if entry is None else entry.state,
        "target": None if entry is None else entry.target,
        "tuned_on": gpu(entry) if isinstance(entry, Entry) else None,
        "elsewhere": not gpu_of_times.same_kind(place.gpu),
        "torch_faster": [] if entry is None else [{"m_min": a, "m_max": b} for a, b in entry.torch_faster],
        "points": points,
        "ranges": [],
        "cells": [
            _cell(signature, at, points, column, place) | {"serves": _serves(at, ranges, column, names)}
            for column in columns
            for at in (serving.find(signature, place, column.first),)
        ],
    }
    if not isinstance(entry, Entry):
        return found | {"measured": 0, "faster_with_torch": 0, "ratio_mean": None, "ratio_worst": None}
    named = [row | {"digest": names.functions[row["function"]]} for row in ranges]
    return found | {"ranges": named} | measured(entry)


def _point(signature: Any, row: dict[str, Any], of: Gpu, names: _Names) -> dict[str, Any]:
    """A time that was measured; `over_floor` is how many times the floor of the GPU it is, None where none is known."""
    least = floor(signature, row["m"], of)
    return {
        "m": row["m"],
        "us": row["us"],
        "spread": row.get("spread"),
        "bimodal": row.get("bimodal", False),
        "torch_us": row["baseline_us"],
        "torch": row.get("baseline") or "torch",
        "ratio": row["ratio"],
        "floor_us": None if least is None else round(least.us, 3),
        "bound": None if least is None else least.bound,
        "over_floor": None if least is None else round(row["us"] / least.us, 3),
        "function": row["function"],
        "digest": names.functions.get(row["function"]),
    }


def _cell(
    signature: Any,
    entry: AnyEntry | None,
    points: list[dict[str, Any]],
    column: Bin,
    place: Place,
) -> dict[str, Any]:
    """What is known of a layer in a column: `worst` is the least ratio that was measured and `worst_m` its M; `us` and
    `over_floor` are what a form predicts at the first M of the column."""
    here = [point for point in points if column.has(point["m"])]
    worst = min(here, key=lambda point: point["ratio"], default=None)
    found = {
        "state": _state(entry, points, here, column),
        "measured": len(here),
        "worst": None if worst is None else worst["ratio"],
        "worst_m": None if worst is None else worst["m"],
        "torch_faster": entry is not None and column.meets_any(entry.torch_faster),
        "us": None,
        "over_floor": None,
    }
    if isinstance(entry, PredictedEntry):
        us, least = entry.us(column.first)[entry.best(column.first)], floor(signature, column.first, place.gpu)
        if math.isfinite(us):
            found["us"] = round(us, 3)
            found["over_floor"] = None if least is None else round(us / least.us, 3)
    return found


def _state(entry: AnyEntry | None, points: list[dict[str, Any]], here: list[dict[str, Any]], column: Bin) -> str:
    if entry is None:
        return MISSING
    if here:
        return MEASURED
    if column.meets_any(entry.torch_faster):
        return TORCH_FASTER
    return BEYOND if points and column.first > points[-1]["m"] else entry.state


def _serves(entry: AnyEntry | None, ranges: list[dict[str, Any]], column: Bin, names: _Names) -> list[str]:
    """The digests of the functions that serve a column, in the order of M; of a form the one at its first M."""
    if entry is None:
        return []
    if isinstance(entry, Entry):
        chosen = [row["function"] for row in ranges if column.meets(row["m_min"], row["m_max"])]
    else:
        chosen = [entry.best(column.first)]
    return list(dict.fromkeys(names.functions[name] for name in chosen))
