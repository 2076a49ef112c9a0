"""scripts/reloads.py: archives that are rewritten and loaded again under an engine's traffic."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime import Library
from runtime.serve.layers import open_archives

from . import universal_archives
from .command_line import ROOT
from .recording_driver import RecordingDriver
from .test_traffic import Engine

sys.path.insert(0, str(ROOT / "scripts"))

import reloads


def under_traffic(files: reloads.Files, apply_model: Callable[[Any], list[Any]], share: int = 1) -> dict[str, Any]:
    """Three minutes of an engine that gives each request a token in 50 ms, of all or so many fewer."""
    engine = Engine(0.05)
    llm = SimpleNamespace(llm_engine=engine, apply_model=apply_model)
    return reloads.under_traffic(llm, files, lambda tokens: tokens // share, 3, engine.clock, sleep=engine.sleep)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    universal_archives.write(tmp_path / "served.aot")
    return tmp_path / "served.aot"


@pytest.mark.usefixtures("torch")  # whose streams calls ask for
def test_every_reload_replaces_functions_and_calls_launch_the_same(archive: Path) -> None:
    driver = RecordingDriver()
    driver.kernels |= universal_archives.write(archive)
    with reloads.copied([str(archive)]) as files:
        library = Library(open_archives(files.paths), driver)
        launched, found = [universal_archives.launched(library, driver, 512, 100)], []

        def in_worker(function: Any) -> list[list[bool]]:
            found.append(function(None))
            launched.append(universal_archives.launched(library, driver, 512, 100))
            return [[any(found[-1])]]  # other libraries of this process are not the engine's

        figures = under_traffic(files, in_worker)
        library.close()
    assert figures["reloads"] == len(found) > 10
    assert set(launched) == {"many"}
    assert figures["requests"] == figures["reloads"] * reloads.REQUESTS
    assert figures["tokens"] > 16 * figures["requests"]
    assert 3 <= figures["minutes"] < 4
    assert archive.exists()
    assert not any(Path(path).exists() for path in files.paths)


def test_files_have_each_version_in_turn(archive: Path) -> None:
    with reloads.copied([str(archive)]) as files:
        (path,) = map(Path, files.paths)
        first = path.read_bytes()
        files.exchange()
        second = path.read_bytes()
        files.exchange()
        assert first == path.read_bytes() == archive.read_bytes() != second


def test_a_worker_that_loads_nothing_new_is_no_reload(archive: Path) -> None:
    with reloads.copied([str(archive)]) as files, pytest.raises(RuntimeError, match="after 0 reloads a worker found"):
        under_traffic(files, lambda _: [[False]])


def test_requests_that_end_early_are_told_of(archive: Path) -> None:
    with reloads.copied([str(archive)]) as files, pytest.raises(RuntimeError, match="64 of 64 requests got too few"):
        under_traffic(files, lambda _: [[True]], share=2)
