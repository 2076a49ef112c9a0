"""Activations of vLLM's behind which an fp8 GEMM quantises tokens: in a compiled graph the archive computes both at
once; on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import runtime
from aot.tune.quantise.measures import activated, quantised
from runtime.container.archive import Archive
from runtime.errors import DeviceError
from runtime.plugin import gated
from runtime.plugin.log import warn_once
from runtime.plugin.served import Served
from runtime.quantise import Signature
from runtime.vllm.packed_tokens import Rows

from .. import vllm_stand_in
from ..moe.test_operation import tensors_of
from ..recording_driver import RecordingDriver, entry, operands_record, tensors_record, write_archive
from ..rmsnorm.test_vllm_fp8 import KEY, OfBoth, compiled
from ..test_vllm_fp8 import SERVED, made
from ..test_vllm_fp8_few import FEW, MOST, SCALINGS, close, layer_of
from ..vllm_stand_in import LAYERS, MINE, K, Server, Start, fp8_layer

start = vllm_stand_in.start  # a fixture

each = pytest.mark.parametrize("scaling", SCALINGS)


class OfRows(OfBoth):
    """Computes quantised rows in the place of norms."""

    def call(self, operation: str, *operands: Any, stream: Any = None, **words: Any) -> Any:
        assert operation == "quantise"
        if self.missing:
            raise runtime.KernelMiss("none", "no kernel runs")
        (x,), activation = operands, words.get("activation", "none")
        assert x.is_contiguous(), "which kernels demand"
        self.calls.append((activation, x.shape[0], words["scaling"]))
        for to, of in zip(words["out"], quantised(activated(x, activation), "e4m3", words["scaling"]), strict=True):
            to.copy_(of)
        return words["out"]


class Down(nn.Module):
    """A layer that vLLM made of the archive's class."""

    def __init__(self, gemm: Any, layer: Any) -> None:
        super().__init__()
        self.gemm, self.layer, self.input_size_per_partition = gemm, layer, K

    def forward(self, x: Any) -> Any:
        return self.gemm.apply_weights(self.layer, x)


class Mlp(nn.Module):
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.act_fn, self.down_proj = nn.Identity(), activation, nn.Identity()

    def forward(self, x: Any) -> Any:
        gate_up = self.gate_up_proj(x)
        x = self.act_fn(gate_up)
        return self.down_proj(x)


@pytest.fixture
def serve(tmp_path: Path, start: Start) -> Callable[..., Server]:
    """Starts a server whose archive has fp8 GEMMs, of few tokens too, and what quantises: also behind gates of K
    columns, for `scalings`; and `more` GEMMs, those of quantised tokens tuned up to `most`."""

    def make(scalings: Any = SCALINGS, more: Any = (), of: type[OfRows] = OfRows, most: int = MOST) -> Server:
        rows = [Signature("bf16", "e4m3", K, scaling) for scaling in SCALINGS]
        rows += [Signature("bf16", "e4m3", K, scaling, activation="swiglu") for scaling in scalings]
        gemms = [*SERVED, *FEW, *more]
        kernels = write_archive(
            tmp_path / "gemms.aot",
            [operands_record(f"gemm{i}", s) for i, s in enumerate(gemms)],
            [entry(s, [(None, f"gemm{i}")], tuned_to=MOST if s["a"] == "bf16" else most) for i, s in enumerate(gemms)],
        )
        kernels |= write_archive(
            tmp_path / "rows.aot",
            [tensors_record(f"rows{i}", *tensors_of(s)) for i, s in enumerate(rows)],
            [entry(s.to_json(), [(None, f"rows{i}")]) for i, s in enumerate(rows)],
            "quantise",
        )
        archives = [Archive.open(tmp_path / f"{name}.aot") for name in ("gemms", "rows")]
        lib = of(archives, RecordingDriver(kernels=kernels))
        server = start(load=lambda paths, **options: lib)
        server.lib = lib
        return server

    return make


def loaded(server: Server, scaling: str, activation: str = "SiluAndMul", **options: Any) -> tuple[Any, Any]:
    """An MLP of a model that the server loads, and the options that its graphs are compiled with."""
    module = server.modules[f"{LAYERS}.activation"]
    of = getattr(module, activation, None) or type(activation, (module.SiluAndMul,), {})
    mlp = Mlp(of())
    config = server.config(MINE, quant=object())
    config.compilation_config.inductor_compile_config.update(options)
    worker = server._worker(config, nn.ModuleList([mlp]))
    mlp.down_proj = Down(made(server, fp8_layer(scaling), scaling), layer_of(scaling))
    worker.load_model()
    return mlp, config.compilation_config.inductor_compile_config


def gates(m: int) -> Any:
    torch.manual_seed(m)
    return torch.randn(m, 2 * K).bfloat16()


def expected(x: Any) -> Any:
    return activated(x, "swiglu")


