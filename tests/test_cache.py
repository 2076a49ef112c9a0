import dataclasses
import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aot.compile import cache as caches
from aot.compile.cache import Cache, CacheError, Entry, KeyFields, ToolFields, UntrustedCache, cache_key
from runtime.errors import AotError

from .command_line import ROOT

TOOLS = ToolFields(
    schema=1,
    python="3.11",
    wheels={"nvidia-cutlass-dsl": "4.8.1 ab", "nvidia-cutlass-dsl-libs-base": "4.8.1 cd"},
    extraction=1,
    options=("KeepCUBIN",),
    sources={"aot/compile/host/ir.py": "cd" * 32},
)
FIELDS = KeyFields(
    tools=cache_key(TOOLS),
    variant={"provider": "own", "config": {"threads": 128, "fast": True}},
    name="own.small",
    target="sm_90a",
    sources="ab" * 32,
)
# One changed value for each field, and for each thing inside one.
OTHER_TOOLS: list[dict[str, Any]] = [
    {"schema": 2},
    {"python": "3.12"},
    {"wheels": {"nvidia-cutlass-dsl": "4.8.1 ab", "nvidia-cutlass-dsl-libs-base": "4.8.2 cd"}},
    {"wheels": {"nvidia-cutlass-dsl": "4.8.1 ab", "nvidia-cutlass-dsl-libs-base": "4.8.1 ce"}},
    {"wheels": {"nvidia-cutlass-dsl": "4.8.1 ab", "nvidia-cutlass-dsl-libs-cu13": "4.8.1 cd"}},
    {"wheels": {"nvidia-cutlass-dsl": "4.8.1 ab"}},
    {"extraction": 2},
    {"options": ("KeepCUBIN", "OptLevel")},
    {"sources": {"aot/compile/host/ir.py": "ce" * 32}},
    {"sources": {"aot/compile/lower.py": "cd" * 32}},
]
OTHER_FIELDS: list[dict[str, Any]] = [
    {"tools": "ab" * 32},
    {"variant": {"provider": "own", "config": {"threads": 256, "fast": True}}},
    {"variant": {"provider": "own", "config": {"threads": 128, "fast": False}}},
    {"variant": {"provider": "own", "config": {"threads": 128, "fast": 1}}},
    {"variant": {"provider": "own", "config": {"threads": "128", "fast": True}}},
    {"name": "own.small2"},
    {"target": "sm_100a"},
    {"sources": "ab" * 31 + "ac"},
]
KEY = cache_key(FIELDS)
ENTRY = Entry({"name": "f", "numbers": [1, 2, 3]}, bytes(range(256)))


class Said(list[str]):
    """What a cache warned of."""


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def top(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def cache(top: Path, said: Said) -> Cache:
    return Cache(top, said.append)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if not path.is_dir()]


# --- keys ---


@pytest.mark.parametrize(("fields", "changes"), [(TOOLS, OTHER_TOOLS), (FIELDS, OTHER_FIELDS)])
def test_every_field_changes_the_key(fields: ToolFields | KeyFields, changes: list[dict[str, Any]]) -> None:
    assert {name for change in changes for name in change} == {f.name for f in dataclasses.fields(fields)}
    keys = [cache_key(dataclasses.replace(fields, **change)) for change in changes]
    assert len({cache_key(fields), *keys}) == len(changes) + 1


def test_equal_fields_have_one_key_in_whatever_order() -> None:
    turned = dataclasses.replace(TOOLS, wheels=dict(reversed(TOOLS.wheels.items())))
    assert cache_key(turned) == cache_key(TOOLS)


@pytest.mark.parametrize("value", [None, "", {}, 1.5, object(), b"x", {"a": None}, {1: "x"}, ["x", ""], {"x"}])
def test_what_names_nothing_cannot_be_in_a_key(value: Any) -> None:
    for fields in (TOOLS, FIELDS):
        for field in dataclasses.fields(fields):
            with pytest.raises(CacheError, match=field.name):
                cache_key(dataclasses.replace(fields, **{field.name: value}))


