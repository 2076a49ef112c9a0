"""A library of made-up GEMMs on a driver that records, and operands for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime import Library
from runtime.container.archive import Archive

from .recording_driver import (
    FakeTensor,
    FakeTorch,
    RecordingDriver,
    cubin,
    entry,
    gemm_record,
    signature,
    write_archive,
)

N, K = 6144, 4096

RECORDS = [
    gemm_record("small", tile_m=16),
    gemm_record("medium", tile_m=64),
    gemm_record("large", tile_m=128),
    gemm_record("batched", batched=True),
    gemm_record("huge", shared_bytes=220_000),
    gemm_record("lean", shared_bytes=60_000),
    gemm_record("bounded", max_m=999),
]

ENTRIES = [
    entry(signature(N, K), [(16, "small"), (128, "medium"), (None, "large")]),
    entry(signature(N, K, batch=3), [(None, "batched")]),
    entry(signature(512, 512), [(None, "huge")], candidates=[[16, ["huge", "lean"]]]),
    entry(signature(1024, 512), [(None, "bounded")]),
]


@pytest.fixture(scope="session")
def archive_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "model.aot"
    write_archive(path, RECORDS, ENTRIES)
    return path


@pytest.fixture
def driver(torch: FakeTorch) -> RecordingDriver:
    return RecordingDriver(kernels={cubin(r["name"]): {f"kernel_{r['name']}": (128, 8, 24)} for r in RECORDS})


@pytest.fixture
def library(archive_path: Path, driver: RecordingDriver) -> Library:
    return Library(Archive.open(archive_path), driver)


def operands(m: int, n: int = N, k: int = K) -> tuple[FakeTensor, FakeTensor, FakeTensor]:
    return FakeTensor((m, k)), FakeTensor((n, k)), FakeTensor((m, n))


@pytest.fixture
def ranked(tmp_path: Path, torch: FakeTorch) -> tuple[Path, RecordingDriver]:
    entries = [
        entry(signature(N, K), [(None, "small")]),
        entry(signature(512, 512), [(None, "medium")], state="ranked"),
        entry(signature(1024, 512), [(None, "medium")], state="ranked"),
    ]
    kernels = write_archive(tmp_path / "ranked.aot", [gemm_record("small"), gemm_record("medium")], entries)
    return tmp_path / "ranked.aot", RecordingDriver(kernels=kernels)
