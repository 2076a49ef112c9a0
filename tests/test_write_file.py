"""How an archive is put where it belongs: whole or not at all, over files, links and what is neither."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aot.files import OutputError, destination
from aot.pack import write as pack
from aot.pack.write import Package, PackError
from runtime.container.archive import Archive

from .command_line import ROOT
from .packed_functions import add


def test_write_replaces_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.aot"
    path.write_bytes(b"old")
    Package().write(path)
    Archive.open(path).close()
    assert os.listdir(tmp_path) == ["x.aot"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failed_write_keeps_the_old_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: BaseException
) -> None:
    def fail(*args: object) -> None:
        raise error

    path = tmp_path / "x.aot"
    path.write_bytes(b"old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises((PackError, KeyboardInterrupt)):
        Package().write(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.aot"]


def test_write_never_lets_an_unreadable_archive_take_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "FORMAT_VERSION", 9)
    path = tmp_path / "x.aot"
    path.write_bytes(b"old")
    with pytest.raises(Exception, match="format version 9"):
        Package().write(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.aot"]


def test_write_never_lets_a_block_that_decompresses_to_something_else_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress = pack._compress
    monkeypatch.setattr(pack, "_compress", lambda data, level: compress(data.swapcase(), level))
    path = tmp_path / "x.aot"
    path.write_bytes(b"old")
    package = Package()
    add(package, "a", b"cubin")
    with pytest.raises(PackError, match="does not decompress to what was compressed"):
        package.write(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.aot"]


def test_write_never_lets_a_file_that_the_disk_changed_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def damage(descriptor: int) -> None:
        fsync(descriptor)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.pwrite(descriptor, b"?", 70)

    path = tmp_path / "x.aot"
    path.write_bytes(b"old")
    package = Package()
    add(package, "a", b"cubin")
    monkeypatch.setattr(os, "fsync", damage)
    with pytest.raises(PackError, match=r"cannot be read back .*SHA-256.*check the disk"):
        package.write(path)
    assert path.read_bytes() == b"old"


def test_write_collects_what_a_killed_writer_left_of_the_same_file(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from aot.pack.write import Package; "
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL); Package().write(sys.argv[1])"
    )
    for name in ("x.aot", "other.aot"):
        ended = subprocess.run([sys.executable, "-c", program, tmp_path / name], cwd=ROOT).returncode
        assert ended == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2
    Package().write(tmp_path / "x.aot")
    left, written = sorted(os.listdir(tmp_path))
    assert re.fullmatch(r"\.other\.aot\.[0-9a-f]{16}\.tmp", left)
    assert written == "x.aot"


def test_write_syncs_the_file_then_renames_then_syncs_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def note_replace(source: Path, destination: Path) -> None:
        calls.append("replace")
        assert source.parent == destination.parent
        replace(source, destination)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    Package().write(tmp_path / "x.aot")
    assert calls == ["file", "replace", "folder"]


def test_write_into_a_missing_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"none/x\.aot: cannot be written: its folder does not exist"):
        Package().write(tmp_path / "none" / "x.aot")


def test_write_onto_a_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.aot").mkdir()
    with pytest.raises(OutputError, match="cannot be written"):
        Package().write(tmp_path / "x.aot")
    assert os.listdir(tmp_path) == ["x.aot"]


@pytest.mark.parametrize("name", ["", ".", "/", "x/", "a\0b"])
def test_write_rejects_what_names_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match=r"the output has no name|it is a folder|null byte"):
        Package().write(name)
    assert os.listdir(tmp_path) == []


def test_write_leaves_a_named_pipe_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OutputError, match="no regular file"):
        Package().write(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK])
def test_destination_rejects_devices_and_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    path = tmp_path / "node"
    path.touch()
    found = os.stat(path)
    real = os.stat

    def as_node(name: Any, **options: Any) -> os.stat_result:
        return os.stat_result((kind | 0o666, *found[1:])) if name == str(path) else real(name, **options)

    monkeypatch.setattr(pack.os, "stat", as_node)
    with pytest.raises(OutputError, match="no regular file"):
        destination(path)


def test_write_follows_a_symbolic_link_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "real.aot", tmp_path / "link.aot"
    real.write_bytes(b"old")
    link.symlink_to(real)
    Package().write(link)
    assert link.is_symlink()
    Archive.open(real).close()
    assert os.listdir(tmp_path / "there") == ["real.aot"]


def test_write_makes_the_file_that_a_symbolic_link_promises(tmp_path: Path) -> None:
    (tmp_path / "link.aot").symlink_to("real.aot")
    Package().write(tmp_path / "link.aot")
    Archive.open(tmp_path / "real.aot").close()


def test_write_rejects_a_circle_of_symbolic_links(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OutputError, match="cannot be written"):
        Package().write(tmp_path / "a")


def test_write_rejects_a_symbolic_link_to_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link.aot").symlink_to("pipe")
    with pytest.raises(OutputError, match="no regular file"):
        Package().write(tmp_path / "link.aot")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_file_mode_respects_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        Package().write(tmp_path / "x.aot")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.aot").stat().st_mode) == mode


def test_write_refuses_what_decompresses_to_more_than_readers_take(tmp_path: Path) -> None:
    path = tmp_path / "x.aot"
    path.write_bytes(b"old")
    package = Package()
    add(package, "a", bytes(8 << 20))
    with pytest.raises(PackError, match=rf"^{path}: .*more than 256 times.*; split the archive$"):
        package.write(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.aot"]


def test_a_name_that_leaves_no_room_for_a_temporary_one_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="its name is too long"):
        destination(tmp_path / ("x" * 240 + ".aot"))
