"""A library whose files change, on a driver that records."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime import Library
from runtime.container.archive import Archive

from .recording_driver import (
    FakeTensor,
    FakeTorch,
    RecordingDriver,
    entry,
    gemm_record,
    signature,
    write_archive,
)

N, K = 1024, 512


def write(path: Path, version: int, driver: RecordingDriver, **more: Any) -> None:
    """Put an archive in place, as a deployment does, whose launches show its version by their kernel."""
    name = f"v{version}"
    fresh = path.with_suffix(".new")
    driver.kernels |= write_archive(fresh, [gemm_record(name, **more)], [entry(signature(N, K), [(None, name)])])
    os.replace(fresh, path)


@pytest.fixture
def driver(torch: FakeTorch) -> RecordingDriver:
    return RecordingDriver()


@pytest.fixture
def path(tmp_path: Path, driver: RecordingDriver) -> Path:
    write(tmp_path / "model.aot", 0, driver)
    return tmp_path / "model.aot"


@pytest.fixture
def library(path: Path, driver: RecordingDriver) -> Library:
    return Library(Archive.open(path), driver)


def call(library: Library, m: int = 5, **more: Any) -> None:
    library.gemm(FakeTensor((m, K)), FakeTensor((N, K)), **more)


def version(library: Library, driver: RecordingDriver, **more: Any) -> str:
    call(library, **more)
    return driver.launches[-1].symbol


def unloaded(driver: RecordingDriver) -> list[bytes]:
    return [what for name, what in (e for e in driver.log if e[0] == "unload")]


@pytest.fixture
def impatient() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)
