"""Norms of vLLM's behind which fp8 GEMMs quantise tokens: in a compiled graph the norm does; on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import runtime
from aot.tune.quantise.measures import quantised
from runtime.container.archive import Archive
from runtime.plugin.log import warn_once
from runtime.plugin.packed_rows import unpacked
from runtime.rmsnorm import Signature
from runtime.vllm.packed_tokens import fuse

from .. import vllm_stand_in
from ..moe.test_operation import tensors_of
from ..recording_driver import RecordingDriver, entry, operands_record, tensors_record, write_archive
from ..test_vllm_fp8 import SERVED, made, scaled
from ..test_vllm_fp8_few import FEW, MOST, SCALINGS, close, layer_of
from ..torch_stand_in import OnCpu
from ..vllm_stand_in import E4M3, MINE, K, Server, Start, fp8_layer

start = vllm_stand_in.start  # a fixture

EPS = 1e-5
KEY = "post_grad_custom_post_pass"
both = pytest.mark.parametrize("scaling", SCALINGS)


class OfBoth(OnCpu):
    """Computes norms and fp8 GEMMs in float32, and records which of them, of how many tokens, and how scaled."""

    missing = False  # what quantises

    def gemm(self, a: Any, b: Any, *, out: Any = None, stream: Any = None, **more: Any) -> Any:
        scale_a, scale_b = more.get("scale_a"), more["scale_b"]
        self.calls.append(("gemm", a.shape[0], "none" if scale_a is None else "scaled"))  # type: ignore[arg-type]
        d = (a.float() if scale_a is None else scaled(a, scale_a)) @ scaled(b, scale_b).T
        return d.to(more["dtype"]) if out is None else out.copy_(d)

    def call(self, operation: str, *operands: Any, stream: Any = None, **words: Any) -> Any:
        scaling = words.get("scaling", "none")
        if scaling != "none" and self.missing:
            raise runtime.KernelMiss("none", "no kernel runs")
        self.calls.append((operation, operands[0].shape[0], scaling))  # type: ignore[arg-type]
        assert operation == "rmsnorm"
        assert operands[0].is_contiguous(), "which kernels demand"
        x, weight = operands
        total = x if words.get("residual") is None else x + words["residual"]
        y = nn.functional.rms_norm(total, weight.shape, weight, words["eps"])
        found = (y,) if scaling == "none" else quantised(y, "e4m3", scaling)
        found = found if words.get("residual") is None else (*found, total)
        if words.get("out") is None:
            return found[0]
        out = words["out"] if isinstance(words["out"], tuple) else (words["out"],)
        for to, of in zip(out, found, strict=True):
            to.copy_(of)
        return words["out"]


@pytest.fixture
def serve(tmp_path: Path, start: Start) -> Callable[..., Server]:
    """Starts a server whose archive has fp8 GEMMs, of few tokens too, and norms, with `scalings` if they quantise."""

    def make(scalings: Any = SCALINGS, **more: Any) -> Server:
        norms = [Signature("bf16", "bf16", "bf16", K, residual) for residual in ("none", "bf16")]
        norms += [Signature("bf16", "bf16", "e4m3", K, "bf16", scaling) for scaling in scalings]
        gemms = [*SERVED, *FEW]
        kernels = write_archive(
            tmp_path / "gemms.aot",
            [operands_record(f"gemm{i}", s) for i, s in enumerate(gemms)],
            [entry(s, [(None, f"gemm{i}")], tuned_to=MOST) for i, s in enumerate(gemms)],
        )
        kernels |= write_archive(
            tmp_path / "norms.aot",
            [tensors_record(f"norm{i}", *tensors_of(s)) for i, s in enumerate(norms)],
            [entry(s.to_json(), [(None, f"norm{i}")]) for i, s in enumerate(norms)],
            "rmsnorm",
        )
        archives = [Archive.open(tmp_path / f"{name}.aot") for name in ("gemms", "norms")]
        lib = OfBoth(archives, RecordingDriver(kernels=kernels))
        server = start(load=lambda paths, **options: lib, **more)
        server.lib = lib
        return server

    return make


def loaded(server: Server, scaling: str, config: Any = None) -> tuple[Any, Any, Any, Any]:
    """A norm, a GEMM and its layer of a model that the server loads, and the options that its graphs are compiled
    with."""
    norm = server.modules["vllm.model_executor.layers.layernorm"].RMSNorm(K, EPS)
    config = config or server.config(MINE, quant=object())
    worker = server._worker(config, nn.ModuleList([norm]))
    gemm = made(server, fp8_layer(scaling), scaling)
    worker.load_model()
    return norm, gemm, layer_of(scaling), dict(config.compilation_config.inductor_compile_config)


def compiled(of: Callable[..., Any], options: Any) -> Callable[..., Any]:
    """`of` as vLLM's workers have Inductor compile it."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    made_of = options[KEY]

    class Pass(CustomGraphPass):
        def __call__(self, graph: Any) -> None:
            made_of(graph)

        def uuid(self) -> Any:
            return None  # nothing is taken from a cache

    return torch.compile(of, fullgraph=True, dynamic=True, options={KEY: Pass()})


