"""Functions are called by the beginnings of their records' digests."""

import hashlib
from pathlib import Path

import pytest

from aot.inspect import digests
from runtime.container.archive import Archive

from . import recording_driver


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    names = [f"f{i}" for i in range(40)]
    records = [recording_driver.operands_record(name, recording_driver.signature(512, 256)) for name in names]
    recording_driver.write_archive(tmp_path / "many.aot", records, [])
    return Archive.open(tmp_path / "many.aot")


def test_a_digest_is_that_of_the_record_which_has_that_of_the_cubin(archive: Archive) -> None:
    for name, digest in digests.digests(archive).items():
        assert digest == hashlib.sha256(archive.record_bytes(name)).hexdigest()
        assert archive.record(name)["cubin"] == hashlib.sha256(archive.cubin(name)).hexdigest()


def test_a_function_is_found_by_its_name_and_by_the_beginning_of_its_digest(archive: Archive) -> None:
    shorts = digests.short_names(archive)
    assert len(set(shorts.values())) == len(shorts) == 40
    for name, short in shorts.items():
        assert digests.function_named(archive, name) == name
        assert digests.function_named(archive, short) == name


@pytest.mark.parametrize("word", ["", "f", "abc", "qkv", "F" * 8, "0" * 64])
def test_what_begins_no_digest_is_no_function(archive: Archive, word: str) -> None:
    assert digests.function_named(archive, word) is None


def test_a_beginning_that_several_have_is_ambiguous(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "digests", lambda _: {"f0": "abcdef01", "f1": "abcdef02"})
    with pytest.raises(digests.AmbiguousDigest, match="begins the digests of f0, f1; give more digits, or the name"):
        digests.function_named(archive, "abcdef")
    assert digests.function_named(archive, "abcdef02") == "f1"
    monkeypatch.setattr(digests, "digests", lambda _: {"f0": "abcdef0101", "f1": "abcdef0102"})
    assert digests.short_names(archive) == {"f0": "abcdef0101", "f1": "abcdef0102"}
