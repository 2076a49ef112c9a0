"""Archives that are damaged or made to harm: refused by name, wherever it is in the file."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from runtime.container import archive as reader
from runtime.container.archive import Archive

from .archive_samples import NOTHING, Edit, refuse
from .archive_samples import parts as parts
from .archive_samples import path as path
from .fuzz_archive import (
    Parts,
    assemble,
    encode,
    encode_index,
)


def refuse_index(path: Path, parts: Parts, match: str) -> None:
    refuse(path, assemble(parts), reader.IndexMalformed, match)


def test_no_flipped_bit_anywhere_goes_unnoticed(path: Path) -> None:
    data = path.read_bytes()
    rng = random.Random(0)
    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(flipped))
        try:
            with Archive.open(path) as archive:
                assert not all(check.ok for check in archive.verify())
        except reader.ArchiveError:
            pass


def test_no_truncation_anywhere_goes_unnoticed(path: Path) -> None:
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(reader.Truncated):
            Archive.open(path)


def test_reader_rejects_truncated_header(path: Path) -> None:
    refuse(path, path.read_bytes()[:63], reader.Truncated, "less than a header")


def test_reader_rejects_future_version(path: Path, parts: Parts) -> None:
    data = assemble(parts, version=2)
    refuse(path, data, reader.UnsupportedVersion, "format version 2, this cute-aot reads 1")


def test_reader_rejects_truncated_index(path: Path) -> None:
    refuse(path, path.read_bytes()[:-1], reader.Truncated, "its header promises")


def test_reader_rejects_trailing_data(path: Path) -> None:
    refuse(path, path.read_bytes() + b"\0", reader.TrailingData, "its header promises")


def test_reader_rejects_index_beyond_the_file(path: Path, parts: Parts) -> None:
    refuse(path, assemble(parts, offset=2**64 - 1), reader.Truncated, "its header promises")


def test_reader_rejects_index_inside_the_header(path: Path, parts: Parts) -> None:
    stored = zstandard.compress(encode_index(parts))
    data = assemble(replace(parts, blocks=[]), stored=stored, offset=0, length=64 + len(stored))
    refuse(path, data, reader.DigestMismatch, "index")


def test_reader_rejects_flipped_bit_in_index(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    refuse(path, bytes(data), reader.DigestMismatch, "the index does not match")


def test_reader_rejects_every_flipped_bit_of_the_header(path: Path) -> None:
    """And says that a copy helps, unless it may be no archive at all, or one of another version."""
    data = path.read_bytes()
    for bit in range(64 * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(flipped))
        with pytest.raises(reader.ArchiveError) as refused:
            Archive.open(path)
        if not isinstance(refused.value, reader.NotAnArchive | reader.UnsupportedVersion):
            assert "; copy " in str(refused.value)


@pytest.mark.parametrize("compressed", [False, True])
def test_reader_rejects_oversized_index(path: Path, parts: Parts, compressed: bool) -> None:
    long = bytes((16 << 20) + 1)
    stored = zstandard.compress(long) if compressed else long
    data = assemble(parts, stored=stored, raw_length=len(long) if compressed else 100)
    refuse(path, data, reader.SizeLimitExceeded, "declares an index of 16777217 bytes")


def test_reader_rejects_index_that_is_not_zstd(path: Path, parts: Parts) -> None:
    refuse(path, assemble(parts, stored=b"garbage" * 9), reader.IndexMalformed, "decompress")


def test_reader_rejects_index_of_another_length_than_declared(path: Path, parts: Parts) -> None:
    data = assemble(parts, raw_length=len(encode_index(parts)) - 1)
    refuse(path, data, reader.IndexMalformed, "its zstd frame declares")


def test_reader_rejects_decompression_bomb_in_index(path: Path, parts: Parts) -> None:
    bomb = zstandard.compress(bytes(80 << 20))
    refuse(path, assemble(parts, raw=b" " * 100, stored=bomb), reader.IndexMalformed, "its zstd frame declares")


def test_reader_rejects_data_after_the_frame_of_the_index(path: Path, parts: Parts) -> None:
    stored = zstandard.compress(encode_index(parts)) + b"\0"
    refuse(path, assemble(parts, stored=stored), reader.IndexMalformed, "unused data")


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"{", "Expecting"),
        (b"\xff", "utf-8"),
        (b"[" * 60_000, "too deeply"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"9" * 5000, "of more than 64 bits"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"[1e999]", "JSON compliant"),
        (b'["\\ud800"]', "surrogates"),
        (b'{"a":1,"a":1}', "'a' occurs twice"),
        (b'{"b":1,"a":1}', "not canonical"),
        (b'{"a": 1}', "not canonical"),
        (b'["\\u0041"]', "not canonical"),
        (b"[1.00]", "not canonical"),
        (b"[]", "must begin with an object with exactly the keys"),
        (b"null", "must begin with an object with exactly the keys"),
    ],
)
def test_reader_rejects_index_whose_head_is_not_canonical_json(
    path: Path, parts: Parts, raw: bytes, match: str
) -> None:
    refuse(path, assemble(parts, raw=raw + b"\n\n"), reader.IndexMalformed, match)


@pytest.mark.parametrize("end", [b"", b"\n", b"\n\n\n", b"\n\n\0"])
def test_reader_rejects_index_of_nothing_in_any_other_spelling(path: Path, end: bytes) -> None:
    path.write_bytes(assemble(NOTHING))
    Archive.open(path).close()
    refuse(
        path,
        assemble(NOTHING, raw=encode(NOTHING.head) + end),
        reader.IndexMalformed,
        "must have a line|columns have 1 bytes",
    )


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda head: head.update(extra=1), "exactly the keys"),
        (lambda head: head.pop("tables"), "exactly the keys"),
        (lambda head: head.update(blocks={}), "blocks must be a list"),
        (lambda head: head.update(functions=[]), "functions must be an object"),
        (lambda head: head.update(tables={}), "tables must be a list of names"),
        (lambda head: head["blocks"].__setitem__(0, []), "block 0 must be an object with exactly"),
        (lambda head: head["blocks"][0].update(extra=1), "block 0 must be an object with exactly"),
        (lambda head: head["blocks"][1].update(kind="sm_9x/../.."), "has kind"),
        (lambda head: head["blocks"][1].update(kind="sm_90a"), "has kind 'sm_90a'"),
        (lambda head: head["blocks"][1].update(kind=["tables"]), "has kind"),
        (lambda head: head["blocks"].reverse(), "block 1 of kind 'sm_9x' comes after one of kind 'tables'"),
        (lambda head: head["blocks"][0].update(length=True), "has length True"),
        (lambda head: head["blocks"][0].update(length=-1), "has length -1"),
        (lambda head: head["blocks"][0].update(length=1.0), "has length 1.0"),
        (lambda head: head["blocks"][0].update(blobs=0), "has blobs 0"),
        (lambda head: head["blocks"][0].update(blobs=True), "has blobs True"),
        (lambda head: head["blocks"][0].update(blobs=10**18), "its columns have"),
        (lambda head: head["blocks"][0].update(blobs=5), "its columns have"),
        (lambda head: (head["blocks"][0].update(blobs=3), head["blocks"][-1].update(blobs=3)), "and 3 records"),
        (lambda head: head["blocks"][-1].update(kind="sm_9x"), "no function uses blob 8"),
        (lambda head: head["functions"].update(sm_9x=1), "'sm_9x' is not a target"),
        (lambda head: head["functions"].update({"sm_90a\n": 1}), "is not a target"),
        (lambda head: head["functions"].update(records=1), "'records' is not a target"),
        (lambda head: head["functions"].update(sm_90a=0), "has 0 functions for sm_90a"),
        (lambda head: head["functions"].update(sm_90a=True), "has True functions for sm_90a"),
        (lambda head: head["functions"].update(sm_90a=[]), "functions for sm_90a"),
        (lambda head: head["functions"].update(sm_90a=3), "its columns have"),
        (
            lambda head: head["functions"].update(sm_80=head["functions"].pop("sm_90a")),
            "for sm_80 has blob . as its cubin",
        ),
        (lambda head: head["functions"].update(sm_90a=1, sm_100a=2), "for sm_103a has blob . as its cubin"),
        (lambda head: head["tables"].pop(), "names 1 tables and has 2"),
        (lambda head: head["tables"].append("z"), "names 3 tables and has 2"),
        (lambda head: head["tables"].append(7), "tables must be a list of names"),
        (lambda head: head["tables"].reverse(), "names of its tables are not sorted"),
        (lambda head: head["tables"].__setitem__(0, "gemm"), "or one is there twice"),
    ],
)
def test_reader_rejects_index_whose_head_breaks_a_rule(path: Path, parts: Parts, edit: Edit, match: str) -> None:
    edit(parts.head)
    refuse_index(path, parts, match)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda parts: parts.names.pop(), "has 3 names for 4 functions"),
        (lambda parts: parts.names.append("z"), "has 5 names for 4 functions"),
        (lambda parts: parts.names.clear(), "has 0 names for 4 functions"),
        (lambda parts: parts.names.__setitem__(slice(2, 4), ["beta", "alpha"]), "for sm_90a are not sorted"),
        (lambda parts: parts.names.__setitem__(3, "alpha"), "for sm_90a are not sorted, or one is there twice"),
        (lambda parts: parts.names.__setitem__(0, "alpha"), "two of its functions have one name"),
        (lambda parts: parts.lengths.__setitem__(7, 0), "blob 7 has no bytes"),
        (lambda parts: parts.lengths.pop(), "its columns have"),
        (lambda parts: parts.cubins.append(4), "its columns have"),
        (lambda parts: parts.cubins.__setitem__(0, 7), "for sm_100a has blob 7 as its cubin"),
        (lambda parts: parts.cubins.__setitem__(0, 3), "for sm_100a has blob 3 as its cubin"),
        (lambda parts: parts.cubins.__setitem__(3, 9), "for sm_90a has blob 9 as its cubin"),
        (lambda parts: parts.cubins.__setitem__(3, 2**32 - 1), "has blob 4294967295 as its cubin"),
        (lambda parts: parts.cubins.__setitem__(1, parts.cubins[0]), "no function uses blob 5"),
        (lambda parts: parts.block_digests.append(bytes(32)), "its columns have"),
        (lambda parts: parts.blob_digests.append(b"\0"), "its columns have"),
        (
            lambda parts: parts.blob_digests.__setitem__(5, parts.blob_digests[4]),
            "two of its cubins of kind sm_10x are",
        ),
    ],
)
def test_reader_rejects_index_whose_columns_break_a_rule(path: Path, parts: Parts, edit: Edit, match: str) -> None:
    edit(parts)
    refuse_index(path, parts, match)


def test_reader_rejects_functions_without_records(path: Path, parts: Parts) -> None:
    parts.head["functions"]["sm_80"] = 1
    parts.names.insert(4, "z")
    parts.cubins.append(4)
    refuse_index(path, parts, "has 5 functions and 4 records")


BAD_NAMES = [
    ("\x00", "printable"),
    ("a\n", "printable|columns"),
    ("\x7f", "printable"),
    ("é", "printable"),
    ("a\u202eb", "printable"),
    ("", "must have 1 to 255"),
    ("x" * 256, "must have 1 to 255"),
    ("a b", "has 5 names"),
]


@pytest.mark.parametrize(("name", "match"), BAD_NAMES)
def test_reader_rejects_bad_function_name(path: Path, parts: Parts, name: str, match: str) -> None:
    parts.names[2] = name
    refuse_index(path, parts, match)


@pytest.mark.parametrize("name", [name for name, _ in BAD_NAMES])
def test_reader_rejects_bad_table_name(path: Path, parts: Parts, name: str) -> None:
    parts.head["tables"][0] = name
    refuse_index(path, parts, "cannot name a table")


def test_reader_rejects_hole_between_blocks_and_index(path: Path, parts: Parts) -> None:
    refuse_index(path, replace(parts, blocks=[*parts.blocks, b"hole"]), "its blocks end at byte")


def test_reader_rejects_block_that_overlaps_the_index(path: Path, parts: Parts) -> None:
    parts.head["blocks"][-1]["length"] += 1
    refuse_index(path, parts, "its blocks end at byte")


@pytest.mark.parametrize("lengths", [[2**32 - 1, 1, 1, 1], [600 << 10, 600 << 10, 1, 1]])
def test_reader_rejects_decompression_bomb_in_block_size(path: Path, parts: Parts, lengths: list[int]) -> None:
    parts.lengths[:4] = lengths
    refuse(path, assemble(parts), reader.SizeLimitExceeded, f"block 0 of records declares {sum(lengths)} bytes")
