"""After `preload` nothing is opened, read, imported, started or loaded, whatever is asked for."""

from __future__ import annotations

import ctypes
import importlib
import logging
import mmap
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime import ArgumentError, DeviceError, KernelMiss, Library, RecordError
from runtime.container import canonical
from runtime.container.archive import Archive
from runtime.gemm.signature import Signature
from runtime.serve import preload
from runtime.serve.function import Function
from runtime.serve.plan import MAX_PLANS

from .forbidden import Forbid, forbidding, hook
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

K = 512
NS = (1024, 2048, 4096)
FUSED = signature(2048, K, epilogue="bias+silu")
RECORDS = [
    *(gemm_record(f"{size}{n}", tile_m=tile) for n in NS for size, tile in (("small", 16), ("large", 128))),
    gemm_record("batched", batched=True),
    gemm_record("huge", shared_bytes=220_000),
    gemm_record("lean", shared_bytes=60_000),
    gemm_record("bounded", max_m=999),
    operands_record("fused", FUSED),
]
ENTRIES = [
    *(entry(signature(n, K), [(16, f"small{n}"), (None, f"large{n}")]) for n in NS),
    entry(signature(1024, K, batch=3), [(None, "batched")]),
    entry(signature(256, K), [(None, "huge")], candidates=[[16, ["huge", "lean"]]]),
    entry(signature(768, K), [(None, "bounded")], candidates=[[16, ["bounded", "lean"]]]),
    entry(FUSED, [(None, "fused")]),
]


@pytest.fixture
def opened(tmp_path: Path, torch: FakeTorch) -> tuple[Library, RecordingDriver]:
    driver = RecordingDriver(kernels=write_archive(tmp_path / "model.aot", RECORDS, ENTRIES))
    return Library(Archive.open(tmp_path / "model.aot"), driver), driver


def call(library: Library, m: int, n: int) -> None:
    library.gemm(FakeTensor((m, K)), FakeTensor((n, K)), out=FakeTensor((m, n)))


def serve(library: Library, m: int) -> None:
    """Every signature of the archive, with and without an output that is given."""
    for n in (*NS, 256):
        call(library, m, n)
        library.gemm(FakeTensor((m, K)), FakeTensor((n, K)))
    library.gemm(FakeTensor((3, m, K)), FakeTensor((3, 1024, K)))
    b, bias = FakeTensor((2048, K)), FakeTensor((2048,))
    library.gemm(FakeTensor((m, K)), b, bias=bias, epilogue="silu")


@pytest.fixture(scope="module")
def audited() -> None:
    sys.addaudithook(hook)


@pytest.fixture
def forbid(opened: tuple[Library, RecordingDriver], audited: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Forbid]:
    found = Forbid()
    driver = opened[1]
    monkeypatch.setattr(driver, "load", found.instead_of("driver.load", driver.load))
    monkeypatch.setattr(os, "pread", found.instead_of("os.pread", os.pread))
    monkeypatch.setattr(Archive, "blob", found.instead_of("Archive.blob", Archive.blob))
    monkeypatch.setattr(canonical, "loads", found.instead_of("canonical.loads", canonical.loads))
    quick = found.instead_of("canonical.loads_for_serving", canonical.loads_for_serving)
    monkeypatch.setattr(canonical, "loads_for_serving", quick)
    forbidding.append(found)
    yield found
    forbidding.remove(found)


