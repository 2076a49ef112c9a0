"""Code that Inductor generates calls the library itself, with no operator in between; the real torch, on the CPU."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import runtime.torch as aot
from runtime import ArgumentError, KernelMiss
from runtime.container.errors import ArchiveClosed
from runtime.plugin import scaled
from runtime.plugin.scaled_products import widened
from runtime.torch import direct, direct_calls, lowering, operator

from .command_line import ROOT
from .torch_stand_in import GATED, HIDDEN, INNER, ONE, PLAIN, QKV, VOCAB, OnCpu, library, llama, near, tensors, tokens

OPERATOR = "torch.ops.cute_aot."
CALL = "cute_aot_gemm_"


@pytest.fixture(autouse=True)
def compiled_anew() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield


@pytest.fixture
def lib(tmp_path: Path) -> Iterator[OnCpu]:
    with library(tmp_path, [*PLAIN, GATED, QKV]) as lib:
        yield lib


def code_of(compiled: Any, *inputs: Any) -> tuple[Any, str]:
    """The result of the first call, and all code that was generated for it, without comments."""
    with torch.no_grad():
        found, codes = run_and_get_code(compiled, *inputs)
    assert codes
    return found, "\n".join(line for code in codes for line in code.splitlines() if not line.strip().startswith("#"))


# --- what is generated ---


def test_compiled_linear_layers_call_the_library_with_any_m(lib: OnCpu) -> None:
    model, inputs = llama(), [tokens(2, columns) for columns in (5, 9, 17)]
    with torch.no_grad():
        wanted = [model(x) for x in inputs]
    aot.replace_linears(model, lib)
    compiled = torch.compile(model, fullgraph=True)
    for x in inputs:
        torch._dynamo.mark_dynamic(x, 1)
    found, code = code_of(compiled, inputs[0])
    assert OPERATOR not in code
    assert code.count(f"    {CALL}") == 9  # qkv, o, gate and up, and down of two blocks; and the head
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for y, other in zip([found, *map(compiled, inputs[1:])], wanted, strict=True):
            assert near(y, other)
    assert [call[0] for call in lib.calls] == ([QKV["n"], HIDDEN, GATED["n"], HIDDEN] * 2 + [VOCAB]) * 3


def test_each_call_is_made_once_in_a_file(lib: OnCpu) -> None:
    w, bias = tensors((HIDDEN, HIDDEN), (HIDDEN,))

    def step(x: Any) -> Any:
        x = aot.gemm(lib, aot.gemm(lib, x, w), w)
        return aot.gemm(lib, x, w, bias=bias)

    _, code = code_of(torch.compile(step, fullgraph=True), *tensors((7, HIDDEN)))
    number = aot.register(lib)
    made = [line.partition(" = ")[2] for line in code.splitlines() if line.startswith(CALL)]
    assert made == [f"cute_aot_gemm({number}, 'a', 'b')", f"cute_aot_gemm({number}, 'a', 'b', 'bias')"]
    assert code.count("from runtime.torch.direct import gemm as cute_aot_gemm") == 1


def test_results_are_buffers_whose_memory_is_used_again(lib: OnCpu) -> None:
    (w,) = tensors((HIDDEN, HIDDEN))

    def step(x: Any) -> Any:
        for _ in range(4):
            x = aot.gemm(lib, x, w)
        return x

    seen = []

    class Watched(OnCpu):
        def gemm(self, a: Any, b: Any, *, out: Any = None, **more: Any) -> Any:
            seen.append((a.data_ptr(), out.data_ptr()))
            return super().gemm(a, b, out=out, **more)

    lib.__class__ = Watched
    found, code = code_of(torch.compile(step, fullgraph=True), *tensors((7, HIDDEN)))
    assert code.count("# reuse") == 2
    places = [out for _, out in seen]
    assert len(set(places)) == 2
    assert places[:2] == places[2:]
    assert found.data_ptr() == places[-1]
    assert [a for a, _ in seen[1:]] == places[:-1]


def variants() -> dict[str, Any]:
    """What may be given besides x (7, HIDDEN) and w (2 * INNER, HIDDEN)."""
    bias, residual = tensors((2 * INNER,), (7, 2 * INNER))
    scales = {name: torch.rand(1) for name in ("scale_a", "scale_b")}
    return {
        "plain": {},
        "bias": {"bias": bias},
        "residual": {"residual": residual, "epilogue": "relu"},
        "bias and residual": {"bias": bias, "residual": residual},
        "gated": {"epilogue": "swiglu"},
        "gated with a bias": {"bias": bias, "epilogue": "swiglu_interleaved"},
        "promised": {"overlap": "launch"},
        "in float32": {"dtype": torch.float32},
        "scaled": {**scales, "scale_d": torch.rand(1), "dtype": torch.bfloat16},
    }


@pytest.mark.parametrize("name", list(variants()))
def test_the_library_is_asked_for_what_the_operator_asks(lib: OnCpu, name: str) -> None:
    more, asked = variants()[name], []
    x, w = tensors((7, HIDDEN), (2 * INNER, HIDDEN))

    class Watched(OnCpu):
        def gemm(self, a: Any, b: Any, *, out: Any = None, **more: Any) -> Any:
            asked.append((out, more))
            return super().gemm(a, b, out=out, **more)

    lib.__class__ = Watched
    with torch.no_grad():
        wanted = aot.gemm(lib, x, w, **more)
    step = torch.compile(lambda x, w, more: aot.gemm(lib, x, w, **more), fullgraph=True)
    found, code = code_of(step, x, w, more)
    assert OPERATOR not in code
    assert torch.equal(found, wanted)
    assert found.dtype == wanted.dtype
    (of_operator, by_operator), (out, by_code) = asked
    assert of_operator is None
    assert out.data_ptr() == found.data_ptr()
    words = {"epilogue": "none", "overlap": "serial", "dtype": None}
    by_operator, by_code = words | by_operator, words | by_code
    assert by_code.pop("dtype") is None  # `out` has it
    by_operator.pop("dtype")
    assert {n for n, x in by_code.items() if x is not None} == {n for n, x in by_operator.items() if x is not None}
    assert all(
        torch.equal(x, by_operator[n]) if isinstance(x, torch.Tensor) else x == by_operator[n]
        for n, x in by_code.items()
    )


def test_products_that_the_pass_routes_call_it_too(lib: OnCpu) -> None:
    w, bias = tensors((HIDDEN, HIDDEN), (HIDDEN,))
    step = lambda x: nn.functional.linear((x * 2) @ w, w, bias)  # noqa: E731
    compiled = torch.compile(step, fullgraph=True, options=aot.inductor_options(lib))
    (x,) = tensors((7, HIDDEN))
    found, code = code_of(compiled, x)
    assert near(found, step(x))
    assert OPERATOR not in code
    assert code.count(f"    {CALL}") == 2


def test_graphs_within_graphs_call_it_too(lib: OnCpu) -> None:
    w, bias = tensors((HIDDEN, HIDDEN), (HIDDEN,))

    def step(x: Any, flag: Any) -> Any:
        return torch.cond(flag, lambda x: aot.gemm(lib, x, w) + 1, lambda x: aot.gemm(lib, x, w, bias=bias).sin(), (x,))

    (x,) = tensors((7, HIDDEN))
    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    found, code = code_of(compiled, x, torch.tensor(True))
    assert OPERATOR not in code
    with torch.no_grad():
        assert near(found, step(x, torch.tensor(True)))
        assert near(compiled(x, torch.tensor(False)), step(x, torch.tensor(False)))


def test_tensors_reach_the_library_bare(lib: OnCpu) -> None:
    class Weight(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    seen: list[Any] = []

    class Watched(OnCpu):
        def gemm(self, a: Any, b: Any, **more: Any) -> Any:
            seen.extend([a, b, *(x for x in more.values() if isinstance(x, torch.Tensor))])

    lib.__class__ = Watched
    number, (w,) = aot.register(lib), tensors((HIDDEN, HIDDEN))
    weight = Weight(w, requires_grad=False)
    for names in (("a", "b"), ("a", "b", "bias"), ("a", "b", "bias", "residual")):
        direct.gemm(number, *names)(*[weight] * len(names), out=w)
    assert [type(x) for x in seen] == [torch.Tensor] * len(seen)
    assert len(seen) == 3 + 4 + 5


# --- fp8 layers of vLLM's, and what their archive lacks ---


def scaled_operands() -> tuple[Any, ...]:
    a, b = (x.to(torch.float8_e4m3fn) for x in tensors((7, 256), (128, 256)))
    return a, b, torch.rand(7, 2), torch.rand(1, 2)


@pytest.mark.parametrize("misses", [False, True])
def test_scaled_products_are_called_so_and_torch_computes_those_that_miss(
    lib: OnCpu, misses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    outs: list[Any] = []

    def gemm(_lib: Any, a: Any, b: Any, *, scale_a: Any, scale_b: Any, out: Any = None, dtype: Any = None) -> Any:
        outs.append(out)
        if misses:
            raise KernelMiss("no kernel at this M", "no kernel runs")
        value = widened(a, scale_a) @ widened(b, scale_b).T
        return value.to(dtype) if out is None else out.copy_(value)

    monkeypatch.setattr(OnCpu, "gemm", gemm)
    number, operands = aot.register(lib), scaled_operands()
    wanted = scaled.SCALED(number, *operands, torch.bfloat16)
    step = torch.compile(lambda *given: scaled.SCALED(number, *given, torch.bfloat16) * 1, fullgraph=True)
    found, code = code_of(step, *operands)
    assert torch.equal(found, wanted)
    assert bool(found.any())
    assert OPERATOR not in code
    assert "from runtime.plugin.scaled import direct as cute_aot_scaled_gemm" in code
    assert [out is None for out in outs] == [True, False]


# --- libraries come and go ---


def test_code_follows_the_library_that_its_number_leads_to(tmp_path: Path) -> None:
    first, (x, w) = library(tmp_path, [ONE]), tensors((7, HIDDEN), (HIDDEN, HIDDEN))
    number, out = aot.register(first), torch.empty(7, HIDDEN, dtype=torch.bfloat16)
    call = direct.gemm(number, "a", "b")  # as a file is loaded
    call(x, w, out=out)
    first.close()
    with pytest.raises(ArchiveClosed):
        call(x, w, out=out)
    with library(tmp_path, [ONE]) as second:
        assert aot.register(second) == number
        call(x, w, out=out)
        assert (len(first.calls), len(second.calls)) == (1, 1)
    del first, second
    gc.collect()
    with pytest.raises(ArgumentError, match=f"knows no library {number}"):
        call(x, w, out=out)


def test_importing_the_binding_does_not_import_inductor() -> None:
    code = "import runtime.torch, sys; assert 'torch._inductor.lowering' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# --- other processes ---

COMPILED = """
import sys
from tests.recording_driver import RecordingDriver
from tests.torch_stand_in import HIDDEN, OnCpu, near, tensors
import torch
from torch._dynamo.utils import counters
import runtime.torch as aot
from runtime.container.archive import Archive

