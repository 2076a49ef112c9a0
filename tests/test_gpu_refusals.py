"""Calls that are refused or fall back on a real GPU: pytest -m gpu --archive=model.aot."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime import ArgumentError, DeviceError, KernelMiss, Library
from runtime.gemm.signature import Signature

from .gpu_library import Problem
from .gpu_library import library as library
from .gpu_library import signature as signature
from .gpu_library import signatures as signatures
from .gpu_library import torch as torch

pytestmark = pytest.mark.gpu

# --- refusals ---


def test_unknown_problem_is_a_miss(library: Library, signature: Signature, torch: Any) -> None:
    a = torch.zeros((16, signature.k + 8), device="cuda", dtype=torch.bfloat16)
    b = torch.zeros((signature.n, signature.k + 8), device="cuda", dtype=torch.bfloat16)
    with pytest.raises(KernelMiss, match="the nearest of"):
        library.gemm(a, b)


def test_fallback_computes_what_the_archive_cannot(tuned_archive: Path, torch: Any) -> None:
    s = Signature("bf16", "bf16", "bf16", "f32", "none", 72, 88)
    with runtime.load(tuned_archive, on_miss="torch") as library:
        problem = Problem(torch, s, 5)
        problem.check(library.gemm(problem.a, problem.b))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        library.gemm(problem.a, problem.b, out=problem.out, stream=stream)
        stream.synchronize()
        problem.check()
        assert library.misses == {s.key(): 2}


def test_fallback_computes_layouts_that_kernels_do_not_take(
    tuned_archive: Path, signature: Signature, torch: Any
) -> None:
    with runtime.load(tuned_archive, on_miss="torch") as library:
        problem = Problem(torch, signature, 16)
        shifted = torch.empty(problem.a.numel() + 1, device="cuda", dtype=problem.a.dtype)[1:].view(problem.a.shape)
        shifted.copy_(problem.a)
        columns = problem.out.t().contiguous().t()
        for a, out, reason in (
            (shifted, problem.out, "address of a"),
            (problem.a.t().contiguous().t(), problem.out, "strides of a"),
            (problem.a, columns, "strides of out"),
        ):
            out.fill_(float("nan"))
            problem.check(library.gemm(a, problem.b, out=out))
            assert library.misses.pop(f"{signature.key()}, {reason}") == 1
        rows = problem.a[:1].expand(16, -1)
        problem.check(library.gemm(problem.a, problem.b))
        assert bool((library.gemm(rows, problem.b) == library.gemm(rows, problem.b)[:1]).all())


def test_tensors_whose_storage_was_freed_are_refused(library: Library, signature: Signature, torch: Any) -> None:
    problem = Problem(torch, signature, 16)
    library.gemm(problem.a, problem.b, out=problem.out)
    problem.a.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match=r"a of shape .* has no memory"):
        library.gemm(problem.a, problem.b, out=problem.out)


def test_forked_child_is_told_why_it_cannot_use_the_gpu(library: Library, signature: Signature, torch: Any) -> None:
    problem = Problem(torch, signature, 16)
    library.gemm(problem.a, problem.b, out=problem.out, stream=0)
    torch.cuda.synchronize()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            library.gemm(problem.a, problem.b, out=problem.out, stream=0)
        except DeviceError as error:
            status = 0 if "forked" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_misaligned_and_overlapping_tensors_are_refused(library: Library, signature: Signature, torch: Any) -> None:
    problem = Problem(torch, signature, 16)
    library.gemm(problem.a, problem.b, out=problem.out)
    storage = torch.zeros(problem.a.numel() + 1, device="cuda", dtype=problem.a.dtype)
    with pytest.raises(ArgumentError, match="must start at a multiple of"):
        library.gemm(storage[1:].view(problem.a.shape), problem.b, out=problem.out)
    with pytest.raises(ArgumentError, match="is on cpu"):
        library.gemm(problem.a.cpu(), problem.b, out=problem.out)
    if problem.b.dtype == problem.out.dtype and problem.b.numel() >= problem.out.numel():
        with pytest.raises(ArgumentError, match="shares memory with b"):
            library.gemm(problem.a, problem.b, out=problem.b.view(-1)[: problem.out.numel()].view(problem.out.shape))
