"""The reading side of the archive: what it gives back, and every way in which a file can be wrong."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from aot import pack
from runtime import archive as reader
from runtime import canonical
from runtime.archive import Archive

from .fuzz_archive import HOWS, Parts, assemble, disassemble, encode, fuzz, mutate_bytes, read_everything, sign_blocks

ROOT = Path(__file__).resolve().parents[1]
CUBINS = {"alpha": b"A" * 100, "beta": b"B" * 50, "gamma": b"C" * 10, "gamma2": b"D" * 10}
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
    refuse(path, assemble(parts.index, parts.blocks), reader.IndexMalformed, match)


def row_of(parts: Parts, kind: str) -> int:
    return next(number for number, row in enumerate(parts.index["blocks"]) if row["kind"] == kind)


# What an archive gives back


def test_reader_returns_what_was_packed(path: Path) -> None:
    with Archive.open(path) as archive:
        assert list(archive.functions) == ["alpha", "beta", "gamma", "gamma2"]
        assert {name: entry.target for name, entry in archive.functions.items()} == TARGETS
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
    blocks = [b"\0" * len(block) for block in parts.blocks]
    path.write_bytes(assemble(parts.index, blocks))
    Archive.open(path).close()


def test_reader_survives_replacement_of_the_file(path: Path) -> None:
    with Archive.open(path) as archive:
        pack.Package().write(path)
        assert archive.cubin("alpha") == CUBINS["alpha"]


def test_reader_imports_neither_torch_nor_the_builder() -> None:
    code = "import sys, runtime.archive; assert not {'aot', 'torch', 'cutlass', 'cuda'} & set(sys.modules)"
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


def test_opening_a_thousand_functions_takes_under_ten_ms(tmp_path: Path) -> None:
    package = pack.Package()
    for number in range(1000):
        cubin = number.to_bytes(4, "little") * 8
        name = f"cutlass_operators.sm90_static_persistent.bf16_bf16_bf16_f32.tile128x256x64.cluster1x2.{number}"
        package.add_function({"name": name, "target": "sm_90a", "cubin": hashlib.sha256(cubin).hexdigest()}, cubin)
    package.write(tmp_path / "many.aot", level=1)
    times_s = []
    for _ in range(20):
        start = time.perf_counter()
        Archive.open(tmp_path / "many.aot").close()
        times_s.append(time.perf_counter() - start)
    assert min(times_s) < 0.010


# Files that are no archives


def test_reader_rejects_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(reader.FileUnreadable, match=r"none\.aot: cannot be opened \(No such file"):
        Archive.open(tmp_path / "none.aot")


def test_reader_rejects_a_directory(tmp_path: Path) -> None:
    with pytest.raises(reader.FileUnreadable, match="Is a directory"):
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
    refuse(path, b"PK", reader.NotAnArchive, "begins with b'PK'")


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
    data = assemble(parts.index, parts.blocks, version=2)
    refuse(path, data, reader.UnsupportedVersion, "format version 2, this cute-aot reads 1")


def test_reader_rejects_truncated_index(path: Path) -> None:
    refuse(path, path.read_bytes()[:-1], reader.Truncated, "its header promises")


def test_reader_rejects_trailing_data(path: Path) -> None:
    refuse(path, path.read_bytes() + b"\0", reader.TrailingData, "its header promises")


def test_reader_rejects_index_beyond_the_file(path: Path, parts: Parts) -> None:
    refuse(path, assemble(parts.index, parts.blocks, offset=2**64 - 1), reader.Truncated, "its header promises")


def test_reader_rejects_index_inside_the_header(path: Path, parts: Parts) -> None:
    stored = zstandard.compress(encode(parts.index))
    data = assemble(parts.index, [], stored=stored, offset=0, length=64 + len(stored))
    refuse(path, data, reader.DigestMismatch, "index")


def test_reader_rejects_flipped_bit_in_index(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    refuse(path, bytes(data), reader.DigestMismatch, "the index does not match")


def test_reader_rejects_every_flipped_bit_of_the_header(path: Path) -> None:
    data = path.read_bytes()
    for bit in range(64 * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(flipped))
        with pytest.raises(reader.ArchiveError):
            Archive.open(path)


@pytest.mark.parametrize("field", ["raw_length", "length"])
def test_reader_rejects_oversized_index(path: Path, parts: Parts, field: str) -> None:
    data = assemble(parts.index, parts.blocks, **{field: (64 << 20) + 1})
    refuse(path, data, reader.SizeLimitExceeded, "declares an index of 67108865 bytes")


# The index as bytes


def test_reader_rejects_index_that_is_not_zstd(path: Path, parts: Parts) -> None:
    refuse(path, assemble(parts.index, parts.blocks, stored=b"garbage" * 9), reader.IndexMalformed, "decompress")


def test_reader_rejects_index_of_another_length_than_declared(path: Path, parts: Parts) -> None:
    data = assemble(parts.index, parts.blocks, raw_length=len(encode(parts.index)) - 1)
    refuse(path, data, reader.IndexMalformed, "its zstd frame declares")


def test_reader_rejects_decompression_bomb_in_index(path: Path, parts: Parts) -> None:
    bomb = zstandard.compress(bytes(80 << 20))
    refuse(path, assemble(b" " * 100, parts.blocks, stored=bomb), reader.IndexMalformed, "its zstd frame declares")


def test_reader_rejects_data_after_the_frame_of_the_index(path: Path, parts: Parts) -> None:
    stored = zstandard.compress(encode(parts.index)) + b"\0"
    refuse(path, assemble(parts.index, parts.blocks, stored=stored), reader.IndexMalformed, "unused data")


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"{", "Expecting"),
        (b"\xff", "utf-8"),
        (b"[" * 100_000, "too deeply"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"9" * 5000, "digits"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"[1e999]", "JSON compliant"),
        (b'["\\ud800"]', "surrogates"),
        (b'{"a":1,"a":1}', "'a' occurs twice"),
        (b'{"b":1,"a":1}', "not canonical"),
        (b'{"a": 1}', "not canonical"),
        (b'["\\u0041"]', "not canonical"),
        (b"[1.00]", "not canonical"),
        (b"[]", "must be an object with exactly the keys"),
        (b"null", "must be an object with exactly the keys"),
    ],
)
def test_reader_rejects_index_that_is_not_canonical_json(path: Path, raw: bytes, match: str) -> None:
    refuse(path, assemble(raw, []), reader.IndexMalformed, match)


# The index as rules

Edit = Callable[[Any], Any]


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda index: index.update(extra=1), "exactly the keys"),
        (lambda index: index.pop("tables"), "exactly the keys"),
        (lambda index: index.update(blocks={}), "blocks must be a list"),
        (lambda index: index.update(functions=[]), "functions must be an object"),
        (lambda index: index.update(tables=[]), "tables must be an object"),
        (lambda index: index["blocks"].__setitem__(0, []), "block 0 must be an object with exactly"),
        (lambda index: index["blocks"][0].update(extra=1), "block 0 must be an object with exactly"),
        (lambda index: index["blocks"][0].update(kind="sm_9x/../.."), "has kind"),
        (lambda index: index["blocks"][0].update(kind="sm_90a"), "has kind 'sm_90a'"),
        (lambda index: index["blocks"][0].update(kind=["tables"]), "has kind"),
        (lambda index: index["blocks"][0].update(length=True), "has length True"),
        (lambda index: index["blocks"][0].update(length=-1), "has length -1"),
        (lambda index: index["blocks"][0].update(length=1.0), "has length 1.0"),
        (lambda index: index["blocks"][0].update(sha256="0" * 63), "has SHA-256 '000"),
        (lambda index: index["blocks"][0].update(sha256="A" * 64), "has SHA-256 'AAA"),
        (lambda index: index["blocks"][0].update(sha256=" " * 64), "has SHA-256 '   "),
        (lambda index: index["blocks"][0].update(sha256=0), "has SHA-256 0"),
        (lambda index: index["blocks"][0].update(blob_lengths=[]), "the length of each of its blobs"),
        (lambda index: index["blocks"][0]["blob_lengths"].__setitem__(0, True), "the length of each"),
        (lambda index: index["blocks"][0]["blob_lengths"].__setitem__(0, 0), "the length of each"),
        (lambda index: index["blocks"][0]["blob_lengths"].__setitem__(0, -(2**70)), "the length of each"),
        (lambda index: index["blocks"][0]["blob_sha256s"].__setitem__(0, "é" * 64), "the SHA-256 of each"),
        (lambda index: index["blocks"][0]["blob_sha256s"].__setitem__(0, None), "the SHA-256 of each"),
        (lambda index: index["blocks"][0]["blob_sha256s"].append("0" * 64), "the SHA-256 of each"),
        (lambda index: index["functions"].update(alpha=[2, 3]), "must be .target, record, cubin."),
        (lambda index: index["functions"].update(alpha="abc"), "must be .target, record, cubin."),
        (lambda index: index["functions"]["alpha"].__setitem__(0, 9), "a function gives something other than a string"),
        (lambda index: index["functions"]["alpha"].__setitem__(0, ["sm_90a"]), "something other than a string"),
        (lambda index: index["functions"]["alpha"].__setitem__(0, "sm_9x"), "'sm_9x' is not a target"),
        (lambda index: index["functions"]["alpha"].__setitem__(0, "sm_90a\n"), "is not a target"),
        (lambda index: index["functions"]["alpha"].__setitem__(0, "records"), "'records' is not a target"),
        (
            lambda index: index["functions"]["alpha"].__setitem__(0, "sm_100a"),
            "for sm_100a has its cubin in blob ., which is of kind 'sm_9x'",
        ),
        (
            lambda index: index["functions"]["alpha"].__setitem__(1, False),
            "a function gives something other than an int",
        ),
        (lambda index: index["functions"]["alpha"].__setitem__(2, 2.0), "a function gives something other than an int"),
        (lambda index: index["functions"]["alpha"].__setitem__(2, -1), "a function gives a number of a blob outside"),
        (lambda index: index["functions"]["alpha"].__setitem__(2, 10), "a function gives a number of a blob outside"),
        (lambda index: index["functions"]["alpha"].__setitem__(2, 10**30), "a number of a blob outside"),
        (
            lambda index: index["functions"]["alpha"].__setitem__(1, index["functions"]["alpha"][2]),
            "has its record in blob",
        ),
        (lambda index: index["functions"]["alpha"].__setitem__(2, 0), "has its cubin in blob 0, which is of kind"),
        (lambda index: index["functions"].update(beta=index["functions"]["alpha"]), "two functions share a record"),
        (lambda index: index["functions"].pop("alpha"), "nothing uses blob"),
        (lambda index: index["tables"].pop("gemm"), "nothing uses blob"),
        (lambda index: index["tables"].update(gemm=True), "a table gives something other than an integer"),
        (lambda index: index["tables"].update(gemm=99), "a table gives a number of a blob outside"),
        (lambda index: index["tables"].update(gemm=2), "table 'gemm' is in blob 2, which is of kind 'records'"),
    ],
)
def test_reader_rejects_index_that_breaks_a_rule(path: Path, parts: Parts, edit: Edit, match: str) -> None:
    edit(parts.index)
    refuse_index(path, parts, match)


@pytest.mark.parametrize("name", ["", "a b", "a\n", "\x00", "\x7f", "é", "a\u202eb", "x" * 256])
@pytest.mark.parametrize("where", ["functions", "tables"])
def test_reader_rejects_unprintable_name(path: Path, parts: Parts, where: str, name: str) -> None:
    entries = parts.index[where]
    entries[name] = entries.pop(min(entries))
    refuse_index(path, parts, "cannot name")


def test_reader_rejects_duplicate_function(path: Path, parts: Parts) -> None:
    text = encode(parts.index).replace(b'"beta":', b'"alpha":')
    refuse(path, assemble(text, parts.blocks), reader.IndexMalformed, "'alpha' occurs twice")


def test_reader_rejects_unsorted_functions(path: Path, parts: Parts) -> None:
    functions = parts.index["functions"]
    functions["alpha"] = functions.pop("alpha")
    text = json.dumps(parts.index, separators=(",", ":")).encode()
    refuse(path, assemble(text, parts.blocks), reader.IndexMalformed, "not canonical")


def test_reader_rejects_duplicate_blob(path: Path, parts: Parts) -> None:
    digests = parts.index["blocks"][row_of(parts, "sm_9x")]["blob_sha256s"]
    digests[1] = digests[0]
    refuse_index(path, parts, "holds a blob that its kind has already")


def test_reader_rejects_hole_between_blocks_and_index(path: Path, parts: Parts) -> None:
    data = assemble(parts.index, [*parts.blocks, b"hole"])
    refuse(path, data, reader.IndexMalformed, "its blocks end at byte")


def test_reader_rejects_block_that_overlaps_the_index(path: Path, parts: Parts) -> None:
    parts.index["blocks"][-1]["length"] += 1
    refuse_index(path, parts, "its blocks end at byte")


def test_reader_rejects_decompression_bomb_in_block_size(path: Path, parts: Parts) -> None:
    parts.index["blocks"][0]["blob_lengths"][0] = 2**40
    data = assemble(parts.index, parts.blocks)
    refuse(path, data, reader.SizeLimitExceeded, "block 0 declares 1099511627")


def test_reader_rejects_block_of_many_blobs_above_the_limit(path: Path, parts: Parts) -> None:
    parts.index["blocks"][0]["blob_lengths"] = [40 << 20, 40 << 20]
    refuse(path, assemble(parts.index, parts.blocks), reader.SizeLimitExceeded, "block 0 declares 83886080")


# Blocks


def replace_block(path: Path, parts: Parts, kind: str, edit: Callable[[bytes], bytes], sign: bool = True) -> Archive:
    """Open the archive with the blocks of `kind` changed by `edit`, and signed again unless told otherwise."""
    number = row_of(parts, kind)
    parts.blocks[number] = edit(parts.blocks[number])
    changed = sign_blocks(parts) if sign else parts
    path.write_bytes(assemble(changed.index, changed.blocks))
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

    number = row_of(parts, "sm_9x")
    parts.index["blocks"][number]["blob_lengths"] = [200, 100]
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
    number = row_of(parts, kind)
    row = parts.index["blocks"][number]
    raw = zstandard.decompress(parts.blocks[number])
    start = sum(row["blob_lengths"][:at])
    raw = raw[:start] + data + raw[start + row["blob_lengths"][at] :]
    row["blob_lengths"][at] = len(data)
    row["blob_sha256s"][at] = hashlib.sha256(data).hexdigest()
    return replace_block(path, parts, kind, lambda block: zstandard.compress(raw))


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
        replace_document(path, parts, "records", parts.index["functions"]["alpha"][1] - 2, data) as archive,
        pytest.raises(reader.DocumentMalformed, match=match),
    ):
        archive.record("alpha")


@pytest.mark.parametrize("key", ["name", "target", "cubin"])
def test_reader_rejects_record_that_disagrees_with_the_index(path: Path, parts: Parts, key: str) -> None:
    data = encode({**record("alpha"), key: "other"})
    with (
        replace_document(path, parts, "records", parts.index["functions"]["alpha"][1] - 2, data) as archive,
        pytest.raises(reader.DocumentMalformed, match=f"its {key} is 'other' where the index has"),
    ):
        archive.record("alpha")


def test_reader_rejects_swapped_cubins(path: Path, parts: Parts) -> None:
    alpha, beta = parts.index["functions"]["alpha"], parts.index["functions"]["beta"]
    alpha[2], beta[2] = beta[2], alpha[2]
    path.write_bytes(assemble(parts.index, parts.blocks))
    with Archive.open(path) as archive, pytest.raises(reader.DocumentMalformed, match="its cubin is"):
        archive.record("alpha")


def test_reader_rejects_another_target_of_the_same_generation(path: Path, parts: Parts) -> None:
    parts.index["functions"]["gamma"][0] = "sm_103a"
    path.write_bytes(assemble(parts.index, parts.blocks))
    with (
        Archive.open(path) as archive,
        pytest.raises(reader.DocumentMalformed, match="its target is 'sm_100a' where the index has 'sm_103a'"),
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
    assert {"block 0 (tables)", "blob 9 (sm_9x)", "record alpha", "table gemm"} <= set(subjects)


def test_verify_names_what_is_broken_and_goes_on(path: Path, parts: Parts) -> None:
    with replace_block(path, parts, "records", lambda block: b"garbage") as archive:
        failed = [check.subject for check in archive.verify() if not check.ok]
    blobs = [f"blob {number} (records)" for number in (2, 3, 4, 5)]
    assert sorted(failed) == sorted(["block 1 (records)", *blobs, *(f"record {name}" for name in CUBINS)])


def test_verify_finds_a_changed_blob(path: Path, parts: Parts) -> None:
    with replace_block(path, parts, "sm_10x", lambda block: zstandard.compress(b"C" * 10 + bytes(10))) as archive:
        failed = [check for check in archive.verify() if not check.ok]
    assert [check.subject for check in failed] == ["blob 7 (sm_10x)"]
    assert "SHA-256" in failed[0].detail


def test_verify_finds_a_bad_table(path: Path, parts: Parts) -> None:
    with replace_document(path, parts, "tables", 1, b"[]") as archive:
        failed = [check.subject for check in archive.verify() if not check.ok]
    assert failed == ["table gemm"]


# Fuzzing; tests/fuzz_archive.py runs it for as long as you like


def test_fuzzed_archives_raise_only_archive_errors() -> None:
    outcomes = fuzz(seconds=60, seed=1, rounds=20)
    assert {outcome.split(":")[0] for outcome in outcomes} == set(HOWS)


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=200, deadline=None)
@given(junk=st.binary(max_size=300))
def test_no_junk_escapes(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.aot"
    for data in (junk, b"CUTEAOT\0" + junk, assemble(junk, []), assemble(b"", [], stored=junk)):
        path.write_bytes(data)
        assert read_everything(path, []) != "intact"
