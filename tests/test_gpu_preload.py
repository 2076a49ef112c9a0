"""What is prepared before the first call, and in other threads, on a real GPU: pytest -m gpu --archive=model.aot."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from runtime import Library
from runtime.gemm.signature import Signature

from . import gpu_library as on_gpu
from .forbidden import Forbid, forbidding, hook
from .gpu_library import Exported, Problem, arguments, is_plain, made

pytestmark = pytest.mark.gpu
library, signature, signatures, torch = on_gpu.library, on_gpu.signature, on_gpu.signatures, on_gpu.torch  # fixtures


def test_only_one_signature_is_preloaded(library: Library, signatures: list[Signature], torch: Any) -> None:
    """Its first call may be under capture, before anything of it ran; others load at their first call."""
    from aot.tune import measure
    from aot.tune.gemm.operands import Weights

    def gemm(s: Signature, o: Any) -> None:
        library.gemm(o.a, o.b, out=o.d, **arguments(s, o))

    one, *others = sorted(signatures, key=lambda s: s.key())
    names = library.preload(tokens=[33], only=[one])
    assert library.stats().kernels_loaded == len(names) < len(library.functions)
    o = made(one, 33)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gemm(one, o)
    o.d.zero_()
    graph.replay()
    replayed = o.d.clone()
    gemm(one, o)
    assert torch.equal(replayed.view(torch.uint8), o.d.view(torch.uint8))
    found = measure.check(one, 33, Weights(one, 33, 0, seed=1), {"gemm": lambda p: gemm(one, p)})["gemm"]
    assert isinstance(found, float), found
    assert library.stats().loads == len(names)
    other = next(s for s in others if library.entry(s).best(33) not in names)
    gemm(other, made(other, 33))
    torch.cuda.synchronize()
    assert library.stats().loads == len(names) + 1


# A process that has no context yet: one thread preloads while the other creates it, and imports torch meanwhile.
_BESIDE = """
import sys, threading
import runtime
from runtime.gemm.signature import Signature
library = runtime.load(sys.argv[1], device=0)
signature = Signature.from_json(eval(sys.argv[2]))
done = []
def prepare():
    done.append(library.preload(tokens=[1, 64], only=[signature]))
thread = threading.Thread(target=prepare)
thread.start()
import torch
from runtime.numbers.dtypes import TORCH_NAMES
dtype = getattr(torch, TORCH_NAMES[signature.a])
a, b = (torch.randn(rows, signature.k, device="cuda").to(dtype) for rows in (64, signature.n))
thread.join()
assert done and done[0], "preload failed"
before = library.stats()
found = [library.gemm(a[:m], b) for _ in range(3) for m in (1, 64)]
after = library.stats()
assert (before.loads, before.plans_made) == (after.loads, after.plans_made), (before, after)
assert all(d.dtype == dtype for d in found)
wanted = a.double() @ b.double().t()
assert all(((d.double() - wanted[: len(d)]).norm() / wanted[: len(d)].norm()).item() < 1e-2 for d in found)
print("right")
"""


def test_preload_beside_the_import_of_torch_and_its_context(tuned_archive: Path, signature: Signature) -> None:
    if not signature.a == signature.b == signature.d:
        pytest.skip("what is allocated is compared with a GEMM of one element type")
    command = [sys.executable, "-c", _BESIDE, str(tuned_archive), repr(signature.to_json())]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
        assert done.stdout.strip() == "right", done.stderr[-2000:]


def test_streams_of_other_arrays_are_waited_for_without_a_context(
    library: Library, signatures: list[Signature], torch: Any
) -> None:
    """In a thread that never used CUDA, as that of a server may be."""
    half = [s for s in signatures if s.a == s.b == s.d == "f16" and is_plain(s)]
    if not half:
        pytest.skip("the archive has no f16 GEMM, and other types have no name in this protocol")
    problem = Problem(torch, half[0], 64)
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    tensors = [Exported(t, "cuda_array") for t in (problem.a, problem.b, problem.out)]
    for exported in tensors:
        exported.__cuda_array_interface__ = exported.__cuda_array_interface__ | {"stream": producer.cuda_stream}
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            library.gemm(tensors[0], tensors[1], out=tensors[2], stream=consumer.cuda_stream)
        except BaseException as error:
            failures.append(error)

    with torch.cuda.stream(producer):
        torch.cuda._sleep(100_000_000)
        problem.fill(seed=1)  # what the GEMM must wait for
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failures
    problem.check()


_THREADS, _ROUNDS = 4, 20


def test_under_load_nothing_is_opened_compiled_or_loaded(
    library: Library, signatures: list[Signature], torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `preload`: threads on streams of their own, every signature, and each M for the first time under load."""
    library.preload()
    tokens = (1, 2, 17, 64, 129, 333)
    work = [[(s, made(s, m, seed)) for s in signatures for m in tokens] for seed in range(_THREADS)]
    calls = [[(o, arguments(s, o)) for s, o in mine] for mine in work]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    forbid, failures = Forbid(), list[BaseException]()
    monkeypatch.setattr(library._driver, "load", forbid.instead_of("driver.load", library._driver.load))
    monkeypatch.setattr(os, "pread", forbid.instead_of("os.pread", os.pread))
    before, start = library.stats(), threading.Barrier(_THREADS)

    def serve(number: int) -> None:
        try:
            with forbid.guarded():
                start.wait()
                for _ in range(_ROUNDS):
                    for o, more in calls[number]:
                        library.gemm(o.a, o.b, out=o.d, stream=streams[number], **more)
        except BaseException as error:
            failures.append(error)

    sys.addaudithook(hook)
    forbidding.append(forbid)
    try:
        threads = [threading.Thread(target=serve, args=(number,)) for number in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
    finally:
        forbidding.remove(forbid)
    assert not failures
    assert not forbid.tried
    after = library.stats()
    assert after.loads == before.loads
    assert after.launches - before.launches >= _THREADS * _ROUNDS * len(calls[0])
    for o, more in (call for mine in calls for call in mine):
        found = o.d.clone()
        library.gemm(o.a, o.b, out=o.d, **more)
        assert torch.equal(found.view(torch.uint8), o.d.view(torch.uint8))
