"""An archive inside torch on a real GPU: pytest -m gpu tests/test_gpu_torch.py --archive model.aot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import runtime
import runtime.torch as aot_torch
from runtime import Library
from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.gemm.operation import GEMM
from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import TORCH_NAMES
from runtime.numbers.epilogue import GATES, Epilogue
from runtime.tables.dispatch import Dispatch

pytestmark = pytest.mark.gpu

EVERY_M = (1, 7, 16, 64, 333)
TOLERANCE = {"bf16": 1e-2, "f16": 5e-3}  # relative error in the norm against float64, by element type
CHAINED_TOLERANCE = 2e-2  # where intermediate results are rounded in different places


@pytest.fixture(scope="module")
def signatures(tuned_archive: Path) -> list[Signature]:
    """What the archive has tuned for this GPU."""
    with Archive.open(tuned_archive) as archive:
        table = Dispatch.from_json(archive.table("gemm"), GEMM)
    found = [e.signature for e in table.entries_for(Driver().compute_capability) if e.state == "tuned"]
    if not found:
        pytest.skip("the archive has no tuned GEMM for this GPU")
    return found


@pytest.fixture
def library(tuned_archive: Path) -> Iterator[Library]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    with runtime.load(tuned_archive) as library:
        yield library
        torch.cuda.synchronize()


def smallest(signatures: list[Signature], what: str, **wanted: Any) -> Signature:
    """The smallest signature in 16 bits whose fields are those wanted; skips where there is none."""
    fields = {"batch": 1, "scaling": "none", "b_major": "k", "overlap": "serial", "epilogue": "none"} | wanted
    found = [s for s in signatures if s.a == s.b == s.d and s.d in TOLERANCE]
    found = [s for s in found if all(getattr(s, name) == x for name, x in fields.items())]
    if not found:
        pytest.skip(f"the archive has no tuned {what} for this GPU")
    return min(found, key=lambda s: (s.n * s.k, s.key()))


@pytest.fixture
def plain(signatures: list[Signature]) -> Signature:
    return smallest(signatures, "plain GEMM")


def dtype(s: Signature) -> Any:
    return getattr(torch, TORCH_NAMES[s.d])


def tensor(s: Signature, *shape: int) -> Any:
    return torch.randn(shape, device="cuda").to(dtype(s))


def weight(s: Signature) -> Any:
    return (torch.randn(s.n, s.k, device="cuda") / s.k**0.5).to(dtype(s))


def error(found: Any, wanted: Any) -> float:
    assert found.shape == wanted.shape
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def product(a: Any, b: Any) -> Any:
    return a.double() @ b.double().transpose(-1, -2)


# --- the operator ---


def test_operator_gives_the_very_bits_of_the_library(library: Library, signatures: list[Signature]) -> None:
    from aot.tune.gemm.operands import Weights, gemm_options

    for s in signatures:
        for m in (1, 77):
            o = Weights(s, m, 0, m).operands(m)[0]
            more = gemm_options(s, o)
            more["dtype"] = dtype(s)
            wanted = library.gemm(o.a, o.b, **more)
            found = aot_torch.gemm(library, o.a, o.b, **more)
            written = torch.empty_like(wanted)
            assert aot_torch.gemm(library, o.a, o.b, out=written, **more) is written
            for result in (found, written):
                assert torch.equal(result.view(torch.uint8), wanted.view(torch.uint8)), f"{s.key()} at M = {m}"


def test_operator_compiles_in_one_graph_with_any_m(library: Library, plain: Signature) -> None:
    b = weight(plain)

    def step(a: Any) -> Any:
        out = torch.empty(a.shape[0], plain.n, device=a.device, dtype=a.dtype)
        aot_torch.gemm(library, a, b, out=out)
        return aot_torch.gemm(library, a * 2, b) + out

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for m in EVERY_M:
        a = tensor(plain, m, plain.k)
        with torch.inference_mode():
            assert error(compiled(a), 3 * product(a, b)) < TOLERANCE[plain.d], f"M = {m}"


@pytest.mark.parametrize("epilogue", ["none", "bias"])
def test_compiled_code_calls_the_library_itself_with_any_m(
    library: Library, signatures: list[Signature], epilogue: str
) -> None:
    from torch._inductor.utils import run_and_get_code

    s = smallest(signatures, f"GEMM with epilogue {epilogue}", epilogue=epilogue)
    layer, every_m = linear(s, s.n), [m for m in EVERY_M if m > 1]  # graphs with any M are of two rows or more
    bias = layer.bias.detach().float() if s.parts.bias else 0
    aot_torch.replace_linears(nn.Sequential(layer), library)
    step = torch.compile(lambda x: layer(x * 2), fullgraph=True, options={"fx_graph_cache": False})
    with torch.no_grad():
        x = tensor(s, every_m[0], s.k)
        torch._dynamo.mark_dynamic(x, 0)
        _, codes = run_and_get_code(step, x)
        launches = library.stats().launches
        with torch._dynamo.config.patch(error_on_recompile=True):
            for m in every_m:
                x = tensor(s, m, s.k)
                wanted = (2 * x).float() @ layer.weight.float().t() + bias
                assert error(step(x), wanted) < TOLERANCE[s.d], f"M = {m}"
        assert library.stats().launches == launches + len(every_m)
    (code,) = ("\n".join(y for y in code.splitlines() if not y.strip().startswith("#")) for code in codes)
    assert "torch.ops.cute_aot" not in code
    assert code.count("    cute_aot_gemm_") == 1


def test_compiled_code_can_be_captured_and_follows_the_current_stream(library: Library, plain: Signature) -> None:
    layer = linear(plain, plain.n)
    aot_torch.replace_linears(nn.Sequential(layer), library)
    step = torch.compile(lambda x: layer(x * 2), fullgraph=True, options={"fx_graph_cache": False})
    x = tensor(plain, 64, plain.k)
    with torch.inference_mode():
        step(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step(x)
        for _ in range(2):
            x.normal_()
            graph.replay()
            torch.cuda.synchronize()
            assert error(found, 2 * product(x, layer.weight)) < CHAINED_TOLERANCE
        source, stream = x.clone(), torch.cuda.Stream()
        x.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # about 25 ms: an unordered launch would read the zeros
            x.copy_(source)
            found = step(x)
        stream.synchronize()
        assert error(found, 2 * product(source, layer.weight)) < CHAINED_TOLERANCE


def test_operator_can_be_captured(library: Library, plain: Signature) -> None:
    a, b = tensor(plain, 64, plain.k), weight(plain)
    aot_torch.gemm(library, a, b)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = aot_torch.gemm(library, a, b)
    for _ in range(2):
        a.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert error(found, product(a, b)) < TOLERANCE[plain.d]


def test_operator_follows_the_current_stream(library: Library, plain: Signature) -> None:
    a, b = tensor(plain, 64, plain.k), weight(plain)
    source = a.clone()
    aot_torch.gemm(library, a, b)
    a.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # about 25 ms: an unordered launch would read the zeros
        a.copy_(source)
        found = aot_torch.gemm(library, a, b)
    stream.synchronize()
    assert error(found, product(a, b)) < TOLERANCE[plain.d]


# --- linear layers ---


def linear(s: Signature, n: int) -> Any:
    return nn.Linear(s.k, n, bias=s.parts.bias, device="cuda", dtype=dtype(s)).eval()


@pytest.mark.parametrize("epilogue", ["none", "bias"])
def test_linear_layer_is_replaced_and_restored(library: Library, signatures: list[Signature], epilogue: str) -> None:
    s = smallest(signatures, f"GEMM with epilogue {epilogue}", epilogue=epilogue)
    model = nn.Sequential(linear(s, s.n))
    (layer,) = aot_torch.replace_linears(model, library).layers
    assert layer.signature == s.key()
    with torch.inference_mode():
        for m in EVERY_M:
            x = tensor(s, 2, m, s.k)
            wanted = product(x, model[0].weight) + (model[0].bias.double() if s.parts.bias else 0)
            assert error(model(x), wanted) < TOLERANCE[s.d], f"M = {m}"
        assert aot_torch.restore_linears(model) == 1
        assert error(model(x), wanted) < TOLERANCE[s.d]


class Attention(nn.Module):
    """What of an attention reads one input, and that alone; returns q, k and v side by side."""

    def __init__(self, s: Signature, widths: tuple[int, int, int]) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (linear(s, n) for n in widths)
        self.o_proj = linear(s, 8)

    def forward(self, x: Any) -> Any:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)


class MLP(nn.Module):
    def __init__(self, s: Signature) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(s, s.n // 2), linear(s, s.n // 2)
        self.down_proj = nn.Linear(s.n // 2, s.k, bias=False, device="cuda", dtype=dtype(s)).eval()
        gate = GATES[s.parts.activation]
        self.act_fn = nn.SiLU() if gate == "silu" else nn.GELU("tanh" if gate == "gelu_tanh" else "none")

    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def check_model(model: Any, s: Signature, library: Library, fused: tuple[str, ...]) -> None:
    """The same results before and after, eager, compiled and captured; the layers `fused` are one GEMM."""
    model.eval()
    inputs = [tensor(s, 1, m, s.k) for m in EVERY_M]
    weights = [p.detach().clone() for p in model.parameters()]
    with torch.inference_mode():
        wanted = [model(x) for x in inputs]
    report = aot_torch.replace_linears(model, library)
    layers = {layer.name: layer for layer in report.layers}
    for name in fused:
        assert layers[name].signature == s.key(), str(report)
        assert set(layers[name].fused_with) == set(fused) - {name}, str(report)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, dynamic=True)
        for x, y in zip(inputs, wanted, strict=True):
            assert error(model(x), y) < CHAINED_TOLERANCE, f"eager at {x.shape}"
            assert error(compiled(x), y) < CHAINED_TOLERANCE, f"compiled at {x.shape}"
        torch.cuda.synchronize()
        graph, static = torch.cuda.CUDAGraph(), inputs[-1].clone()
        model(static)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found = model(static)
        graph.replay()
        torch.cuda.synchronize()
        assert error(found, wanted[-1]) < CHAINED_TOLERANCE
    assert aot_torch.restore_linears(model) == sum(layer.taken for layer in report.layers)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    with torch.inference_mode():
        assert error(model(inputs[0]), wanted[0]) < CHAINED_TOLERANCE


def test_attention_is_fused(library: Library, signatures: list[Signature]) -> None:
    s = smallest([s for s in signatures if s.n % 32 == 0], "plain GEMM of N in multiples of 32")
    check_model(Attention(s, (s.n // 2, s.n // 4, s.n // 4)), s, library, ("q_proj", "k_proj", "v_proj"))


@pytest.mark.parametrize("gate", list(GATES))
def test_mlp_is_fused(library: Library, signatures: list[Signature], gate: str) -> None:
    word = Epilogue(gate).word()
    try:
        s = smallest(signatures, f"{gate} GEMM", epilogue=word)
    except pytest.skip.Exception:
        s = smallest(signatures, f"{gate} GEMM", epilogue=Epilogue(gate, interleaved=True).word())
    check_model(MLP(s), s, library, ("gate_proj", "up_proj"))


def test_graphs_of_torch_compile_follow_fused_weights(library: Library, signatures: list[Signature]) -> None:
    s = smallest([s for s in signatures if s.n % 32 == 0], "plain GEMM of N in multiples of 32")
    model = Attention(s, (s.n // 2, s.n // 4, s.n // 4)).eval()
    x = tensor(s, 1, 16, s.k)
    with torch.no_grad():
        aot_torch.replace_linears(model, library)
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(x).clone()
        model.q_proj.weight.zero_()
        torch.compiler.cudagraph_mark_step_begin()
        changed = compiled(x).clone()
        torch.cuda.synchronize()
    half = s.n // 2
    assert not bool(changed[..., :half].any())
    assert torch.equal(changed[..., half:], found[..., half:])


# --- the Inductor pass ---


def routed(library: Library, function: Any, m: int, make: Any) -> Any:
    """The pass, after `function` was compiled with it and gave what it gives without, at M = m and M = 2 m + 1."""
    options = aot_torch.inductor_options(library)
    compiled = torch.compile(function, fullgraph=True, options={"fx_graph_cache": False, **options})
    with torch.no_grad():
        for rows in (m, 2 * m + 1):
            x = make(rows)
            torch._dynamo.mark_dynamic(x, x.dim() - 2)
            found, wanted = compiled(x), function(x)
            assert found.stride() == wanted.stride()
            assert error(found, wanted) < CHAINED_TOLERANCE, f"M = {rows}"
    return options["post_grad_custom_pre_pass"]


@pytest.mark.parametrize("epilogue", ["none", "bias"])
def test_pass_routes_linear_layers_with_any_m(library: Library, signatures: list[Signature], epilogue: str) -> None:
    s = smallest(signatures, f"GEMM with epilogue {epilogue}", epilogue=epilogue)
    layer = linear(s, s.n)
    routes = routed(library, lambda x: layer(x * 2).relu(), 16, lambda m: tensor(s, m, s.k))
    assert dict(routes.routed) == {s.key(): 1}, str(routes)


def test_pass_routes_n_major_weights(library: Library, signatures: list[Signature]) -> None:
    s = smallest(signatures, "GEMM of an N-major B", b_major="n")
    b = weight(s).t().contiguous()
    routes = routed(library, lambda x: (x + 1) @ b, 16, lambda m: tensor(s, m, s.k))
    assert dict(routes.routed) == {s.key(): 1}, str(routes)


def test_pass_routes_batches(library: Library, signatures: list[Signature]) -> None:
    batches = {s.batch for s in signatures if s.batch > 1}
    if not batches:
        pytest.skip("the archive has no batched GEMM for this GPU")
    s = smallest(signatures, "batched GEMM", batch=min(batches))
    b = (torch.randn(s.batch, s.n, s.k, device="cuda") / s.k**0.5).to(dtype(s))
    step = lambda x: torch.bmm(x * 2, b.transpose(1, 2))  # noqa: E731
    routes = routed(library, step, 16, lambda m: tensor(s, s.batch, m, s.k))
    assert dict(routes.routed) == {s.key(): 1}, str(routes)


def test_pass_leaves_what_the_archive_does_not_have(library: Library, plain: Signature) -> None:
    b = torch.randn(24, plain.k, device="cuda").to(dtype(plain))
    routes = routed(library, lambda x: nn.functional.linear(x, b), 16, lambda m: tensor(plain, m, plain.k))
    assert dict(routes.routed) == {}
    assert "no kernel for" in str(routes)


# --- autotuning ---


@pytest.mark.parametrize("epilogue", ["none", "bias"])
@pytest.mark.parametrize("backends", ["ATEN", "ATEN,TRITON"])
def test_autotuning_measures_the_archive(
    library: Library, signatures: list[Signature], epilogue: str, backends: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """With results that are right, whatever wins, for any M; and where Inductor sees the archive win, it is chosen."""
    from runtime.torch import extern_kernel

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    s = smallest(signatures, f"GEMM with epilogue {epilogue}", epilogue=epilogue)
    layer = linear(s, s.n)
    real = extern_kernel._Caller.benchmark
    for wins in (False, True):
        measured: list[float] = []

        def benchmark(self: Any, *args: Any, out: Any, wins: bool = wins, measured: list[float] = measured) -> float:
            measured.append(real(self, *args, out=out))
            return 1e-6 if wins else measured[-1]

        monkeypatch.setattr(extern_kernel._Caller, "benchmark", benchmark)
        torch._dynamo.reset()
        torch._inductor.utils.clear_caches()
        options = aot_torch.autotune_choices(library, mode="max-autotune-no-cudagraphs")
        more = {"fx_graph_cache": False, "autotune_local_cache": False, "max_autotune_gemm_backends": backends}
        compiled = torch.compile(layer, fullgraph=True, options={**options, **more})
        with torch.no_grad():
            for m in (16, 33):
                x = tensor(s, m, s.k)
                torch._dynamo.mark_dynamic(x, 0)
                assert error(compiled(x), layer(x)) < CHAINED_TOLERANCE, f"M = {m}"
        choices = options["post_grad_custom_post_pass"]
        assert dict(choices.offered) == {s.key(): 1}, str(choices)
        assert not choices.failed, str(choices)
        assert measured
        assert all(0 < time < 1e3 for time in measured), "finite times, in milliseconds"
    assert dict(choices.chosen) == {s.key(): 1}, str(choices)


def test_autotuned_graphs_are_captured(library: Library, plain: Signature, tmp_path: Path, monkeypatch: Any) -> None:
    from runtime.torch import extern_kernel

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(extern_kernel._Caller, "benchmark", lambda *_, **__: 1e-6)
    layer, x = linear(plain, plain.n), tensor(plain, 16, plain.k)
    options = aot_torch.autotune_choices(library)
    more = {"fx_graph_cache": False, "max_autotune_gemm_backends": "ATEN"}
    compiled = torch.compile(layer, fullgraph=True, options={**options, **more})
    with torch.no_grad():
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            x.normal_()
            assert error(compiled(x), layer(x)) < CHAINED_TOLERANCE
    assert dict(options["post_grad_custom_post_pass"].chosen) == {plain.key(): 1}