# --- entries ---


def test_a_cache_touches_no_file_before_the_first_entry(cache: Cache, top: Path) -> None:
    assert cache.get(KEY) is None
    assert not top.exists()


def test_an_entry_comes_back_as_it_was(cache: Cache, top: Path, said: Said) -> None:
    cache.put(KEY, ENTRY)
    assert cache.get(KEY) == ENTRY
    assert files(top) == [cache.path(KEY)]
    assert said == []


def test_the_last_entry_written_counts(cache: Cache) -> None:
    cache.put(KEY, Entry({"old": True}, b"old"))
    cache.put(KEY, ENTRY)
    assert cache.get(KEY) == ENTRY


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "AB" * 32, "ab" * 31])
def test_a_key_is_hexadecimal(cache: Cache, key: str) -> None:
    with pytest.raises(CacheError, match="64 hexadecimal digits"):
        cache.get(key)


def test_readers_and_writers_of_one_entry_never_see_a_part_of_it(cache: Cache) -> None:
    entries = [Entry({"writer": i}, bytes([i]) * 50_000) for i in range(4)]
    seen: list[Entry | None] = []

    def work(entry: Entry) -> None:
        for _ in range(30):
            cache.put(KEY, entry)
            seen.append(cache.get(KEY))

    threads = [threading.Thread(target=work, args=(e,)) for e in entries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 120
    assert all(entry in entries for entry in seen)


# --- damage: each entry that is not what was asked for is removed, and reported once ---


def _dropped(cache: Cache, said: Said) -> bool:
    said.clear()
    found = cache.get(KEY)
    return found is None and len(said) == 1 and str(cache.path(KEY)) in said[0]


def test_any_flipped_bit_is_noticed(cache: Cache, said: Said) -> None:
    cache.put(KEY, ENTRY)
    path = cache.path(KEY)
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        path.chmod(0o600)
        assert _dropped(cache, said)
        assert said[0].endswith("does not match its digest; it was removed, and what it was for is made again")


@pytest.mark.parametrize("keep", [0, 10, 44, 60, -1])
def test_an_entry_cut_short_is_dropped(cache: Cache, said: Said, keep: int) -> None:
    cache.put(KEY, ENTRY)
    path = cache.path(KEY)
    path.write_bytes(path.read_bytes()[:keep])
    assert _dropped(cache, said)
    assert not path.exists()


def test_an_entry_under_another_key_is_not_served(cache: Cache, said: Said) -> None:
    other = cache_key(dataclasses.replace(FIELDS, name="other"))
    cache.put(other, ENTRY)
    cache.put(KEY, ENTRY)
    cache.path(other).rename(cache.path(KEY))
    assert _dropped(cache, said)


def _signed(data: bytes) -> bytes:
    """An entry whose record is `data`, as whoever may write to the directory can make one."""
    size = len(data).to_bytes(4, "little")
    return caches._HEADER.pack(caches._MAGIC, caches._digest(KEY, size + data), len(data)) + data


@pytest.mark.parametrize("record", [b"[" * 200_000, b"[]", b"{", b'{"a":1,"a":2}', b"\xff", b"1" * 10_000, b"null"])
def test_an_entry_whose_record_is_no_object_is_dropped(cache: Cache, said: Said, record: bytes) -> None:
    cache.put(KEY, ENTRY)
    cache.path(KEY).write_bytes(_signed(record))
    assert _dropped(cache, said)


@pytest.mark.parametrize("error", [ValueError("is of something else"), AotError("is of something else")])
def test_an_entry_that_is_not_what_was_asked_for_is_dropped(cache: Cache, said: Said, error: Exception) -> None:
    def check(entry: Entry) -> None:
        assert entry == ENTRY
        raise error

    cache.put(KEY, ENTRY)
    assert cache.get(KEY, check) is None
    assert said == [f"{cache.path(KEY)}: is of something else; it was removed, and what it was for is made again"]
    assert cache.get(KEY, check) is None
    assert len(said) == 1


def _a_pipe(path: Path) -> None:
    os.mkfifo(path)


def _an_endless_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _a_link_to_an_entry(path: Path) -> None:
    kept = path.with_name("kept")
    Cache(path.parent.parent).put(KEY, ENTRY)
    path.rename(kept)
    path.symlink_to(kept)


def _a_large_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(caches.MAX_ENTRY_BYTES + 1)
    path.chmod(0o600)


def _a_file_others_may_write(path: Path) -> None:
    Cache(path.parent.parent).put(KEY, ENTRY)
    path.chmod(0o620)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_a_pipe, "is no regular file"),
        (_an_endless_link, "is no regular file"),
        (_a_link_to_an_entry, "is no regular file"),
        (_a_large_file, f"has {caches.MAX_ENTRY_BYTES + 1} bytes, the limit is {caches.MAX_ENTRY_BYTES}"),
        (_a_file_others_may_write, "its mode 620 lets others write to it"),
    ],
)
def test_what_is_no_entry_is_neither_read_nor_waited_for(
    cache: Cache, said: Said, make: Callable[[Path], None], reason: str
) -> None:
    cache.put(KEY, ENTRY)
    cache.path(KEY).unlink()
    make(cache.path(KEY))
    assert _dropped(cache, said)
    assert f": {reason}; it was removed" in said[0]
    assert not os.path.lexists(cache.path(KEY))


