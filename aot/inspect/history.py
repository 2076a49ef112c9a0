"""What was done to make an archive, in order, as plain data: behind `aot history`.

An archive keeps no time of day and no host, so that the same work gives the same bytes; that is for a provenance beside
it to say. What it keeps is the order: what it was built from, then each machine that it was tuned on.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from runtime.container.archive import Archive

from ..pack import build_table, tuning_table
from ..tune import history as tunings


def history(archive: Archive) -> list[dict[str, Any]]:
    """The steps: one for each model that it was built for, then one for each tuning or check.

    A tuning counts the functions that it found `rejected` and `right`. `signatures`, `points` and `launched`, how many
    signatures were tuned, at how many M, and how many functions were timed there, are what the table "history" has of
    the kind of GPU, whose tunings it does not tell apart: they are with the last of these, None with others.

    Raises:
        RecordError: a table is malformed.
    """
    build = build_table.read(archive)
    steps: list[dict[str, Any]] = [
        {
            "step": "build",
            "model": model.model,
            "source": model.source,
            "manifest": model.manifest,
            "layers": len(model.problems),
            "tools": dict(build.tools),
        }
        for model in build.models
    ]
    environments = tuning_table.read(archive)
    last = {row["gpu"]: i for i, row in enumerate(environments)}
    seen = _seen(archive)
    for i, row in enumerate(environments):
        of = {name: value for name, value in row.items() if name not in ("rejected", "right")}
        counts = seen.get(row["gpu"], Counter()) if last[row["gpu"]] == i else None
        steps.append(
            {
                "step": "check" if "right" in row else "tune",
                **of,
                "rejected": len(row.get("rejected", {})),
                "right": len(row.get("right", {})),
                **{what: None if counts is None else counts[what] for what in ("signatures", "points", "launched")},
            }
        )
    return steps


def _seen(archive: Archive) -> dict[str, Counter[str]]:
    """What the table "history" has, counted by kind of GPU."""
    found: dict[str, Counter[str]] = {}
    for row in tunings.tunings(archive):
        of = found.setdefault(row["gpu"], Counter())
        of["signatures"] += 1
        of["points"] += len(row["points"])
        of["launched"] += sum(len(point["finalists"]) + len(point["screened"]) for point in row["points"])
    return found
