"""What RMSNorm's kernels make of rows, on the emulated GPU (`tests.ptx`)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from aot.compile.lower import Lowered
from aot.tune.elements import poisoned

from ..ptx.compiled import functions_once, run
from ..quantise.test_kernels import expected, outputs, rows_of

SCALINGS = pytest.mark.parametrize("scaling", ["block", "row_column"])
# The least and the most that a block has: the first keep 32 elements a thread, the others have the fewest registers.
THREADS = pytest.mark.parametrize("threads", [32, 1024])
EPS = 1e-5


def name(threads: int, scaling: str = "none", added: bool = True, target: str = "sm_90a") -> str:
    sums = ["bf16"] if added else []
    y = ["bf16"] if scaling == "none" else ["e4m3", "f32"]
    elements = "_".join(["bf16", *sums, "bf16", *y, *sums, "f32"])
    scaled = "" if scaling == "none" else f".{scaling}_scaled"
    return f"own.rmsnorm_row.{elements}{scaled}.threads{threads}.{target}"


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> Mapping[str, Lowered]:
    names = [name(threads, scaling) for threads in (32, 64, 544, 1024) for scaling in ("none", "block", "row_column")]
    return functions_once(request, "rmsnorm", [*names, name(32, "block", added=False)])


def operands(m: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, a residual and a weight."""
    weight = torch.randn(n, generator=torch.Generator().manual_seed(n)).bfloat16()
    return rows_of(m, n, n), rows_of(m, n, n + 1), weight


def normed(
    kernels: Mapping[str, Lowered], threads: int, x: Tensor, residual: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The norm and the sum, of 16 bits."""
    y, total = (poisoned(tuple(x.shape), "bf16", "cpu") for _ in range(2))
    run(kernels[name(threads)], [x, residual, weight, y, total, EPS], [y, total])
    return y, total


@SCALINGS
@pytest.mark.parametrize(
    ("threads", "m", "n"),
    [
        *((threads, m, n) for threads in (32, 1024) for m, n in ((1, 16), (4, 400))),
        *((32, 2, 2096), (64, 2, 2448), (544, 1, 4624)),  # more than threads keep, and no whole number of loads
    ],
)
def test_what_a_norm_quantises_is_what_quantising_makes_of_it(
    kernels: Mapping[str, Lowered], threads: int, scaling: str, m: int, n: int
) -> None:
    """Bit for bit, also of what is behind the elements that threads keep in registers."""
    x, residual, weight = operands(m, n)
    (y, scale), total = outputs(m, n, scaling), poisoned((m, n), "bf16", "cpu")
    run(kernels[name(threads, scaling)], [x, residual, weight, y, scale, total, EPS], [y, scale, total])
    norm, of_norm = normed(kernels, threads, x, residual, weight)
    wanted = expected(norm, scaling)
    assert torch.equal(y.float(), wanted[0])
    assert torch.equal(scale, wanted[1])
    assert torch.equal(total, of_norm)


@THREADS
def test_a_norm_is_of_the_rounded_sum(kernels: Mapping[str, Lowered], threads: int) -> None:
    x, residual, weight = operands(3, 1040)
    y, total = normed(kernels, threads, x, residual, weight)
    assert torch.equal(total, x + residual)
    wide = total.double()
    wanted = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()
    torch.testing.assert_close(y.double(), wanted, rtol=2**-8, atol=1e-30)


def test_the_sum_may_take_the_residuals_place(kernels: Mapping[str, Lowered]) -> None:
    x, residual, weight = operands(3, 1040)
    norm, total = normed(kernels, 32, x, residual, weight)
    y, scale = outputs(3, 1040, "block")
    run(kernels[name(32, "block")], [x, residual, weight, y, scale, residual, EPS], [y, scale, residual])
    assert torch.equal(residual, total)
    assert torch.equal(y.float(), expected(norm, "block")[0])


def test_a_norm_without_a_residual_quantises_too(kernels: Mapping[str, Lowered]) -> None:
    x, residual, weight = operands(3, 1040)
    norm, total = normed(kernels, 32, x, residual, weight)
    y, scale = outputs(3, 1040, "block")
    run(kernels[name(32, "block", added=False)], [total, weight, y, scale, EPS], [y, scale])
    assert torch.equal(y.float(), expected(norm, "block")[0])


def test_the_largest_blocks_fit_in_registers_before_hopper(request: pytest.FixtureRequest) -> None:
    """Which have no more of them."""
    of = name(1024, added=False, target="sm_80")
    (kernel,) = functions_once(request, "rmsnorm-sm_80", [of], "sm_80")[of].record["kernels"]
    assert kernel["local_bytes"] == 0
