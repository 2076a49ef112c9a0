"""The reading side of the archive: what it gives back, and every way in which a file can be wrong."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from aot.pack import write as pack
from runtime.container import archive as reader
from runtime.container import canonical
from runtime.container.archive import Archive

from .archive_samples import CUBINS, NOTHING, TARGETS, record, refuse, replace_block, replace_document
from .archive_samples import parts as parts
from .archive_samples import path as path
from .fuzz_archive import (
    HOWS,
    Parts,
    assemble,
    fuzz,
    mutate_bytes,
    read_everything,
)

ROOT = Path(__file__).resolve().parents[1]


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


@settings(max_examples=200)
@given(junk=st.binary(max_size=300))
def test_no_junk_escapes(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.aot"
    for data in (junk, b"CUTEAOT\0" + junk, assemble(NOTHING, raw=junk), assemble(NOTHING, stored=junk)):
        path.write_bytes(data)
        assert read_everything(path, []) != "intact"
