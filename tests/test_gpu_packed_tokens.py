"""Norms and activations that quantise for fp8 GEMMs, in compiled code on a real GPU, beside the same with a kernel
between: pytest -m gpu tests/test_gpu_packed_tokens.py --archive=X, for an archive of tests/data/fp8_layers.yaml."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from runtime import Library  # noqa: E402  # needs torch, as all below
from runtime.gemm.signature import Signature  # noqa: E402
from runtime.plugin import gated  # noqa: E402
from runtime.plugin.activations import swiglu  # noqa: E402
from runtime.plugin.linears import is_tuned, unquantised  # noqa: E402
from runtime.plugin.scaled import QUANTISING  # noqa: E402
from runtime.torch.norms import ADD_RMSNORM  # noqa: E402
from runtime.torch.operator import register  # noqa: E402
from runtime.vllm.packed_tokens import SWIGLU, fuse, norm_of, swiglu_of  # noqa: E402

from .gpu_library import library_of_module as library_of_module  # noqa: E402

pytestmark = pytest.mark.gpu

HIDDEN, INNER, N, EPS = 512, 1024, 768, 1e-5
ROWS = 1, 16, 17, 33, 300, 700
SCALINGS = pytest.mark.parametrize("scaling", ["block", "row_column"])
KEY = "post_grad_custom_post_pass"


class Layer(NamedTuple):
    """A weight in e4m3, its scales, how tokens that nobody quantised come to it, and the weight that it stands for."""

    b: Any
    scale: Any
    way: Any
    exact: Any


def layer_of(lib: Library, n: int, k: int, scaling: str) -> Layer:
    """Random, if the archive was tuned for it; skips otherwise."""
    of = Signature("e4m3", "e4m3", "bf16", "f32", "none", n, k, scaling=scaling)
    way, _ = unquantised(lib, of)
    if way is None or not is_tuned(lib, of):
        pytest.skip("the archive was not tuned for fp8 layers of tests/data/fp8_layers.yaml")
    b = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    shape = (n // 128, k // 128) if scaling == "block" else (n,)
    scale = (torch.rand(shape, device="cuda") + 0.5) / k**0.5
    each = scale.repeat_interleave(128, 0).repeat_interleave(128, 1) if scaling == "block" else scale[:, None]
    return Layer(b, scale, way, b.double() * each)


def steps(lib: Library, scaling: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A norm, qkv, and an MLP, as a server's graph has them; and what they should give."""
    shapes = (N, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER)
    qkv, gates, down = (layer_of(lib, *shape, scaling) for shape in shapes)
    for of in (norm_of("bf16", HIDDEN, scaling), swiglu_of("bf16", INNER, scaling)):
        assert is_tuned(lib, of), of.key()
    number, weight = register(lib), torch.randn(HIDDEN, device="cuda").bfloat16()

    def product(x: Any, of: Layer) -> Any:
        return QUANTISING(number, x, of.b, of.scale, torch.bfloat16, *of.way)

    def step(x: Any, residual: Any) -> Any:
        y, total = ADD_RMSNORM(number, x, residual, weight, EPS)
        return product(y, qkv), total, product(SWIGLU(number, product(y, gates)), down)

    def exactly(x: Any, residual: Any) -> Any:
        total = x + residual
        wide = total.double()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()
        gate, up = (y @ gates.exact.T).chunk(2, dim=-1)
        return y @ qkv.exact.T, total, (torch.nn.functional.silu(gate) * up) @ down.exact.T

    return step, exactly


def compiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """With the pass, which a server's graphs are compiled with."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            fuse(graph)

        def uuid(self) -> Any:
            return None  # nothing is taken from a cache

    torch._dynamo.reset()
    return torch.compile(step, fullgraph=True, dynamic=True, options={KEY: Pass()})


def operands(m: int, seed: int = 0) -> list[Any]:
    random = torch.Generator("cuda").manual_seed(seed + m)
    return [torch.randn((m, HIDDEN), device="cuda", generator=random).bfloat16() for _ in range(2)]


def error(found: Any, wanted: Any) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@SCALINGS
def test_what_is_packed_is_as_near_as_what_is_quantised_between(library: Library, scaling: str) -> None:
    """With launches less: of more tokens than GEMMs quantise themselves; fewer have an activation of no kernel."""
    step, exactly = steps(library, scaling)
    run, activations = compiled(step), list[int]()

    def counted(x: Any) -> Any:
        activations.append(x.shape[0])
        return swiglu(x)

    gated.use(register(library), counted)
    for m in ROWS:
        given, launches, by_server = operands(m), [], []
        results = []
        for of in (run, step):
            of(*given)  # which loads kernels
            before = library.stats().launches
            activations.clear()
            results.append(of(*given))
            launches.append(library.stats().launches - before)
            by_server.append(len(activations))
        wanted = exactly(*given)
        assert torch.equal(results[0][1], wanted[1])
        for i, most in ((0, 0.05), (2, 0.06)):  # e4m3 held what the second is made of twice: 0.05 at one token
            packed, apart, exact = (of[i] for of in (*results, wanted))
            assert error(packed, exact) < most, m
            assert error(packed, exact) < 1.1 * error(apart, exact), m
        assert launches == ([4, 4] if m <= 16 else [5, 7]), "the norm, the GEMMs, and what quantises apart"
        assert by_server == [0, 1]


@SCALINGS
def test_what_is_packed_is_captured_and_replayed(library: Library, scaling: str) -> None:
    step, _ = steps(library, scaling)
    run = compiled(step)
    for m in (16, 33, 300):
        given = operands(m)
        run(*given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(*given)
        for seed in (1, 2):
            for to, of in zip(given, operands(m, seed), strict=True):
                to.copy_(of)
            graph.replay()
            for result, wanted in zip(found, run(*given), strict=True):
                assert torch.equal(result, wanted), (m, seed)
    torch.cuda.synchronize()
