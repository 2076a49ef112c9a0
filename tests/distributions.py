"""Distributions with entry points, put into a folder as an installer would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

OPERATIONS, PROVIDERS = "cute_aot.operations", "cute_aot.providers"
BUILDING, TUNING = "cute_aot.building", "cute_aot.tuning"


def install(site: Path, name: str, points: Mapping[str, str], version: str = "1") -> None:
    """Put the distribution `name` into `site`. `points` has for each group of entry points "word = module:object"."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{point}\n" for group, point in points.items()))


def install_row_scale(site: Path, tuned: bool = False) -> None:
    """The operation of `tests.row_scale` with its kernels and, if `tuned`, what tuning knows of it."""
    points = {
        OPERATIONS: "row_scale = tests.row_scale.operation:ROW_SCALE",
        PROVIDERS: "row_scales = tests.row_scale.provider:RowScales",
    }
    more = {TUNING: "row_scale = tests.row_scale.tuning:ROW_SCALE"} if tuned else {}
    install(site, "row-scale", points | more)