def test_preload_reads_before_it_needs_the_context(
    opened: tuple[Library, RecordingDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may be creating it meanwhile."""
    library, driver = opened
    order: list[str] = []

    def noted(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            order.append(what)
            return function(*arguments)

        return call

    monkeypatch.setattr(Archive, "blob", noted("read", Archive.blob))
    monkeypatch.setattr(driver, "current", noted("context", driver.current))
    table, documents = 1, 2 * len(library.preload())  # of each function its record and its cubin
    assert order.index("context") == order.count("read") == table + documents


def test_nothing_is_read_or_loaded_after_preload(opened: tuple[Library, RecordingDriver], forbid: Forbid) -> None:
    library, driver = opened
    library.preload()
    driver.quiet = True
    failures: list[BaseException] = []

    def work(first: int) -> None:
        try:
            with forbid.guarded():
                for m in range(first, 400, 7):
                    serve(library, m)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(1 + i,)) for i in range(7)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (forbid.tried, failures) == ([], [])
    assert library.stats().loads == driver.count("load")


def test_what_is_forbidden_is_seen(opened: tuple[Library, RecordingDriver], forbid: Forbid, tmp_path: Path) -> None:
    library, _ = opened
    attempts: list[Callable[[], Any]] = [
        lambda: (tmp_path / "model.aot").read_bytes(),
        lambda: os.open(tmp_path / "model.aot", os.O_RDONLY),
        lambda: subprocess.run(["true"]),
        lambda: ctypes.CDLL("libcuda.so.1"),
        lambda: mmap.mmap(-1, 4096),
        lambda: compile("1", "x", "eval"),
        lambda: importlib.import_module("this"),
        lambda: call(library, 1, 2048),  # without preload
    ]
    with forbid.guarded():
        for attempt in attempts:
            with pytest.raises(AssertionError):
                attempt()
    assert len(forbid.tried) == len(attempts)


def key(n: int, **more: Any) -> str:
    return Signature.from_json(signature(n, K, **more)).key()


def test_only_what_a_model_needs_is_preloaded(opened: tuple[Library, RecordingDriver], forbid: Forbid) -> None:
    """It is served as after a whole preload, and others load at their first call, as without."""
    library, driver = opened
    fused = Signature.from_json(FUSED)
    assert set(library.preload(tokens=[7], only=[key(1024), fused])) == {"small1024", "large1024", "fused"}
    with forbid.guarded():
        for m in (3, 7, 300):
            call(library, m, 1024)
        library.gemm(FakeTensor((5, K)), FakeTensor((2048, K)), bias=FakeTensor((2048,)), epilogue="silu")
        with pytest.raises(AssertionError, match=r"driver\.load|blob"):
            call(library, 5, 4096)
    forbid.tried.clear()
    call(library, 5, 4096)
    assert driver.launches[-1].symbol == "kernel_small4096"
    assert "lean" not in library.preload(only=[key(768)])
    with pytest.raises(KernelMiss, match="lean: was not loaded by preload"):
        call(library, 1000, 768)
    driver.shared_bytes = 100_000
    call(library, 1000, 256)  # whose runner-up is the same, but nothing promised that nothing more is loaded for it
    assert driver.launches[-1].symbol == "kernel_lean"
    assert "small2048" in library.preload()  # all of them, from then on


def test_preload_refuses_what_the_archive_does_not_have(opened: tuple[Library, RecordingDriver]) -> None:
    library, driver = opened
    with pytest.raises(KernelMiss, match=rf"cannot preload {key(4104)}: it has no such entry for this GPU; `aot ls`"):
        library.preload(only=[key(1024), key(4104)])
    assert driver.count("load") == 0
    for wrong in (key(1024), Signature.from_json(FUSED), 7, [7]):
        with pytest.raises(ArgumentError, match="only must"):
            library.preload(only=wrong)  # type: ignore[arg-type]
    assert library.preload(only=[]) == ()


def test_runner_up_is_loaded_where_the_best_cannot_run(opened: tuple[Library, RecordingDriver]) -> None:
    library, driver = opened
    driver.shared_bytes = 100_000
    assert {"huge", "lean"} <= set(library.preload())
    before = driver.count("load")
    call(library, 5, 256)
    assert driver.launches[-1].symbol == "kernel_lean"
    assert driver.count("load") == before


def test_runner_up_is_not_loaded_in_the_middle_of_serving(opened: tuple[Library, RecordingDriver]) -> None:
    library, driver = opened
    assert "lean" not in library.preload()
    before = driver.count("load")
    with pytest.raises(KernelMiss, match=r"bounded: division by zero(.|\n)*lean: was not loaded by preload"):
        call(library, 1000, 768)
    assert driver.count("load") == before
    assert "lean" in library.preload(tokens=[1000])
    call(library, 1000, 768)
    assert driver.launches[-1].symbol == "kernel_lean"


def test_tokens_are_planned_before_the_first_call(opened: tuple[Library, RecordingDriver]) -> None:
    library, driver = opened
    library.preload(tokens=[1, 17, 64])
    made, prepared = library.stats().plans_made, driver.count("prepare")
    for m in (1, 17, 64):
        serve(library, m)
    assert (library.stats().plans_made, driver.count("prepare")) == (made, prepared)
    call(library, 65, 1024)
    assert library.stats().plans_made == made + 1


def test_prepared_plans_are_those_that_a_call_would_make(opened: tuple[Library, RecordingDriver]) -> None:
    library, driver = opened
    other = Library(Archive.open(library._now.layers.archives[0].path), driver)
    library.preload(tokens=[33])
    tensors = FakeTensor((33, K)), FakeTensor((1024, K))
    for each in (other, library, library):
        each.gemm(*tensors, out=FakeTensor((33, 1024), pointer=1 << 44))
    first, *rest = driver.launches[-3:]
    assert rest == [first, first]


def test_tokens_that_nothing_serves_are_logged(
    opened: tuple[Library, RecordingDriver], caplog: pytest.LogCaptureFixture
) -> None:
    library, driver = opened
    driver.shared_bytes = 48 << 10
    with caplog.at_level(logging.WARNING):
        library.preload(tokens=[5])
    assert any("n256_k512 at M = 5 is not prepared" in message for message in caplog.messages)


@pytest.mark.parametrize("tokens", [[0], [-1], [True], ["5"], [1.0]])
def test_tokens_are_positive_integers(opened: tuple[Library, RecordingDriver], tokens: Any) -> None:
    with pytest.raises(ArgumentError, match="tokens must be positive integers"):
        opened[0].preload(tokens=tokens)


@pytest.mark.parametrize("tokens", [b"\x01\x10", b"", "16", ""])
def test_tokens_are_no_text(opened: tuple[Library, RecordingDriver], tokens: Any) -> None:
    with pytest.raises(ArgumentError, match="tokens must be a sequence of M values"):
        opened[0].preload(tokens=tokens)


def test_tokens_that_are_given_twice_count_once(opened: tuple[Library, RecordingDriver]) -> None:
    library, _ = opened
    library.preload(tokens=[16, 1] * MAX_PLANS)
    assert library._now.plans.preloaded is not None
    assert library._now.plans.preloaded.tokens == (1, 16)
    assert library.stats().plans_made == 2 * 2 * len(ENTRIES), "for torch's tensors and for others"


def test_more_plans_than_are_kept_are_refused(opened: tuple[Library, RecordingDriver]) -> None:
    with pytest.raises(ArgumentError, match="more plans than the 4096 that are kept"):
        opened[0].preload(tokens=range(1, 1000))


def test_preload_keeps_no_decompressed_blocks(opened: tuple[Library, RecordingDriver]) -> None:
    library, _ = opened
    library.preload()
    assert all(archive._cached_bytes == 0 for archive in library._now.layers.archives)


def test_failed_preload_keeps_nothing(opened: tuple[Library, RecordingDriver]) -> None:
    library, driver = opened
    driver.failing = "cuLibraryLoadData"
    with pytest.raises(DeviceError):
        library.preload()
    assert all(function._cubin is None for function in library._now.layers.made())
    assert all(archive._cached_bytes == 0 for archive in library._now.layers.archives)
    driver.failing = ""
    assert library.preload()


@pytest.mark.parametrize("promised_before", [False, True])
def test_failed_preload_promises_nothing_more(
    opened: tuple[Library, RecordingDriver], monkeypatch: pytest.MonkeyPatch, promised_before: bool
) -> None:
    library, driver = opened
    if promised_before:
        library.preload(tokens=[4], only=[key(1024)])
    promised = library._now.plans.preloaded

    def refuse(*_: Any) -> Any:
        raise DeviceError("cuCtxGetCurrent failed: CUDA_ERROR_DEINITIALIZED (4)")

    with monkeypatch.context() as patch:
        patch.setattr(driver, "prepare", refuse)
        with pytest.raises(DeviceError, match="DEINITIALIZED"):
            library.preload(tokens=[5])
    assert library._now.plans.preloaded == promised
    call(library, 1000, 768)
    assert driver.launches[-1].symbol == "kernel_lean", "loaded at its first call, as without preload"


@pytest.mark.parametrize("there", [False, True])
def test_torch_that_cannot_be_imported_is_none(
    opened: tuple[Library, RecordingDriver], monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    library, _ = opened
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch") if there else None)
    if there:  # another thread is importing it, in vain

        def fail(name: str) -> Any:
            raise ImportError(f"{name}: libcudart.so.13: cannot open shared object file")

        monkeypatch.setattr(importlib, "import_module", fail)
    assert library.preload(tokens=[5])
    assert library._now.plans.preloaded is not None
    assert [key[0] for key in library._now.plans._by_shape] == [False] * len(ENTRIES)


def test_function_that_is_loaded_while_it_is_read_keeps_no_cubin(opened: tuple[Library, RecordingDriver]) -> None:
    library, _ = opened
    function = library.functions["small1024"]
    archive: Any = function._archive
    cubin = archive.cubin

    def read_and_load(name: str) -> bytes:
        data: bytes = cubin(name)
        if not function.loaded:
            archive.cubin = cubin
            worker = threading.Thread(target=function.load)
            worker.start()
            worker.join()
        return data

    archive.cubin = read_and_load
    function.read()
    assert function.loaded
    assert function._cubin is None


@pytest.mark.usefixtures("torch")
def test_torch_and_others_share_the_launches_of_a_shape(opened: tuple[Library, RecordingDriver]) -> None:
    library, _ = opened
    library.preload(tokens=[5])
    plans = library._now.plans._by_shape
    torch, others = ([plan for key, plan in plans.items() if key[0] is kind] for kind in (True, False))
    assert len(torch) == len(others) > 1
    assert [plan.plan for plan in torch] == [plan.plan for plan in others]
    assert {(plan.dtype, plan.streams) for plan in others} == {(None, None)}
    assert all(plan.dtype is not None and plan.streams is not None for plan in torch)


def test_torch_that_another_thread_is_importing_is_waited_for(
    opened: tuple[Library, RecordingDriver], torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it would do for plans that no call may use: without an element type, and without torch's stream."""
    library, _ = opened
    half = types.ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", half)

    def imported(name: str) -> Any:
        assert name == "torch"
        monkeypatch.setitem(sys.modules, "torch", torch)
        return torch

    monkeypatch.setattr(importlib, "import_module", imported)
    library.preload(tokens=[5])
    plans = [plan for key, plan in library._now.plans._by_shape.items() if key[0]]
    assert plans
    assert all(plan.dtype is not None and plan.streams is not None for plan in plans)


# While one thread imports torch, which takes a second, the other preloads.
_IMPORTING = """
import sys, threading
from pathlib import Path
from runtime import Library
from runtime.container.archive import Archive
from tests import recording_driver
from tests.test_preload import ENTRIES, RECORDS
path = Path(sys.argv[1])
driver = recording_driver.RecordingDriver(kernels=recording_driver.write_archive(path, RECORDS, ENTRIES))
library = Library(Archive.open(path), driver)
assert "torch" not in sys.modules
def prepare():
    while "torch" not in sys.modules:
        pass
    library.preload(tokens=[1, 16])
thread = threading.Thread(target=prepare)
thread.start()
import torch
thread.join()
plans = [plan for key, plan in library._now.plans._by_shape.items() if key[0]]
print(len(plans), {str(plan.dtype) for plan in plans}, all(callable(plan.streams.current_stream) for plan in plans))
"""


def test_preload_waits_for_the_import_of_torch_in_another_thread(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-c", _IMPORTING, str(tmp_path / "model.aot")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.stdout.strip() == "14 {'torch.bfloat16'} True", done.stdout + done.stderr


def test_plans_of_preloads_of_different_signatures_are_all_kept(opened: tuple[Library, RecordingDriver]) -> None:
    library, _ = opened
    tokens = range(1, MAX_PLANS // 2 // 2 + 1)
    library.preload(tokens=tokens, only=[key(1024)])
    library.preload(tokens=tokens, only=[key(2048)])
    made = library.stats().plans_made
    for m in reversed(tokens):
        call(library, m, 1024)
        call(library, m, 2048)
    assert library.stats().plans_made == made
    with pytest.raises(ArgumentError, match=rf"for 3 signatures .* give fewer, {MAX_PLANS // 6} in all"):
        library.preload(only=[key(4096)])


def test_values_of_several_preloads_count_together(opened: tuple[Library, RecordingDriver]) -> None:
    library, _ = opened
    most = MAX_PLANS // len(library._now.entries.table().entries) // 2
    library.preload(tokens=range(1, most // 2 + 1))
    with pytest.raises(ArgumentError, match=rf"more plans than .* give fewer, {most} in all"):
        library.preload(tokens=range(most // 2 + 1, most + 2))
    with pytest.raises(ArgumentError, match="tokens must be a sequence"):
        library.preload(tokens=5)  # type: ignore[arg-type]


def test_preload_evaluates_no_more_than_a_server_has_time_for(
    opened: tuple[Library, RecordingDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    library, _ = opened
    bytes_ = sum(archive.file_bytes for archive in library._now.layers.archives)
    monkeypatch.setattr(preload, "PRELOAD_ALLOWANCE_STEPS", 1000 - preload.PRELOAD_STEPS_OF_A_BYTE * bytes_)
    with pytest.raises(RecordError, match="would evaluate more than 1000 steps of launch programs"):
        library.preload()
    library.preload(only=[Signature.from_json(signature(1024, K, batch=3)).key()])
    monkeypatch.setattr(preload, "PRELOAD_ALLOWANCE_STEPS", 5000)
    assert len(library.preload()) > 5


def test_preload_has_time_for_every_row_count_that_is_asked_for(
    opened: tuple[Library, RecordingDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    library, _ = opened
    bytes_ = sum(archive.file_bytes for archive in library._now.layers.archives)
    monkeypatch.setattr(preload, "PRELOAD_ALLOWANCE_STEPS", 5000 - preload.PRELOAD_STEPS_OF_A_BYTE * bytes_)
    assert library.preload(tokens=range(1, 190))


# --- many ranges ---


def test_preload_evaluates_twice_for_each_function_however_many_ranges_it_has(
    tmp_path: Path, torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the least M of its ranges and at the largest that ends one, or where its last has no end, that one's first."""
    names = ["small1024", "large1024", "small2048"]
    bounds: list[int | None] = [*range(8, 1600, 8), None]
    made = entry(signature(1024, K), [(bound, names[i % 3]) for i, bound in enumerate(bounds)])
    driver = RecordingDriver(kernels=write_archive(tmp_path / "dense.aot", RECORDS, [made]))
    library = Library(Archive.open(tmp_path / "dense.aot"), driver)
    tried: list[tuple[str, int]] = []
    fits = Function.check_fit

    def check_fit(self: Function, views: Any) -> None:
        tried.append((self.name, views[0].shape[0]))
        fits(self, views)

    monkeypatch.setattr(Function, "check_fit", check_fit)
    assert set(library.preload()) == set(names)
    assert sorted(tried) == [
        ("large1024", 9),
        ("large1024", 1593),
        ("small1024", 1),
        ("small1024", 1592),
        ("small2048", 17),
        ("small2048", 1584),
    ]
    tried.clear()
    library.preload(tokens=[100])
    assert ("small1024", 100) in tried
    assert len(tried) == 7


@pytest.fixture
def sparse(tmp_path: Path, torch: FakeTorch) -> tuple[Library, RecordingDriver]:
    """ "bounded" can do M up to 999, and is to serve more."""
    made = [
        entry(signature(1024, K), [(5, "bounded"), (6, "small1024"), (1_200, "bounded"), (None, "large1024")]),
        entry(signature(2048, K), [(1_000, "bounded"), (None, "large2048")], candidates=[[900, ["bounded", "lean"]]]),
    ]
    driver = RecordingDriver(kernels=write_archive(tmp_path / "sparse.aot", RECORDS, made))
    return Library(Archive.open(tmp_path / "sparse.aot"), driver), driver


def test_after_preload_another_loaded_function_serves_where_one_cannot(sparse: tuple[Library, RecordingDriver]) -> None:
    library, driver = sparse
    assert set(library.preload(only=[Signature.from_json(signature(1024, K))])) == {"bounded", "small1024", "large1024"}
    loads = driver.count("load")
    for m, name in ((999, "bounded"), (1_000, "large1024")):
        call(library, m, 1024)
        assert driver.launches[-1].symbol == f"kernel_{name}"
    assert driver.count("load") == loads


def test_preload_loads_runners_up_where_the_last_m_of_a_range_cannot_be_served(
    sparse: tuple[Library, RecordingDriver],
) -> None:
    library, driver = sparse
    assert set(library.preload(only=[Signature.from_json(signature(2048, K))])) == {"bounded", "lean", "large2048"}
    call(library, 1_000, 2048)
    assert driver.launches[-1].symbol == "kernel_lean"
