"""Operators of operations besides GEMM, with the real torch on the CPU.

The library is a real one, with a table of row-wise scaling, on a driver that only records; its `call` computes with
torch.
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
from torch._inductor.utils import run_and_get_code

import runtime.torch as aot
from runtime import ArgumentError, Library
from runtime.container.archive import Archive
from runtime.torch import operations

from .command_line import ROOT
from .distributions import OPERATIONS, install, install_row_scale
from .row_scale.archives import write
from .row_scale.operation import ROW_SCALE

N = 4096
FOUR = ["Tensor? bias=None", "str act='none'", "int n=3", "bool fast=True"]


class OnCpu(Library):
    """Computes what the archive would, and records with how many rows and which factor it was asked."""

    @property
    def calls(self) -> list[tuple[str, int, float]]:
        return vars(self).setdefault("_calls", [])

    def call(self, operation: str, *tensors: Any, stream: Any = None, **words: Any) -> Any:
        self._refuse_if_closed()
        x, weight = tensors
        factor, out = words.get("factor", 1.0), words.get("out")
        self.calls.append((operation, x.shape[:-1].numel(), factor))
        found = scaled(x, weight, factor)
        return found if out is None else out.copy_(found)


def scaled(x: Any, weight: Any, factor: float = 1.0) -> Any:
    return (x.float() * weight.float() * factor).to(x.dtype)


@pytest.fixture(scope="session")
def operators() -> Any:
    """Those of row-wise scaling, which torch lets nobody define twice: they are there where the process imported the
    binding while a test had the operation installed."""
    return operations._operators.get("row_scale") or operations._define(ROW_SCALE)


@pytest.fixture
def lib(tmp_path: Path, row_scale: None, operators: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnCpu]:
    monkeypatch.setitem(operations._operators, "row_scale", operators)
    torch.manual_seed(0)
    torch._dynamo.reset()
    driver = write(tmp_path / "scales.aot")
    lib = OnCpu(Archive.open(tmp_path / "scales.aot"), driver)
    yield lib
    lib.close()


def tensors(*shapes: tuple[int, ...]) -> list[Any]:
    return [torch.randn(shape).bfloat16() for shape in shapes]


def meta(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.empty(shape, device="meta", dtype=dtype)


def test_operator_computes_what_the_library_does(lib: OnCpu) -> None:
    x, weight = tensors((2, 5, N), (N,))
    assert torch.equal(aot.call(lib, "row_scale", x, weight, factor=0.5), scaled(x, weight, 0.5))
    out = torch.empty_like(x)
    assert aot.call(lib, "row_scale", x, weight, out=out) is out
    assert torch.equal(out, scaled(x, weight))
    assert lib.calls == [("row_scale", 10, 0.5), ("row_scale", 10, 1.0)]


def test_tensors_in_host_memory_are_refused_by_the_library_itself(lib: OnCpu) -> None:
    real = Library(lib._now.layers.archives, lib._driver)
    with pytest.raises(ArgumentError, match="x is on cpu; move it to the GPU"):
        aot.call(real, "row_scale", *tensors((5, N), (N,)))


@pytest.mark.parametrize("which", ["row_scale", "row_scale_out"])
def test_operator_passes_torchs_own_checks(lib: OnCpu, which: str) -> None:
    x, weight = tensors((5, N), (N,))
    out = (torch.empty_like(x),) if which == "row_scale_out" else ()
    operator = getattr(torch.ops.cute_aot, which).default
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, (aot.register(lib), x, weight, *out), {"factor": 0.5}, test_utils=tests)


@pytest.mark.parametrize("shape", [(2, 5, N), (5, N), (N,), (0, N)])
def test_fake_results_are_shaped_as_real_ones(lib: OnCpu, shape: tuple[int, ...]) -> None:
    found = aot.call(lib, "row_scale", meta(*shape, dtype=torch.float16), meta(N, dtype=torch.float16))
    assert (tuple(found.shape), found.dtype, found.device.type) == (shape, torch.float16, "meta")
    assert lib.calls == []


@pytest.mark.parametrize(
    ("x", "weight", "more", "message"),
    [
        (meta(5, 64), meta(96), {}, r"row_scale takes x \(..., N\), weight \(N\)"),
        (meta(5, 64), meta(64), {"out": meta(5, 96)}, "row_scale takes x"),
        (meta(5, 64, dtype=torch.float64), meta(64), {}, "x has element type torch.float64"),
        (meta(5, 64), torch.empty(64), {}, "weight is on cpu and x on meta"),
    ],
)
def test_fake_refuses_what_the_library_would(lib: OnCpu, x: Any, weight: Any, more: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        aot.call(lib, "row_scale", x, weight, **more)


def test_compiles_in_one_graph_with_any_m(lib: OnCpu) -> None:
    frames = []

    def backend(graph: Any, _inputs: Any) -> Any:
        frames.append(graph)
        return graph.forward

    (weight,) = tensors((N,))
    step = torch.compile(
        lambda x: aot.call(lib, "row_scale", x * 2, weight, factor=0.5) + 1, fullgraph=True, backend=backend
    )
    for m in (5, 6, 7, 33):
        (x,) = tensors((m, N))
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(step(x), scaled(x * 2, weight, 0.5) + 1)
    assert len(frames) == 1


def test_inductor_compiles_both_operators_with_any_m(lib: OnCpu) -> None:
    (weight,) = tensors((N,))

    def step(x: Any) -> Any:
        out = torch.empty_like(x)
        aot.call(lib, "row_scale", x, weight, out=out, factor=0.5)
        return aot.call(lib, "row_scale", out * 2, weight).flatten(0, 1) + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for m in (5, 9):
        (x,) = tensors((2, m, N))
        assert torch.equal(compiled(x), step(x))


def test_compiled_code_calls_the_library_itself(lib: OnCpu) -> None:
    (weight,) = tensors((N,))
    step = lambda x: aot.call(lib, "row_scale", x * 2, weight, factor=0.5)  # noqa: E731
    compiled = torch.compile(step, fullgraph=True, dynamic=True, options={"fx_graph_cache": False})
    x, other = tensors((5, N), (9, N))
    found, (code,) = run_and_get_code(compiled, x)
    assert f"cute_aot_row_scale({aot.register(lib)}, 'row_scale', 2, 'x', 'weight', factor=0.5)" in code
    assert "torch.ops.cute_aot" not in code
    assert torch.equal(found, step(x))
    assert torch.equal(compiled(other), step(other))
    assert lib.calls == [("row_scale", m, 0.5) for m in (5, 5, 9, 9)]


def test_gradients_are_refused(lib: OnCpu) -> None:
    x, weight = tensors((5, N), (N,))
    weight.requires_grad_()
    with pytest.raises(ArgumentError, match="row_scale would have to record a gradient"):
        aot.call(lib, "row_scale", x, weight)
    with torch.no_grad():
        aot.call(lib, "row_scale", x, weight)


def test_operations_without_an_operator_are_refused_by_name(lib: OnCpu) -> None:
    x, weight = tensors((5, N), (N,))
    with pytest.raises(ArgumentError, match="unknown operation 'softmax'"):
        aot.call(lib, "softmax", x)
    with pytest.raises(ArgumentError, match="cannot say what gemm takes"):
        aot.call(lib, "gemm", x, weight)


# --- which operations have operators ---


def imported(site: Path) -> str:
    """What a process that imports the binding has operators for, with `site` on its path, and what it logs."""
    code = "import runtime.torch.operations as found; print(*found._operators)"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{site}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def test_operators_are_there_once_the_binding_is_imported_but_for_broken_ones(tmp_path: Path) -> None:
    install_row_scale(tmp_path)
    (tmp_path / "broken_operation.py").write_text("import nothing_of_this_name")
    install(tmp_path, "broken", {OPERATIONS: "broken = broken_operation:BROKEN"})
    there, said = imported(tmp_path).split("\n", 1)
    assert "row_scale" in there.split()
    assert "broken" not in there.split()
    assert "no operator: operation broken: " in said


@pytest.mark.parametrize(
    ("parameters", "schema"),
    [
        ("view, x, weight, *, out=None, factor=1e-6", (["x", "weight"], ["float factor=1e-06"])),
        ("view, x, *, out, bias=None, act='none', n=3, fast=True", (["x"], FOUR)),
        ("view, *tensors, out=None", None),
        ("view, x, weight", None),
        ("view, x, *, out, factor", None),
        ("view, x, *, out, shape=()", None),
        ("view, *, out", None),
    ],
)
def test_schema_is_what_the_operation_is_asked_with(parameters: str, schema: Any) -> None:
    class Asked:
        ask = staticmethod(eval(f"lambda {parameters}: None"))

    of: Any = Asked()
    assert operations._schema(of) == schema
