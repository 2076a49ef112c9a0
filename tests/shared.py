"""What takes long to make and does not change: made once, by whichever of pytest-xdist's workers needs it first."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .command_line import ALONE, COMMAND, ROOT


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


def built_once(
    request: pytest.FixtureRequest,
    name: str,
    manifest: str,
    *options: str,
    install: Callable[[Path], None] | None = None,
) -> Path:
    """A folder, made once, with NAME.yaml, NAME.aot that `aot build` makes of it, and what it said in said.txt.

    `install` puts what the build imports into a folder. Skips where the DSL is not installed.
    """
    pytest.importorskip("cutlass", reason="the DSL is not installed")

    def make(folder: Path) -> None:
        (folder / f"{name}.yaml").write_text(manifest)
        if install is not None:
            install(folder / "site")
        command = [*COMMAND, "build", f"{name}.yaml", "-o", f"{name}.aot", "--cache", "cache", "--no-tune", *ALONE]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "site")])}
        done = subprocess.run([*command, *options], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (folder / "said.txt").write_text(done.stderr)

    return made_once(request, name, make)