@each
def test_an_activation_quantises_for_the_gemm_behind_it(serve: Callable[..., Server], scaling: str) -> None:
    """More tokens than the GEMM quantises itself; fewer are as the server's kernel gives them."""
    server = serve()
    mlp, options = loaded(server, scaling)
    run = compiled(mlp, options)
    for m in (MOST + 1, MOST, 40):
        server.lib.calls.clear()
        x = gates(m)
        assert close(run(x), mlp.down_proj.layer, expected(x))
        of_both = [("gemm", m, "none")] if m <= MOST else [("swiglu", m, scaling), ("gemm", m, "scaled")]
        assert server.lib.calls == of_both
    assert "serves 1 of 1 quantising activations and 1 of 1 fp8 layers" in server.lines[0]


@each
def test_outside_a_graph_the_activation_is_the_servers(serve: Callable[..., Server], scaling: str) -> None:
    server = serve()
    mlp, _ = loaded(server, scaling)
    x = gates(MOST + 1)
    assert torch.equal(mlp.act_fn(x), nn.functional.silu(x[:, :K]) * x[:, K:])
    assert close(mlp(x), mlp.down_proj.layer, expected(x))
    assert server.lib.calls == [("none", MOST + 1, scaling), ("gemm", MOST + 1, "scaled")]
    assert mlp.act_fn(x.float()).dtype == torch.float32


@pytest.mark.parametrize("m", [MOST, MOST + 1])
def test_contiguous_rows_come_to_the_servers_kernel_and_to_the_archives(serve: Callable[..., Server], m: int) -> None:
    server = serve()
    mlp, options = loaded(server, "block")
    laid_out = []

    def silu_and_mul(x: Any) -> Any:
        laid_out.append(x.is_contiguous())
        return expected(x)

    gated.use(mlp.act_fn.number, silu_and_mul)
    x = gates(m)
    assert close(compiled(lambda x: mlp(x.t() * 2), options)(x.t().contiguous()), mlp.down_proj.layer, expected(2 * x))
    assert laid_out == [True] * (m <= MOST)


def test_layers_of_another_type_and_the_same_k_do_not_matter(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    unquantised = Served.unquantised

    def with_another(self: Any, signature: Any, gates: bool) -> Any:
        self._read.add(Rows("f16", K, "block", MOST))
        return unquantised(self, signature, gates)

    monkeypatch.setattr(Served, "unquantised", with_another)
    mlp, _ = loaded(serve(), "block")
    assert (type(mlp.act_fn).__name__, mlp.act_fn.dtype) == ("Activation", torch.bfloat16)


def test_what_others_read_is_not_quantised(serve: Callable[..., Server]) -> None:
    server = serve()
    mlp, options = loaded(server, "block")

    def step(x: Any) -> Any:
        act = mlp.act_fn(x)
        return mlp.down_proj(act), 2 * act

    x = gates(MOST + 1)
    d, more = compiled(step, options)(x)
    assert close(d, mlp.down_proj.layer, expected(x))
    torch.testing.assert_close(more, 2 * expected(x), rtol=2**-6, atol=1e-3)
    assert server.lib.calls[0] == ("none", MOST + 1, "block")


@each
def test_what_the_archive_cannot_quantise_the_server_does(serve: Callable[..., Server], scaling: str) -> None:
    warn_once.cache_clear()
    server = serve()
    mlp, options = loaded(server, scaling)
    server.lib.missing = True
    x = gates(MOST + 1)
    assert close(compiled(mlp, options)(x), mlp.down_proj.layer, expected(x))
    said = f"a SwiGLU of K {K} that quantises was left to one that does not, and to the server: KernelMiss"
    assert any(said in line for line in server.lines)


@pytest.mark.parametrize("case", ["not tuned", "another activation", "the user's pass"])
def test_other_activations_are_left(serve: Callable[..., Server], case: str) -> None:
    server = serve(["row_column"] if case == "not tuned" else SCALINGS)
    options = {KEY: "mine"} if case == "the user's pass" else {}
    activation = "GeluAndMul" if case == "another activation" else "SiluAndMul"
    mlp, _ = loaded(server, "block", activation, **options)
    assert type(mlp.act_fn).__name__ == activation
    assert not any("quantising activations" in line for line in server.lines)


def test_activations_are_vllms_again_where_kernels_cannot_be_loaded(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    preload = OfRows.preload

    def fail(self: Any, *sizes: Any, only: Any = None) -> None:
        if any("swiglu" in key for key in only):
            raise DeviceError("no memory")
        preload(self, *sizes, only=only)

    monkeypatch.setattr(OfRows, "preload", fail)
    mlp, _ = loaded(server, "block")
    assert type(mlp.act_fn).__name__ == "SiluAndMul"
    assert server.lines[-1].endswith("serves nothing, vLLM's kernels do: no memory")
