"""What tests on a real GPU share: the archive's library, its problems, and operands of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime import Library
from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.gemm.operation import GEMM
from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import TORCH_NAMES
from runtime.tables.dispatch import Dispatch

REPEATS = 5

# Relative error of a result against float64, by its element type: rounding once, and some for the order of summation.
TOLERANCE = {"bf16": 5e-3, "f16": 1e-3, "f32": 1e-3}


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def signatures(tuned_archive: Path) -> list[Signature]:
    """What the archive's gemm table has for this GPU."""
    with Archive.open(tuned_archive) as archive:
        table = Dispatch.from_json(archive.table("gemm"), GEMM)
    found = [e.signature for e in table.entries_for(Driver().compute_capability)]
    if not found:
        pytest.skip("the archive has no GEMM for this GPU")
    return found


def is_plain(s: Signature) -> bool:
    """Whether A and B are all there is to it, and there is no batch."""
    return s == Signature(s.a, s.b, s.d, s.accumulator, "none", s.n, s.k)


@pytest.fixture(scope="module")
def signature(signatures: list[Signature]) -> Signature:
    """The smallest plain problem."""
    plain = [s for s in signatures if is_plain(s)]
    if not plain:
        pytest.skip("the archive has no plain GEMM for this GPU")
    return min(plain, key=lambda s: s.n * s.k)


@pytest.fixture
def library(tuned_archive: Path, torch: Any) -> Iterator[Library]:
    torch.manual_seed(0)
    with runtime.load(tuned_archive) as library:
        yield library
        torch.cuda.synchronize()


@pytest.fixture(name="library", scope="module")
def library_of_module(tuned_archive: Path) -> Iterator[Library]:
    """One for all tests of a module."""
    torch = pytest.importorskip("torch")
    with runtime.load(tuned_archive) as library:
        yield library
        torch.cuda.synchronize()


class Problem:
    """Random operands of a signature, an output full of NaN, and the error of what is in it."""

    def __init__(self, torch: Any, s: Signature, m: int, seed: int = 0) -> None:
        self.torch, self.signature = torch, s
        lead = (s.batch,) if s.batch > 1 else ()
        kinds = [getattr(torch, TORCH_NAMES[t]) for t in (s.a, s.b, s.d)]
        self.a = torch.empty((*lead, m, s.k), device="cuda", dtype=kinds[0])
        self.b = torch.empty((*lead, s.n, s.k), device="cuda", dtype=kinds[1])
        self.out = torch.empty((*lead, m, s.n), device="cuda", dtype=kinds[2])
        self.fill(seed)

    def fill(self, seed: int) -> None:
        generator = self.torch.Generator(device="cuda").manual_seed(seed)
        for t in (self.a, self.b):
            t.copy_(self.torch.randn(t.shape, device="cuda", generator=generator))
        self.poison()

    def poison(self) -> None:
        self.out.fill_(float("nan"))

    def check(self, found: Any = None) -> None:
        found = self.out if found is None else found
        reference = self.a.double() @ self.b.double().transpose(-1, -2)
        error = (found.double() - reference).norm() / reference.norm()
        assert error.item() < TOLERANCE[self.signature.d], f"{self.signature.key()}: relative error {error.item()}"


def arguments(s: Signature, o: Any) -> Any:
    """What `gemm` takes by keyword for this signature and these operands."""
    from aot.tune.gemm.operands import gemm_options

    return gemm_options(s, o)


def made(s: Signature, m: int, seed: int = 0) -> Any:
    from aot.tune.gemm.operands import Weights

    return Weights(s, m, 0, seed).operands(m)[0]


def bits(torch: Any, t: Any) -> Any:
    """The bits of a dense tensor, which compare equal where NaN does not."""
    return t.contiguous().view(torch.uint8)


class Exported:
    """A tensor that shows one protocol and nothing else."""

    def __init__(self, tensor: Any, protocol: str) -> None:
        self.tensor = tensor
        if protocol == "cuda_array":
            self.__cuda_array_interface__ = tensor.__cuda_array_interface__


class ExportedDLPack(Exported):
    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)