def test_damage_that_cannot_be_removed_is_reported_and_not_served(cache: Cache, said: Said) -> None:
    cache.put(KEY, ENTRY)
    cache.path(KEY).unlink()
    cache.path(KEY).mkdir()
    assert _dropped(cache, said)
    assert "it cannot be removed (" in said[0]


# --- trust ---


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
@pytest.mark.parametrize("inner", [False, True])
def test_a_folder_that_others_may_write_to_is_refused(top: Path, said: Said, mode: int, inner: bool) -> None:
    Cache(top).put(KEY, ENTRY)
    folder = Cache(top).path(KEY).parent if inner else top
    folder.chmod(mode)
    for use in (lambda cache: cache.get(KEY), lambda cache: cache.put(KEY, ENTRY)):
        with pytest.raises(UntrustedCache, match=f"{folder}: .*chmod -R go-w {top}` or name another"):
            use(Cache(top, said.append))
    folder.chmod(mode & ~0o022)
    assert Cache(top).get(KEY) == ENTRY
    assert said == []


@pytest.mark.parametrize(("uid", "fine"), [(0, True), (4242, False)])
def test_a_folder_must_be_this_users_or_roots(top: Path, monkeypatch: pytest.MonkeyPatch, uid: int, fine: bool) -> None:
    Cache(top).put(KEY, ENTRY)
    real = os.stat

    def stat_as(path: Any, **options: Any) -> os.stat_result:
        found = real(path, **options)
        return os.stat_result((*found[:4], uid, *found[5:])) if Path(path) == top else found

    monkeypatch.setattr(os, "stat", stat_as)
    if fine:
        assert Cache(top).get(KEY) == ENTRY
    else:
        with pytest.raises(UntrustedCache, match="belongs to user 4242"):
            Cache(top).get(KEY)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_folders_and_entries_are_this_users_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        Cache(tmp_path / "a" / "b").put(KEY, ENTRY)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*")}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_the_directory_may_be_a_link_but_not_a_folder_in_it(top: Path, tmp_path: Path, said: Said) -> None:
    Cache(tmp_path / "real").put(KEY, ENTRY)
    top.symlink_to(tmp_path / "real")
    assert Cache(top).get(KEY) == ENTRY
    inner = Cache(top).path(KEY).parent
    inner.rename(tmp_path / "moved")
    inner.symlink_to(tmp_path / "moved")
    assert Cache(top, said.append).get(KEY) is None
    assert len(said) == 1


