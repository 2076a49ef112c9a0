"""`on_damage="torch"`: a server goes on without a kernel whose bytes in the file are damaged, and says so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime import ArchiveError, ArgumentError, KernelMiss, Library
from runtime.container.archive import Archive
from runtime.container.errors import DigestMismatch
from runtime.serve.options import Options

from .recording_driver import (
    FakeTensor,
    FakeTorch,
    RecordingDriver,
    entry,
    gemm_record,
    operands_record,
    signature,
    write_archive,
)

N, K = 256, 512
PLAIN = signature(N, K)
SCALED = signature(N, K, dtype="e4m3", d="bf16", scaling="tensor")
SILU = signature(N, K, dtype="e4m3", d="bf16", scaling="tensor", epilogue="silu")


def flip(path: Path, kind: str) -> None:
    """Change a byte of a block, in place."""
    with Archive.open(path) as archive:
        block = next(block for block in archive.blocks if block.kind == kind)
    data = bytearray(path.read_bytes())
    data[block.offset + block.length // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def driver(torch: FakeTorch) -> RecordingDriver:
    return RecordingDriver()


@pytest.fixture
def path(tmp_path: Path, driver: RecordingDriver) -> Path:
    found = tmp_path / "model.aot"
    records = [gemm_record("f"), operands_record("scaled", SCALED), operands_record("silu", SILU)]
    rows = [entry(PLAIN, [(None, "f")]), entry(SCALED, [(None, "scaled")]), entry(SILU, [(None, "silu")])]
    driver.kernels |= write_archive(found, records, rows)
    return found


def opened(path: Path, driver: RecordingDriver, **options: Any) -> Library:
    return Library(Archive.open(path), driver, Options(**{"on_damage": "torch"} | options))


def call(library: Library, m: int = 5) -> Any:
    return library.gemm(FakeTensor((m, K)), FakeTensor((N, K)))


def scaled(library: Library, **words: Any) -> Any:
    a, b = FakeTensor((5, K), "float8_e4m3fn"), FakeTensor((N, K), "float8_e4m3fn")
    one = FakeTensor((1,), "float32")
    return library.gemm(a, b, scale_a=one, scale_b=one, **words)


@pytest.mark.parametrize("kind", ["sm_9x", "records"])
def test_torch_computes_what_a_damaged_kernel_was_for(
    path: Path, driver: RecordingDriver, torch: FakeTorch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    flip(path, kind)
    library = opened(path, driver)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            call(library)
    assert (torch.matmuls, driver.launches) == (3, [])
    stats = library.stats()
    assert (stats.damaged, stats.misses, stats.fallbacks) == (("f",), 3, 3)
    assert [refusal.reason for refusal in stats.refusals] == ["damaged"]
    assert list(library.misses.values()) == [3]
    said = [record.getMessage() for record in caplog.records]
    assert sum("f serves nothing any more, as it is damaged in the file" in line for line in said) == 1
    assert 'cute_aot_damaged{library="x"} 1\n' in library.prometheus("x")


def test_damaged_file_is_read_once(path: Path, driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(path, "sm_9x")
    library, reads, cubin = opened(path, driver), list[str](), Archive.cubin

    def read(archive: Archive, name: str) -> bytes:
        reads.append(name)
        return cubin(archive, name)

    monkeypatch.setattr(Archive, "cubin", read)
    for m in (5, 5, 6):
        call(library, m)
    assert reads == ["f"]


@pytest.mark.parametrize("kind", ["sm_9x", "records"])
def test_damage_is_an_error_unless_told_otherwise(path: Path, driver: RecordingDriver, kind: str) -> None:
    flip(path, kind)
    for options in ({"on_damage": "error"}, {"on_damage": "error", "on_miss": "torch"}):
        library = opened(path, driver, **options)
        with pytest.raises(DigestMismatch):
            call(library)
        with pytest.raises(DigestMismatch):
            library.preload()


def test_preload_goes_on_without_what_is_damaged(path: Path, driver: RecordingDriver, torch: FakeTorch) -> None:
    flip(path, "sm_9x")
    library = opened(path, driver)
    assert library.preload(tokens=[5]) == ()
    assert library.stats().damaged == ("f", "scaled", "silu")
    call(library)
    assert torch.matmuls == 1


def test_another_function_of_the_entry_serves_first(
    tmp_path: Path, driver: RecordingDriver, torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "two.aot"
    rows = [entry(PLAIN, [(16, "few"), (None, "many")])]
    driver.kernels |= write_archive(path, [gemm_record("few"), gemm_record("many")], rows)
    cubin = Archive.cubin

    def damaged(archive: Archive, name: str) -> bytes:
        if name == "few":
            raise DigestMismatch(f"{path}: made up")
        return cubin(archive, name)

    monkeypatch.setattr(Archive, "cubin", damaged)
    for preloads in (False, True):
        library = opened(path, driver)
        if preloads:
            assert library.preload(tokens=[5]) == ("many",)
        call(library)
        assert (torch.matmuls, driver.launches[-1].symbol) == (0, "kernel_many")
        assert library.stats().launches_by_function == {"many": 1}


def test_torch_computes_8_bits_where_it_has_one_call_for_them(
    path: Path, driver: RecordingDriver, torch: FakeTorch
) -> None:
    flip(path, "sm_9x")
    library = opened(path, driver)
    assert scaled(library).shape == (5, N)
    assert [name for name, _, _ in torch.products] == ["_scaled_mm"]
    with pytest.raises(KernelMiss, match=r"(?s)no kernel .*silu: .* block 1 has SHA-256"):
        scaled(library, epilogue="silu")
    torch.refuses = "_scaled_mm"
    with pytest.raises(KernelMiss):
        scaled(library)
    assert (library.stats().misses, library.stats().fallbacks) == (3, 1)


def test_function_that_is_called_by_its_name_is_an_error(path: Path, driver: RecordingDriver) -> None:
    flip(path, "sm_9x")
    library = opened(path, driver)
    tensors = [FakeTensor((5, K)), FakeTensor((N, K)), FakeTensor((5, N))]
    with pytest.raises(ArchiveError):
        library.functions["f"](*tensors, stream=1)


@pytest.mark.parametrize("kind", ["index", "tables"])
def test_damaged_index_or_table_is_refused_all_the_same(path: Path, driver: RecordingDriver, kind: str) -> None:
    if kind == "index":
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
        with pytest.raises(DigestMismatch):
            opened(path, driver)
    else:
        flip(path, kind)
        with pytest.raises(DigestMismatch):
            call(opened(path, driver))


def test_reload_refuses_damaged_files_and_goes_on_with_the_old(path: Path, driver: RecordingDriver) -> None:
    library = opened(path, driver)
    call(library)
    other = path.with_name("other.aot")
    driver.kernels |= write_archive(other, [gemm_record("g")], [entry(PLAIN, [(None, "g")])])
    flip(other, "sm_9x")
    with pytest.raises(DigestMismatch):
        library.reload(other)
    call(library)
    assert library.stats().launches_by_function == {"f": 2}


def test_good_copy_serves_again_after_a_reload(path: Path, driver: RecordingDriver, torch: FakeTorch) -> None:
    other = path.with_name("other.aot")
    driver.kernels |= write_archive(other, [gemm_record("f", tile_m=16)], [entry(PLAIN, [(None, "f")])])
    flip(path, "sm_9x")
    library = opened(path, driver)
    call(library)
    library.reload(other)
    call(library)
    assert (torch.matmuls, library.stats().damaged, len(driver.launches)) == (1, (), 1)


def test_words_that_make_no_sense_are_refused(path: Path) -> None:
    with pytest.raises(ArgumentError, match="on_damage must be one of"):
        runtime.load(path, on_damage="ignore")
    with pytest.raises(ArgumentError, match="batch_invariant=True with on_damage='torch'"):
        runtime.load(path, batch_invariant=True, on_damage="torch")
