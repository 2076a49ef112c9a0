"""The operator, replaced linear layers and the Inductor pass, with the real torch on the CPU.

Libraries are those of tests/torch_stand_in.py.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import runtime.torch as aot
from runtime import ArgumentError, Library
from runtime.container.errors import ArchiveClosed

from . import torch_stand_in
from .torch_stand_in import (
    HIDDEN,
    INNER,
    ONE,
    PLAIN,
    OnCpu,
    library,
    linear,
    llama,
    near,
    tensors,
    tokens,
)

lib = torch_stand_in.lib  # a fixture


# --- the operator ---


def test_importing_runtime_does_not_import_it() -> None:
    code = "import runtime, sys; assert 'torch' not in sys.modules and 'runtime.torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


def test_operator_computes_what_the_library_does(lib: OnCpu) -> None:
    a, b, bias, residual = tensors((5, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN,), (5, HIDDEN))
    found = aot.gemm(lib, a, b, bias=bias, residual=residual, epilogue="relu")
    assert near(found, (a.float() @ b.float().T + bias.float()).relu() + residual.float())
    assert lib.calls == [(HIDDEN, HIDDEN, "bias+relu")]
    assert aot.gemm(lib, a, b, dtype=torch.float32).dtype == torch.float32
    out = torch.empty(5, HIDDEN, dtype=torch.bfloat16)
    assert aot.gemm(lib, a, b, out=out, epilogue="silu") is out
    assert near(out, nn.functional.silu(a.float() @ b.float().T))
    with pytest.raises(ArgumentError, match="out has element type"):
        aot.gemm(lib, a, b, out=out, dtype=torch.float32)


def test_tensors_in_host_memory_are_refused_by_the_library_itself(lib: OnCpu) -> None:
    real = Library(lib._now.layers.archives, lib._driver)
    a, b = tensors((5, HIDDEN), (HIDDEN, HIDDEN))
    with pytest.raises(ArgumentError, match="a is on cpu; move it to the GPU"):
        aot.gemm(real, a, b)


@pytest.mark.parametrize("which", ["gemm", "gemm_out"])
def test_operator_passes_torchs_own_checks(lib: OnCpu, which: str) -> None:
    a, b, bias = tensors((5, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN,))
    out = (torch.empty(5, HIDDEN, dtype=torch.bfloat16),) if which == "gemm_out" else ()
    operator = getattr(torch.ops.cute_aot, which).default
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, (aot.register(lib), a, b, *out), {"bias": bias}, test_utils=tests)


@pytest.mark.parametrize("how", ["dual", "jvp"])
def test_tangents_are_refused_as_gradients_are(lib: OnCpu, how: str) -> None:
    a, b, tangent = tensors((5, HIDDEN), (HIDDEN, HIDDEN), (5, HIDDEN))

    def jvp() -> None:
        if how == "jvp":
            torch.func.jvp(lambda x: aot.gemm(lib, x, b), (a,), (tangent,))
        with torch.autograd.forward_ad.dual_level():
            aot.gemm(lib, torch.autograd.forward_ad.make_dual(a, tangent), b)

    with torch.no_grad(), pytest.raises(ArgumentError, match="gemm would have to compute a tangent"):
        jvp()
    with torch.autograd.forward_ad.dual_level():
        aot.gemm(lib, a, b)


@pytest.mark.parametrize(
    ("shapes", "more", "wanted"),
    [
        (((2, 5, HIDDEN), (INNER, HIDDEN)), {}, ((2, 5, INNER), "bfloat16")),
        (((5, HIDDEN), (INNER, HIDDEN)), {"epilogue": "swiglu"}, ((5, INNER // 2), "bfloat16")),
        (((5, HIDDEN), (INNER, HIDDEN)), {"epilogue": "geglu_interleaved"}, ((5, INNER // 2), "bfloat16")),
        (((3, 5, HIDDEN), (3, INNER, HIDDEN)), {}, ((3, 5, INNER), "bfloat16")),
        (((0, HIDDEN), (INNER, HIDDEN)), {"dtype": "float32"}, ((0, INNER), "float32")),
        (((5, HIDDEN), (INNER, HIDDEN)), {"of": "float8_e4m3fn"}, ((5, INNER), "bfloat16")),
        (((5, HIDDEN), (INNER, HIDDEN)), {"of": "float16"}, ((5, INNER), "float16")),
    ],
)
def test_fake_results_are_shaped_as_real_ones(lib: OnCpu, shapes: Any, more: Any, wanted: Any) -> None:
    more = dict(more)
    dtype = getattr(torch, more.pop("of", "bfloat16"))
    if "dtype" in more:
        more["dtype"] = getattr(torch, more["dtype"])
    a, b = (torch.empty(shape, device="meta", dtype=dtype) for shape in shapes)
    found = aot.gemm(lib, a, b, **more)
    assert (tuple(found.shape), str(found.dtype)) == (wanted[0], f"torch.{wanted[1]}")
    assert found.is_contiguous()
    assert lib.calls == []


def meta(*shape: int, dtype: Any = torch.bfloat16) -> Any:
    return torch.empty(shape, device="meta", dtype=dtype)


@pytest.mark.parametrize(
    ("a", "b", "more", "message"),
    [
        (meta(5, 64), meta(96, 72), {}, "must end in the same K"),
        (meta(5, 64), meta(3, 96, 64), {}, "needs a of shape"),
        (meta(5, 64), meta(97, 64), {"epilogue": "swiglu"}, "even number of rows"),
        (meta(5, 64), meta(96, 64), {"epilogue": "tanh"}, "epilogue must be one of"),
        (meta(5, 64), meta(96, 64), {"overlap": "all"}, "overlap must be one of"),
        (meta(5, 64), meta(96, 64), {"bias": meta(95)}, r"bias must have shape \(96,\)"),
        (meta(5, 64), meta(96, 64), {"bias": meta(96, dtype=torch.float32)}, "bias must have element type bf16"),
        (meta(5, 64), meta(96, 64), {"residual": meta(4, 96)}, r"residual must have shape \(5, 96\)"),
        (meta(5, 64), meta(96, 64), {"scale_a": meta(1, dtype=torch.float32)}, "come together"),
        (meta(5, 64), meta(96, 64), {"out": meta(5, 97)}, r"out must have shape \(5, 96\)"),
        (meta(5, 64, dtype=torch.float64), meta(96, 64), {}, "a has element type torch.float64"),
        (meta(5, 64), torch.empty(96, 64), {}, "b is on cpu and a on meta"),
    ],
)
def test_fake_refuses_what_the_library_would(lib: OnCpu, a: Any, b: Any, more: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        aot.gemm(lib, a, b, **more)


def test_compiles_in_one_graph_with_any_m(lib: OnCpu) -> None:
    frames = []

    def backend(graph: Any, _inputs: Any) -> Any:
        frames.append(graph)
        return graph.forward

    (b,) = tensors((HIDDEN, HIDDEN))
    step = torch.compile(lambda a, r: aot.gemm(lib, a * 2, b, residual=r) + 1, fullgraph=True, backend=backend)
    torch._dynamo.reset()
    for m in (5, 6, 7, 33):
        a, r = tensors((m, HIDDEN), (m, HIDDEN))
        for x in (a, r):
            torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad():
            assert near(step(a, r), a.float() * 2 @ b.float().T + r.float() + 1)
    assert len(frames) == 1


def test_inductor_compiles_both_operators_with_any_m(lib: OnCpu) -> None:
    (b,) = tensors((HIDDEN, HIDDEN))

    def step(a: Any) -> Any:
        out = torch.empty(a.shape[0], HIDDEN, dtype=a.dtype)
        aot.gemm(lib, a, b, out=out, epilogue="relu")
        return aot.gemm(lib, out * 2, b).t() + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for m in (5, 9):
        (a,) = tensors((m, HIDDEN))
        assert near(compiled(a), step(a))


def test_compiled_code_follows_the_library_it_is_given(tmp_path: Path) -> None:
    first, second = library(tmp_path, [ONE]), library(tmp_path, [ONE], require="tuned")
    a, b = tensors((5, HIDDEN), (HIDDEN, HIDDEN))
    step = torch.compile(lambda lib: aot.gemm(lib, a, b), backend="aot_eager", fullgraph=True)
    for lib in (first, second, second):
        step(lib)
    assert (len(first.calls), len(second.calls)) == (1, 2)


# --- libraries by number ---


def test_number_is_the_same_in_another_process_and_goes_to_the_next_like_it(tmp_path: Path) -> None:
    lib = library(tmp_path, [ONE])
    number = aot.register(lib)
    assert aot.register(lib) == number
    identity = lib.identity
    code = f"import hashlib; print(int.from_bytes(hashlib.sha256({identity!r}.encode()).digest()[:6], 'big'))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) == number
    with library(tmp_path, [ONE]) as twin:
        assert aot.register(twin) == number + 1
    lib.close()
    with library(tmp_path, [ONE]) as again:
        assert aot.register(again) == number
        assert aot.register(library(tmp_path, [ONE], require="tuned")) != number


def test_closed_unknown_and_lost_libraries_are_named(tmp_path: Path) -> None:
    lib = library(tmp_path, [ONE])
    a, b = tensors((5, HIDDEN), (HIDDEN, HIDDEN))
    number = aot.register(lib)
    lib.close()
    with pytest.raises(ArchiveClosed, match="was closed"):
        torch.ops.cute_aot.gemm(number, a, b)
    with pytest.raises(ArgumentError, match="was closed"):
        aot.inductor_options(library_closed(tmp_path))
    with pytest.raises(ArgumentError, match="returns, found str"):
        aot.gemm("model.aot", a, b)  # type: ignore[arg-type]
    del lib
    gc.collect()
    with pytest.raises(ArgumentError, match=f"knows no library {number}"):
        torch.ops.cute_aot.gemm(number, a, b)


def library_closed(folder: Path) -> OnCpu:
    lib = library(folder, [ONE])
    lib.close()
    return lib


def test_gradients_are_refused(lib: OnCpu) -> None:
    a, b = tensors((5, HIDDEN), (HIDDEN, HIDDEN))
    b.requires_grad_()
    with pytest.raises(ArgumentError, match="would have to record a gradient"):
        aot.gemm(lib, a, b)
    with torch.no_grad():
        aot.gemm(lib, a, b)
    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN, bias=False)).bfloat16().eval()
    aot.replace_linears(model, lib)
    with pytest.raises(ArgumentError, match="would have to record a gradient"):
        model(a)
    with torch.inference_mode():
        model(a)


# --- the Inductor pass ---


def compiled_with(lib: OnCpu, function: Any, **more: Any) -> tuple[Any, Any]:
    torch._dynamo.reset()
    options = aot.inductor_options(lib, **more)
    found = torch.compile(function, fullgraph=True, options={"fx_graph_cache": False, **options})
    return found, options["post_grad_custom_pre_pass"]


def test_pass_routes_a_models_products_with_any_m(lib: OnCpu) -> None:
    model = llama()
    compiled, routes = compiled_with(lib, model)
    with torch.no_grad():
        for columns in (5, 9, 17):
            x = tokens(2, columns)
            torch._dynamo.mark_dynamic(x, 1)
            assert near(compiled(x), model(x))
    assert sum(routes.routed.values()) == 15, str(routes)
    assert routes.routed["bf16_bf16_bf16_f32_none_n32_k64"] == 4
    assert len(lib.calls) == 45
    assert "15 matrix products go to the archive" in str(routes)


@pytest.mark.parametrize("how", ["scaled", "autocast"])
def test_operands_that_are_computed_lie_as_the_pass_saw_them(
    lib: OnCpu, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Of B's two layouts the archive may have one alone."""
    seen, real = [], OnCpu.gemm

    def gemm(self: OnCpu, a: Any, b: Any, **more: Any) -> Any:
        seen.append((a.stride(-1), b.stride(-1)))
        return real(self, a, b, **more)

    def step(x: Any, w: Any) -> Any:
        if how == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ w.T
        return x @ (w.to(torch.bfloat16).T * 2)

    monkeypatch.setattr(OnCpu, "gemm", gemm)
    (x,), w = tensors((7, HIDDEN)), torch.randn(HIDDEN, HIDDEN)
    compiled, routes = compiled_with(lib, step)
    with torch.no_grad():
        assert near(compiled(x, w), step(x, w))
    assert list(routes.routed) == ["bf16_bf16_bf16_f32_none_n64_k64"]
    assert seen == [(1, 1)]


