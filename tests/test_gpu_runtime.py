"""The runtime on a real GPU, with an archive tuned for it: pytest -m gpu --archive model.aot."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime import ArgumentError, Library
from runtime.gemm.signature import Signature
from runtime.numbers.scaling import SCALINGS, TILES

from .gpu_library import REPEATS, Exported, ExportedDLPack, Problem, arguments, bits, is_plain, made
from .gpu_library import library as library
from .gpu_library import signature as signature
from .gpu_library import signatures as signatures
from .gpu_library import torch as torch

pytestmark = pytest.mark.gpu

RAGGED_M = (1, 3, 16, 17, 128, 333, 1000)

CHAIN = 16

# --- results ---


def test_results_are_right_at_ragged_m(library: Library, signatures: list[Signature], torch: Any) -> None:
    from aot.tune import measure
    from aot.tune.gemm.operands import Weights

    for s in signatures:

        def launch(o: Any, s: Signature = s) -> None:
            assert library.gemm(o.a, o.b, out=o.d, **arguments(s, o)) is o.d

        for m in RAGGED_M:
            found = measure.check(s, m, Weights(s, m, 0, m), {"gemm": launch})["gemm"]
            assert isinstance(found, float), f"{s.key()} at M = {m}: {found}"


def test_results_are_the_same_bits_every_time(library: Library, signatures: list[Signature], torch: Any) -> None:
    for s in signatures:
        for m in (1, 64, 333):
            o = made(s, m)
            library.gemm(o.a, o.b, out=o.d, **arguments(s, o))
            first = o.d.clone()
            for _ in range(REPEATS - 1):
                o.d.fill_(float("nan"))
                library.gemm(o.a, o.b, out=o.d, **arguments(s, o))
                assert torch.equal(bits(torch, o.d), bits(torch, first)), f"{s.key()} at M = {m}"
            again = library.gemm(o.a, o.b, dtype=s.d, **arguments(s, o))
            assert torch.equal(bits(torch, again), bits(torch, first)), f"{s.key()} at M = {m}"


def test_residual_may_be_the_output(library: Library, signatures: list[Signature], torch: Any) -> None:
    having = [s for s in signatures if s.parts.residual and s.d != "e4m3"]
    if not having:
        pytest.skip("the archive has no GEMM that adds a residual of D's type")
    for s in having:
        for m in RAGGED_M:  # at which the last tile along M begins earlier, and two make some rows
            o = made(s, m)
            library.gemm(o.a, o.b, out=o.d, **arguments(s, o))
            x = o.extras["residual"].clone()
            library.gemm(o.a, o.b, out=x, **(arguments(s, o) | {"residual": x}))
            assert torch.equal(bits(torch, x), bits(torch, o.d)), f"{s.key()} at M = {m}"


def test_operands_may_be_strided(library: Library, signatures: list[Signature], torch: Any) -> None:
    """Rows that lie apart, in a residual and in scales of blocks; scales either way round. Kernels that read tiles of
    scales take no gaps."""
    for s in (s for s in signatures if s.batch == 1 and not is_plain(s) and SCALINGS[s.scaling].layout != TILES):
        o = made(s, 77)
        library.gemm(o.a, o.b, out=o.d, **arguments(s, o))
        extras = dict(o.extras)
        if "residual" in extras:
            wide = torch.zeros(77, s.columns + 64, device="cuda", dtype=extras["residual"].dtype)
            wide[:, : s.columns] = extras["residual"]
            extras["residual"] = wide[:, : s.columns]
        if s.scaling == "block":
            extras["scale_a"] = extras["scale_a"].contiguous()
            extras["scale_b"] = extras["scale_b"].contiguous()
        target = torch.full((77, s.columns + 64), 7.0, device="cuda").to(o.d.dtype)
        library.gemm(o.a, o.b, out=target[:, : s.columns], **(arguments(s, o) | extras))
        assert torch.equal(bits(torch, target[:, : s.columns]), bits(torch, o.d)), s.key()
        assert bool((target[:, s.columns :].float() == 7.0).all()), s.key()


@pytest.mark.parametrize("m", [1, 16, 333])
def test_launches_that_overlap_wait_for_what_they_read(
    library: Library, signatures: list[Signature], torch: Any, m: int
) -> None:
    """A captured chain in which each launch reads what the one before wrote, against one launch at a time."""
    chained = [s for s in signatures if s.overlap != "serial" and s.batch == 1 and s.a == s.d]
    if not chained:
        pytest.skip("the archive has no GEMM that overlaps and reads what it writes")
    for s in chained:
        o = made(s, m)
        # A gate multiplies two sums: chained, values would grow without end.
        b = (o.b.float() / 4).to(o.b.dtype) if s.parts.gated else o.b
        width = max(s.k, s.columns)
        start = [torch.randn(m, width, device="cuda").to(o.a.dtype) for _ in range(CHAIN + 1)]
        values = [torch.empty_like(x) for x in start]

        def run(after: Any, values: list[Any] = values, s: Signature = s, o: Any = o, b: Any = b) -> None:
            for x, y in itertools.pairwise(values):
                more = arguments(s, o)
                if s.parts.residual:
                    more["residual"] = x[:, : s.columns]
                library.gemm(x[:, : s.k], b, out=y[:, : s.columns], **more)
                after()

        def reset(values: list[Any] = values, start: list[Any] = start) -> None:
            for x, y in zip(values, start, strict=True):
                x.copy_(y)

        reset()
        run(torch.cuda.synchronize)
        expected = [x.clone() for x in values]
        assert bool(expected[-1].float().isfinite().all())
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(lambda: None)
        for _ in range(3):
            reset()
            graph.replay()
            torch.cuda.synchronize()
            for i, (x, y) in enumerate(zip(values, expected, strict=True)):
                assert torch.equal(bits(torch, x), bits(torch, y)), f"{s.key()} at M = {m}: launch {i}"


def test_results_do_not_touch_what_lies_behind_them(library: Library, signature: Signature, torch: Any) -> None:
    for m in RAGGED_M:
        problem = Problem(torch, signature, m)
        whole = torch.full((m + 8, signature.n), 7.0, device="cuda", dtype=problem.out.dtype)
        library.gemm(problem.a, problem.b, out=whole[:m])
        problem.check(whole[:m])
        assert bool((whole[m:] == 7.0).all())


def test_row_strides_are_followed(library: Library, signature: Signature, torch: Any) -> None:
    problem = Problem(torch, signature, 33)
    wide = torch.zeros((33, signature.k + 64), device="cuda", dtype=problem.a.dtype)
    wide[:, : signature.k] = problem.a
    target = torch.full((33, signature.n + 64), 7.0, device="cuda", dtype=problem.out.dtype)
    library.gemm(wide[:, : signature.k], problem.b, out=target[:, : signature.n])
    problem.check(target[:, : signature.n])
    assert bool((target[:, signature.n :] == 7.0).all())


def test_leading_dimensions_are_rows(library: Library, signature: Signature, torch: Any) -> None:
    problem = Problem(torch, signature, 32)
    found = library.gemm(problem.a.view(4, 8, -1), problem.b)
    assert found.shape == (4, 8, signature.n)
    problem.check(found.view(32, -1))


def test_no_rows_give_an_empty_result(library: Library, signature: Signature, torch: Any) -> None:
    problem = Problem(torch, signature, 0)
    assert library.gemm(problem.a, problem.b).shape == (0, signature.n)


# --- streams, contexts, threads ---


def test_work_is_ordered_on_the_current_stream(library: Library, signature: Signature, torch: Any) -> None:
    problem = Problem(torch, signature, 64)
    library.gemm(problem.a, problem.b, out=problem.out)
    source = problem.a.clone()
    problem.a.zero_()
    problem.poison()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # about 25 ms: an unordered launch would read the zeros
        problem.a.copy_(source)
        library.gemm(problem.a, problem.b, out=problem.out)
    stream.synchronize()
    problem.check()


def test_stream_can_be_given_in_every_form(library: Library, signature: Signature, torch: Any) -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    problem = Problem(torch, signature, 64)
    stream = torch.cuda.Stream()
    for form in (stream, stream.cuda_stream, driver.CUstream(stream.cuda_stream)):
        problem.poison()
        stream.wait_stream(torch.cuda.current_stream())
        library.gemm(problem.a, problem.b, out=problem.out, stream=form)
        stream.synchronize()
        problem.check()
        result = library.gemm(problem.a, problem.b, stream=form)
        stream.synchronize()
        problem.check(result)


def test_threads_share_one_shape(library: Library, signature: Signature, torch: Any) -> None:
    problems = [Problem(torch, signature, 64, seed=i) for i in range(4)]
    failures: list[BaseException] = []
    torch.cuda.synchronize()

    def work(problem: Problem) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()) as _:
                for _ in range(200):
                    library.gemm(problem.a, problem.b, out=problem.out)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(p,)) for p in problems]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for problem in problems:
        problem.check()


def test_thread_without_a_context_can_use_the_default_stream(
    library: Library, signature: Signature, torch: Any
) -> None:
    problem = Problem(torch, signature, 64)
    library.gemm(problem.a, problem.b, out=problem.out, stream=0)
    problem.poison()
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            library.gemm(problem.a, problem.b, out=problem.out, stream=0)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert failures == []
    problem.check()


def test_other_devices_tensors_are_served_whatever_device_is_current(
    tuned_archive: Path, signature: Signature, torch: Any
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(1):
        problem = Problem(torch, signature, 64)
        torch.cuda.synchronize()
    with torch.cuda.device(0), runtime.load(tuned_archive, device=1) as library:
        for _ in range(3):
            problem.poison()
            library.gemm(problem.a, problem.b, out=problem.out)
            torch.cuda.synchronize(1)
            problem.check()
        with pytest.raises(ArgumentError, match="device 0"):
            library.gemm(problem.a.to("cuda:0"), problem.b, out=problem.out)


def test_devices_are_served_at_once(tuned_archive: Path, signature: Signature, torch: Any) -> None:
    """Two threads for each device, with launches and captured graphs, while other devices are current elsewhere."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    failures: list[BaseException] = []
    capturing = threading.Lock()  # torch waits for the device where it begins, which ends another's capture

    def work(library: Library, device: int, seed: int) -> None:
        try:
            with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                problem = Problem(torch, signature, 33, seed=seed)
                for _ in range(200):
                    library.gemm(problem.a, problem.b, out=problem.out)
                torch.cuda.current_stream().synchronize()
                problem.check()
                graph = torch.cuda.CUDAGraph()
                # Without a stream torch captures on one that it made once, for the device that was current then.
                stream = torch.cuda.current_stream()
                with capturing, torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    library.gemm(problem.a, problem.b, out=problem.out)
                problem.fill(seed + 10)
                graph.replay()
                torch.cuda.current_stream().synchronize()
                problem.check()
        except BaseException as error:
            failures.append(error)

    with runtime.load(tuned_archive, device=0) as first, runtime.load(tuned_archive, device=1) as second:
        both = (first, second)
        threads = [threading.Thread(target=work, args=(both[i % 2], i % 2, i)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert [library.device for library in both] == ["cuda:0", "cuda:1"]
        assert first.reload(tuned_archive) is False
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)


# --- other frameworks ---


@pytest.mark.parametrize("stream", ["default", "given"])
def test_dlpack_tensors_are_taken(library: Library, signature: Signature, torch: Any, stream: str) -> None:
    problem = Problem(torch, signature, 64)
    torch.cuda.synchronize()
    given = torch.cuda.Stream() if stream == "given" else None
    tensors = [ExportedDLPack(t, "dlpack") for t in (problem.a, problem.b, problem.out)]
    for _ in range(2):
        library.gemm(tensors[0], tensors[1], out=tensors[2], stream=given)
    torch.cuda.synchronize()
    problem.check()


def test_cuda_array_interface_is_taken(library: Library, signatures: list[Signature], torch: Any) -> None:
    half = [s for s in signatures if s.a == s.b == s.d == "f16" and is_plain(s)]
    if not half:
        pytest.skip("the archive has no f16 GEMM, and other types have no name in this protocol")
    problem = Problem(torch, half[0], 64)
    torch.cuda.synchronize()
    tensors = [Exported(t, "cuda_array") for t in (problem.a, problem.b, problem.out)]
    library.gemm(tensors[0], tensors[1], out=tensors[2])
    torch.cuda.synchronize()
    problem.check()


# --- refusals ---


def test_every_function_of_this_gpu_loads_with_the_expected_parameters(library: Library) -> None:
    names = library.preload()
    assert names
    for name in names:
        assert library.functions[name].record.name == name
