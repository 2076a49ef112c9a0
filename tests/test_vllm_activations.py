"""MLPs of vLLM's whose activation the GEMM of their gates computes, in modules shaped like vLLM's; on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from runtime.errors import DeviceError

from . import vllm_stand_in
from .recording_driver import signature
from .torch_stand_in import HIDDEN, INNER, near, tensors
from .vllm_stand_in import Server, Start

start = vllm_stand_in.start  # a fixture

GATE_UP, DOWN = signature(2 * INNER, HIDDEN), signature(HIDDEN, INNER)
SWIGLU = signature(2 * INNER, HIDDEN, epilogue="swiglu")
FUSED = (2 * INNER, HIDDEN, "swiglu")


@pytest.fixture
def made(start: Start) -> Start:
    """Makes servers, as tests/vllm_stand_in.py has them."""
    return start


def mlp_of(server: Server, name: str = "Mlp", **more: Any) -> Any:
    return getattr(server.modules["vllm.model_executor.models"], name)(INNER, HIDDEN, **more)


def expected(mlp: Any, x: Any) -> Any:
    gate, up = (x.float() @ mlp.gate_up_proj.weight.float().T).chunk(2, -1)
    return (nn.functional.silu(gate) * up) @ mlp.down_proj.weight.float().T


@pytest.mark.parametrize("have", [[SWIGLU, DOWN], [GATE_UP, SWIGLU, DOWN]], ids=["fused-alone", "both"])
def test_one_gemm_computes_gates_and_activation(made: Start, have: list[dict[str, Any]]) -> None:
    server = made(have)
    mlp = mlp_of(server)
    server.serve(mlp)
    (x,) = tensors((5, HIDDEN))
    assert near(mlp(x), expected(mlp, x))
    assert server.lib.calls == [FUSED, (HIDDEN, INNER, "none")]
    (line,) = server.lines
    assert "serves 2 of 2 linear layers and 1 activations (2 signatures preloaded" in line


def load_again(mlp: Any) -> None:
    """As vLLM's layerwise reload does: each layer is processed again, and no worker's `load_model` is called."""
    for layer in (mlp.gate_up_proj, mlp.down_proj):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("have", [[SWIGLU, DOWN], [GATE_UP, SWIGLU, DOWN]], ids=["fused-alone", "both"])
@pytest.mark.parametrize("whole", [False, True], ids=["layers", "model"])
def test_activation_is_computed_once_after_weights_are_loaded_again(
    made: Start, have: list[dict[str, Any]], whole: bool
) -> None:
    server = made(have)
    mlp = mlp_of(server)
    worker = server.serve(mlp)
    nn.init.normal_(mlp.gate_up_proj.weight)
    worker.load_model() if whole else load_again(mlp)
    (x,) = tensors((5, HIDDEN))
    assert near(mlp(x), expected(mlp, x))
    assert server.lib.calls == [FUSED, (HIDDEN, INNER, "none")]


def test_activation_is_the_servers_again_where_weights_are_loaded_again_beside_an_engine_without_archive(
    made: Start,
) -> None:
    server = made([GATE_UP, SWIGLU, DOWN])
    mlp = mlp_of(server)
    server.serve(mlp)
    server.serve(server.linear(HIDDEN, HIDDEN), config={})
    load_again(mlp)
    (x,) = tensors((5, HIDDEN))
    assert near(mlp(x), expected(mlp, x))
    assert server.lib.calls == []


EARLY = [signature(of["n"], of["k"], epilogue=of["epilogue"], overlap="weights") for of in (GATE_UP, SWIGLU, DOWN)]
ALONE = (2 * INNER, HIDDEN, "none")


@pytest.mark.parametrize("backend", ["", "aot_eager", "inductor"])
def test_activation_is_computed_apart_where_the_archive_says_so(made: Start, backend: str) -> None:
    server = made([GATE_UP, SWIGLU, DOWN, *EARLY], apart=[(1, 2), (5, 5)])
    mlp = mlp_of(server)
    own = type(mlp.act_fn).forward_native
    apart = list[Any]()

    def forward_cuda(x: Any) -> Any:  # vLLM's kernel
        apart.append(x.shape)
        return own(x)

    mlp.act_fn.forward_cuda = forward_cuda
    server.serve(mlp)
    run = torch.compile(mlp, fullgraph=True, backend=backend, dynamic=True) if backend else mlp
    for m in (5, 3, 2):
        (x,) = tensors((m, HIDDEN))
        assert near(run(x), expected(mlp, x))
    down = (HIDDEN, INNER, "none")
    assert server.lib.calls == [ALONE, down, FUSED, down, ALONE, down]
    assert set(server.lib.overlaps) == {"weights"}
    assert apart == [(5, 2 * INNER), (2, 2 * INNER)]
    assert "serves 2 of 2 linear layers and 1 activations (3 signatures preloaded" in server.lines[0]


def test_activation_apart_has_the_shape_of_its_input(made: Start) -> None:
    server = made([GATE_UP, SWIGLU], apart=[(6, None)])
    mlp = mlp_of(server)
    server.serve(mlp)
    (x,) = tensors((2, 3, HIDDEN))
    assert near(mlp(x), expected(mlp, x))
    assert server.lib.calls == [ALONE]


def test_activation_is_not_left_to_a_product_that_is_not_there(made: Start) -> None:
    server = made([SWIGLU], apart=[(1, None)])
    mlp = mlp_of(server)
    server.serve(mlp)
    (x,) = tensors((5, HIDDEN))
    assert near(mlp(x), expected(mlp, x))
    assert server.lib.calls == [FUSED]


def test_an_odd_call_is_computed_as_vllm_does(made: Start) -> None:
    server = made([SWIGLU])
    mlp = mlp_of(server)
    server.serve(mlp)
    x = torch.randn(HIDDEN).bfloat16()
    assert near(mlp(x), expected(mlp, x[None])[0])
    assert server.lib.calls == []


def test_it_compiles_in_one_graph(made: Start) -> None:
    server = made([SWIGLU, DOWN])
    mlp = mlp_of(server)
    server.serve(mlp)
    (x,) = tensors((5, HIDDEN))
    assert near(torch.compile(mlp, fullgraph=True, backend="aot_eager", dynamic=True)(x), expected(mlp, x))
    assert server.lib.calls[0] == FUSED


@pytest.mark.parametrize("what", ["another forward", "a bias", "a hook", "gathered", "not there", "ranked", "its own"])
def test_other_mlps_keep_their_activation(made: Start, what: str) -> None:
    server = made([GATE_UP] if what == "not there" else [SWIGLU], state="ranked" if what == "ranked" else "tuned")
    mlp = mlp_of(server, "ScaledMlp" if what == "another forward" else "Mlp", bias=what == "a bias")
    if what == "a hook":
        mlp.act_fn.register_forward_hook(lambda *_: None)
    if what == "gathered":
        mlp.gate_up_proj.gather_output = True
    if what == "its own":
        mlp.forward = mlp.forward
    before = mlp.act_fn
    server.serve(mlp)
    assert mlp.act_fn is before
    mlp(*tensors((5, HIDDEN)))
    assert FUSED not in server.lib.calls


def test_a_tuned_product_is_not_given_up_for_a_predicted_one(made: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = made([GATE_UP, SWIGLU])
    entry = server.lib.entry
    monkeypatch.setattr(type(server.lib), "checked", lambda self, found: True)
    monkeypatch.setattr(
        type(server.lib),
        "entry",
        lambda self, s: entry(s)._replace(state="predicted") if s.epilogue != "none" else entry(s),
    )
    mlp = mlp_of(server)
    server.serve(mlp)
    mlp(*tensors((5, HIDDEN)))
    assert server.lib.calls[0] == (2 * INNER, HIDDEN, "none")


def test_activations_come_back_where_kernels_cannot_be_loaded(made: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = made([SWIGLU])
    mlp = mlp_of(server)
    before = mlp.act_fn

    def preload(*_: Any, **__: Any) -> None:
        raise DeviceError("out of memory")

    monkeypatch.setattr(server.lib, "preload", preload)
    server.serve(mlp)
    assert mlp.act_fn is before
    (x,) = tensors((5, HIDDEN))
    assert near(mlp(x), expected(mlp, x))
    assert server.lib.calls == []


def test_the_compile_cache_tells_it_apart(made: Start) -> None:
    """Of one archive and one model, once with an activation that must stay."""
    keys = set()
    for watched in (False, True):
        server = made([GATE_UP, SWIGLU])
        mlp, config = mlp_of(server), server.config({"cute_aot": "model.aot"})
        if watched:
            mlp.act_fn.register_forward_hook(lambda *_: None)
        server.serve(mlp, config=config)
        keys.add(config.compute_hash())
    assert len(keys) == 2