def tokens(m: int) -> tuple[Any, Any]:
    torch.manual_seed(m)
    return torch.randn(m, K).bfloat16(), torch.randn(m, K).bfloat16()


@both
def test_a_norm_quantises_for_the_gemm_behind_it(
    serve: Callable[..., Server], scaling: str, caplog: pytest.LogCaptureFixture
) -> None:
    """More tokens than the GEMM quantises itself; and its sum is as it was."""
    server = serve()
    norm, gemm, layer, options = loaded(server, scaling)

    def step(x: Any, residual: Any) -> Any:
        y, total = norm(x, residual)
        return gemm.apply_weights(layer, y), total

    run = compiled(step, options)
    for m in (MOST + 1, MOST, 40, 0):
        x, residual = tokens(m)
        server.lib.calls.clear()
        d, total = run(x, residual)
        assert torch.equal(total, x + residual)
        assert close(d, layer, nn.functional.rms_norm(total, (K,), norm.weight, EPS))
        of_norm, of_gemm = ("none", "none") if m <= MOST else (scaling, "scaled")
        assert server.lib.calls == [("rmsnorm", m, of_norm), ("gemm", m, of_gemm)]
    assert "through torch's dispatcher" not in caplog.text


@pytest.mark.parametrize("m", [MOST, MOST + 1])
def test_a_norm_that_quantises_gets_contiguous_rows(serve: Callable[..., Server], m: int) -> None:
    server = serve()
    norm, gemm, layer, options = loaded(server, "block")
    run = compiled(lambda x, r: gemm.apply_weights(layer, norm(x.t() * 2, r)[0]), options)
    x, residual = tokens(m)
    assert close(run(x.t().contiguous(), residual), layer, norm(2 * x, residual)[0])


@both
def test_gemms_of_one_norm_read_the_same_rows(serve: Callable[..., Server], scaling: str) -> None:
    server = serve()
    norm, gemm, layer, options = loaded(server, scaling)
    run = compiled(
        lambda x, r: [gemm.apply_weights(layer, y) for y in norm(x, r)[:1] * 2],
        options,
    )
    x, residual = tokens(MOST + 1)
    assert all(close(d, layer, norm(x, residual)[0]) for d in run(x, residual))
    assert server.lib.calls.count(("rmsnorm", MOST + 1, scaling)) == 1
    assert server.lib.calls.count(("gemm", MOST + 1, "scaled")) == 2


@pytest.mark.parametrize("other", ["result", "sum", "elementwise"])
def test_rows_that_others_read_are_not_quantised_by_the_norm(serve: Callable[..., Server], other: str) -> None:
    server = serve()
    norm, gemm, layer, options = loaded(server, "block")

    def step(x: Any, residual: Any) -> Any:
        y, total = norm(x, residual)
        more = {"result": y, "sum": total, "elementwise": 2 * y}[other]
        return gemm.apply_weights(layer, y), more

    x, residual = tokens(MOST + 1)
    d, more = compiled(step, options)(x, residual)
    y, total = norm(x, residual)
    assert close(d, layer, y)
    assert torch.equal(more, {"result": y, "sum": total, "elementwise": 2 * y}[other])
    assert server.lib.calls[0] == ("rmsnorm", MOST + 1, "block" if other == "sum" else "none")