def test_pass_takes_biases_batches_and_both_layouts_and_leaves_the_rest(lib: OnCpu) -> None:
    w, other, bias, batched = tensors((HIDDEN, HIDDEN), (72, HIDDEN), (HIDDEN,), (3, HIDDEN, HIDDEN))

    def step(x: Any) -> Any:
        y = nn.functional.linear(x, w, bias).relu()
        y = y @ w
        z = torch.bmm(y.expand(3, -1, -1).contiguous() * 2, batched.transpose(1, 2))
        scaled = torch.addmm(bias, y, w, alpha=2)
        left = nn.functional.linear(x, other)
        return y.t(), z.sum(0), scaled, left, (x.float() @ w.float())

    (x,) = tensors((7, HIDDEN))
    compiled, routes = compiled_with(lib, step)
    with torch.no_grad():
        for found, wanted in zip(compiled(x), step(x), strict=True):
            assert near(found, wanted)
            assert found.stride() == wanted.stride()
    assert set(routes.routed) == {
        "bf16_bf16_bf16_f32_bias_n64_k64",
        "bf16_bf16_bf16_f32_none_n64_k64_n-major",
        "bf16_bf16_bf16_f32_none_n64_k64_b3",
    }
    left = "\n".join(routes.left)
    assert "no kernel for bf16_bf16_bf16_f32_none_n72_k64" in left
    assert "no kernel for f32_f32_f32" in left
    assert "addmm: alpha or beta is not 1" in left
    assert sum(routes.left.values()) == 3


