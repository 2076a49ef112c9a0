"""Linear layers that are replaced, with the real torch on the CPU.

Libraries are those of tests/torch_stand_in.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import runtime.torch as aot
from runtime import ArgumentError

from . import torch_stand_in
from .recording_driver import signature
from .torch_stand_in import (
    GATED,
    HIDDEN,
    INNER,
    KV,
    MLP,
    ONE,
    PLAIN,
    QKV,
    VOCAB,
    Attention,
    OnCpu,
    OtherMLP,
    library,
    linear,
    llama,
    near,
    tensors,
    tokens,
)

lib = torch_stand_in.lib  # a fixture


def by_name(report: Any) -> dict[str, Any]:
    return {layer.name: layer for layer in report.layers}


def test_model_computes_the_same_with_replaced_layers(lib: OnCpu) -> None:
    model, x = llama(), tokens()
    parameters = dict(model.named_parameters())
    state = {name: t.clone() for name, t in model.state_dict().items()}
    with torch.no_grad():
        wanted = model(x)
        report = aot.replace_linears(model, lib)
        found = model(x)
    assert near(found, wanted)
    assert all(layer.taken and not layer.reason for layer in report.layers)
    # 2 blocks of qkv, o, gate and up, down; and the head
    assert [call[0] for call in lib.calls] == [QKV["n"], HIDDEN, GATED["n"], HIDDEN] * 2 + [VOCAB]
    assert {name: id(p) for name, p in model.named_parameters()} == {n: id(p) for n, p in parameters.items()}
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(model.state_dict()[name], t) for name, t in state.items())
    assert model.lm_head.weight is model.embed_tokens.weight


def test_report_reads_as_a_table_and_as_data(lib: OnCpu) -> None:
    report = aot.replace_linears(llama(layers=1), lib)
    layers = by_name(report)
    assert layers["layers.0.mlp.gate_proj"].fused_with == ("layers.0.mlp.up_proj",)
    assert layers["layers.0.self_attn.k_proj"].signature == "bf16_bf16_bf16_f32_none_n128_k64"
    assert list(layers)[-1] == "lm_head"
    lines = str(report).splitlines()
    assert lines[0].split()[:2] == ["layer", "signature"]
    assert lines[-1] == "8 of 8 linear layers are served by the archive"
    assert report.to_json()[0]["name"] == "layers.0.self_attn.q_proj"


def test_what_replaced_layers_need_is_what_is_preloaded(tmp_path: Path) -> None:
    model, x = llama(layers=1), tokens()
    with library(tmp_path, PLAIN) as lib, torch.no_grad():
        report = aot.replace_linears(model.layers, lib)  # all but the head, whose signature is another
        assert report.signatures == {layer.signature for layer in report.layers}
        assert len(lib.preload(only=report.signatures)) < len(lib.functions)
        before = lib.stats().loads
        model.layers[0](model.embed_tokens(x))
        assert lib.stats().loads == before
        frozen = nn.Sequential(nn.Linear(8, 8).train())
        assert aot.replace_linears(frozen, lib).signatures == frozenset()


def test_fused_weights_are_laid_out_once_and_still_loaded_into(lib: OnCpu) -> None:
    model, other = llama(layers=1), llama(layers=1)
    aot.replace_linears(model, lib)
    attention, mlp = model.layers[0].self_attn, model.layers[0].mlp
    for layers in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
        weights = [layer.weight for layer in layers]
        assert len({w.untyped_storage().data_ptr() for w in weights}) == 1
        assert weights[0].untyped_storage().nbytes() == sum(w.nbytes for w in weights)
        assert all(w.is_contiguous() for w in weights)
    model.load_state_dict(other.state_dict())
    x = tokens()
    with torch.no_grad():
        assert near(model(x), other(x))


def test_repeating_changes_nothing_and_restoring_undoes_it(lib: OnCpu) -> None:
    model, x = llama(), tokens()
    with torch.no_grad():
        wanted = model(x)
    classes = [type(module) for module in model.modules()]
    first = aot.replace_linears(model, lib)
    weights = [p.data_ptr() for p in model.parameters()]
    assert aot.replace_linears(model, lib) == first
    assert [p.data_ptr() for p in model.parameters()] == weights
    assert aot.restore_linears(model) == len(first.layers) == 15
    assert aot.restore_linears(model) == 0
    assert [type(module) for module in model.modules()] == classes
    assert not any(name.startswith("_aot") for module in model.modules() for name in vars(module))
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
    lib.close()
    with torch.no_grad():
        assert torch.equal(model(x), wanted)


def test_layers_of_another_library_are_refused(lib: OnCpu, tmp_path: Path) -> None:
    model = llama(layers=1)
    aot.replace_linears(model, lib)
    (tmp_path / "other").mkdir()
    with library(tmp_path / "other", PLAIN) as other, pytest.raises(ArgumentError, match="another library"):
        aot.replace_linears(model, other)


def test_layers_are_replaced_one_by_one_where_the_fused_signature_is_missing(tmp_path: Path) -> None:
    model, x = llama(layers=1), tokens()
    with library(tmp_path, PLAIN) as lib, torch.no_grad():
        wanted = model(x)
        layers = by_name(aot.replace_linears(model, lib))
        assert near(model(x), wanted)
        assert len(lib.calls) == 8
    gate = layers["layers.0.mlp.gate_proj"]
    assert gate.taken
    assert gate.fused_with == ()
    assert gate.reason.startswith("not fused: no kernel for bf16_bf16_bf16_f32_swiglu_n192_k64")
    assert "nearest is bf16_bf16" in gate.reason


def test_fusing_can_be_left_out(lib: OnCpu) -> None:
    report = aot.replace_linears(llama(), lib, fuse=False)
    assert all(layer.taken and not layer.fused_with and not layer.reason for layer in report.layers)


@pytest.mark.parametrize(
    ("act", "word"),
    [
        (nn.SiLU(), "swiglu"),
        (nn.functional.silu, "swiglu"),
        (nn.GELU(), "geglu"),
        (nn.GELU("tanh"), "geglu_tanh"),
        (nn.GELU("tanh"), "geglu_tanh_interleaved"),
        (nn.SiLU(), "swiglu_interleaved"),
    ],
)
def test_gates_are_told_by_what_they_compute(tmp_path: Path, act: Any, word: str) -> None:
    mlp = MLP(act).bfloat16().eval()
    (x,) = tensors((2, 3, HIDDEN))
    with library(tmp_path, [signature(2 * INNER, HIDDEN, epilogue=word)]) as lib, torch.no_grad():
        wanted = mlp(x)
        assert by_name(aot.replace_linears(mlp, lib))["gate_proj"].fused_with == ("up_proj",)
        assert near(mlp(x), wanted)
        assert lib.calls == [(2 * INNER, HIDDEN, word)]
        aot.restore_linears(mlp)
        assert torch.equal(mlp(x), wanted)


def test_biases_are_fused(tmp_path: Path) -> None:
    attention = Attention(bias=True).bfloat16().eval()
    (x,) = tensors((2, 3, HIDDEN))
    with library(tmp_path, [signature(HIDDEN + 2 * KV, HIDDEN, epilogue="bias")]) as lib, torch.no_grad():
        wanted = attention(x)
        layers = by_name(aot.replace_linears(attention, lib))
        assert near(attention(x), wanted)
        assert lib.calls == [(HIDDEN + 2 * KV, HIDDEN, "bias+none")]
    assert layers["v_proj"].fused_with == ("q_proj", "k_proj")
    assert layers["o_proj"].reason.startswith("no kernel for")


def not_fused(mlp: Any, lib: OnCpu) -> str:
    gate = by_name(aot.replace_linears(mlp.bfloat16().eval(), lib))["gate_proj"]
    assert gate.fused_with == ()
    return str(gate.reason)


def test_mlps_that_cannot_be_fused_are_not(lib: OnCpu) -> None:
    assert "does not compute" in not_fused(OtherMLP(), lib)
    assert "act_fn is none of" in not_fused(MLP(nn.ReLU()), lib)
    hooked = MLP()
    hooked.up_proj.register_forward_hook(lambda *_: None)
    assert "a hook" in not_fused(hooked, lib)
    tied = MLP()
    tied.up_proj.weight = tied.gate_proj.weight
    assert "shares memory" in not_fused(tied, lib)
    zero = MLP()
    nn.init.zeros_(zero.down_proj.weight)
    assert "cannot be seen" in not_fused(zero, lib)


def test_attention_to_other_states_is_right_though_fused(lib: OnCpu) -> None:
    attention = Attention().bfloat16().eval()
    x, y = tensors((2, 3, HIDDEN), (2, 3, HIDDEN))
    with torch.no_grad():
        wanted, same = attention(x, y), attention(x)
        aot.replace_linears(attention, lib)
        assert near(attention(x, y), wanted)
        assert len(lib.calls) == 3
        for _ in range(2):  # nothing is kept from the call before
            x.mul_(-1)
            attention(x)
        assert near(attention(x), same)
    assert attention.q_proj._aot_gemm.pending is None


def test_a_call_that_was_cut_short_leaves_nothing_to_the_next(lib: OnCpu) -> None:
    attention = Attention().bfloat16().eval()
    (x,) = tensors((3, HIDDEN))
    aot.replace_linears(attention, lib)
    with torch.no_grad():
        attention.q_proj(x)
        attention.k_proj(x)
        x.mul_(-2)
        wanted = nn.functional.linear(x, attention.q_proj.weight)
        assert near(attention.q_proj(x), wanted)


def reason(model: Any, lib: OnCpu) -> str:
    (layer,) = aot.replace_linears(nn.Sequential(model), lib).layers
    assert not layer.taken
    return str(layer.reason)


def test_layers_that_cannot_be_served_say_why(lib: OnCpu, tmp_path: Path) -> None:
    assert "no kernel for bf16_bf16_bf16_f32_none_n72_k64 on compute capability 9.0" in reason(linear(72), lib)
    assert "N is 64, wanted 72" in reason(linear(72), lib)
    assert "no kernel for f32_f32_f32" in reason(linear(dtype=torch.float32), lib)
    assert "element type torch.float64" in reason(linear(dtype=torch.float64), lib)
    assert "on meta; the library serves cpu" in reason(linear(device="meta"), lib)
    assert "is in training" in reason(linear().train(), lib)
    wide = linear()
    wide.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN + 1).bfloat16()[:, :HIDDEN])
    assert "not contiguous" in reason(wide, lib)
    assert "not an nn.Linear" in reason(torch.nn.utils.parametrizations.weight_norm(linear()), lib)
    patched = linear()
    patched.forward = lambda x: x
    assert "forward of its own" in reason(patched, lib)
    (tmp_path / "ranked").mkdir()
    with library(tmp_path / "ranked", [ONE], state="ranked") as ranked:
        assert "is ranked, never run on a GPU; run: aot tune" in reason(linear(), ranked)
    frozen = linear().train().requires_grad_(False)
    assert aot.replace_linears(nn.Sequential(frozen), lib).layers[0].taken


def test_weights_stored_the_other_way_round_are_served(lib: OnCpu) -> None:
    layer = linear()
    layer.weight = nn.Parameter(layer.weight.data.t().contiguous().t())
    (x,) = tensors((3, HIDDEN))
    with torch.no_grad():
        wanted = layer(x)
        assert "n-major" in aot.replace_linears(nn.Sequential(layer), lib).layers[0].signature
        assert near(layer(x), wanted)


def test_promise_falls_back_to_entries_that_rely_on_less(tmp_path: Path) -> None:
    launch = signature(INNER, HIDDEN, overlap="launch")
    strong, weak = (signature(KV, HIDDEN, overlap=word) for word in ("weights", "launch"))
    with library(tmp_path, [ONE, launch, weak, strong]) as lib:
        model = nn.Sequential(linear(), linear(INNER), linear(KV))
        layers = aot.replace_linears(model, lib, overlap="weights").layers
        assert [layer.signature.partition("k64")[2] for layer in layers] == ["", "_launch", "_weights"]
        aot.restore_linears(model)
        assert [layer.taken for layer in aot.replace_linears(model, lib).layers] == [True, False, False]
        with pytest.raises(ArgumentError, match="overlap must be one of"):
            aot.replace_linears(model, lib, overlap="most")


def test_hooks_of_replaced_layers_run(lib: OnCpu) -> None:
    model, seen = llama(layers=1), []
    for layer in (model.lm_head, model.layers[0].self_attn.k_proj):
        layer.register_forward_hook(lambda _m, _x, y: seen.append(tuple(y.shape)))
    aot.replace_linears(model, lib)
    with torch.no_grad():
        model(tokens())
    assert seen == [(2, 5, KV), (2, 5, VOCAB)]


class Adapted(nn.Module):
    """A layer with something added, as adapters are put in its place."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Any) -> Any:
        return self.base(x) + x.sum(-1, keepdim=True)


