"""Configs of models and the manifests that follow from them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from aot.problem.manifest import Manifest, ManifestError
from aot.problem.model_config import Wanted, manifest_from_config
from aot.problem.models.config import load_config

ROOT = Path(__file__).resolve().parents[1]

CONFIGS = ROOT / "tests" / "data" / "configs"


def config(name: str = "llama-3.1-8b", **changes: Any) -> dict[str, Any]:
    merged = {**load_config(CONFIGS / f"{name}.json"), **changes}
    return {field: value for field, value in merged.items() if value != "absent"}


def manifest(config: dict[str, Any], tp: Any = 1, **arguments: Any) -> Manifest:
    wanted = {field.name: arguments.pop(field.name) for field in fields(Wanted) if field.name in arguments}
    return manifest_from_config(
        config, Wanted(**{"tp": tp, "tokens": (16,), "targets": ("sm_90a",), **wanted}), **arguments
    )


def refused(config: dict[str, Any], *words: str, tp: Any = 1, **arguments: Any) -> None:
    with pytest.raises(ManifestError) as caught:
        manifest(config, tp, **{"source": "x/config.json", **arguments})
    message = str(caught.value)
    assert message.startswith("x/config.json: ")
    assert "\n" not in message
    for word in words:
        assert word in message