def test_a_norm_that_was_not_tuned_to_quantise_does_not(serve: Callable[..., Server]) -> None:
    server = serve(scalings=["row_column"])
    norm, gemm, layer, options = loaded(server, "block")
    x, residual = tokens(MOST + 1)
    d = compiled(lambda x, r: gemm.apply_weights(layer, norm(x, r)[0]), options)(x, residual)
    assert close(d, layer, norm(x, residual)[0])
    assert server.lib.calls[:2] == [("rmsnorm", MOST + 1, "none"), ("gemm", MOST + 1, "scaled")]


@both
def test_what_a_norm_cannot_quantise_the_server_does(serve: Callable[..., Server], scaling: str) -> None:
    warn_once.cache_clear()
    server = serve()
    norm, gemm, layer, options = loaded(server, scaling)
    server.lib.missing = True
    x, residual = tokens(MOST + 1)
    d, total = compiled(lambda x, r: (gemm.apply_weights(layer, norm(x, r)[0]), norm(x, r)[1]), options)(x, residual)
    assert close(d, layer, norm(x, residual)[0])
    assert torch.equal(total, x + residual)
    said = f"a norm of N {K} that quantises was left to one that does not, and to the server: KernelMiss"
    assert any(said in line for line in server.lines)


def test_kernels_of_norms_that_quantise_are_loaded_with_the_others(serve: Callable[..., Server]) -> None:
    server = serve()
    loaded(server, "block")
    assert "serves 1 of 1 norms and 1 of 1 fp8 layers (5 signatures preloaded" in server.lines[0]


def test_a_pass_of_the_users_keeps_its_place_and_others_get_none(serve: Callable[..., Server]) -> None:
    server = serve()
    config = server.config(MINE, quant=object())
    config.compilation_config.inductor_compile_config[KEY] = "mine"
    assert loaded(server, "block", config)[3] == {KEY: "mine"}
    for other in ({}, {"mode": 0}, {"mode": 2}, {"backend": "eager"}):
        config = server.config(MINE, quant=object() if other else None)
        vars(config.compilation_config).update(other)
        server.serve(nn.Linear(2, 2), config=config)
        assert config.compilation_config.inductor_compile_config == {}, other
    config = server.config(MINE, quant=object())
    key = config.compute_hash()
    server.serve(nn.Linear(2, 2), config=config)
    (mine,) = config.compilation_config.inductor_compile_config.values()
    assert mine.callable is fuse
    assert mine.uuid().startswith("cute_aot ")
    assert config.compute_hash() != key


def test_norms_do_not_quantise_where_vllm_has_no_such_place(serve: Callable[..., Server]) -> None:
    server = serve()
    del server.modules["vllm.platforms"].current_platform.pass_key
    assert loaded(server, "block")[3] == {}
    assert any(line.startswith("norms and activations do not quantise: AttributeError") for line in server.lines)
    assert not any("serves nothing" in line for line in server.lines)


def test_packed_rows_are_views_of_one_memory() -> None:
    """Of the second of two matrices, whose elements do not begin where the memory does."""
    rows = torch.zeros(2, 6, K, dtype=torch.bfloat16)
    for scaling, shape in (("block", (6, 3)), ("row_column", (6,))):
        y, scale = unpacked(rows[1], scaling)
        assert (tuple(y.shape), tuple(scale.shape), y.dtype) == ((6, K), shape, E4M3)
        assert y.data_ptr() == rows[1].data_ptr()
        assert scale.data_ptr() == y.data_ptr() + 6 * K
        assert y.is_contiguous()
        assert scale.is_contiguous()
