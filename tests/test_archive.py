"""The reading side of the archive: what it gives back, and every way in which a file can be wrong."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from aot.pack import write as pack
from runtime.container import archive as reader
from runtime.container import canonical
from runtime.container.archive import Archive

from .fuzz_archive import (
    HOWS,
    Parts,
    assemble,
    disassemble,
    encode,
    encode_index,
    fuzz,
    mutate_bytes,
    read_everything,
    replace_documents,
    sign_blocks,
)

ROOT = Path(__file__).resolve().parents[1]
CUBINS = {"alpha": b"A" * 100, "beta": b"B" * 50, "gamma": b"C" * 10, "gamma2": b"D" * 10}
ALPHA = 2  # the number of its record: sm_100a and sm_103a come before
TARGETS = {"alpha": "sm_90a", "beta": "sm_90a", "gamma": "sm_100a", "gamma2": "sm_103a"}


def record(name: str) -> dict[str, Any]:
    return {"name": name, "target": TARGETS[name], "cubin": hashlib.sha256(CUBINS[name]).hexdigest()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    package = pack.Package()
    for name, cubin in CUBINS.items():
        package.add_function(record(name), cubin)
    package.set_table("gemm", {"entries": [1, 2]})
    package.set_table("build", {"dsl": "4.8.1"})
    package.write(tmp_path / "model.aot")
    return tmp_path / "model.aot"


@pytest.fixture
def parts(path: Path) -> Parts:
    return disassemble(path.read_bytes())


def refuse(path: Path, data: bytes, error: type[Exception], match: str) -> None:
    """Opening `data` raises exactly `error`, whose message matches and names the file."""
    path.write_bytes(data)
    with pytest.raises(error, match=match) as caught:
        Archive.open(path)
    assert caught.type is error
    assert str(caught.value).startswith(str(path))


def refuse_index(path: Path, parts: Parts, match: str) -> None:
    refuse(path, assemble(parts), reader.IndexMalformed, match)


def block_of(parts: Parts, kind: str) -> int:
    return next(number for number, row in enumerate(parts.head["blocks"]) if row["kind"] == kind)


# What an archive gives back


def test_reader_returns_what_was_packed(path: Path) -> None:
    with Archive.open(path) as archive:
        assert list(archive.functions) == ["alpha", "beta", "gamma", "gamma2"]
        assert {name: entry.target for name, entry in archive.functions.items()} == TARGETS
        assert archive.functions.targets_by_name() == TARGETS
        for name, cubin in CUBINS.items():
            assert archive.cubin(name) == cubin
            assert archive.record(name) == record(name)
            assert archive.record_bytes(name) == canonical.dumps(record(name))
        assert archive.table("gemm") == {"entries": [1, 2]}
        assert list(archive.tables) == ["build", "gemm"]


def test_reader_describes_the_file(path: Path) -> None:
    with Archive.open(path) as archive:
        assert archive.targets == ("sm_100a", "sm_103a", "sm_90a")
        assert archive.file_bytes == path.stat().st_size
        assert archive.digest == path.read_bytes()[32:64].hex()
        sizes = archive.sizes()
        assert list(sizes) == ["records", "sm_10x", "sm_9x", "tables"]
        assert (sizes["sm_9x"].blobs, sizes["sm_9x"].raw) == (2, 150)
        assert sum(size.stored for size in sizes.values()) == archive.blocks[-1].offset + archive.blocks[-1].length - 64
        assert archive.blob_entry(archive.entry("gamma").cubin).length == 10


def test_reader_accepts_an_archive_of_nothing(tmp_path: Path) -> None:
    pack.Package().write(tmp_path / "empty.aot")
    with Archive.open(tmp_path / "empty.aot") as archive:
        assert (dict(archive.functions), dict(archive.tables), archive.targets, archive.verify()) == ({}, {}, (), [])


def test_functions_cannot_be_changed(path: Path) -> None:
    with Archive.open(path) as archive, pytest.raises(TypeError):
        archive.functions["delta"] = archive.functions["alpha"]  # type: ignore[index]


def test_opening_reads_no_block(path: Path, parts: Parts) -> None:
    path.write_bytes(assemble(replace(parts, blocks=[bytes(len(block)) for block in parts.blocks])))
    Archive.open(path).close()


def test_reader_survives_replacement_of_the_file(path: Path) -> None:
    with Archive.open(path) as archive:
        pack.Package().write(path)
        assert archive.cubin("alpha") == CUBINS["alpha"]


def test_reader_imports_neither_torch_nor_the_builder() -> None:
    code = "import sys, runtime.container.archive; assert not {'aot', 'torch', 'cutlass', 'cuda'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_reader_serves_many_threads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CACHE_BYTES", 155)  # too little for all, so that threads evict each other's blocks
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(300):
                name = rng.choice(list(CUBINS))
                assert archive.cubin(name) == CUBINS[name]
                assert archive.record(name)["name"] == name
        except BaseException as error:
            failures.append(error)

    with Archive.open(path) as archive:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_cache_reads_a_block_once_and_stays_within_its_bound(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    read = Archive._read_block
    monkeypatch.setattr(Archive, "_read_block", lambda self, index: reads.append(index) or read(self, index))  # type: ignore[func-returns-value]
    with Archive.open(path) as archive:
        for name in ("alpha", "beta", "alpha"):
            archive.cubin(name)
        assert len(reads) == 1
        monkeypatch.setattr(reader, "CACHE_BYTES", 155)
        archive.cubin("gamma")
        archive.cubin("beta")
        assert len(reads) == 3
        assert archive._cached_bytes == sum(map(len, archive._cache.values())) <= 155


# Files that are no archives


def test_reader_rejects_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(reader.FileUnreadable, match=r"none\.aot: cannot be opened \(No such file"):
        Archive.open(tmp_path / "none.aot")


def test_reader_rejects_a_folder(tmp_path: Path) -> None:
    with pytest.raises(reader.FileUnreadable, match=r"is a folder; name an \.aot file in it"):
        Archive.open(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_reader_rejects_a_file_without_permission(path: Path) -> None:
    path.chmod(0)
    with pytest.raises(reader.FileUnreadable, match="Permission denied"):
        Archive.open(path)


def test_reader_rejects_a_file_that_the_system_refuses(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_to_open(path: str, flags: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(reader, "_open_without_waiting", refuse_to_open)
    with pytest.raises(reader.FileUnreadable, match="Permission denied"):
        Archive.open(path)


def test_reader_rejects_a_failing_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> bytes:
        raise OSError(5, "Input/output error")

    with Archive.open(path) as archive:
        monkeypatch.setattr(os, "pread", fail)
        with pytest.raises(reader.FileUnreadable, match="Input/output error"):
            archive.cubin("alpha")


def test_reader_rejects_a_named_pipe_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.aot")
    with pytest.raises(reader.FileUnreadable, match="not a regular file"):
        Archive.open(tmp_path / "pipe.aot")


def test_reader_rejects_a_path_with_a_zero_byte() -> None:
    with pytest.raises(reader.FileUnreadable, match="null"):
        Archive.open("model\0.aot")


def test_reader_rejects_an_empty_file(path: Path) -> None:
    refuse(path, b"", reader.Truncated, "has 0 bytes")


def test_reader_rejects_another_kind_of_file(path: Path) -> None:
    refuse(path, b"\x7fELF" + bytes(100), reader.NotAnArchive, "begins with b'.x7fELF")


def test_reader_rejects_a_short_file_of_another_kind(path: Path) -> None:
    refuse(path, b"PK", reader.NotAnArchive, "begins with b'PK'.*so it is no archive; name an .aot file")


# Any damage at all


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


# Headers


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


# The index as bytes


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


# The index as rules

Edit = Callable[[Any], Any]


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


# Blocks


def replace_block(path: Path, parts: Parts, kind: str, edit: Callable[[bytes], bytes], sign: bool = True) -> Archive:
    """Open the archive with the blocks of `kind` changed by `edit`, and signed again unless told otherwise."""
    number = block_of(parts, kind)
    parts.blocks[number] = edit(parts.blocks[number])
    path.write_bytes(assemble(sign_blocks(parts) if sign else parts))
    return Archive.open(path)


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


# Records and tables


def replace_document(path: Path, parts: Parts, kind: str, at: int, data: bytes) -> Archive:
    """Open the archive with one record or table changed and everything signed again."""
    number = block_of(parts, kind)
    documents = parts.documents_of(number)
    documents[at] = data
    path.write_bytes(assemble(replace_documents(parts, number, documents)))
    return Archive.open(path)


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


# Wrong calls


@pytest.mark.parametrize(
    ("target", "kind"),
    [("sm_80", "sm_8x"), ("sm_90a", "sm_9x"), ("sm_100a", "sm_10x"), ("sm_103a", "sm_10x"), ("sm_120a", "sm_12x")],
)
def test_generation_of_a_target(target: str, kind: str) -> None:
    assert reader.generation(target) == kind


@pytest.mark.parametrize(
    "text", ["", "records", "sm_9x", "sm_10x", "sm_9", "sm_90a\n", "sm_1000", "sm_90ab", "SM_90", "sm_९०"]
)
def test_generation_rejects_what_is_no_target(text: str) -> None:
    with pytest.raises(ValueError, match="is not a target"):
        reader.generation(text)


def test_reader_rejects_unknown_function(path: Path) -> None:
    with Archive.open(path) as archive, pytest.raises(reader.UnknownEntry, match="no function 'delta' among its 4"):
        archive.cubin("delta")


def test_reader_rejects_unknown_table(path: Path) -> None:
    with Archive.open(path) as archive, pytest.raises(reader.UnknownEntry, match="it holds build, gemm"):
        archive.table("norms")


def test_closed_archive_refuses_to_read(path: Path) -> None:
    archive = Archive.open(path)
    archive.cubin("alpha")
    archive.close()
    archive.close()
    for read in (archive.cubin, archive.record, archive.record_bytes):
        with pytest.raises(reader.ArchiveClosed, match="open it again"):
            read("alpha")
    with pytest.raises(reader.ArchiveClosed):
        archive.table("gemm")
    with pytest.raises(reader.ArchiveClosed):
        archive.verify()


# verify


def test_verify_covers_every_block_blob_record_and_table(path: Path) -> None:
    with Archive.open(path) as archive:
        checks = archive.verify()
    assert all(check.ok for check in checks)
    subjects = [check.subject for check in checks]
    assert len(subjects) == len(set(subjects)) == 4 + 10 + 4 + 2
    assert {"block 0 (records)", "blob 9 (tables)", "record alpha", "table gemm"} <= set(subjects)


def test_verify_minds_how_numbers_are_spelled(tmp_path: Path) -> None:
    package = pack.Package()
    package._tables["gemm"] = b'{"small":1e-7}'  # dumps writes 1e-07
    package.write(tmp_path / "spelled.aot")
    with Archive.open(tmp_path / "spelled.aot") as archive:
        assert archive.table("gemm") == {"small": 1e-7}
        (failed,) = [check for check in archive.verify() if not check.ok]
    assert failed.subject == "table gemm"
    assert "not canonical" in failed.detail


def test_verify_names_what_is_broken_and_goes_on(path: Path, parts: Parts) -> None:
    with replace_block(path, parts, "records", lambda block: b"garbage") as archive:
        failed = [check.subject for check in archive.verify() if not check.ok]
    blobs = [f"blob {number} (records)" for number in (0, 1, 2, 3)]
    assert sorted(failed) == sorted(["block 0 (records)", *blobs, *(f"record {name}" for name in CUBINS)])


def test_verify_finds_a_changed_blob(path: Path, parts: Parts) -> None:
    with replace_block(path, parts, "sm_10x", lambda block: zstandard.compress(b"C" * 10 + bytes(10))) as archive:
        failed = [check for check in archive.verify() if not check.ok]
    assert [check.subject for check in failed] == ["blob 5 (sm_10x)"]
    assert "SHA-256" in failed[0].detail


def test_verify_finds_a_bad_table(path: Path, parts: Parts) -> None:
    with replace_document(path, parts, "tables", 1, b"[]") as archive:
        failed = [check.subject for check in archive.verify() if not check.ok]
    assert failed == ["table gemm"]


# Fuzzing; tests/fuzz_archive.py runs it for as long as you like


def test_fuzzed_archives_raise_only_archive_errors() -> None:
    outcomes = fuzz(seconds=60, seed=1, rounds=20)
    assert {outcome.split(":")[0] for outcome in outcomes} == set(HOWS)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_no_mutation_of_the_bytes_escapes(
    tmp_path_factory: pytest.TempPathFactory, seed: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("mutant") / "model.aot"
    cubin = data.draw(st.binary(min_size=1, max_size=200))
    package = pack.Package()
    package.add_function({"name": "f", "target": "sm_80", "cubin": hashlib.sha256(cubin).hexdigest()}, cubin)
    package.write(path, level=1)
    valid = path.read_bytes()
    path.write_bytes(mutate_bytes(random.Random(seed), valid))
    if read_everything(path, []) == "intact":
        assert path.read_bytes() == valid


NOTHING = Parts({"blocks": [], "functions": {}, "tables": []}, [], [], [], [], [], [])


@settings(max_examples=200)
@given(junk=st.binary(max_size=300))
def test_no_junk_escapes(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.aot"
    for data in (junk, b"CUTEAOT\0" + junk, assemble(NOTHING, raw=junk), assemble(NOTHING, stored=junk)):
        path.write_bytes(data)
        assert read_everything(path, []) != "intact"
