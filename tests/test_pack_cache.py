"""Compressed blocks that a build cache keeps: taken where they are right, never trusted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from aot.compile.cache import Cache
from aot.pack import write as pack
from aot.pack.write import Package

from .packed_functions import add


def cached_twice(tmp_path: Path, between: Callable[[Cache], None]) -> tuple[bytes, bytes, list[bytes]]:
    """A package written without a cache, and again with one after `between`; and what was compressed then."""
    package, cache, compressed = Package(), Cache(tmp_path / "cache"), []
    for name in "abc":
        add(package, name, name.encode() * 100, family=name)
    package.write(tmp_path / "x.aot")
    package.write(tmp_path / "y.aot", cache=cache)
    between(cache)
    compress = pack._compress

    def counted(data: bytes, level: int) -> bytes:
        compressed.append(data)
        return compress(data, level)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "_compress", counted)
        package.write(tmp_path / "y.aot", cache=cache)
    return (tmp_path / "x.aot").read_bytes(), (tmp_path / "y.aot").read_bytes(), compressed


def test_cached_blocks_are_not_compressed_again_and_do_not_show(tmp_path: Path) -> None:
    without, with_cache, compressed = cached_twice(tmp_path, lambda cache: None)
    assert without == with_cache
    assert len(compressed) == 1, "the index, which is not kept"


def test_damaged_cached_block_is_compressed_again(tmp_path: Path) -> None:
    def damage(cache: Cache) -> None:
        for path in (tmp_path / "cache").rglob("*.kernel"):
            path.write_bytes(path.read_bytes()[:-1] + b"?")

    without, with_cache, compressed = cached_twice(tmp_path, damage)
    assert without == with_cache
    assert len(compressed) > 1


def _forged(block: bytes) -> Callable[[Cache], None]:
    """Put `block` in place of every one that is cached, as whoever may write to the directory can."""

    def forge(cache: Cache) -> None:
        for path in (cache.directory or Path()).rglob("*.kernel"):
            key = path.parent.name + path.stem
            entry = cache.get(key)
            assert entry is not None
            cache.put(key, dataclasses.replace(entry, cubin=block))

    return forge


@pytest.mark.parametrize(
    "block",
    [
        b"no frame",
        zstandard.compress(b"other"),
        zstandard.compress(b"other") * 2,
        zstandard.ZstdCompressor(write_content_size=False).compress(b"other"),
        bytes.fromhex("28b52ffde0") + b"\xff" * 7 + b"\x00" + bytes(9),  # a frame that declares 2**56 bytes
    ],
)
def test_cached_block_of_something_else_is_reported_and_compressed_again(tmp_path: Path, block: bytes) -> None:
    said: list[str] = []

    def forge(cache: Cache) -> None:
        _forged(block)(cache)
        cache._warn = said.append

    without, with_cache, compressed = cached_twice(tmp_path, forge)
    assert without == with_cache
    assert len(compressed) == len(said) + 1 > 1
    assert all("it was removed" in line for line in said)


def test_entry_that_says_it_was_compressed_otherwise_is_not_taken(tmp_path: Path) -> None:
    def forge(cache: Cache) -> None:
        for path in (tmp_path / "cache").rglob("*.kernel"):
            key = path.parent.name + path.stem
            entry = cache.get(key)
            assert entry is not None
            cache.put(key, dataclasses.replace(entry, record=entry.record | {"level": 1}))

    without, with_cache, compressed = cached_twice(tmp_path, forge)
    assert without == with_cache
    assert len(compressed) > 1


def test_without_a_cache_that_works_an_archive_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said: list[str] = []
    package = Package()
    for name in "abc":
        add(package, name, name.encode() * 100)
    package.write(tmp_path / "x.aot")
    package.write(tmp_path / "y.aot", cache=Cache(tmp_path / "file", said.append))
    assert (tmp_path / "x.aot").read_bytes() == (tmp_path / "y.aot").read_bytes()
    assert len(said) == 1


def test_level_of_compression_names_another_cached_block(tmp_path: Path) -> None:
    package, cache = Package(), Cache(tmp_path / "cache")
    add(package, "a", bytes(range(256)) * 400)
    for level in (1, 19):
        package.write(tmp_path / "cached.aot", level, cache)
        package.write(tmp_path / "plain.aot", level)
        assert (tmp_path / "cached.aot").read_bytes() == (tmp_path / "plain.aot").read_bytes()
