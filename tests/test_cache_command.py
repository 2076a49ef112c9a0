"""The command cache: what the build cache holds, and entries of it removed."""

import json
import os
import time
from pathlib import Path

import pytest

from aot.compile.cache import Cache, Entry

from .command_line import Run

DAY_S = 24 * 3600


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache of three kernels of 1 MB, written 1, 10 and 100 days ago, and a file that is no entry."""
    cache = Cache(tmp_path / "cache")
    for days in (1, 10, 100):
        key = f"{days:064x}"
        cache.put(key, Entry({"days": days}, bytes(1_000_000)))
        written = time.time() - days * DAY_S
        os.utime(cache.path(key), (written, written))
    (tmp_path / "cache" / "00" / "notes.txt").write_text("mine")
    return tmp_path / "cache"


def _left(folder: Path) -> list[int]:
    cache = Cache(folder)
    return [days for days in (1, 10, 100) if cache.get(f"{days:064x}") is not None]


def test_info_counts_entries_and_bytes(run: Run, folder: Path) -> None:
    found = json.loads(run("cache", "info", "--cache", folder, "--json").out)
    assert (found["entries"], found["kinds"]["kernel"]["entries"]) == (3, 3)
    assert 3_000_000 < found["bytes"] < 3_001_000
    assert (found["oldest_days"], found["newest_days"]) == (100.0, 1.0)
    assert "100 to 1 days ago" in run("cache", "info", "--cache", folder).out


def test_info_of_a_cache_that_is_not_there_yet_says_so(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    result = run("cache", "info")
    assert (result.status, result.err) == (0, "")
    assert "which is not there yet" in " ".join(result.out.split())


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["--older-than", 30], [1, 10]),
        (["--most", 2], [1]),
        (["--most", 0], []),
        (["--older-than", 5, "--most", 9], [1]),
    ],
)
def test_prune_removes_the_oldest(run: Run, folder: Path, arguments: list[object], left: list[int]) -> None:
    found = json.loads(run("cache", "prune", "--cache", folder, *arguments, "--json").out)
    assert (found["removed"], found["entries"]) == (3 - len(left), len(left))
    assert _left(folder) == left
    assert (folder / "00" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prune"], "give --older-than DAYS or --most MB"),
        (["prune", "--most", "1", "--cache", "nowhere"], "cannot be read as a build cache"),
        (["info", "--cache", "nowhere"], "cannot be read as a build cache"),
    ],
)
def test_a_wrong_call_is_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("cache", *arguments)
    assert (result.status, result.out, result.err.count("\n")) == (2, "", 1)
    assert said in result.err
