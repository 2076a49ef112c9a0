"""What workers share is made once, and each has a copy of its own."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .shared import made_once


def worker(tmp_path: Path, name: str) -> Any:
    """What a fixture of a worker of that name requests with."""
    base = tmp_path / name

    def mktemp(name: str) -> Path:
        (base / name).mkdir(parents=True)
        return base / name

    base.mkdir()
    factory = SimpleNamespace(getbasetemp=lambda: base, mktemp=mktemp)
    return SimpleNamespace(config=SimpleNamespace(workerinput={}), getfixturevalue=lambda _: factory)


def test_two_workers_make_a_thing_once_and_have_a_copy_each(tmp_path: Path) -> None:
    made, found = list[Path](), list[Path]()

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "half").write_text("1")
        time.sleep(0.1)
        (folder / "whole").write_text("2")

    threads = [
        threading.Thread(target=lambda one=one: found.append(made_once(one, "thing", make)))
        for one in (worker(tmp_path, "gw0"), worker(tmp_path, "gw1"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(set(found)) == 2
    for folder in found:
        assert sorted(path.name for path in folder.iterdir()) == ["half", "whole"]


def test_what_failed_is_made_by_the_next_who_asks(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("1")
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        made_once(worker(tmp_path, "gw0"), "thing", fail)
    found = made_once(worker(tmp_path, "gw1"), "thing", lambda folder: (folder / "whole").touch())
    assert [path.name for path in found.iterdir()] == ["whole"]
