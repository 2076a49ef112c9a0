"""No small archive makes a reader spend more than a second of CPU time, or 512 MB, on any one thing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.container.archive import Archive
from runtime.program.record import Record

from .bombs import BOMBS

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("readings", ["first", pytest.param("second", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", BOMBS)
def test_small_archive_costs_little(name: str, readings: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "tests/bombs.py", name, readings]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.parametrize("name", [name for name in BOMBS if name.startswith(("cubin_", "cubins_of"))])
def test_bomb_of_a_cubin_is_read_as_far_as_its_cubin(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bomb.aot"
    path.write_bytes(BOMBS[name]()[0])
    with Archive.open(path) as archive:
        for function in archive.functions:
            Record.from_json(archive.record(function))
            assert archive.cubin(function).startswith(b"\x7fELF\x02\x01")
