"""The layers of all manifests and models of this checkout, read once: scripts/random_cases.py takes seconds."""

from __future__ import annotations

import sys
from functools import cache

from runtime.gemm.signature import Signature

from .command_line import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import random_cases


@cache
def layers() -> list[random_cases.Layer]:
    """Each distinct layer."""
    return random_cases.load_layers(random_cases.default_paths())


def of_model(model: str) -> list[Signature]:
    """The signatures of a model's layers; at least one."""
    found = [x.signature for x in layers() if any(name.startswith(f"{model}:") for name in x.names)]
    assert found, model
    return found
