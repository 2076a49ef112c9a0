"""What the page shows of layers on a kind of GPU: cells with a class, a few characters, a sentence; times; ranges."""

from __future__ import annotations

import bisect
import math
import operator
from collections import Counter
from typing import Any

from .strips import MOST_RANGES, family_class, strips
from .text import ratio, span, us

MOST_LAYERS = 60  # of a kind of GPU; the slowest against torch, where there are more
_MOST_SPANS = 4  # that a cell names of where torch is faster
_BELOW = ((0.9, "slow3"), (0.97, "slow2"), (1.0, "slow1"), (1.03, "even"), (1.1, "fast1"), (1.25, "fast2"))


def place_view(place: dict[str, Any], by_digest: dict[str, Any], families: dict[str, int]) -> dict[str, Any]:
    """What the templates take for a kind of GPU; `families` numbers families of functions, for their colours."""
    layers = place["layers"]
    if len(layers) > MOST_LAYERS:
        layers = sorted(layers, key=lambda layer: layer["ratio_worst"] or math.inf)[:MOST_LAYERS]
    shared = {name for name, number in Counter(layer["label"] for layer in layers).items() if number > 1}
    names = [_unique(layer, shared) for layer in layers]
    gpu = place["gpu"]
    rate = f", {gpu['memory_gbps']} GB/s" if gpu["memory_gbps"] else ""
    return {
        "gpu": gpu["name"],
        "says": f"{gpu['multiprocessors']} SMs{rate}, sm {place['compute_capability']}"
        + (", assumed: nothing was tuned here" if place["assumed_gpu"] else ""),
        "columns": place["bins"],
        "rows": [
            {
                "label": name,
                "signature": layer["signature"],
                "cells": [
                    _cell(name, layer, column, cell) for column, cell in zip(place["bins"], layer["cells"], strict=True)
                ],
            }
            for name, layer in zip(names, layers, strict=True)
        ],
        "all": len(place["layers"]),
        "any_measured": any(layer["points"] for layer in layers),
        "times": [row for name, layer in zip(names, layers, strict=True) for row in _times(name, layer, place)],
        "families": _families(layers, by_digest, families),
        "strips": strips(names, layers, by_digest, families),
        "ranges": [
            {
                "label": name,
                "signature": layer["signature"],
                "all": len(layer["ranges"]),
                "rows": [_range(row, layer, by_digest) for row in layer["ranges"][:MOST_RANGES]],
            }
            for name, layer in zip(names, layers, strict=True)
            if layer["ranges"]
        ],
    }


def _families(layers: list[dict[str, Any]], by_digest: dict[str, Any], families: dict[str, int]) -> dict[str, str]:
    """The families that the picture of dispatch has, in the order of `families`, each with its colour's class."""
    shown = {by_digest[row["digest"]]["family"] for layer in layers for row in layer["ranges"][:MOST_RANGES]}
    return {name: family_class(number) for name, number in families.items() if name in shown}


def _unique(layer: dict[str, Any], shared: set[str]) -> str:
    """What a layer is called, with its models and its key where several share a name, and with the kind of GPU that its
    times are of where that is another."""
    name = str(layer["label"])
    if name in shared:
        name += f" ({', '.join(layer['models'])}: {layer['signature']})"
    return f"{name}, as on {layer['tuned_on']['name']}" if layer["elsewhere"] else name


def _cell(name: str, layer: dict[str, Any], column: dict[str, Any], cell: dict[str, Any]) -> dict[str, str]:
    """The class, the few characters, and the sentence of a cell against torch."""
    here = span(column["first"], column["last"])
    serves = f"served by {', '.join(cell['serves'][:4])}{' and others' if len(cell['serves']) > 4 else ''}"
    faster = meeting(layer["torch_faster"], column)
    spans = ", ".join(span(row["m_min"], row["m_max"]) for row in faster[:_MOST_SPANS])
    also = f"; torch is faster at M = {spans}{' and others' if len(faster) > _MOST_SPANS else ''}" if faster else ""
    where = f"{name} at M = {here}"
    if cell["state"] == "measured":
        points = [p for p in layer["points"] if _in(p["m"], column)]
        worst = min(points, key=lambda point: point["ratio"])
        of = "" if len(points) == 1 else f", the least of {len(points)} that were measured"
        over = "" if worst["over_floor"] is None else f", {ratio(worst['over_floor'])} times the floor"
        says = (
            f"{name} at M = {worst['m']}: {us(worst['us'])} us{over}; {worst['torch']} {us(worst['torch_us'])} us, "
            f"so {ratio(worst['ratio'])} times as fast as torch{of}{also}; {serves}"
        )
        return {"class": _bucket(worst["ratio"]), "text": ratio(worst["ratio"]) + ("*" if faster else ""), "says": says}
    known = {
        "torch_faster": ("slow1", "*", f"{where}: torch was found faster between M that were measured{also}; {serves}"),
        "tuned": ("near", "·", f"{where}: not measured here; {serves}, chosen by times at other M"),
        "beyond": ("beyond", "·", f"{where}: beyond what was measured; {serves}"),
        "ranked": ("ranked", "r", f"{where}: nothing was timed; {serves}, chosen by estimates"),
        "missing": ("missing", "x", f"{where}: nothing serves it"),
    }
    if cell["state"] in known:
        kind, text, says = known[cell["state"]]
        return {"class": kind, "text": text, "says": says}
    over = "" if cell["over_floor"] is None else f", {ratio(cell['over_floor'])} times the floor"
    return {"class": "ranked", "text": "p", "says": f"{where}: {us(cell['us'])} us predicted{over}; {serves}"}


def _in(m: int, column: dict[str, Any]) -> bool:
    return bool(column["first"] <= m and (column["last"] is None or m <= column["last"]))


def meeting(ranges: list[dict[str, Any]], column: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of ranges, ascending and disjoint, that have an M of a column."""
    begins = bisect.bisect_left(ranges, column["first"], key=lambda r: math.inf if r["m_max"] is None else r["m_max"])
    last = math.inf if column["last"] is None else column["last"]
    return ranges[begins : bisect.bisect_right(ranges, last, key=operator.itemgetter("m_min"))]


def _bucket(value: float) -> str:
    return next((name for below, name in _BELOW if value < below), "fast3")


def _times(name: str, layer: dict[str, Any], place: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the table of times, those of a form predicted."""
    rows = [{"label": name, "how": "measured", **point} for point in layer["points"]]
    for column, cell in zip(place["bins"], layer["cells"], strict=True):
        if cell["us"] is not None:
            empty = dict.fromkeys(("torch_us", "torch", "ratio", "floor_us", "bound", "spread"))
            known = {"m": column["first"], "us": cell["us"], "over_floor": cell["over_floor"]}
            rows.append({"label": name, "how": "predicted", **empty, **known, "digest": cell["serves"][0]})
    return rows


def _range(row: dict[str, Any], layer: dict[str, Any], by_digest: dict[str, Any]) -> dict[str, Any]:
    """A range of dispatch with what was measured in it, at the largest M of those."""
    inside = [p for p in layer["points"] if p["m"] >= row["m_min"] and (row["m_max"] is None or p["m"] <= row["m_max"])]
    last = inside[-1] if inside else None
    function = by_digest[row["digest"]]
    return {
        "m": span(row["m_min"], row["m_max"]),
        "digest": row["digest"],
        "choices": function["words"] or function["name"],
        "family": function["family"],
        "measured": "" if last is None else f"{us(last['us'])} us at M = {last['m']}",
        "ratio": None if last is None else last["ratio"],
    }