def test_pass_leaves_operands_that_kernels_cannot_read(lib: OnCpu) -> None:
    (w,) = tensors((HIDDEN, HIDDEN))

    (x,) = tensors((HIDDEN, HIDDEN + 8))
    compiled, routes = compiled_with(lib, lambda x: torch.mm(x[:, 1 : HIDDEN + 1], w.t()))
    compiled(x)
    assert routes.routed == {}
    assert "offset of a" in str(routes)
    compiled, routes = compiled_with(lib, lambda x: torch.mm(x.expand(7, -1), w.t()))
    compiled(x[:1, :HIDDEN].contiguous())
    assert routes.routed == {}
    assert "strides (0, 1) or offset of a" in str(routes)
    compiled, routes = compiled_with(lib, lambda x: torch.mm(x[:, ::2], w.t()))
    compiled(*tensors((7, 2 * HIDDEN)))
    assert routes.routed == {}
    assert "strides (128, 2) or offset of a" in str(routes)
    compiled, routes = compiled_with(lib, lambda x: torch.mm(x.t(), w.t()))
    compiled(x[:, :HIDDEN].contiguous())
    assert routes.routed == {}
    assert "strides (1, 64) or offset of a" in str(routes)


def test_pass_serves_training_graphs_too(lib: OnCpu) -> None:
    layer = linear().train()
    compiled, routes = compiled_with(lib, layer)
    (x,) = tensors((16, HIDDEN))
    layer(x).sum().backward()
    wanted, layer.weight.grad = layer.weight.grad, None
    compiled(x).sum().backward()
    assert near(layer.weight.grad, wanted)
    assert routes.routed["bf16_bf16_bf16_f32_none_n64_k64"] == 1


