"""What becomes of the old kernels after a reload, and of calls that are under way."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime import ArchiveError, DeviceError, Library
from runtime.container.archive import Archive
from runtime.serve.gemm.calls import GemmCalls

from .recording_driver import (
    FakeTensor,
    FakeTorch,
    RecordingDriver,
    TorchDType,
    cubin,
    entry,
    gemm_record,
    operands_record,
    signature,
    write_archive,
)
from .reloaded import K, N, call, unloaded, version, write
from .reloaded import driver as driver
from .reloaded import impatient as impatient
from .reloaded import library as library
from .reloaded import path as path

# --- the old kernels ---


def test_old_kernels_stay_loaded_until_they_are_dropped(library: Library, path: Path, driver: RecordingDriver) -> None:
    call(library)
    old = library.functions["v0"]
    for number in (1, 2):
        write(path, number, driver)
        library.reload()
        call(library)
    old(FakeTensor((5, K)), FakeTensor((N, K)), FakeTensor((5, N)))
    assert (driver.launches[-1].symbol, unloaded(driver)) == ("kernel_v0", [])
    assert (library.stats().replaced, library.stats().kernels_loaded) == (2, 3)
    assert library.drop_old() == 0
    assert sorted(unloaded(driver)) == [cubin("v0"), cubin("v1")]
    assert driver.log.index(("synchronize",)) < driver.log.index(("unload", cubin("v0"))), "kernels may still run"
    assert (library.stats().replaced, library.stats().kernels_loaded) == (0, 1)
    with pytest.raises(ArchiveError, match=r"v0 was unloaded, .*take it from Library\.functions again"):
        old(FakeTensor((5, K)), FakeTensor((N, K)), FakeTensor((5, N)))
    with pytest.raises(ArchiveError, match="v0 was unloaded"):  # as a call sees it that had passed the check above
        old.plan(())
    assert library.drop_old() == 0
    assert driver.count("synchronize") == 1, "there was nothing to wait for"


def test_closing_unloads_the_old_kernels_too(library: Library, path: Path, driver: RecordingDriver) -> None:
    call(library)
    write(path, 1, driver)
    library.reload()
    call(library)
    library.close()
    assert sorted(unloaded(driver)) == [cubin("v0"), cubin("v1")]


def test_device_that_cannot_wait_keeps_the_old_kernels(library: Library, path: Path, driver: RecordingDriver) -> None:
    call(library)
    write(path, 1, driver)
    library.reload()
    driver.failing = "cuCtxSynchronize"
    with pytest.raises(DeviceError, match="cuCtxSynchronize"):
        library.drop_old()
    assert (unloaded(driver), library.stats().replaced) == ([], 1)
    driver.failing = ""
    assert library.drop_old() == 0
    assert unloaded(driver) == [cubin("v0")]


def test_function_that_is_first_asked_for_while_kernels_are_dropped_is_not_loaded(
    library: Library, path: Path, driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = library.functions
    write(path, 1, driver)
    library.reload()

    def ask_meanwhile() -> None:
        with pytest.raises(ArchiveError, match=r"v0 was unloaded, .*take it from Library\.functions again"):
            taken["v0"](FakeTensor((5, K)), FakeTensor((N, K)), FakeTensor((5, N)))

    monkeypatch.setattr(driver, "synchronize", ask_meanwhile)
    assert library.drop_old() == 0
    with pytest.raises(ArchiveError, match="v0 was unloaded"):
        taken["v0"].load()
    assert (driver.count("load"), driver.launches) == (0, [])


class Stuck:
    """Has the driver refuse to unload these cubins."""

    def __init__(self, driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.cubins, self.unload = [cubin(name) for name in names], driver.unload
        monkeypatch.setattr(driver, "unload", self.refuse)

    def refuse(self, library: bytes) -> None:
        if library in self.cubins:
            raise DeviceError(f"cuLibraryUnload of {library[-2:].decode()} failed: CUDA_ERROR_INVALID_VALUE (1)")
        self.unload(library)


def write_three(path: Path, letter: str, driver: RecordingDriver) -> None:
    """As `write`, with a kernel for each of three signatures: a0, a1 and a2 where the letter is "a"."""
    names = [f"{letter}{i}" for i in range(3)]
    entries = [entry(signature(N * (i + 1), K), [(None, name)]) for i, name in enumerate(names)]
    driver.kernels |= write_archive(path.with_suffix(".new"), [gemm_record(name) for name in names], entries)
    os.replace(path.with_suffix(".new"), path)


def test_kernels_that_do_not_unload_keep_no_others_and_are_tried_again(
    library: Library, path: Path, driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for letter in "abc":
        write_three(path, letter, driver)
        library.reload()
        library.preload()
    stuck = Stuck(driver, monkeypatch, "a0", "b1")
    with pytest.raises(DeviceError, match="cuLibraryUnload of a0 failed"):
        library.drop_old()
    assert sorted(unloaded(driver)) == [cubin(name) for name in ("a1", "a2", "b0", "b2")]
    assert (library.stats().replaced, library.stats().kernels_loaded) == (2, 5)
    stuck.cubins.clear()
    assert library.drop_old() == 0
    assert sorted(unloaded(driver)) == [cubin(f"{letter}{i}") for letter in "ab" for i in range(3)], "each once"
    assert (library.stats().replaced, library.stats().kernels_loaded) == (0, 3)


def test_closing_unloads_all_but_the_kernels_that_do_not(
    library: Library, path: Path, driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_three(path, "a", driver)
    library.reload()
    library.preload()
    Stuck(driver, monkeypatch, "a0")
    with pytest.raises(DeviceError, match="cuLibraryUnload of a0 failed"):
        library.close()
    assert sorted(unloaded(driver)) == [cubin("a1"), cubin("a2")]


def test_reload_that_fails_says_why_though_its_kernels_do_not_unload(
    library: Library,
    path: Path,
    driver: RecordingDriver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    library.preload()
    write_three(path, "a", driver)
    driver.kernels[cubin("a2")]["kernel_a2"] = (8,)
    Stuck(driver, monkeypatch, "a0")
    with pytest.raises(DeviceError, match="takes parameters of"):
        library.reload()
    assert "cuLibraryUnload of a0 failed" in caplog.text
    assert sorted(unloaded(driver)) == [cubin("a1"), cubin("a2")]
    assert version(library, driver) == "kernel_v0"


class HeldTorch(FakeTorch):
    """Keeps one thread waiting where it asks for the current stream: its plan is found, and not yet launched."""

    held: threading.Thread | None = None

    def hold(self, thread: threading.Thread) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.held = thread

    @property
    def stream(self) -> int:
        if threading.current_thread() is self.held:
            self.inside.set()
            assert self.go_on.wait(20)
        return 0

    @stream.setter
    def stream(self, _: int) -> None:
        pass


def test_kernels_are_not_dropped_under_a_call_that_is_about_to_launch(
    library: Library, path: Path, driver: RecordingDriver, torch: FakeTorch
) -> None:
    call(library)
    call(library)
    torch.__class__ = HeldTorch
    assert isinstance(torch, HeldTorch)
    caller = threading.Thread(target=call, args=(library,))
    torch.hold(caller)
    caller.start()
    assert torch.inside.wait(20)
    write(path, 1, driver)
    library.reload()
    assert version(library, driver) == "kernel_v1"
    assert library.drop_old() == 1, "the call still holds its plan"
    assert (unloaded(driver), library.stats().replaced) == ([], 1)
    torch.go_on.set()
    caller.join()
    assert driver.launches[-1].symbol == "kernel_v0"
    assert version(library, driver) == "kernel_v1"
    assert library.drop_old() == 0
    assert unloaded(driver) == [cubin("v0")]
    assert library.stats().launches == len(driver.launches) == 5


class Gate:
    """Keeps a thread waiting at one place."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.inside, self.go_on, self.thread = threading.Event(), threading.Event(), threading.Thread(target=work)

    def hold(self) -> None:
        if threading.current_thread() is self.thread and not self.go_on.is_set():
            self.inside.set()
            assert self.go_on.wait(20)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While a thread of its own is held there."""
        self.thread.start()
        assert self.inside.wait(20)
        yield
        self.go_on.set()
        self.thread.join()


def test_plan_that_was_made_before_a_reload_is_not_kept_after_it(
    library: Library, path: Path, driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered = GemmCalls._remember
    gate = Gate(lambda: call(library))

    def held(*arguments: Any) -> None:
        gate.hold()
        remembered(*arguments)

    monkeypatch.setattr(GemmCalls, "_remember", held)
    with gate.held():  # with a plan, which it is about to keep for later calls
        write(path, 1, driver)
        library.reload()
        assert version(library, driver) == "kernel_v1"
    assert driver.launches[-1].symbol == "kernel_v0"
    assert version(library, driver) == "kernel_v1"


@pytest.mark.parametrize("served_meanwhile", [True, False])
def test_word_that_was_looked_up_before_a_reload_means_the_same_after_it(
    tmp_path: Path, driver: RecordingDriver, served_meanwhile: bool
) -> None:
    path, words = tmp_path / "model.aot", ("silu", "relu")
    records = [operands_record(w, signature(N, K, epilogue=w)) for w in words]
    entries = [entry(signature(N, K, epilogue=w), [(None, w)]) for w in words]
    driver.kernels |= write_archive(path, records, entries)
    library = Library(Archive.open(path), driver)

    class Slow(TorchDType):
        def __hash__(self) -> int:
            gate.hold()
            return hash(self.name)

    dtype = Slow("bfloat16")
    gate = Gate(lambda: call(library, epilogue="silu", dtype=dtype))
    call(library, epilogue="silu", dtype=dtype)
    with gate.held():
        write_archive(path, [*records, gemm_record("more")], entries)
        assert library.reload()
        for _ in range(2 * served_meanwhile):
            call(library, epilogue="relu")
    assert driver.launches[-1].symbol == "kernel_silu"


class CheckedLaunches(list[Any]):
    """Where a driver writes launches down: says what was launched though it was unloaded, or older than it may be."""

    def __init__(self, driver: RecordingDriver) -> None:
        super().__init__()
        self.driver = driver
        self.oldest: dict[int, int] = {}  # by thread, the version that was in service before its call began
        self.wrong: list[str] = []
        self.versions: set[int] = set()

    def append(self, launched: Any) -> None:
        number = int(launched.symbol.removeprefix("kernel_v"))
        self.versions.add(number)
        if ("unload", cubin(f"v{number}")) in self.driver.log:
            self.wrong.append(f"{launched.symbol} was unloaded")
        if number < self.oldest[threading.get_ident()]:
            self.wrong.append(f"{launched.symbol} after {self.oldest[threading.get_ident()]}")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("preloaded", [False, True])
def test_threads_never_launch_what_was_replaced_before_their_call(
    library: Library, path: Path, driver: RecordingDriver, preloaded: bool
) -> None:
    checked = driver.launches = CheckedLaunches(driver)
    if preloaded:
        library.preload(tokens=[1, 2])
    in_service, stop, failures = [0], threading.Event(), list[BaseException]()

    def once(b: FakeTensor, outs: list[FakeTensor]) -> None:
        for m, out in enumerate(outs, 1):
            for given in (None, out):
                checked.oldest[threading.get_ident()] = in_service[0]
                library.gemm(FakeTensor((m, K)), b, out=given)

    def work() -> None:
        b, outs = FakeTensor((N, K)), [FakeTensor((m, N)) for m in range(1, 5)]
        try:
            while not stop.is_set():
                once(b, outs)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    waiting = 0
    try:
        for number in range(1, 13):
            write(path, number, driver)
            assert library.reload()
            in_service[0] = number
            once(FakeTensor((N, K)), [FakeTensor((1, N))])
            waiting = library.drop_old()
            driver.log[:] = [e for e in driver.log if e[0] == "unload"]
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    assert (failures, checked.wrong) == ([], [])
    assert checked.versions == set(range(13))
    assert library.drop_old() == 0
    assert len(unloaded(driver)) == 12, f"each once; {waiting} waited for calls"
