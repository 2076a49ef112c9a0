"""RMSNorm's operators of torch's, on the CPU with a driver that only records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

import runtime.torch as aot
from runtime import ArgumentError, Library
from runtime.container.archive import Archive

from .archives import write

N = 4096


@pytest.fixture
def lib(tmp_path: Path) -> Iterator[Library]:
    driver = write(tmp_path / "norms.aot")
    lib = Library(Archive.open(tmp_path / "norms.aot"), driver)
    yield lib
    lib.close()


def meta(*shape: int, dtype: Any = torch.float16) -> Any:
    return torch.empty(shape, device="meta", dtype=dtype)


def test_its_operators_take_what_a_call_does() -> None:
    schema = "(int library, Tensor x, Tensor weight, *, float eps=9.9999999999999995e-07) -> Tensor"
    assert str(torch.ops.cute_aot.rmsnorm.default._schema) == "cute_aot::rmsnorm" + schema
    assert "Tensor(a!) out" in str(torch.ops.cute_aot.rmsnorm_out.default._schema)


@pytest.mark.parametrize("shape", [(2, 5, N), (5, N), (N,), (0, N)])
def test_fake_results_are_shaped_like_x(lib: Library, shape: tuple[int, ...]) -> None:
    found = aot.call(lib, "rmsnorm", meta(*shape), meta(N), eps=0.5)
    assert (tuple(found.shape), found.dtype, found.device.type) == (shape, torch.float16, "meta")


def test_an_operator_with_a_residual_gives_both(lib: Library) -> None:
    x, weight = meta(5, N), meta(N)
    y, total = aot.add_rmsnorm(lib, x, meta(5, N), weight, eps=0.5)
    assert tuple(y.shape) == tuple(total.shape) == (5, N)
    with pytest.raises(ArgumentError, match=r"add_rmsnorm takes x and residual \(..., N\)"):
        aot.add_rmsnorm(lib, x, meta(4, N), weight)
    with pytest.raises(ArgumentError, match="must be of one element type and on one device"):
        aot.add_rmsnorm(lib, x, meta(5, N, dtype=torch.bfloat16), weight)


def test_operands_that_do_not_go_together_are_refused_while_tracing(lib: Library) -> None:
    with pytest.raises(ArgumentError, match=r"rmsnorm takes x \(..., N\), weight \(N\)"):
        aot.call(lib, "rmsnorm", meta(5, 64), meta(96))
