import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from aot.cache import Cache, CacheError, DamagedEntry, Entry, KeyFields, cache_key

FIELDS = KeyFields(
    schema=1,
    variant={"provider": "own", "config": {"threads": 128, "fast": True}},
    name="own.rmsnorm",
    target="sm_90a",
    python="3.11",
    wheels={"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-base": "4.8.1"},
    provider="ab" * 32,
    extraction=1,
    options=("KeepCUBIN",),
    sources={"aot/host_ir.py": "cd" * 32},
)
# One changed value for each field, and for each thing inside one.
PERTURBED: list[dict[str, Any]] = [
    {"schema": 2},
    {"variant": {"provider": "own", "config": {"threads": 256, "fast": True}}},
    {"variant": {"provider": "own", "config": {"threads": 128, "fast": False}}},
    {"variant": {"provider": "own", "config": {"threads": 128, "fast": 1}}},
    {"variant": {"provider": "own", "config": {"threads": "128", "fast": True}}},
    {"name": "own.rmsnorm2"},
    {"target": "sm_100a"},
    {"python": "3.12"},
    {"wheels": {"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-base": "4.8.2"}},
    {"wheels": {"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-cu13": "4.8.1"}},
    {"wheels": {"nvidia-cutlass-dsl": "4.8.1"}},
    {"provider": "ab" * 31 + "ac"},
    {"extraction": 2},
    {"options": ("KeepCUBIN", "OptLevel")},
    {"sources": {"aot/host_ir.py": "ce" * 32}},
    {"sources": {"aot/lower.py": "cd" * 32}},
]
KEY = cache_key(FIELDS)
ENTRY = Entry({"name": "f", "numbers": [1, 2, 3]}, bytes(range(256)))


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def test_every_field_changes_the_key() -> None:
    assert {name for change in PERTURBED for name in change} == {f.name for f in dataclasses.fields(KeyFields)}
    keys = [cache_key(dataclasses.replace(FIELDS, **change)) for change in PERTURBED]
    assert len({KEY, *keys}) == len(PERTURBED) + 1


def test_equal_fields_have_one_key_in_whatever_order() -> None:
    turned = dataclasses.replace(FIELDS, wheels=dict(reversed(FIELDS.wheels.items())))
    assert cache_key(turned) == KEY


@pytest.mark.parametrize("value", [None, "", {}, 1.5, object(), b"x", {"a": None}, {1: "x"}, ["x", ""], {"x"}])
def test_what_names_nothing_cannot_be_in_a_key(value: Any) -> None:
    for field in dataclasses.fields(KeyFields):
        with pytest.raises(CacheError, match=field.name):
            cache_key(dataclasses.replace(FIELDS, **{field.name: value}))


def test_a_cache_touches_no_file_before_the_first_entry(cache: Cache) -> None:
    assert cache.get(KEY) is None
    assert not cache.directory.exists()


def test_an_entry_comes_back_as_it_was(cache: Cache) -> None:
    cache.put(KEY, ENTRY)
    assert cache.get(KEY) == ENTRY
    assert [p for p in cache.directory.rglob("*") if p.is_file()] == [cache.path(KEY)]


def test_the_last_entry_written_counts(cache: Cache) -> None:
    cache.put(KEY, Entry({"old": True}, b"old"))
    cache.put(KEY, ENTRY)
    assert cache.get(KEY) == ENTRY


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_any_flipped_bit_is_noticed(cache: Cache) -> None:
    cache.put(KEY, ENTRY)
    path = cache.path(KEY)
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(_flipped(good, at))
        with pytest.raises(DamagedEntry, match="removed"):
            cache.get(KEY)


@pytest.mark.parametrize("keep", [0, 10, 44, 60, -1])
def test_an_entry_cut_short_is_dropped(cache: Cache, keep: int) -> None:
    cache.put(KEY, ENTRY)
    path = cache.path(KEY)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DamagedEntry):
        cache.get(KEY)
    assert cache.get(KEY) is None


def test_an_entry_under_another_key_is_not_served(cache: Cache) -> None:
    other = cache_key(dataclasses.replace(FIELDS, extraction=9))
    cache.put(KEY, ENTRY)
    cache.path(other).parent.mkdir(parents=True, exist_ok=True)
    cache.path(KEY).rename(cache.path(other))
    with pytest.raises(DamagedEntry):
        cache.get(other)


@pytest.mark.parametrize("key", ["", "../../etc/passwd", "AB" * 32, "ab" * 31])
def test_a_key_is_hexadecimal(cache: Cache, key: str) -> None:
    with pytest.raises(CacheError, match="64 hexadecimal digits"):
        cache.get(key)


def test_a_directory_without_a_name_is_an_error() -> None:
    with pytest.raises(CacheError, match="no name"):
        Cache("")


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheError, match="cannot be written"):
        Cache(tmp_path / "file").put(KEY, ENTRY)


def test_an_entry_that_cannot_be_read_is_an_error(cache: Cache) -> None:
    cache.path(KEY).mkdir(parents=True)
    with pytest.raises(CacheError, match="cannot be read"):
        cache.get(KEY)


def test_a_write_that_fails_leaves_nothing_behind(cache: Cache) -> None:
    cache.path(KEY).mkdir(parents=True)  # so that the rename fails
    with pytest.raises(CacheError, match="cannot be written"):
        cache.put(KEY, ENTRY)
    assert not [p for p in cache.directory.rglob("*") if p.is_file()]


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