def test_cached_graphs_are_told_apart_by_archive_and_options(lib: OnCpu, tmp_path: Path) -> None:
    def uuid(lib: OnCpu, **more: Any) -> Any:
        return aot.inductor_options(lib, **more)["post_grad_custom_pre_pass"].uuid()

    assert uuid(lib) == uuid(lib) != uuid(lib, overlap="launch")
    (tmp_path / "other").mkdir()
    with library(tmp_path / "other", PLAIN) as other:
        assert uuid(other) != uuid(lib)
    with pytest.raises(ArgumentError, match="overlap must be one of serial, launch, found 'weights'"):
        aot.inductor_options(lib, overlap="weights")


def test_graphs_come_back_from_inductors_cache(lib: OnCpu, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    (w,) = tensors((HIDDEN, HIDDEN))
    (x,) = tensors((7, HIDDEN))
    counts = []
    for _ in range(2):
        torch._dynamo.reset()
        options = aot.inductor_options(lib)
        step = torch.compile(lambda x: nn.functional.linear(x, w), options=options)
        assert near(step(x), x.float() @ w.float().T)
        counts.append(sum(options["post_grad_custom_pre_pass"].routed.values()))
    assert counts == [1, 0]
    assert len(lib.calls) == 2


def test_closed_library_has_no_number_though_another_took_it(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    first = library(tmp_path / "one", [ONE])
    number = aot.register(first)
    first.close()
    with library(tmp_path / "two", [ONE]) as second:
        assert aot.register(second) == number
        with pytest.raises(ArgumentError, match="was closed"):
            aot.register(first)
