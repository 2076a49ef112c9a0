"""The kept corpora of fuzzers, and their seeds: no reader answers any input otherwise than it says."""

from __future__ import annotations

import pytest

from runtime import native as native_code
from runtime.errors import AotError

from .fuzz import native, readers
from .fuzz.corpus import inputs


@pytest.mark.parametrize("number", range(len(readers.READERS)))
def test_reader_answers_each_kept_input(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(native_code, "_native", None)
    monkeypatch.setattr(native_code, "costs", None)
    for data in inputs(readers.CORPUS):
        if data[0] % len(readers.READERS) == number:
            readers.read(data)


def test_each_reader_has_a_seed_that_it_takes() -> None:
    seen = set()
    for seed in readers.seeds():
        readers.READERS[seed[0]](seed[1:])
        seen.add(seed[0])
    assert seen == set(range(len(readers.READERS)))


def test_what_a_reader_does_not_promise_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: bytes) -> None:
        raise {b"key": KeyError, b"aot": AotError, b"value": ValueError}[data]("planted")

    monkeypatch.setattr(readers, "READERS", (broken, *[broken] * 7))
    readers.read(b"\x00aot")
    readers.read(b"\x03value")  # what is no JSON
    for data in (b"\x00key", b"\x00value", b"\x03key"):
        with pytest.raises((KeyError, ValueError), match="planted"):
            readers.read(data)


def test_seeds_of_native_readers_are_programs_as_bytes() -> None:
    assert native.encode([1, 300, "add", None]) == b"\xc4\x01\xe1\x2c\x01" + bytes(
        [0x80 + native.WORDS.index("add"), 0xE4]
    )
    assert len(native.seeds()) > 10
    assert len({len(seed) for seed in native.seeds()}) > 5
