"""What a process leaves behind when it is killed is collected, and nothing that anybody still uses."""

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from aot import files

from .command_line import ROOT

DAY_S = 24 * 3600


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def leave(folder: Path, kind: str, prefix: str = "x.") -> Path:
    """Have a process make something and be killed."""
    program = f"""
        import os, signal
        from pathlib import Path
        from aot import files
        with files.{kind}(Path({str(folder)!r}), {prefix!r}):
            os.kill(os.getpid(), signal.SIGKILL)
    """
    before = set(folder.iterdir())
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT).returncode
    assert ended == -signal.SIGKILL
    (left,) = set(folder.iterdir()) - before
    return left


def from_elsewhere(path: Path) -> Path:
    """Give a leftover the name that another machine would have given it."""
    return path.rename(path.with_name(path.name.replace(files._boot(), "0" * 8)))


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def test_a_file_and_a_folder_are_gone_in_the_end(tmp_path: Path) -> None:
    with files.file(tmp_path, "x.") as (path, file), files.folder(tmp_path, "y.") as folder:
        file.write(b"1")
        (folder / "inside").touch()
        assert names(tmp_path) == [path.name, folder.name]
        assert path.stat().st_mode & 0o777 == 0o600
        assert folder.stat().st_mode & 0o777 == 0o700
    assert names(tmp_path) == []


def test_a_file_that_was_renamed_stays(tmp_path: Path) -> None:
    with files.file(tmp_path) as (path, file):
        file.write(b"1")
        path.rename(tmp_path / "kept")
    assert (tmp_path / "kept").read_bytes() == b"1"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_killed_process_left_is_collected(tmp_path: Path, kind: str) -> None:
    leave(tmp_path, kind)
    files.collect(tmp_path, "y.")
    assert len(names(tmp_path)) == 1
    files.collect(tmp_path, "x.")
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_a_living_process_uses_stays_however_old(tmp_path: Path, kind: str) -> None:
    with getattr(files, kind)(tmp_path, "x.") as made:
        path = made if kind == "folder" else made[0]
        age(path, 9 * DAY_S)
        files.collect(tmp_path, "x.")
        assert names(tmp_path) == [path.name]


@pytest.mark.parametrize(("age_s", "left"), [(DAY_S - 60, 1), (DAY_S + 60, 0)])
def test_what_another_machine_left_is_collected_after_a_day(tmp_path: Path, age_s: float, left: int) -> None:
    age(from_elsewhere(leave(tmp_path, "folder")), age_s)
    files.collect(tmp_path, "x.")
    assert len(names(tmp_path)) == left


@pytest.mark.parametrize(("age_s", "left"), [(DAY_S - 60, 1), (DAY_S + 60, 0)])
def test_where_there_are_no_locks_a_leftover_is_collected_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, left: int
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(37, "No locks available")

    age(leave(tmp_path, "file"), age_s)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with files.file(tmp_path, "x."):
        files.collect(tmp_path, "x.")
        assert len(names(tmp_path)) == left + 1


def test_what_others_own_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(tmp_path, "folder")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    files.collect(tmp_path, "x.")
    assert len(names(tmp_path)) == 1


def test_nothing_else_is_collected(tmp_path: Path) -> None:
    digits = files._boot() + "0" * 8
    kept = [f"x.{digits}", f"x.{digits}.tmp.x", f"x.y.{digits}.tmp", f"x.{digits[1:]}.tmp", "x.tmp", f"X.{digits}.tmp"]
    for name in kept:
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / f"x.{digits}.tmp")
    (tmp_path / f"x.{digits[::-1]}.tmp").symlink_to(tmp_path / "x.tmp")
    before = names(tmp_path)
    for path in tmp_path.iterdir():
        if path.is_file() and not path.is_symlink():
            age(path, 9 * DAY_S)
    files.collect(tmp_path, "x.")
    assert names(tmp_path) == before


def test_collecting_where_there_is_no_folder_does_nothing(tmp_path: Path) -> None:
    files.collect(tmp_path / "none")


def test_one_that_is_collected_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    collected: list[Path] = []

    def late(descriptor: int, operation: int) -> None:
        if not collected:
            collected.extend(tmp_path.iterdir())
            collected[0].unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with files.file(tmp_path) as (path, _):
        assert path not in collected
        assert path.exists()
    assert names(tmp_path) == []


def test_a_folder_that_takes_a_file_is_not_refused(tmp_path: Path) -> None:
    assert files.refusal(tmp_path) is None
    assert names(tmp_path) == []


def test_a_folder_that_takes_no_file_is_refused(tmp_path: Path) -> None:
    assert files.refusal(tmp_path / "none") == "No such file or directory"


def test_a_folder_that_takes_only_a_small_file_is_refused(tmp_path: Path) -> None:
    program = (
        "import resource, sys; from pathlib import Path; from aot import files; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); "
        f"print(files.refusal(Path({str(tmp_path)!r})))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "File too large\n"
    assert names(tmp_path) == []
