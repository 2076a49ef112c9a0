"""Distributions: with entry points, put into a folder as an installer would; and those that this project needs."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from .command_line import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it there

OPERATIONS, PROVIDERS = "cute_aot.operations", "cute_aot.providers"
BUILDING, TUNING = "cute_aot.building", "cute_aot.tuning"


def install(site: Path, name: str, points: Mapping[str, str], version: str = "1") -> None:
    """Put the distribution `name` into `site`. `points` has for each group of entry points "word = module:object"."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{point}\n" for group, point in points.items()))


def project() -> dict[str, Any]:
    """What pyproject.toml says of this distribution."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        found: dict[str, Any] = tomllib.load(file)["project"]
    return found


def normal(name: str) -> str:
    """The name of a distribution as all ways to write it are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def brought_by(requirements: Iterable[str]) -> set[str]:
    """The distributions installed here that come with `requirements`, themselves included."""
    found: set[str] = set()
    waiting = list(requirements)
    while waiting:
        requirement = Requirement(waiting.pop())
        name = normal(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        waiting += metadata.requires(name) or []
    return found


def install_row_scale(site: Path, tuned: bool = False) -> None:
    """The operation of `tests.row_scale` with its kernels and, if `tuned`, what tuning knows of it."""
    points = {
        OPERATIONS: "row_scale = tests.row_scale.operation:ROW_SCALE",
        PROVIDERS: "row_scales = tests.row_scale.provider:RowScales",
    }
    more = {TUNING: "row_scale = tests.row_scale.tuning:ROW_SCALE"} if tuned else {}
    install(site, "row-scale", points | more)
