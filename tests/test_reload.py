"""A library takes new files in service under load, keeps to the old where these are wrong, and drops those safely."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from aot.pack.write import Package
from runtime import ArchiveError, DeviceError, KernelMiss, Library, RecordError
from runtime.container.archive import Archive
from runtime.gemm.signature import Signature
from runtime.serve.layers import open_archives

from .recording_driver import (
    FakeTensor,
    FakeTorch,
    RecordingDriver,
    cubin,
    entry,
    gemm_record,
    operands_record,
    signature,
    table,
    write_archive,
)
from .reloaded import K, N, call, unloaded, version, write
from .reloaded import driver as driver
from .reloaded import impatient as impatient
from .reloaded import library as library
from .reloaded import path as path


def test_unchanged_file_changes_nothing(library: Library, driver: RecordingDriver) -> None:
    call(library)
    plans = library._now.plans
    assert library.reload() is False
    assert library._now.plans is plans
    assert (library.stats().reloads, library.stats().replaced) == (0, 0)


def test_new_file_serves_every_way_of_calling(library: Library, path: Path, driver: RecordingDriver) -> None:
    ways: list[dict[str, Any]] = [{}, {"out": FakeTensor((5, N))}, {"stream": 7}, {"epilogue": "none"}]
    for number in range(3):
        for way in ways * 2:
            assert version(library, driver, **way) == f"kernel_v{number}"
        write(path, number + 1, driver)
        assert library.reload() is True
    assert library.stats().reloads == 3
    assert library.stats().launches == 24


def test_words_keep_their_meaning_in_the_native_table(tmp_path: Path, driver: RecordingDriver) -> None:
    path = tmp_path / "model.aot"
    words = ("silu", "relu")
    for order in (words, words[::-1]):
        records = [operands_record(f"{w}{order[0]}", signature(N, K, epilogue=w)) for w in words]
        entries = [entry(signature(N, K, epilogue=w), [(None, f"{w}{order[0]}")]) for w in words]
        driver.kernels |= write_archive(path.with_suffix(".new"), records, entries)
        os.replace(path.with_suffix(".new"), path)
        if order == words:
            library = Library(Archive.open(path), driver)
        else:
            library.reload()
        for word in order * 2:
            call(library, epilogue=word)
            assert driver.launches[-1].symbol == f"kernel_{word}{order[0]}"


def test_what_was_preloaded_is_preloaded_before_the_change(
    library: Library, path: Path, driver: RecordingDriver
) -> None:
    library.preload(tokens=[5])
    write(path, 1, driver)
    library.reload()
    loads, plans = driver.count("load"), library.stats().plans_made
    assert version(library, driver) == "kernel_v1"
    assert (driver.count("load"), library.stats().plans_made) == (loads, plans)


def test_reload_keeps_to_the_signatures_that_were_preloaded(
    path: Path, driver: RecordingDriver, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = (N, 2 * N, 3 * N)

    def write_sizes(version: int, *there: int) -> None:
        records = [gemm_record(f"v{version}n{n}") for n in there]
        entries = [entry(signature(n, K), [(None, f"v{version}n{n}")]) for n in there]
        driver.kernels |= write_archive(path.with_suffix(".new"), records, entries)
        os.replace(path.with_suffix(".new"), path)

    write_sizes(1, *sizes)
    library = Library(Archive.open(path), driver)
    keys = [Signature.from_json(signature(n, K)).key() for n in sizes]
    assert library.preload(only=keys[:1]) == (f"v1n{N}",)
    assert library.preload(only=keys[1:2]) == (f"v1n{2 * N}",)
    write_sizes(2, *sizes)
    library.reload()
    now = [name for name, function in library.functions.items() if function.loaded]
    assert sorted(now) == [f"v2n{N}", f"v2n{2 * N}"]
    write_sizes(3, N)
    library.reload()
    assert f"cannot preload {keys[1]}: it has no such entry for this GPU, as it had before" in caplog.text
    assert library.functions[f"v3n{N}"].loaded
    write_sizes(4, *sizes)  # and what comes back is preloaded again
    library.reload()
    assert [function.loaded for _, function in sorted(library.functions.items())] == [True, True, False]


@pytest.mark.parametrize("damage", ["missing", "foreign", "cut", "block", "table", "tuning"])
def test_damaged_file_leaves_the_old_one_in_service(
    library: Library, path: Path, driver: RecordingDriver, damage: str
) -> None:
    call(library)
    write(path, 1, driver)
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "table":
        write_archive(path, [gemm_record("v1")], [entry(signature(N, K), [(None, "v2")])])
    elif damage == "tuning":
        package = Package()
        package.add_function(gemm_record("v1"), cubin("v1"))
        package.set_table("gemm", table([entry(signature(N, K), [(None, "v1")])]))
        package._tables["tuning"] = b"not JSON"
        package.write(path)
    else:
        changed = {
            "foreign": b"PK" + data[2:],
            "cut": data[:-1],
            "block": bytes([*data[:70], data[70] ^ 1, *data[71:]]),
        }
        fresh = path.with_suffix(".new")
        fresh.write_bytes(changed[damage])
        os.replace(fresh, path)
    with pytest.raises(RecordError if damage == "table" else ArchiveError, match=r"model\.aot"):
        library.reload()
    assert version(library, driver) == version(library, driver, m=6) == "kernel_v0"
    assert (library.stats().reloads, library.stats().replaced) == (0, 0)
    write(path, 2, driver)
    assert library.reload()
    assert version(library, driver) == "kernel_v2"


def test_file_for_another_gpu_leaves_the_old_one_in_service(
    library: Library, path: Path, driver: RecordingDriver
) -> None:
    call(library)
    driver.kernels |= write_archive(
        path.with_suffix(".new"),
        [gemm_record("v1", target="sm_100a")],
        [entry(signature(N, K), [(None, "v1")], target="sm_100a")],
    )
    os.replace(path.with_suffix(".new"), path)
    with pytest.raises(DeviceError, match="has kernels for sm_100a"):
        library.reload()
    assert version(library, driver) == "kernel_v0"


def test_kernels_that_do_not_load_leave_the_old_ones_in_service(
    library: Library, path: Path, driver: RecordingDriver
) -> None:
    library.preload()
    write(path, 1, driver)
    driver.kernels[cubin("v1")]["kernel_v1"] = (8,)
    with pytest.raises(DeviceError, match="takes parameters of"):
        library.reload()
    assert version(library, driver) == "kernel_v0"
    assert unloaded(driver) == [cubin("v1")]


def test_reload_takes_other_files_and_goes_back(library: Library, path: Path, driver: RecordingDriver) -> None:
    patch = path.with_name("patch.aot")
    write(patch, 1, driver)
    assert library.reload([path, patch])
    assert version(library, driver) == "kernel_v1"
    assert library.reload() is False, "it is these that are looked at from now on"
    assert library.reload(path)
    assert version(library, driver) == "kernel_v0"
    write(patch, 2, driver)
    assert library.reload() is False


def test_library_that_was_never_used_reloads_without_a_device(path: Path, torch: FakeTorch) -> None:
    driver = RecordingDriver()
    library = Library(Archive.open(path), driver)
    write(path, 1, driver)
    assert library.reload()
    assert driver.log == []


def test_closed_library_does_not_reload(library: Library, path: Path, driver: RecordingDriver) -> None:
    library.close()
    for refused in (library.reload, library.drop_old, library.preload):
        with pytest.raises(ArchiveError, match="closed"):
            refused()


# --- the old kernels ---


@pytest.mark.usefixtures("impatient")
def test_reloads_at_once_take_turns(library: Library, path: Path, driver: RecordingDriver) -> None:
    call(library)
    write(path, 1, driver)
    changed: list[bool] = []
    workers = [threading.Thread(target=lambda: changed.append(library.reload())) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(changed) == [False, False, False, True]
    assert version(library, driver) == "kernel_v1"


def test_misses_are_counted_over_reloads(library: Library, path: Path, driver: RecordingDriver) -> None:
    for number in (1, 2):
        with pytest.raises(KernelMiss):
            library.gemm(FakeTensor((5, K)), FakeTensor((8, K)))
        write(path, number, driver)
        library.reload()
    assert library.stats().misses == 2


def test_layers_reload_together(path: Path, driver: RecordingDriver) -> None:
    patch = path.with_name("patch.aot")
    write(patch, 1, driver)
    library = Library(open_archives([path, patch]), driver)
    assert version(library, driver) == "kernel_v1"
    write(path, 2, driver)
    assert library.reload()
    assert version(library, driver) == "kernel_v1"
    write(patch, 3, driver)
    assert library.reload()
    assert version(library, driver) == "kernel_v3"