# --- trouble: the work goes on without the cache, which is said once ---


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_a_directory_without_a_name_is_an_error(name: str) -> None:
    with pytest.raises(CacheError, match="no name"):
        Cache(name)


def _use_all(cache: Cache) -> None:
    for key in (KEY, KEY[::-1]):
        cache.get(key)
        cache.put(key, ENTRY)


def test_without_a_directory_nothing_is_kept_which_is_said_once(said: Said) -> None:
    cache = Cache(None, said.append)
    _use_all(cache)
    assert cache.get(KEY) is None
    assert said == ["there is no home directory to keep it in, and the build goes on without a cache; name a directory"]


@pytest.mark.parametrize("below", [".", "cache", "far/away"])
def test_a_file_in_the_way_is_said_once(tmp_path: Path, said: Said, below: str) -> None:
    (tmp_path / "file").write_text("in the way")
    _use_all(Cache(tmp_path / "file" / below, said.append))
    assert len(said) == 1
    assert said[0].startswith(f"{tmp_path / 'file'}")
    assert "(Not a directory), and the build goes on without a cache" in said[0]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_what_cannot_be_written_is_said_once_and_what_is_there_is_served(
    cache: Cache, said: Said, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    tried = []

    def refuse(*_: Any) -> None:
        tried.append(True)
        raise OSError(error, os.strerror(error))

    cache.put(KEY, ENTRY)
    monkeypatch.setattr(os, "replace", refuse)
    for _ in range(3):
        cache.put(KEY[::-1], ENTRY)
    assert cache.get(KEY) == ENTRY
    assert (len(said), len(tried)) == (1, 1)
    assert f"cannot be written ({os.strerror(error)})" in said[0]


def test_a_disk_that_is_full_leaves_nothing_behind(top: Path) -> None:
    program = f"""
        import resource
        from aot.compile.cache import Cache, Entry
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        cache = Cache({str(top)!r}, print)
        cache.put({KEY!r}, Entry({{"small": 1}}, bytes(100)))
        cache.put({KEY[::-1]!r}, Entry({{}}, bytes(100_000)))
        print(cache.get({KEY!r}).record)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True)
    first, second = done.stdout.splitlines()
    assert "cannot be written (File too large), and the build goes on without a cache; check that" in first
    assert second == "{'small': 1}"
    assert files(top) == [Cache(top).path(KEY)]


def test_an_entry_that_cannot_be_read_is_said_once(cache: Cache, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, *arguments: Any) -> int:
        if path == cache.path(KEY):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *arguments)

    cache.put(KEY, ENTRY)
    monkeypatch.setattr(os, "open", refuse)
    assert cache.get(KEY) is cache.get(KEY) is None
    assert len(said) == 1
    assert "cannot be read (Input/output error)" in said[0]


def test_a_cache_that_is_removed_meanwhile_is_no_error(cache: Cache, top: Path, said: Said) -> None:
    cache.put(KEY, ENTRY)
    shutil.rmtree(top)
    assert cache.get(KEY) is None
    cache.put(KEY, ENTRY)
    assert len(said) == 1


# --- leftovers ---


@pytest.mark.parametrize("use", [lambda cache: cache.get(KEY), lambda cache: cache.put(KEY, ENTRY)])
def test_what_a_killed_writer_left_is_collected(top: Path, use: Callable[[Cache], object]) -> None:
    program = f"""
        import os, signal
        from aot.compile.cache import Cache, Entry
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        Cache({str(top)!r}).put({KEY!r}, Entry({{}}, bytes(100)))
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT).returncode
    assert ended == -signal.SIGKILL
    assert [path.suffix for path in files(top)] == [".tmp"]
    use(Cache(top))
    assert not list(top.rglob("*.tmp"))
