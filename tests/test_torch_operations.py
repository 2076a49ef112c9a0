"""Operators of operations besides GEMM, with the real torch on the CPU.

The library is a real one, with an rmsnorm table, on a driver that only records; its `call` computes with torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

import runtime.torch as aot
from runtime import ArgumentError, Library
from runtime.container.archive import Archive
from runtime.program.operation import operation
from runtime.torch import operations

from .command_line import ROOT
from .test_operations import outside as outside  # a fixture
from .test_operations import write

N = 4096
FOUR = ["Tensor? bias=None", "str act='none'", "int n=3", "bool fast=True"]


class OnCpu(Library):
    """Computes what the archive would, and records with how many rows and which eps it was asked."""

    @property
    def calls(self) -> list[tuple[str, int, float]]:
        return vars(self).setdefault("_calls", [])

    def call(self, operation: str, *tensors: Any, stream: Any = None, **words: Any) -> Any:
        self._refuse_if_closed()
        x, weight = tensors
        eps, out = words.get("eps", 1e-6), words.get("out")
        self.calls.append((operation, x.shape[:-1].numel(), eps))
        found = normalised(x, weight, eps)
        return found if out is None else out.copy_(found)


def normalised(x: Any, weight: Any, eps: float = 1e-6) -> Any:
    return torch.nn.functional.rms_norm(x.float(), (N,), weight.float(), eps).to(x.dtype)


@pytest.fixture
def lib(tmp_path: Path) -> Iterator[OnCpu]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    driver = write(tmp_path / "norms.aot")
    lib = OnCpu(Archive.open(tmp_path / "norms.aot"), driver)
    yield lib
    lib.close()


def tensors(*shapes: tuple[int, ...]) -> list[Any]:
    return [torch.randn(shape).bfloat16() for shape in shapes]


def meta(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.empty(shape, device="meta", dtype=dtype)


def test_operator_computes_what_the_library_does(lib: OnCpu) -> None:
    x, weight = tensors((2, 5, N), (N,))
    assert torch.equal(aot.call(lib, "rmsnorm", x, weight, eps=0.5), normalised(x, weight, 0.5))
    out = torch.empty_like(x)
    assert aot.call(lib, "rmsnorm", x, weight, out=out) is out
    assert torch.equal(out, normalised(x, weight))
    assert lib.calls == [("rmsnorm", 10, 0.5), ("rmsnorm", 10, 1e-6)]


def test_tensors_in_host_memory_are_refused_by_the_library_itself(lib: OnCpu) -> None:
    real = Library(lib._now.layers.archives, lib._driver)
    with pytest.raises(ArgumentError, match="x is on cpu; move it to the GPU"):
        aot.call(real, "rmsnorm", *tensors((5, N), (N,)))


@pytest.mark.parametrize("which", ["rmsnorm", "rmsnorm_out"])
def test_operator_passes_torchs_own_checks(lib: OnCpu, which: str) -> None:
    x, weight = tensors((5, N), (N,))
    out = (torch.empty_like(x),) if which == "rmsnorm_out" else ()
    operator = getattr(torch.ops.cute_aot, which).default
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, (aot.register(lib), x, weight, *out), {"eps": 0.5}, test_utils=tests)


@pytest.mark.parametrize("shape", [(2, 5, N), (5, N), (N,), (0, N)])
def test_fake_results_are_shaped_as_real_ones(lib: OnCpu, shape: tuple[int, ...]) -> None:
    found = aot.call(lib, "rmsnorm", meta(*shape, dtype=torch.float16), meta(N, dtype=torch.float16))
    assert (tuple(found.shape), found.dtype, found.device.type) == (shape, torch.float16, "meta")
    assert lib.calls == []


@pytest.mark.parametrize(
    ("x", "weight", "more", "message"),
    [
        (meta(5, 64), meta(96), {}, r"rmsnorm takes x \(..., N\), weight \(N\)"),
        (meta(5, 64), meta(64), {"out": meta(5, 96)}, "rmsnorm takes x"),
        (meta(5, 64, dtype=torch.float64), meta(64), {}, "x has element type torch.float64"),
        (meta(5, 64), torch.empty(64), {}, "weight is on cpu and x on meta"),
    ],
)
def test_fake_refuses_what_the_library_would(lib: OnCpu, x: Any, weight: Any, more: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        aot.call(lib, "rmsnorm", x, weight, **more)


def test_compiles_in_one_graph_with_any_m(lib: OnCpu) -> None:
    frames = []

    def backend(graph: Any, _inputs: Any) -> Any:
        frames.append(graph)
        return graph.forward

    (weight,) = tensors((N,))
    step = torch.compile(
        lambda x: aot.call(lib, "rmsnorm", x * 2, weight, eps=0.5) + 1, fullgraph=True, backend=backend
    )
    for m in (5, 6, 7, 33):
        (x,) = tensors((m, N))
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(step(x), normalised(x * 2, weight, 0.5) + 1)
    assert len(frames) == 1


def test_inductor_compiles_both_operators_with_any_m(lib: OnCpu) -> None:
    (weight,) = tensors((N,))

    def step(x: Any) -> Any:
        out = torch.empty_like(x)
        aot.call(lib, "rmsnorm", x, weight, out=out, eps=0.5)
        return aot.call(lib, "rmsnorm", out * 2, weight).flatten(0, 1) + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for m in (5, 9):
        (x,) = tensors((2, m, N))
        assert torch.equal(compiled(x), step(x))


def test_gradients_are_refused(lib: OnCpu) -> None:
    x, weight = tensors((5, N), (N,))
    weight.requires_grad_()
    with pytest.raises(ArgumentError, match="rmsnorm would have to record a gradient"):
        aot.call(lib, "rmsnorm", x, weight)
    with torch.no_grad():
        aot.call(lib, "rmsnorm", x, weight)


def test_operations_without_an_operator_are_refused_by_name(lib: OnCpu) -> None:
    x, weight = tensors((5, N), (N,))
    with pytest.raises(ArgumentError, match="unknown operation 'softmax'"):
        aot.call(lib, "softmax", x)
    with pytest.raises(ArgumentError, match="cannot say what gemm takes"):
        aot.call(lib, "gemm", x, weight)


# --- operations of other packages ---


@pytest.mark.usefixtures("outside")
def test_an_operation_of_another_package_has_operators(lib: OnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    defined = operations._define(operation("row_scale"))
    assert defined is not None
    monkeypatch.setitem(operations._operators, "row_scale", defined)
    x, weight = tensors((5, N), (N,))
    assert torch.equal(aot.call(lib, "row_scale", x, weight, eps=0.5), normalised(x, weight, 0.5))
    assert lib.calls == [("row_scale", 5, 0.5)]
    assert aot.call(lib, "row_scale", meta(5, N), meta(N), out=meta(5, N)).shape == (5, N)


def imported(site: Path) -> str:
    """What a process that imports the binding has operators for, with `site` on its path, and what it logs."""
    code = "import runtime.torch.operations as found; print(*found._operators)"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{site}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


@pytest.mark.usefixtures("outside")
def test_operators_are_there_once_the_binding_is_imported_but_for_broken_ones(tmp_path: Path) -> None:
    site = tmp_path / "site"
    assert imported(site).split() == ["rmsnorm", "row_scale"]
    (site / "row_scale_of_another.py").write_text("import nothing_of_this_name")
    said = imported(site)
    assert said.startswith("rmsnorm\n")
    assert "no operator: operation row_scale: " in said


@pytest.mark.parametrize(
    ("parameters", "schema"),
    [
        ("view, x, weight, *, out=None, eps=1e-6", (["x", "weight"], ["float eps=1e-06"])),
        ("view, x, *, out, bias=None, act='none', n=3, fast=True", (["x"], FOUR)),
        ("view, *tensors, out=None", None),
        ("view, x, weight", None),
        ("view, x, *, out, eps", None),
        ("view, x, *, out, shape=()", None),
        ("view, *, out", None),
    ],
)
def test_schema_is_what_the_operation_is_asked_with(parameters: str, schema: Any) -> None:
    class Asked:
        ask = staticmethod(eval(f"lambda {parameters}: None"))

    of: Any = Asked()
    assert operations._schema(of) == schema
