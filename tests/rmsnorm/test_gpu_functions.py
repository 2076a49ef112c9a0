"""RMSNorm's functions on a real GPU, called by name: pytest -m gpu --archive=model.aot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime import ArgumentError, Library
from runtime.device.driver import Driver
from runtime.numbers.dtypes import TORCH_NAMES
from runtime.tables.dispatch import serves

pytestmark = pytest.mark.gpu

# Relative error of a result against float64, by its element type: rounding once, and some for the order of summation.
TOLERANCE = {"bf16": 5e-3, "f16": 1e-3}


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def library(tuned_archive: Path, torch: Any) -> Iterator[Library]:
    torch.manual_seed(0)
    with runtime.load(tuned_archive) as library:
        yield library
        torch.cuda.synchronize()


@pytest.fixture
def norms(library: Library) -> list[Any]:
    """The archive's RMSNorm functions without a residual (`aot build --function rmsnorm`)."""
    return functions(library, "weight")


@pytest.fixture
def norms_of_sums(library: Library) -> list[Any]:
    """Those with a residual whose results have no scales."""
    return functions(library, "residual")


def functions(library: Library, second: str) -> list[Any]:
    """Those whose second argument this is, for this GPU."""
    found = [
        f
        for name, f in library.functions.items()
        if "rmsnorm" in name and serves(f.target, Driver().compute_capability)
        if f.record.arguments[1].name == second and "scale" not in (a.name for a in f.record.arguments)
    ]
    if not found:
        pytest.skip("the archive has no RMSNorm; build it with --function rmsnorm")
    return found


def test_rmsnorm_is_right_and_keeps_to_its_rows(norms: list[Any], torch: Any) -> None:
    for norm in norms:
        dtype = getattr(torch, TORCH_NAMES[norm.record.arguments[0].dtype])
        for rows, columns in ((1, 8), (3, 128), (17, 4096), (333, 5376), (1000, 1024)):
            x = torch.randn(rows, columns + 64, device="cuda", dtype=dtype)[:, :columns]  # rows that lie apart
            weight = torch.randn(columns, device="cuda", dtype=dtype)
            whole = torch.full((rows + 2, columns + 8), 7.0, device="cuda", dtype=dtype)
            y = whole[1:-1, :columns]
            norm(x, weight, y, 1e-5)
            reference = torch.nn.functional.rms_norm(x.double(), (columns,), weight.double(), 1e-5)
            error = (y.double() - reference).norm() / reference.norm()
            assert error.item() < TOLERANCE[norm.record.arguments[0].dtype]
            whole[1:-1, :columns] = 7.0
            assert bool((whole == 7.0).all())


@pytest.mark.parametrize("in_place", [False, True])
def test_rmsnorm_of_a_sum_is_right_of_rows_that_lie_apart(norms_of_sums: list[Any], torch: Any, in_place: bool) -> None:
    """Also where y takes x's place and the sum the residual's, of rows that registers hold and of longer ones."""
    for norm in norms_of_sums:
        dtype = getattr(torch, TORCH_NAMES[norm.record.arguments[0].dtype])
        for rows, columns in ((1, 8), (17, 4096), (33, 20_000), (1000, 1024)):
            x, residual, y, total = (
                torch.randn(rows, columns + pad, device="cuda", dtype=dtype)[:, :columns] for pad in (64, 8, 24, 40)
            )
            weight = torch.randn(columns, device="cuda", dtype=dtype)
            both = (x.float() + residual.float()).to(dtype)
            reference = torch.nn.functional.rms_norm(both.double(), (columns,), weight.double(), 1e-5)
            if in_place:
                y, total = x, residual
            norm(x, residual, weight, y, total, 1e-5)
            assert torch.equal(total, both)
            error = (y.double() - reference).norm() / reference.norm()
            assert error.item() < TOLERANCE[norm.record.arguments[0].dtype]


def test_rmsnorm_can_be_captured(norms: list[Any], torch: Any) -> None:
    norm = norms[0]
    dtype = getattr(torch, TORCH_NAMES[norm.record.arguments[0].dtype])
    x, weight = torch.randn(64, 4096, device="cuda", dtype=dtype), torch.randn(4096, device="cuda", dtype=dtype)
    y = torch.empty_like(x)
    norm(x, weight, y, 1e-5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm(x, weight, y, 1e-5)
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    reference = torch.nn.functional.rms_norm(x.double(), (4096,), weight.double(), 1e-5)
    assert ((y.double() - reference).norm() / reference.norm()).item() < 5e-3


def test_rmsnorm_refuses_what_it_was_not_compiled_for(norms: list[Any], torch: Any) -> None:
    norm = norms[0]
    dtype = getattr(torch, TORCH_NAMES[norm.record.arguments[0].dtype])
    x, weight = torch.randn(4, 4096, device="cuda", dtype=dtype), torch.randn(4096, device="cuda", dtype=dtype)
    with pytest.raises(ArgumentError, match="must equal"):
        norm(x, weight[:4088], torch.empty_like(x), 1e-5)
    with pytest.raises(ArgumentError, match="element type"):
        norm(x.float(), weight, torch.empty_like(x), 1e-5)
    with pytest.raises(ArgumentError, match="a number"):
        norm(x, weight, torch.empty_like(x), None)
