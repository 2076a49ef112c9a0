"""Blocks and documents of an archive that are not what its index and its record say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import zstandard

from runtime.container import archive as reader
from runtime.container.archive import Archive

from .archive_samples import CUBINS, Edit, block_of, record, replace_block, replace_document
from .archive_samples import parts as parts
from .archive_samples import path as path
from .fuzz_archive import (
    Parts,
    assemble,
    encode,
)

ALPHA = 2  # the number of its record: sm_100a and sm_103a come before


def test_reader_rejects_flipped_bit_in_block(path: Path, parts: Parts) -> None:
    with (
        replace_block(path, parts, "sm_9x", lambda block: block[:-1] + bytes([block[-1] ^ 1]), sign=False) as archive,
        pytest.raises(reader.DigestMismatch, match=r"block . has SHA-256"),
    ):
        archive.cubin("alpha")


def test_reader_serves_intact_blocks_beside_a_broken_one(path: Path, parts: Parts) -> None:
    with replace_block(path, parts, "sm_9x", lambda block: bytes(len(block)), sign=False) as archive:
        assert archive.cubin("gamma") == CUBINS["gamma"]


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda block: b"garbage", "does not decompress"),
        (lambda block: block[:-1], "does not decompress"),
        (lambda block: block + b"\0", "unused data"),
        (lambda block: block + block, "unused data"),
        (lambda block: b"\x50\x2a\x4d\x18\x96\0\0\0" + bytes(150), "does not decompress"),
        (lambda block: zstandard.compress(bytes(149)), "declares 149 bytes, the archive 150"),
        (lambda block: zstandard.compress(bytes(64 << 20)), "declares 67108864 bytes, the archive 150"),
        (lambda block: zstandard.ZstdCompressor(write_content_size=False).compress(bytes(150)), "declares"),
    ],
    ids=["garbage", "cut", "trailing", "two frames", "skippable frame", "short", "bomb", "no size"],
)
def test_reader_rejects_block_that_is_not_its_blobs_exactly(path: Path, parts: Parts, edit: Edit, match: str) -> None:
    with (
        replace_block(path, parts, "sm_9x", edit) as archive,
        pytest.raises(reader.BlockMalformed, match=match),
    ):
        archive.cubin("alpha")


def test_reader_rejects_frame_that_holds_more_than_it_declares(path: Path, parts: Parts) -> None:
    def understate(block: bytes) -> bytes:
        frame = bytearray(zstandard.compress(bytes(1150)))
        at = frame.index((1150 - 256).to_bytes(2, "little"))
        frame[at : at + 2] = (300 - 256).to_bytes(2, "little")
        return bytes(frame)

    parts.lengths[parts.blobs_of(block_of(parts, "sm_9x"))] = [200, 100]
    with (
        replace_block(path, parts, "sm_9x", understate) as archive,
        pytest.raises(reader.BlockMalformed, match="does not decompress"),
    ):
        archive.cubin("alpha")


def test_reader_rejects_changed_cubin_in_signed_block(path: Path, parts: Parts) -> None:
    with (
        replace_block(path, parts, "sm_9x", lambda block: zstandard.compress(b"X" * 150)) as archive,
        pytest.raises(reader.DigestMismatch, match=r"blob . has SHA-256"),
    ):
        archive.cubin("alpha")


def test_reader_rejects_file_cut_short_while_open(path: Path) -> None:
    with Archive.open(path) as archive:
        os.truncate(path, 70)
        with pytest.raises(reader.Truncated, match="was cut short after it was opened"):
            archive.cubin("alpha")


DOCUMENTS = [
    (b"[]", "is a JSON list, not an object"),
    (b"7", "is a JSON int, not an object"),
    (b"{", "Expecting"),
    (b'{"a": 1}', "not canonical"),
    (b'{"a":NaN}', "NaN"),
    (b'{"a":1,"a":2}', "occurs twice"),
    (b'{"a":' * 50_000, "too deeply"),
]


@pytest.mark.parametrize(("data", "match"), DOCUMENTS)
def test_reader_rejects_table_that_is_no_canonical_object(path: Path, parts: Parts, data: bytes, match: str) -> None:
    with (
        replace_document(path, parts, "tables", 0, data) as archive,
        pytest.raises(reader.DocumentMalformed, match=match),
    ):
        archive.table("build")


@pytest.mark.parametrize(("data", "match"), DOCUMENTS)
def test_reader_rejects_record_that_is_no_canonical_object(path: Path, parts: Parts, data: bytes, match: str) -> None:
    with (
        replace_document(path, parts, "records", ALPHA, data) as archive,
        pytest.raises(reader.DocumentMalformed, match=match),
    ):
        archive.record("alpha")


@pytest.mark.parametrize("key", ["name", "target", "cubin"])
def test_reader_rejects_record_that_disagrees_with_the_index(path: Path, parts: Parts, key: str) -> None:
    data = encode({**record("alpha"), key: "other"})
    with (
        replace_document(path, parts, "records", ALPHA, data) as archive,
        pytest.raises(reader.DocumentMalformed, match=f"its {key} is 'other' where the index has"),
    ):
        archive.record("alpha")


def test_reader_rejects_swapped_cubins(path: Path, parts: Parts) -> None:
    parts.cubins[2:] = reversed(parts.cubins[2:])
    path.write_bytes(assemble(parts))
    with Archive.open(path) as archive, pytest.raises(reader.DocumentMalformed, match="its cubin is"):
        archive.record("alpha")


def test_reader_rejects_another_target_of_the_same_generation(path: Path, parts: Parts) -> None:
    parts.head["functions"]["sm_101a"] = parts.head["functions"].pop("sm_100a")
    path.write_bytes(assemble(parts))
    with (
        Archive.open(path) as archive,
        pytest.raises(reader.DocumentMalformed, match="its target is 'sm_100a' where the index has 'sm_101a'"),
    ):
        archive.record("gamma")
