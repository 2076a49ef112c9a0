"""What opening a large archive costs a process, and that processes of every kind can share one file."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime import DeviceError, Library
from runtime.container.archive import Archive
from runtime.device.driver import Driver

from .recording_driver import (
    FakeTensor,
    FakeTorch,
    RecordingDriver,
    cubin,
    entry,
    gemm_record,
    signature,
    write_archive,
)

ROOT = Path(__file__).resolve().parent.parent
FUNCTIONS, K = 1200, 512
MOST_BYTES = 5 << 20

PROLOGUE = """
import gc, os, sys
def private_bytes():
    # pages of this process alone: what a file is mapped to or cached in is not among them
    gc.collect()
    rows = (line.split() for line in open("/proc/self/smaps_rollup"))
    return sum(int(row[1]) for row in rows if row[0] in ("Private_Dirty:", "Private_Clean:")) << 10
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[bytes, dict[str, tuple[int, ...]]]]:
    path = tmp_path_factory.mktemp("large") / "large.aot"
    records = [gemm_record(f"function{i:05}", tile_m=16 << (i % 4)) for i in range(FUNCTIONS)]
    entries = [entry(signature(128 * (i + 1), K), [(None, f"function{i:05}")]) for i in range(FUNCTIONS)]
    return path, write_archive(path, records, entries)


def python(script: str, *arguments: Any) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def open_cost(path: Path, small: Path, then: str = "") -> int:
    """The private memory that a fresh process has more after it opened `path`, in bytes; the first open is not it."""
    script = f"""{PROLOGUE}
import runtime
warm = runtime.load(sys.argv[2])
before = private_bytes()
library = runtime.load(sys.argv[1])
{then}
print(private_bytes() - before)
"""
    return int(python(script, path, small))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "small.aot"
    write_archive(path, [gemm_record("one")], [entry(signature(), [(None, "one")])])
    return path


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="Linux says what memory is a process's own")
def test_opening_a_thousand_kernels_takes_less_than_5_mb(large: Any, small: Path) -> None:
    assert open_cost(large[0], small) < MOST_BYTES


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="Linux says what memory is a process's own")
def test_memory_that_is_kept_would_be_seen(large: Any, small: Path) -> None:
    assert open_cost(large[0], small, "kept = bytearray(os.urandom(6 << 20))") > MOST_BYTES


def test_opening_writes_nothing_and_works_where_nothing_may_be_written(large: Any, tmp_path: Path) -> None:
    folder = tmp_path / "read-only"
    folder.mkdir()
    (folder / "model.aot").write_bytes(large[0].read_bytes())
    (folder / "model.aot").chmod(0o444)
    folder.chmod(0o555)
    script = """
import os, sys
import runtime
def hook(event, arguments):
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        raise AssertionError(arguments)
    if event in ("os.mkdir", "os.rename", "os.remove", "os.truncate", "fcntl.flock", "fcntl.lockf", "mmap.__new__"):
        raise AssertionError((event, arguments))
sys.addaudithook(hook)
with runtime.load(sys.argv[1]) as library:
    library._now.check_files()
    print(len(library.functions))
"""
    assert int(python(script, folder / "model.aot")) == FUNCTIONS
    assert [p.name for p in folder.iterdir()] == ["model.aot"]
    folder.chmod(0o755)


def serve(library: Library, driver: RecordingDriver, number: int) -> None:
    """Load kernels of all parts of the file and launch them; in a child the first use of the device."""
    for i in range(number, FUNCTIONS, 97):
        n = 128 * (i + 1)
        library.gemm(FakeTensor((5, K)), FakeTensor((n, K)), out=FakeTensor((5, n)))
        assert driver.launches[-1].symbol == f"kernel_function{i:05}"
    assert library.stats().launches == len(driver.launches) > 10


def finish(processes: list[Any]) -> None:
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * len(processes)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_children_forked_before_the_first_use_share_the_open_file(large: Any, torch: FakeTorch) -> None:
    driver = RecordingDriver(kernels=large[1])
    library = Library(Archive.open(large[0]), driver)
    fork = multiprocessing.get_context("fork")
    finish([fork.Process(target=serve, args=(library, driver, number)) for number in range(4)])
    serve(library, driver, 0)  # the parent too: reading in a child moves nothing here


def _spawned(path: Path, number: int) -> None:
    sys.modules["torch"] = FakeTorch()
    names = [f"function{i:05}" for i in range(FUNCTIONS)]
    kernels: dict[bytes, dict[str, tuple[int, ...]]] = {cubin(name): {f"kernel_{name}": (128, 8, 24)} for name in names}
    driver = RecordingDriver(kernels=kernels)
    with Library(Archive.open(path), driver) as library:
        serve(library, driver, number)


def test_spawned_children_open_the_file_themselves(large: Any) -> None:
    spawn = multiprocessing.get_context("spawn")
    finish([spawn.Process(target=_spawned, args=(large[0], number)) for number in range(2)])


def test_device_that_was_used_before_the_fork_is_refused(large: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver._device, driver._process = 0, os.getpid() + 1  # as a child finds it
    library = Library(Archive.open(large[0]), driver)
    for refused in (library.preload, lambda: library.functions["function00000"].load()):
        with pytest.raises(DeviceError, match="fork before the first use"):
            refused()