outs = []

class Watched(OnCpu):
    def gemm(self, a, b, *, out=None, **more):
        outs.append(out is not None)
        return super().gemm(a, b, out=out, **more)

torch.manual_seed(0)
x, w, bias = tensors((7, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN,))
"""
CACHED = f"""{COMPILED}
lib = Watched(Archive.open(sys.argv[1]), RecordingDriver())
step = torch.compile(lambda x, w, bias: aot.gemm(lib, x, w, bias=bias) + 1, fullgraph=True, dynamic=True)
for m in (7, 9):
    (x,) = tensors((m, HIDDEN))
    assert near(step(x, w, bias), x.float() @ w.float().T + bias.float() + 1)
assert outs == [True, True], outs
print(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
"""
# As vLLM does: a graph is compiled to a file, which another process loads, here before it has imported the binding.
SAVED = f"""{COMPILED}
from torch.fx.experimental.proxy_tensor import make_fx
lib = Watched(Archive.open(sys.argv[1]), RecordingDriver())
number = aot.register(lib)
step = lambda x, w, bias: (torch.ops.cute_aot.gemm.default(number, x, w, bias=bias) + 1,)
graph = make_fx(step, tracing_mode="symbolic")(x, w, bias)
artifact = torch._inductor.standalone_compile(graph, [x, w, bias], dynamic_shapes="from_graph")
artifact.save(path=sys.argv[2], format="binary")
"""
LOADED = (
    """
import sys
import torch
artifact = torch._inductor.CompiledArtifact.load(path=sys.argv[2], format="binary")
"""
    + COMPILED
    + """
lib = Watched(Archive.open(sys.argv[1]), RecordingDriver())
number = aot.register(lib)
for m in (7, 9):
    (x,) = tensors((m, HIDDEN))
    found = artifact(x, w, bias)
    assert near(found[0] if isinstance(found, (tuple, list)) else found, x.float() @ w.float().T + bias.float() + 1)
assert outs == [True, True], outs
assert "runtime.torch.lowering" not in sys.modules
"""
)


def in_another_process(code: str, cache: Path, *arguments: Path) -> str:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long  # two processes that import Inductor and compile
def test_cached_code_calls_the_library_in_another_process(tmp_path: Path) -> None:
    library(tmp_path, [ONE]).close()
    found = [in_another_process(CACHED, tmp_path / "cache", tmp_path / "model.aot") for _ in range(2)]
    assert int(found[0]) == 0
    assert int(found[1]) > 0


@pytest.mark.long  # two processes that import Inductor and compile
def test_a_saved_graph_finds_what_it_calls_in_another_process(tmp_path: Path) -> None:
    library(tmp_path, [ONE]).close()
    arguments = tmp_path / "model.aot", tmp_path / "artifact"
    in_another_process(SAVED, tmp_path / "one", *arguments)
    in_another_process(LOADED, tmp_path / "other", *arguments)


# --- where it cannot be ---


def operator_is_called(lib: OnCpu, **options: Any) -> None:
    (w,) = tensors((HIDDEN, HIDDEN))
    torch._dynamo.reset()
    step = torch.compile(lambda x: aot.gemm(lib, x * 2, w), fullgraph=True, options=options or None)
    (x,) = tensors((7, HIDDEN))
    found, code = code_of(step, x)
    assert near(found, x.float() * 2 @ w.float().T)
    assert CALL not in code
    assert "cute_aot" in code if options else f"{OPERATOR}gemm.default(" in code


@pytest.fixture
def not_lowered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor was told of no operator yet."""
    monkeypatch.setattr(lowering, "_lowered", set())
    lowering._say_once.cache_clear()
    operator._lowering.cache_clear()
    if operator.GEMM in torch._inductor.lowering.lowerings:
        monkeypatch.delitem(torch._inductor.lowering.lowerings, operator.GEMM)
    yield
    operator._lowering.cache_clear()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "through torch's dispatcher" in text]


