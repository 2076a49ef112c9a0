"""From the data of `aot report` to what the templates take: what is put first, and what is cut."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from .layers import place_view
from .strips import family_class
from .text import span

MOST_FUNCTIONS = 300
MOST_FINDINGS = 30  # of one rule
_SLOWEST = 8
_BUILDERS = ("cute-aot", "nvidia-cutlass-dsl")
_OF_MACHINE = {"driver": "driver", "cuda": "CUDA", "torch": "torch", "cublas": "cuBLAS", "cute_aot": "cute-aot"}


def view(data: dict[str, Any]) -> dict[str, Any]:
    """What the template takes, by name."""
    about = data["archive"]
    families = {row["family"]: place for place, row in enumerate(data["families"])}
    by_digest = {row["digest"]: row for row in data["functions"]}
    places = [place_view(place, by_digest, families) for place in data["places"]]
    return {
        "about": about,
        "file": PurePath(about["path"]).name,
        "title": ", ".join(m["model"] for m in about["models"] if m["model"]) or PurePath(about["path"]).name,
        "done": "tuned" if about["entries"]["tuned"] or not about["checked_on"] else "checked",
        "machines": list(dict.fromkeys(map(_machine, about["tuning"]))),
        "built_with": ", ".join(f"{name} {about['tools'][name]}" for name in _BUILDERS if name in about["tools"]),
        "places": places,
        "slowest": _slowest(data["places"]),
        "against": _against(data["places"]),
        "findings": _findings(data["lint"]),
        "counts": Counter(finding["severity"] for finding in data["lint"]),
        "forms": data["forms"],
        "families": data["families"],
        "family_classes": {name: family_class(number) for name, number in families.items()},
        "most_bytes": max((row["bytes"] for row in data["families"]), default=1),
        "functions": sorted(data["functions"], key=_by_spills)[:MOST_FUNCTIONS],
        "all_functions": len(data["functions"]),
    }


def _by_spills(row: dict[str, Any]) -> tuple[Any, ...]:
    return -(row["local_bytes"] or 0), -(row["registers"] or 0), row["family"], row["name"]


def _machine(environment: dict[str, Any]) -> str:
    """A machine that tuned: its GPU, and of versions what is known."""
    known = [f"{words} {environment[name]}" for name, words in _OF_MACHINE.items() if environment.get(name)]
    return ", ".join([environment["gpu"], *known])


def _against(places: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """All that was measured against torch: at how many M, at how many torch was faster, of how many layers, and the
    geometric mean of layers' means."""
    layers = [layer for place in places for layer in place["layers"] if not layer["elsewhere"]]
    means = [layer["ratio_mean"] for layer in layers if layer["ratio_mean"]]
    return {
        "measured": sum(layer["measured"] for layer in layers),
        "slower": sum(layer["faster_with_torch"] for layer in layers),
        "layers": len(means),
        "slower_layers": sum(bool(layer["torch_faster"]) for layer in layers),
        "mean": statistics.geometric_mean(means) if means else None,
    }


def _slowest(places: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The layers that are the slowest against torch, each with where it is."""
    rows = [
        {
            "label": layer["label"],
            "gpu": place["gpu"]["name"].removeprefix("NVIDIA "),
            "mean": layer["ratio_mean"],
            "worst": layer["ratio_worst"],
            "worst_m": min(layer["points"], key=lambda point: point["ratio"])["m"],
            "where": ", ".join(span(row["m_min"], row["m_max"]) for row in layer["torch_faster"]),
        }
        for place in places
        for layer in place["layers"]
        if layer["points"] and not layer["elsewhere"]
    ]
    return sorted(rows, key=lambda row: row["worst"])[:_SLOWEST]


def _findings(lint: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Findings of one rule and one piece of advice together, no more than `MOST_FINDINGS` of each."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for finding in lint:
        groups.setdefault((finding["severity"], finding["rule"], finding["advice"]), []).append(finding)
    return [
        {"severity": severity, "rule": rule, "advice": advice, "found": found[:MOST_FINDINGS], "count": len(found)}
        for (severity, rule, advice), found in groups.items()
    ]
