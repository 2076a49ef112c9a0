"""Captured calls, files that change, and preloading, on a real GPU: pytest -m gpu --archive=model.aot."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime import KernelMiss, Library
from runtime.container.archive import Archive
from runtime.gemm.signature import Signature

from .gpu_library import REPEATS, Problem, arguments, bits, made
from .gpu_library import library as library
from .gpu_library import signature as signature
from .gpu_library import signatures as signatures
from .gpu_library import torch as torch

pytestmark = pytest.mark.gpu

# --- CUDA graphs ---


@pytest.mark.parametrize("warm", ["first call", "preload"])
def test_captured_call_replays_with_new_inputs(library: Library, signature: Signature, torch: Any, warm: str) -> None:
    problem = Problem(torch, signature, 64, seed=1)
    if warm == "preload":
        library.preload()
    else:
        library.gemm(problem.a, problem.b, out=problem.out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        library.gemm(problem.a, problem.b, out=problem.out)
        allocated = library.gemm(problem.a, problem.b)
    for seed in (2, 3):
        problem.fill(seed)
        allocated.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        problem.check()
        problem.check(allocated)


def test_every_form_can_be_captured_and_runs_on_any_stream(
    library: Library, signatures: list[Signature], torch: Any
) -> None:
    for s in signatures:
        o = made(s, 77)
        library.gemm(o.a, o.b, out=o.d, **arguments(s, o))
        torch.cuda.synchronize()
        expected = o.d.clone()
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            library.gemm(o.a, o.b, out=o.d, **arguments(s, o))
        for replayed in (True, False):
            o.d.fill_(float("nan"))
            torch.cuda.synchronize()
            if replayed:
                graph.replay()
            else:
                library.gemm(o.a, o.b, out=o.d, stream=side, **arguments(s, o))
            torch.cuda.synchronize()
            assert torch.equal(bits(torch, o.d), bits(torch, expected)), s.key()


@pytest.fixture
def other_archive(tuned_archive: Path, tmp_path: Path) -> Path:
    """The same kernels in a file with another digest."""
    from aot.pack.write import Package

    with Archive.open(tuned_archive) as archive:
        package = Package()
        package.add_archive(archive)
        for name in archive.tables:
            package.set_table(name, archive.table(name))
        package.set_table("test", {"other": True})
        package.write(tmp_path / "other.aot")
    return tmp_path / "other.aot"


# --- other contents ---


@pytest.mark.alone
def test_reload_serves_the_new_files_and_drops_the_old(
    library: Library, signature: Signature, other_archive: Path, torch: Any
) -> None:
    problem = Problem(torch, signature, 64)
    library.preload([64])
    library.gemm(problem.a, problem.b, out=problem.out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        library.gemm(problem.a, problem.b, out=problem.out)
    loaded, free = library.stats().kernels_loaded, torch.cuda.mem_get_info()[0]
    assert library.reload(other_archive)
    assert not library.reload()
    both = library.stats()
    assert (both.reloads, both.replaced, both.kernels_loaded) == (1, 1, 2 * loaded)
    problem.poison()
    library.gemm(problem.a, problem.b, out=problem.out)
    problem.check()
    problem.fill(2)
    graph.replay()  # the old kernel is still there
    torch.cuda.synchronize()
    problem.check()
    del graph
    assert library.drop_old() == 0
    assert library.stats().kernels_loaded == loaded
    assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)
    problem.poison()
    library.gemm(problem.a, problem.b, out=problem.out)
    problem.check()


def test_threads_get_right_results_while_files_change(
    library: Library, signature: Signature, tuned_archive: Path, other_archive: Path, torch: Any
) -> None:
    failures: list[BaseException] = []
    stop = threading.Event()

    def work(number: int) -> None:
        try:
            problem = Problem(torch, signature, (16, 17, 64, 333)[number], seed=number)
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()) as _:
                while not stop.is_set():
                    problem.poison()
                    for _ in range(50):
                        library.gemm(problem.a, problem.b, out=problem.out)
                    problem.check()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for i in range(8):
        assert library.reload((other_archive, tuned_archive)[i % 2])
        library.drop_old()
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert library.drop_old() == 0
    assert library.stats().replaced == 0


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_files_change_beside_a_capture(
    library: Library, signature: Signature, other_archive: Path, torch: Any, mode: str
) -> None:
    """Another thread opens and preloads new files; the graph keeps kernels of both."""
    problem, again = Problem(torch, signature, 64, seed=1), Problem(torch, signature, 64, seed=2)
    library.preload([64])
    library.gemm(problem.a, problem.b, out=problem.out)
    torch.cuda.synchronize()
    changed: list[bool] = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        library.gemm(problem.a, problem.b, out=problem.out)
        thread = threading.Thread(target=lambda: changed.append(library.reload(other_archive)))
        thread.start()
        thread.join()
        library.gemm(again.a, again.b, out=again.out)
    assert changed == [True]
    for each in (problem, again):
        each.poison()
    graph.replay()
    torch.cuda.synchronize()
    problem.check()
    again.check()


def test_layers_serve_from_the_last_that_has_it(
    tuned_archive: Path, other_archive: Path, signature: Signature, torch: Any
) -> None:
    with runtime.load([tuned_archive, other_archive]) as library:
        for m in (1, 64, 333):
            problem = Problem(torch, signature, m)
            library.gemm(problem.a, problem.b, out=problem.out)
            problem.check()
        assert [info.path for info in library.stats().archives] == [str(tuned_archive), str(other_archive)]
        base, patch = library._now.layers.all
        assert not any(function.loaded for function in base.made.values())
        assert any(function.loaded for function in patch.made.values())


def test_everything_is_counted(library: Library, signature: Signature, torch: Any) -> None:
    problem = Problem(torch, signature, 64)
    for _ in range(REPEATS):
        library.gemm(problem.a, problem.b, out=problem.out)
    torch.cuda.synchronize()
    found = library.stats()
    assert found.launches == REPEATS == sum(found.launches_by_function.values())
    assert (found.kernels_loaded, found.loads, found.plans_made) == (1, 1, 1)
    assert found.kernel_bytes > 0 < found.load_seconds
    with pytest.raises(KernelMiss):
        library.gemm(problem.a, torch.zeros(24, signature.k, device="cuda", dtype=problem.b.dtype))
    assert [(r.reason, r.misses) for r in library.stats().refusals] == [("no entry", 1)]
    assert "cute_aot" in library.prometheus()


def test_after_preload_nothing_is_loaded_or_read(
    library: Library, signatures: list[Signature], torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first call of each shape after `preload` opens and reads no file, imports nothing and loads no kernel."""
    library.preload()
    operands = [(s, made(s, m)) for s in signatures for m in (1, 33, 129)]
    calls = [(o, arguments(s, o)) for s, o in operands]
    before = library.stats()
    torch.cuda.synchronize()

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("a kernel was loaded, or a file opened or read")

    driver = type(library._driver)
    with monkeypatch.context() as patched:
        patched.setattr(driver, "load", forbidden)
        for name in ("open", "pread", "read", "stat"):
            patched.setattr(os, name, forbidden)
        patched.setattr("builtins.open", forbidden)
        patched.setattr("builtins.__import__", forbidden)
        for o, more in calls:
            library.gemm(o.a, o.b, out=o.d, **more)
    torch.cuda.synchronize()
    after = library.stats()
    assert (after.loads, after.kernels_loaded) == (before.loads, before.kernels_loaded)
    assert after.launches >= len(calls)