def test_where_inductor_takes_no_lowering_the_operator_is_called(
    lib: OnCpu, not_lowered: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = types.SimpleNamespace(fallback_handler=torch._inductor.lowering.fallback_handler)
    monkeypatch.setattr(lowering, "lowering", known)
    operator_is_called(lib)
    operator_is_called(lib)
    assert len(said(caplog)) == len(direct_calls.DIRECT), "once for each operator"
    assert "no attribute 'register_lowering'" in said(caplog)[0]


def test_where_inductor_has_other_classes_the_operator_is_called(
    lib: OnCpu, not_lowered: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(aot, "lowering")
    monkeypatch.delitem(sys.modules, "runtime.torch.lowering")
    known = types.ModuleType("torch._inductor.ir")
    with monkeypatch.context() as without:
        without.setattr(torch._inductor, "ir", known)
        operator.tell_inductor()
    operator_is_called(lib)
    assert len(said(caplog)) == 1
    assert "no attribute 'ExternKernelOut'" in said(caplog)[0]


def test_where_a_call_cannot_be_lowered_the_operator_is_called(
    lib: OnCpu, not_lowered: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def init(*_: Any, **__: Any) -> None:
        raise TypeError("an unexpected keyword argument")

    monkeypatch.setattr(lowering._Call, "__init__", init)
    operator_is_called(lib)
    operator_is_called(lib)
    assert len(said(caplog)) == 1
    assert said(caplog)[0].endswith("an unexpected keyword argument")


def test_generated_cpp_calls_the_operator(lib: OnCpu) -> None:
    operator_is_called(lib, cpp_wrapper=True)
