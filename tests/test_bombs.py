"""No small archive makes a reader spend more than a second of CPU time, or 512 MB, on any one thing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .bombs import BOMBS

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", BOMBS)
def test_small_archive_costs_little(name: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "tests/bombs.py", name]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
