"""What takes long to make and does not change: made once, by whichever of pytest-xdist's workers needs it first."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(request: pytest.FixtureRequest, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that this worker may write to, with what `make` writes into an empty one.

    Workers of a session run `make` once between them: others wait for it, and each gets a copy. One that fails leaves
    nothing behind, so that each worker that asks sees its error.
    """
    factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    base = factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        base = base.parent  # which all workers of a session share
    ready = base / f"shared-{name}"
    with open(base / f"shared-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            making = factory.mktemp(f"making-{name}")
            make(making)
            making.rename(ready)
    own = factory.mktemp(name)
    shutil.copytree(ready, own, dirs_exist_ok=True)
    return own
