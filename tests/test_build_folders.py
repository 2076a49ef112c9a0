"""Where a build keeps its cache and its scratch files, and what it leaves where these fail or it is stopped."""

import errno
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aot import build, selection
from aot.compile import cache

from .command_line import ALONE, COMMAND, ROOT, Run, hear_control_c


def test_the_cache_is_where_the_system_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_directory() == tmp_path / "cute-aot"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache.default_directory() == Path("/home/somebody/.cache/cute-aot")


def test_without_a_home_nothing_is_cached_and_the_build_goes_on(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert cache.default_directory() is None
    monkeypatch.setattr(build, "build", _asks_the_cache)
    result = run("build", folder / "tiny.yaml", "-o", tmp_path / "x.aot")
    assert result.err.splitlines() == [
        "warning: cache: there is no home directory to keep it in, and the build goes on without a cache; "
        "name a directory",
        "error: asked",
    ]


def _asks_the_cache(work: Any, output: Path, cache: Any, *_: Any) -> None:
    for _again in range(2):
        cache.get("ab" * 32)
    raise selection.BuildError("asked")


def test_a_cache_that_cannot_be_written_is_one_warning_and_the_archive_is_the_same(
    run: Run, folder: Path, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that lacks an entry, on a read-only file system."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    shutil.copytree(folder / "cache", tmp_path / "cache")
    for entry in [*(tmp_path / "cache").rglob("*.contents"), *sorted((tmp_path / "cache").rglob("*.kernel"))[:2]]:
        entry.unlink()
    arguments = ["--candidates", 1, "--cache", tmp_path / "cache", "--no-tune"]
    monkeypatch.setattr("aot.compile.cache.Cache._make", refuse)
    result = run("build", folder / "tiny.yaml", "-o", tmp_path / "again.aot", *arguments)
    assert result.status == 0
    warnings = [line for line in result.err.splitlines() if not line.startswith("compiling")]
    assert len(warnings) == 1
    assert re.fullmatch(r"warning: cache: .* cannot be written \(Read-only .*\), and the build goes on .*", warnings[0])
    assert (tmp_path / "again.aot").read_bytes() == archive.read_bytes()


def test_a_cache_that_is_named_and_no_folder_is_an_error(build_again: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = build_again("--no-tune", "--cache", tmp_path / "file")
    assert (result.status, result.out) == (2, "")
    assert result.err == f"error: {tmp_path / 'file'}: cannot be the build cache: it is no folder; name a folder\n"


def test_a_cache_that_others_may_write_to_is_refused(build_again: Run, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "cache", tmp_path / "cache")
    (tmp_path / "cache").chmod(0o775)
    result = build_again("--no-tune", "--cache", tmp_path / "cache")
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"error: {tmp_path / 'cache'}: ")
    assert f"chmod -R go-w {tmp_path / 'cache'}" in result.err
    assert result.err.count("\n") == 1
    assert not (tmp_path / "again.aot").exists()


def _build_in(scratch: Path, folder: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    arguments = ["build", folder / "tiny.yaml", "-o", tmp_path / "x.aot", "--cache", tmp_path / "cache", "--no-tune"]
    environment = os.environ | {"TMPDIR": str(scratch)}
    command = [*COMMAND, *map(str, arguments), "--candidates", "1"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB; making one takes root."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(path)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_scratch_folder_without_space_ends_a_build_that_writes_nothing(
    folder: Path, tmp_path: Path, small_disk: Path
) -> None:
    (small_disk / "large").write_bytes(bytes(5 << 20))
    done = _build_in(small_disk, folder, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {small_disk}: a file of 4,194,304 bytes cannot be written to compile in (No space")
    assert re.search(r"; 1,0\d\d,\d{3} bytes are left there\)", last)
    assert not (tmp_path / "x.aot").exists()
    assert os.listdir(small_disk) == ["large"]


def test_a_scratch_folder_that_is_none_ends_a_build_that_writes_nothing(folder: Path, tmp_path: Path) -> None:
    done = _build_in(tmp_path / "none", folder, tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: {tmp_path / 'none'}: a file of 4,194,304 bytes cannot be written to compile in" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "x.aot").exists()


def test_control_c_says_how_far_it_came_and_keeps_it(folder: Path, tmp_path: Path) -> None:
    arguments = ["build", str(folder / "tiny.yaml"), "-o", str(tmp_path / "x.aot"), "--cache", str(tmp_path / "cache")]
    with subprocess.Popen(
        [*COMMAND, *arguments, *ALONE],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_control_c,
    ) as process:
        while process.poll() is None and not list(tmp_path.rglob("*.kernel")):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (130, "")
    first, *_, last = err.splitlines()
    assert first.startswith("compiling ")
    assert re.fullmatch(r"error: interrupted with \d+ of \d+ kernels done; the same command continues there", last)
    assert list(tmp_path.rglob("*.kernel"))
    assert not (tmp_path / "x.aot").exists()


def test_termination_is_like_control_c_and_leaves_nothing_behind(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    arguments = ["build", str(folder / "tiny.yaml"), "-o", str(tmp_path / "x.aot"), "--cache", str(tmp_path / "cache")]
    environment = os.environ | {"TMPDIR": str(tmp_path / "scratch")}
    with subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, env=environment, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not list(tmp_path.rglob("worker-*.log")):
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 143
    assert b"error: interrupted with " in err
    assert b"Traceback" not in err
    assert not list((tmp_path / "scratch").iterdir())