class OfMethod(nn.Module):
    """Has its activation as a method, of which each access makes another object."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(INNER), linear(INNER), linear(HIDDEN, INNER)

    def act_fn(self, x: Any) -> Any:
        return nn.functional.silu(x)

    def forward(self, x: Any) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("act", ["module", "function", "method"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_fused_mlp_is_one_gemm_whatever_its_activation_is_kept_as(lib: OnCpu, act: str, compiled: bool) -> None:
    torch._dynamo.reset()
    mlp = OfMethod() if act == "method" else MLP(nn.functional.silu if act == "function" else None).bfloat16()
    (x,), mlp = tensors((5, HIDDEN)), mlp.eval()
    wanted = mlp(x)
    aot.replace_linears(mlp, lib)
    run = torch.compile(mlp, fullgraph=True, backend="eager") if compiled else mlp
    with torch.no_grad():
        assert near(run(x), wanted)
        assert near(run(x=x), wanted)
    assert lib.calls == 2 * [(2 * INNER, HIDDEN, "swiglu"), (HIDDEN, INNER, "none")]


def test_a_forward_that_a_layer_was_given_since_is_called(lib: OnCpu) -> None:
    (x,), mlp = tensors((5, HIDDEN)), MLP().bfloat16().eval()
    aot.replace_linears(mlp, lib)
    mlp.gate_proj.forward = lambda x: torch.zeros((*x.shape[:-1], INNER), dtype=x.dtype)
    with torch.no_grad():
        assert not mlp(x).any()


@pytest.mark.parametrize("change", ["adapter", "activation", "hook on gate", "hook on activation"])
def test_a_fused_mlp_computes_with_what_was_put_into_it_since(lib: OnCpu, change: str) -> None:
    (x,), seen = tensors((5, HIDDEN)), []
    mlps = plain, fused = [MLP().bfloat16().eval() for _ in range(2)]
    fused.load_state_dict(plain.state_dict())
    aot.replace_linears(fused, lib)
    assert "_aot_gemm" in vars(fused)
    for mlp in mlps:
        if change == "adapter":
            mlp.up_proj = Adapted(mlp.up_proj)
        elif change == "activation":
            mlp.act_fn = nn.ReLU()
        else:
            layer = mlp.gate_proj if change == "hook on gate" else mlp.act_fn
            layer.register_forward_hook(lambda _m, _x, y: seen.append(y.shape))
    with torch.no_grad():
        assert near(fused(x), plain(x))
    assert len(seen) == (2 if change.startswith("hook") else 0)
    assert not lib.calls or set(lib.calls) == {(HIDDEN, INNER, "none")}


def test_an_mlp_that_clamps_far_out_is_not_fused(lib: OnCpu) -> None:
    class Clamped(MLP):
        def forward(self, x: Any) -> Any:
            gate, up = self.act_fn(self.gate_proj(x)).clamp(max=16), self.up_proj(x).clamp(-16, 16)
            return self.down_proj(gate * up)

    class Far(nn.Module):
        def forward(self, x: Any) -> Any:
            return nn.functional.silu(x).clamp(max=12)

    mlp = Clamped().bfloat16().eval()
    report = aot.replace_linears(mlp, lib)
    assert not any(layer.fused_with for layer in report.layers)
    assert "does not compute" in str(report)
    other = MLP(Far()).bfloat16().eval()
    assert "act_fn is none of" in str(aot.replace_linears(other, lib))


def test_layers_are_called_by_keyword_as_before(lib: OnCpu) -> None:
    layer, (x,) = linear(HIDDEN, HIDDEN), tensors((5, HIDDEN))
    wanted = layer(x)
    aot.replace_linears(nn.Sequential(layer), lib)
    with torch.no_grad():
        assert near(layer(input=x), wanted)


def test_restoring_in_inference_mode_makes_no_inference_tensors(lib: OnCpu) -> None:
    mlp = MLP().bfloat16().eval()
    aot.replace_linears(mlp, lib)
    with torch.inference_mode():
        aot.restore_linears(mlp)
    assert not any(p.is_inference() for p in mlp.parameters())


def test_weights_that_moved_after_fusing_are_noticed(lib: OnCpu) -> None:
    x = tokens()
    for move in (copy.deepcopy, lambda m: [m, m.load_state_dict(llama(layers=1).state_dict(), assign=True)][0]):
        torch._dynamo.reset()
        model = llama(layers=1)
        aot.replace_linears(model, lib)
        moved = move(model)
        with torch.no_grad():
            with pytest.raises(ArgumentError, match="were moved or replaced"):
                moved(x)
            aot.restore_linears(moved)
            wanted = moved(x)
            aot.replace_linears(moved, lib)
            assert near(moved(x), wanted)


def test_replaced_models_cannot_be_pickled(lib: OnCpu, tmp_path: Path) -> None:
    model = llama(layers=1)
    aot.replace_linears(model, lib)
    with pytest.raises(ArgumentError, match="cannot be pickled"):
        torch.save(model, tmp_path / "model.pt")
    torch.save(model.state_dict(), tmp_path / "state.pt")


def test_replaced_model_compiles_in_one_graph_with_any_m(lib: OnCpu) -> None:
    model = llama()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        x, y = tokens(2, 5), tokens(2, 9)
        wanted = model(x), model(y)
        aot.replace_linears(model, lib)
        assert near(compiled(x), wanted[0])
        assert near(compiled(y), wanted[1])
    assert [call[0] for call in lib.calls] == ([QKV["n"], HIDDEN, GATED["n"], HIDDEN] * 2 + [VOCAB]) * 2


def test_fused_weights_are_known_to_stay_where_they_are(lib: OnCpu) -> None:
    """As Parameters are, so that CUDA graphs of torch.compile read them in place."""
    inputs = {}

    def backend(graph: Any, _inputs: Any) -> Any:
        for node in graph.graph.find_nodes(op="placeholder"):
            inputs[tuple(node.meta["example_value"].shape)] = node.meta["tensor_dict"]
        return graph.forward

    mlp = MLP().bfloat16().eval()
    aot.replace_linears(mlp, lib)
    with torch.no_grad():
        torch.compile(mlp, fullgraph=True, backend=backend)(*tensors((3, HIDDEN)))
    for weight in ((2 * INNER, HIDDEN), (HIDDEN, INNER)):
        assert "_dynamo_static_input_type" in inputs[weight]
    assert "_dynamo_static_input_type" not in inputs[3, HIDDEN]
