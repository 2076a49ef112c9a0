"""Several archives as one: the last has its way, each entry keeps to the functions of its own file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime import ArchiveError, ArgumentError, DeviceError, KernelMiss, Library, RecordError
from runtime.container.archive import Archive
from runtime.container.errors import UnknownEntry
from runtime.serve.layers import open_archives

from .recording_driver import FakeTensor, FakeTorch, RecordingDriver, entry, gemm_record, signature, write_archive

K = 512
A, B, C = signature(1024, K), signature(2048, K), signature(4096, K)


def record(name: str, block: int, **more: Any) -> dict[str, Any]:
    """A record whose launches show in `block` which of several with one name it is."""
    found = gemm_record(name, **more)
    found["program"]["nodes"][1] = ["const", 32, block]
    return found


@pytest.fixture
def driver(torch: FakeTorch) -> RecordingDriver:
    return RecordingDriver()


@pytest.fixture
def files(tmp_path: Path, driver: RecordingDriver) -> list[Path]:
    """A base with A and B by "same" and "old", and a patch with B and C by another "same" and "new"."""
    base, patch = tmp_path / "base.aot", tmp_path / "patch.aot"
    driver.kernels |= write_archive(
        base,
        [record("same", 32), record("old", 64)],
        [entry(A, [(None, "same")]), entry(B, [(16, "same"), (None, "old")])],
    )
    driver.kernels |= write_archive(
        patch, [record("same", 96), record("new", 128)], [entry(B, [(None, "same")]), entry(C, [(None, "new")])]
    )
    return [base, patch]


@pytest.fixture
def library(files: list[Path], driver: RecordingDriver) -> Library:
    return Library(open_archives(files), driver)


def launched(library: Library, driver: RecordingDriver, n: int, m: int = 5) -> tuple[str, int]:
    library.gemm(FakeTensor((m, K)), FakeTensor((n, K)), out=FakeTensor((m, n)))
    return driver.launches[-1].symbol, driver.launches[-1].block[0]


def test_last_archive_replaces_entries_and_adds_new_ones(library: Library, driver: RecordingDriver) -> None:
    for _ in range(2):
        assert launched(library, driver, 1024) == ("kernel_same", 32), "the base's, of its own file"
        assert launched(library, driver, 2048) == ("kernel_same", 96), "replaced by the patch"
        assert launched(library, driver, 2048, 500) == ("kernel_same", 96), "ranges and all"
        assert launched(library, driver, 4096) == ("kernel_new", 128), "new"
    with pytest.raises(KernelMiss, match="the nearest of 3 entries"):
        launched(library, driver, 8)


def test_order_of_the_archives_decides(files: list[Path], driver: RecordingDriver) -> None:
    library = Library(open_archives(files[::-1]), driver)
    assert launched(library, driver, 2048, 500) == ("kernel_old", 64)
    assert launched(library, driver, 4096) == ("kernel_new", 128)


def test_three_layers_and_one_twice(files: list[Path], driver: RecordingDriver) -> None:
    library = Library(open_archives([*files, files[0]]), driver)
    assert launched(library, driver, 2048, 500) == ("kernel_old", 64)
    assert launched(library, driver, 4096) == ("kernel_new", 128)


def test_functions_show_the_patch_first(library: Library, driver: RecordingDriver) -> None:
    assert list(library.functions) == ["new", "same", "old"]
    assert len(library.functions) == 3
    assert "old" in library.functions
    assert library.functions.get("nothing") is None
    library.functions["same"](FakeTensor((3, K)), FakeTensor((1024, K)), FakeTensor((3, 1024)))
    assert driver.launches[-1].block[0] == 96
    assert library.functions["same"] is library.functions["same"]


def test_unknown_function_is_told_every_file(library: Library, files: list[Path]) -> None:
    with pytest.raises(UnknownEntry, match=r"patch\.aot, .*base\.aot: have no function 'nothing' among their 3"):
        library.functions["nothing"]


def test_digest_covers_every_archive_and_their_order(files: list[Path], driver: RecordingDriver) -> None:
    digests = {Library(open_archives(paths), driver).digest for paths in (files, files[::-1], files[:1], files[1:])}
    assert len(digests) == 4
    assert Library(open_archives(files[:1]), driver).digest == Archive.open(files[0]).digest
    assert [a.path for a in Library(open_archives(files), driver).stats().archives] == [str(p) for p in files]


def test_preload_takes_the_merged_table(library: Library, driver: RecordingDriver) -> None:
    assert set(library.preload(tokens=[5])) == {"same", "new"}
    assert driver.count("load") == 3, "two of them have one name"
    before = driver.count("load")
    test_last_archive_replaces_entries_and_adds_new_ones(library, driver)
    assert driver.count("load") == before


def test_patch_for_another_target_leaves_the_base_alone(
    tmp_path: Path, files: list[Path], driver: RecordingDriver
) -> None:
    other = tmp_path / "other.aot"
    driver.kernels |= write_archive(
        other, [record("same", 96, target="sm_100a")], [entry(A, [(None, "same")], target="sm_100a")]
    )
    library = Library(open_archives([files[0], other]), driver)
    assert launched(library, driver, 1024) == ("kernel_same", 32)


def test_patch_without_a_gemm_table_adds_functions(tmp_path: Path, files: list[Path], driver: RecordingDriver) -> None:
    from aot.pack.write import Package

    from .recording_driver import cubin

    package = Package()
    package.add_function(record("norm", 96), cubin("norm"))
    package.write(tmp_path / "norm.aot")
    library = Library(open_archives([files[0], tmp_path / "norm.aot"]), driver)
    assert list(library.functions) == ["norm", "old", "same"]
    assert launched(library, driver, 1024) == ("kernel_same", 32)


def test_errors_name_the_right_file(tmp_path: Path, files: list[Path], driver: RecordingDriver) -> None:
    broken = record("same", 96)
    broken["arguments"][1]["shape"] = ["k", "n"]
    bad = tmp_path / "bad.aot"
    driver.kernels |= write_archive(bad, [broken], [entry(signature(K, K), [(None, "same")])])
    library = Library(open_archives([bad, files[0]]), driver)
    with pytest.raises(RecordError, match=rf"^{re.escape(str(bad))}: the gemm table has same for"):
        launched(library, driver, K)
    write_archive(bad, [record("same", 96)], [entry(A, [(None, "nobody")])])
    library = Library(open_archives([files[0], bad]), driver)
    with pytest.raises(RecordError, match=rf"^{re.escape(str(bad))}: .*'nobody' is not in the archive"):
        launched(library, driver, 1024)
    bad.write_bytes(b"nothing of the kind")
    with pytest.raises(ArchiveError, match=re.escape(str(bad))):
        runtime.load([files[0], bad])


def test_ranked_entry_is_blamed_on_its_file(
    tmp_path: Path, files: list[Path], driver: RecordingDriver, caplog: pytest.LogCaptureFixture
) -> None:
    patch = tmp_path / "ranked.aot"
    write_archive(patch, [record("same", 96)], [entry(A, [(None, "same")], state="ranked")])
    library = Library(open_archives([files[0], patch]), driver)
    launched(library, driver, 2048)
    assert caplog.messages == []
    launched(library, driver, 1024)
    assert caplog.messages[0].startswith(f"{patch}: ")


def test_wrong_gpu_is_told_what_all_of_them_have(library: Library, files: list[Path], driver: RecordingDriver) -> None:
    driver.capability = (10, 0)
    with pytest.raises(
        DeviceError, match=rf"{re.escape(str(files[0]))}, .*patch\.aot has kernels for sm_90a; this GPU"
    ):
        launched(library, driver, 1024)


def test_no_path_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no path was given"):
        runtime.load([])


def test_closing_closes_every_file(library: Library, driver: RecordingDriver) -> None:
    for n in (1024, 2048, 4096):
        launched(library, driver, n)
    library.close()
    assert driver.count("unload") == 3
    for archive in library._now.layers.archives:
        with pytest.raises(ArchiveError, match="closed"):
            archive.record("same")


def test_a_file_that_cannot_be_opened_leaves_none_open(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    close = Archive.close

    def watched(self: Archive) -> None:
        closed.append(self.path)
        close(self)

    monkeypatch.setattr(Archive, "close", watched)
    with pytest.raises(ArchiveError):
        runtime.load([*files, "/nonexistent.aot"])
    assert closed == [str(path) for path in files]
