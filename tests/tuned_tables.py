"""Candidates for three signatures, and the table that tuning makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runtime.container.archive import Archive
from runtime.gemm.operation import GEMM
from runtime.tables.dispatch import Dispatch

from .recording_driver import entry, gemm_record, signature, write_archive

NAMES = ["slow", "quick", "wrong"]

EQUAL = [(16, "wrong"), (99, "quick"), (None, "slow")]  # what gives equal bits, by the builder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    candidates = [[16, NAMES], [512, NAMES]]
    rows = [
        entry(signature(n, 512), [(None, "wrong")], candidates=candidates, invariant=EQUAL) | {"state": "ranked"}
        for n in (512, 1024, 2048)
    ]
    path = tmp_path / "candidates.aot"
    write_archive(path, [gemm_record(n) for n in [*NAMES, "no_candidate"]], rows)
    return path


def table(path: Path) -> dict[int, Any]:
    with Archive.open(path) as archive:
        entries = Dispatch.from_json(archive.table("gemm"), GEMM, archive.functions.targets_by_name()).entries
        return {e.signature.n: e for e in entries}
