"""Workspaces on a recording driver: whose they are, how large, when they are zeroed, and when they are given back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from aot.cli.commands.show import _arguments
from runtime import DeviceError, Library, RecordError
from runtime.container.archive import Archive
from runtime.device.workspace import Need, Workspaces
from runtime.program.record import Record

from .recording_driver import (
    FakeTensor,
    FakeTorch,
    RecordingDriver,
    entry,
    gemm_record,
    signature,
    write_archive,
)

SMALL, LARGE, FIXED = 1 << 10, 1 << 16, 512
RECORDS = [
    gemm_record("plain"),
    gemm_record("small", workspaces=((SMALL, "max_active_clusters", False), (64, "max_active_clusters", True))),
    gemm_record("large", workspaces=((LARGE, "max_active_clusters", False), (64, "max_active_clusters", True))),
    gemm_record("fixed", workspaces=((FIXED, None, True), (FIXED, None, True))),
]
ENTRIES = [entry(signature(1024 * (i + 1), 512), [(None, r["name"])]) for i, r in enumerate(RECORDS)]
CLUSTERS = 66


@pytest.fixture
def driver(torch: FakeTorch) -> RecordingDriver:
    return RecordingDriver(active_clusters=CLUSTERS)


@pytest.fixture
def library(tmp_path: Path, driver: RecordingDriver) -> Library:
    driver.kernels = write_archive(tmp_path / "model.aot", RECORDS, ENTRIES)
    return Library(Archive.open(tmp_path / "model.aot"), driver)


def gemm(library: Library, name: str, stream: int, m: int = 3) -> None:
    n = 1024 * (1 + [r["name"] for r in RECORDS].index(name))
    library.gemm(FakeTensor((m, 512)), FakeTensor((n, 512)), out=FakeTensor((m, n)), stream=stream)


def spaces(driver: RecordingDriver) -> list[int]:
    """The workspaces of the last launch."""
    return [int.from_bytes(p, "little") for p in driver.launches[-1].parameters[3:]]


def test_workspace_is_as_large_as_the_device_makes_it(library: Library, driver: RecordingDriver) -> None:
    gemm(library, "small", 5)
    gemm(library, "fixed", 6)
    assert [*driver.allocated.values()] == [
        (CLUSTERS * SMALL, False),
        (CLUSTERS * 64, True),
        (FIXED, True),
        (FIXED, True),
    ]
    assert len(set(spaces(driver))) == 2


def test_launches_of_a_stream_share_a_workspace_and_streams_do_not(library: Library, driver: RecordingDriver) -> None:
    seen: dict[int, list[int]] = {}
    for stream in (5, 7, 5, 7):
        for m in (3, 300):
            gemm(library, "small", stream, m)
            seen.setdefault(stream, spaces(driver))
            assert spaces(driver) == seen[stream]
    assert not set(seen[5]) & set(seen[7])
    assert len(driver.allocated) == 4


def test_every_capture_has_workspaces_of_its_own(library: Library, driver: RecordingDriver) -> None:
    used = []
    for capture in (-1, 1, 2, -1):
        driver.captures[5] = capture
        gemm(library, "small", 5)
        used.append(tuple(spaces(driver)))
    assert used[0] == used[3]
    assert len({pointer for pair in used for pointer in pair}) == 6


def test_functions_share_what_is_large_enough(library: Library, driver: RecordingDriver) -> None:
    gemm(library, "small", 5)
    small = spaces(driver)
    gemm(library, "large", 5)
    large = spaces(driver)
    assert large[0] != small[0], "it was too small"
    assert large[1] == small[1]
    gemm(library, "small", 5)
    assert spaces(driver) == small, "an address that a graph may hold stays"


def test_functions_called_by_name_get_theirs_too(library: Library, driver: RecordingDriver) -> None:
    library.functions["small"](FakeTensor((3, 512)), FakeTensor((2048, 512)), FakeTensor((3, 2048)), stream=5)
    assert spaces(driver) == [*driver.allocated]


def test_functions_without_a_workspace_allocate_and_ask_nothing(library: Library, driver: RecordingDriver) -> None:
    gemm(library, "plain", 5)
    before = len(driver.log)
    gemm(library, "plain", 5)
    assert driver.allocated == {}
    assert [what for what, *_ in driver.log[before:]].count("stream_key") == 0


def test_closing_frees_every_workspace_once(library: Library, driver: RecordingDriver) -> None:
    for stream in (5, 7):
        gemm(library, "small", stream)
        gemm(library, "large", stream)
    library.close()
    library.close()
    assert sorted(pointer for what, pointer, *_ in (e for e in driver.log if e[0] == "free")) == sorted(
        driver.allocated
    )


def test_memory_that_is_not_there_is_named_and_asked_for_again(library: Library, driver: RecordingDriver) -> None:
    driver.failing = "cuMemAlloc"
    with pytest.raises(DeviceError, match="cuMemAlloc"):
        gemm(library, "small", 5)
    driver.failing = ""
    gemm(library, "small", 5)
    assert len(driver.launches) == 1


def test_forgetting_captures_frees_theirs_and_no_others(library: Library, driver: RecordingDriver) -> None:
    for capture in (-1, 1, 2):
        driver.captures[5] = capture
        gemm(library, "small", 5)
    streams, of_captures = [*driver.allocated][:2], [*driver.allocated][2:]
    library.forget_captures()
    assert [e[1] for e in driver.log if e[0] == "free"] == of_captures
    driver.captures[5] = -1
    gemm(library, "small", 5)
    assert spaces(driver) == streams
    driver.captures[5] = 2
    gemm(library, "small", 5)
    assert not set(spaces(driver)) & set(of_captures)


def test_one_that_cannot_be_freed_keeps_no_others(driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    workspaces = Workspaces(driver)
    first, second = (workspaces.pointers(stream, (Need(64, True),))[0] for stream in (5, 7))
    freed: list[int] = []

    def free(pointer: int) -> None:
        freed.append(pointer)
        if pointer == first:
            raise DeviceError("refused")

    monkeypatch.setattr(driver, "free", free)
    with pytest.raises(DeviceError, match="refused"):
        workspaces.close()
    workspaces.close()
    assert freed == [first, second]
    with pytest.raises(DeviceError, match="closed"):
        workspaces.pointers(5, (Need(64, True),))


def test_workspace_and_overlapping_launches_do_not_go_together() -> None:
    changed = gemm_record("both", workspaces=((64, None, True),))
    launch = changed["program"]["launches"][0]
    launch["attributes"].append([6, [launch["grid"][2]]])
    with pytest.raises(RecordError, match="overlap"):
        Record.from_json(changed)


def test_threads_that_need_one_workspace_at_once_get_one(driver: RecordingDriver) -> None:
    workspaces = Workspaces(driver)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(workspaces.pointers(5, (Need(64, True),)))) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == len(driver.allocated) == 1


def test_reader_that_does_not_know_an_argument_names_it(tmp_path: Path) -> None:
    """What a reader from before workspaces says of one."""
    changed = gemm_record("later", workspaces=((64, None, True),))
    changed["arguments"][-2]["kind"] = "scratchpad"
    with pytest.raises(RecordError, match="function later argument 'space0': unknown kind 'scratchpad'"):
        Record.from_json(changed)


def test_workspaces_are_listed() -> None:
    rows = {row[0]: row[-1] for row in _arguments(RECORDS[1]["arguments"])}
    assert rows["space0"] == "1024 bytes for each of max_active_clusters, which the runtime provides"
    assert rows["space1"] == "64 bytes of zeros for each of max_active_clusters, which the runtime provides"
