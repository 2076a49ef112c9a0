"""What the plugin takes of a model, and what it leaves to SGLang, in modules shaped like SGLang's; computed on the CPU.

Libraries are those of tests/torch_stand_in.py: real ones, whose `gemm` computes with torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

import runtime
from runtime.plugin.served import RequiredError
from runtime.sglang import hooks
from runtime.sglang.plugin import Plugin, install
from runtime.sglang.settings import settings_of

from . import sglang_stand_in
from .command_line import ROOT
from .recording_driver import signature
from .sglang_stand_in import FP8, MINE, QUANTIZATION, SERVED, Server, Start, arguments
from .torch_stand_in import HIDDEN, INNER, VOCAB, Graphs, device_is_gone, library, near, tensors

start = sglang_stand_in.start  # a fixture
DOWN, SWIGLU = signature(HIDDEN, INNER), signature(2 * INNER, HIDDEN, epilogue="swiglu")


# --- what is taken ---


def test_layers_and_head_that_the_archive_has_are_served(start: Start) -> None:
    server = start()
    one, up, head = server.linear(HIDDEN, HIDDEN), server.linear(INNER, HIDDEN), server.head(VOCAB, HIDDEN)
    server.serve(one, up, head)
    (x,) = tensors((5, HIDDEN))
    for layer in (one, up):
        assert near(layer(x)[0], x.float() @ layer.weight.float().T)
    logits = server.logits(x.float(), head)
    assert logits.dtype == torch.bfloat16
    assert near(logits, x.float() @ head.weight.float().T)
    assert server.lib.calls == [(HIDDEN, HIDDEN, "none"), (INNER, HIDDEN, "none"), (VOCAB, HIDDEN, "none")]
    one(x[0])
    server.logits(x[0], head)
    with pytest.raises(RuntimeError, match="dtype"):  # what SGLang says of it, and not the archive
        one(x.float())
    assert len(server.lib.calls) == 3
    (line,) = server.lines
    assert "serves 2 of 2 linear layers and 1 of 1 heads (3 signatures preloaded, for 3 numbers of tokens" in line
    options = {"on_miss": "torch", "on_slower": "torch", "capture_workspaces": "shared", "require_signed": None}
    assert server.asked == [(("model.aot",), options)]


def test_a_head_with_a_bias_is_called_without(start: Start) -> None:
    server = start()
    head = server.head(VOCAB, HIDDEN)
    head.bias = nn.Parameter(torch.randn(VOCAB).bfloat16(), requires_grad=False)
    server.serve(head)
    (x,) = tensors((5, HIDDEN))
    assert near(server.logits(x, head), x.float() @ head.weight.float().T)
    assert server.lib.calls == [(VOCAB, HIDDEN, "none")]
    assert "serves 1 of 1 heads" in server.lines[0]


def test_an_embedding_is_a_head_where_there_is_no_other(start: Start) -> None:
    server = start()
    tied = server.embedding(VOCAB, HIDDEN)
    server.serve(tied)
    (x,) = tensors((5, HIDDEN))
    server.logits(x, tied)
    assert len(server.lib.calls) == 1
    server.serve(server.embedding(VOCAB, HIDDEN), server.head(VOCAB, HIDDEN))
    assert "serves 1 of 1 embeddings (1" in server.lines[0]
    assert "serves 1 of 1 heads (1" in server.lines[1]


@pytest.mark.parametrize(
    ("runner", "served"), [({"pp_size": 2}, 0), ({"pp_size": 2, "pp_rank": 1}, 1), ({"is_generation": False}, 0)]
)
def test_heads_that_nobody_multiplies_with_are_neither_required_nor_loaded(
    start: Start, runner: dict[str, Any], served: int
) -> None:
    server = start()
    for each in (server.embedding, server.head):
        layers = server.linear(HIDDEN, HIDDEN), each(VOCAB if served else VOCAB + 1, HIDDEN)
        server.serve(*layers, setting={"cute_aot": {"archive": "model.aot", "required": "layers"}}, ranks=runner)
        assert ("1 of 1 heads" in server.lines[-1] or "1 of 1 embeddings" in server.lines[-1]) == bool(served)
        assert f"serves 1 of 1 linear layers{' and ' if served else ' ('}" in server.lines[-1]


def test_a_head_in_f32_is_left(start: Start) -> None:
    server = start()
    head = server.head(VOCAB, HIDDEN)
    server.serve(head, enable_fp32_lm_head=True)
    server.logits(*tensors((5, HIDDEN)), head)
    assert server.lib.calls == []
    assert "1 x --enable-fp32-lm-head asks for f32" in server.lines[0]


def test_a_linear_layer_as_a_head_in_f32_is_left(start: Start) -> None:
    server = start()
    head = server.linear(HIDDEN, HIDDEN)
    server.logits.use_fp32_lm_head = True
    server.serve(head, enable_fp32_lm_head=True)
    logits = server.logits(*tensors((5, HIDDEN)), head)
    assert (logits.dtype, server.lib.calls) == (torch.float32, [])


def test_what_the_archive_lacks_stays_sglangs_and_is_named(start: Start) -> None:
    server = start()
    one, lacking = server.linear(HIDDEN, HIDDEN), server.linear(HIDDEN, INNER)
    own = server.linear(HIDDEN, HIDDEN, method=server.modules[f"{QUANTIZATION}.unquant"].OwnMethod())
    server.serve(one, lacking, own)
    (y,) = tensors((5, INNER))
    assert torch.equal(lacking(y)[0], nn.functional.linear(y, lacking.weight))
    assert server.lib.calls == []
    (line,) = server.lines
    assert "serves 1 of 3 linear layers; SGLang computes the rest: 1 x " in line
    assert "no kernel for bf16_bf16_bf16_f32_none_n64_k96" in line
    assert "1 x OwnMethod has an apply of its own" in line


def packed(server: Server, name: str, of: Any = nn.Module) -> Any:
    """A layer with a weight of this name, computed by a method of its own."""
    layer = of() if of is nn.Module else of(VOCAB, HIDDEN)
    layer.weight = None
    setattr(layer, name, nn.Parameter(torch.zeros(8, 8, dtype=torch.int32), requires_grad=False))
    layer.quant_method = server.modules[f"{QUANTIZATION}.unquant"].OwnMethod()
    return layer


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "int4") for name in ("qweight", "weight_packed", "B")),
        *((name, "expert") for name in ("w13_qweight", "w13_weight_packed")),
    ],
)
def test_packed_layers_are_named_and_may_be_required(start: Start, name: str, kind: str) -> None:
    server = start()
    layers = [server.linear(HIDDEN, HIDDEN), packed(server, name), packed(server, "k_scale")]
    server.serve(*layers)
    assert f"0 of 1 {kind} layers; SGLang computes the rest: 1 x OwnMethod computes it (" in server.lines[0]
    setting = {"cute_aot": {"archive": "model.aot", "required": "layers"}}
    with pytest.raises(RequiredError, match="1 x OwnMethod computes it"):
        server.serve(*layers, setting=setting)
    server.lib.close()  # which a traceback keeps


def test_a_packed_embedding_is_named_where_it_is_a_head(start: Start) -> None:
    server = start()
    embedding = packed(server, "qweight", server.embedding)
    server.serve(embedding)
    server.serve(embedding, server.head(VOCAB, HIDDEN))
    server.serve(embedding, server.linear(HIDDEN, HIDDEN), ranks={"pp_size": 2})
    assert "serves 0 of 1 embeddings; SGLang computes the rest: 1 x OwnMethod computes it (" in server.lines[0]
    assert "serves 1 of 1 heads (" in server.lines[1]
    assert "serves 1 of 1 linear layers (" in server.lines[2]


def test_kernels_that_were_never_run_are_left(start: Start) -> None:
    server = start(state="ranked")
    server.serve(server.linear(HIDDEN, HIDDEN))
    assert "serves 0 of 1 linear layers" in server.lines[0]
    assert "never run on a GPU" in server.lines[0]


def test_a_bias_is_computed_by_the_archive_where_it_has_that(start: Start) -> None:
    server = start()
    layer = server.linear(HIDDEN, HIDDEN, bias=True)
    server.serve(layer)
    (x,) = tensors((5, HIDDEN))
    assert near(layer(x)[0], x.float() @ layer.weight.float().T + layer.bias.float())
    assert server.lib.calls == [(HIDDEN, HIDDEN, "bias+none")]


@pytest.mark.parametrize("compiled", [False, True])
def test_one_gemm_computes_gates_and_activation(start: Start, compiled: bool) -> None:
    server = start([SWIGLU, DOWN])
    mlp = server.mlp(INNER, HIDDEN)
    server.serve(mlp)
    (x,) = tensors((5, HIDDEN))
    gate, up = (x.float() @ mlp.gate_up_proj.weight.float().T).chunk(2, -1)
    run = torch.compile(mlp, fullgraph=True, backend="aot_eager", dynamic=True) if compiled else mlp
    assert near(run(x), (nn.functional.silu(gate) * up) @ mlp.down_proj.weight.float().T)
    assert server.lib.calls == [(2 * INNER, HIDDEN, "swiglu"), (HIDDEN, INNER, "none")]
    assert "serves 2 of 2 linear layers and 1 activations (2 signatures preloaded" in server.lines[0]


@pytest.mark.parametrize("what", ["another forward", "adapters", "hooks", "a hook of gates"])
def test_other_mlps_keep_their_activation(start: Start, what: str) -> None:
    server = start([SWIGLU, DOWN])
    mlp = (server.scaled_mlp if what == "another forward" else server.mlp)(INNER, HIDDEN)
    before, of_server = mlp.act_fn, [{"name": "a", "target_modules": ["*"]}] if what == "hooks" else None
    if what == "a hook of gates":
        mlp.gate_up_proj.register_forward_hook(lambda *_: None)
    server.serve(mlp, enable_lora=what == "adapters", forward_hooks=of_server)
    assert mlp.act_fn is before
    mlp(*tensors((5, HIDDEN)))
    assert server.lib.calls == [(HIDDEN, INNER, "none")]


def test_compiled_code_calls_the_operator_with_any_m(start: Start) -> None:
    server = start()
    one, lacking, head = (
        server.linear(HIDDEN, HIDDEN, bias=True),
        server.linear(HIDDEN, INNER),
        server.head(VOCAB, HIDDEN),
    )
    up = server.linear(INNER, HIDDEN)
    server.serve(one, lacking, up, head)
    graphs = Graphs()

    def step(x: Any) -> Any:
        return server.logits(lacking(up(one(x)[0] * 2)[0])[0], head)

    compiled = torch.compile(step, fullgraph=True, backend=graphs)
    for m in (5, 7):
        (x,) = tensors((m, HIDDEN))
        torch._dynamo.mark_dynamic(x, 0)
        with torch.inference_mode():
            assert near(compiled(x), step(x))
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("cute_aot" in target for target in called) == 3


# --- before graphs are captured ---


@pytest.mark.parametrize(
    ("more", "planned"),
    [
        ({}, 3),
        ({"disable_cuda_graph": True}, 0),
        ({"cuda_graph_bs": None}, 0),
        ({"speculative_num_draft_tokens": 3}, 6),
        ({"disable_piecewise_cuda_graph": False}, 5),
        ({"cuda_graph_bs": list(range(1, 5000))}, 0),  # more than plans are kept
    ],
)
def test_preload_plans_for_the_sizes_that_sglang_captures(start: Start, more: Any, planned: int) -> None:
    server = start()
    server.serve(server.linear(HIDDEN, HIDDEN), **more)
    assert f"1 signatures preloaded, for {planned} numbers of tokens planned" in server.lines[0]
    assert server.lib.stats().kernels_loaded == 1  # of the layer that the model has, and no other


@pytest.mark.parametrize("split", ["enable_two_batch_overlap", "enable_pdmux"])
def test_graphs_that_run_at_once_share_no_workspace(start: Start, split: str) -> None:
    server = start()
    server.serve(server.linear(HIDDEN, HIDDEN), **{split: True})
    ((_, options),) = server.asked
    assert options["capture_workspaces"] == "own"


# --- what goes wrong is one line, and SGLang computes ---


def left_to_sglang(server: Server, **more: Any) -> str:
    """The one line that says why nothing is served."""
    layer = server.linear(HIDDEN, HIDDEN)
    server.serve(layer, **more)
    (x,) = tensors((5, HIDDEN))
    assert torch.equal(layer(x)[0], nn.functional.linear(x, layer.weight))
    assert server.lib.calls == []
    assert not any(name.startswith("_cute_aot") for name in vars(layer))
    (line,) = server.lines
    assert "\n" not in line
    assert "serves nothing, SGLang's kernels do: " in line
    return line


def method_of(server: Server, hook: hooks.Hook) -> Any:
    module = server.modules[hook.module]
    return vars(getattr(module, hook.owner) if hook.owner else module)[hook.method]


@pytest.mark.parametrize("setting", ["{}", "", '{"other": 1}', '{"cute_aot": null}', '["cute_aot"]'])
def test_servers_that_name_no_archive_are_not_touched(start: Start, setting: str) -> None:
    server = start()
    before = {hook: method_of(server, hook) for hook in hooks.HOOKS}
    server.serve(server.linear(HIDDEN, HIDDEN), setting=setting)
    assert {hook: method_of(server, hook) for hook in before} == before
    assert set(server.registry.hooks) == {str(hooks.MODEL_LOADED)}
    assert server.lines == server.asked == []


def test_archives_that_cannot_be_opened_are_named(start: Start, tmp_path: Path) -> None:
    path = str(tmp_path / "other.aot")
    assert path in left_to_sglang(start(load=runtime.load), setting={"cute_aot": path})


@pytest.mark.parametrize("more", [{}, {"record": 7}], ids=["no file", "no setting"])
def test_a_server_does_not_start_without_an_archive_that_it_requires(start: Start, more: Any, tmp_path: Path) -> None:
    server = start(load=runtime.load)
    setting = {"cute_aot": {"archive": str(tmp_path / "none.aot"), "required": "archive", **more}}
    with pytest.raises(RequiredError, match=r"serves nothing: .*; 'required' is 'archive', so SGLang does not start"):
        server.serve(server.linear(HIDDEN, HIDDEN), setting=setting)


def test_a_server_does_not_start_where_a_layer_is_left_that_it_requires(start: Start) -> None:
    server = start()
    layers = nn.ModuleList([server.linear(HIDDEN, HIDDEN), server.linear(HIDDEN, 3 * HIDDEN)])
    setting = {"cute_aot": {"archive": "model.aot", "required": "layers"}}
    with pytest.raises(RequiredError, match=r"serves 1 of 2 .*'required' is 'layers', so SGLang does not start"):
        server.serve(layers, setting=setting)
    server.lib.close()  # which a traceback keeps


@pytest.mark.parametrize("required", ["archive", "layers"])
def test_a_server_does_not_start_where_the_archive_that_it_requires_serves_none(start: Start, required: str) -> None:
    server = start()
    setting = {"cute_aot": {"archive": "model.aot", "required": required}}
    words = rf"0 of 1 linear layers.*'required' is '{required}', so SGLang does not start: build an archive .*aot build"
    with pytest.raises(RequiredError, match=words):
        server.serve(server.linear(HIDDEN, 3 * HIDDEN), setting=setting)
    server.lib.close()  # which a traceback keeps


def test_a_server_starts_with_a_draft_model_that_is_left_where_its_target_is_served(start: Start) -> None:
    server = start()
    setting = {"cute_aot": {"archive": "model.aot", "required": "archive"}}
    server.serve(server.linear(HIDDEN, HIDDEN), setting=setting)
    server.serve(server.linear(HIDDEN, 3 * HIDDEN), setting=setting, draft=True)
    assert "serves 1 of 1 linear layers" in server.lines[0]
    assert "serves 0 of 1 linear layers" in server.lines[1]


def test_unknown_versions_are_refused_unless_that_is_allowed(start: Start) -> None:
    line = left_to_sglang(start(version="0.6.0"))
    assert "knows SGLang 0.5.13, found 0.6.0" in line
    assert "'strict': false in cute_aot of --json-model-override-args" in line
    server = start(version="0.6.0")
    server.serve(server.linear(HIDDEN, HIDDEN), setting={"cute_aot": {"archive": "model.aot", "strict": False}})
    assert "serves 1 of 1 linear layers" in server.lines[-1]


def test_hooks_that_are_missing_or_changed_are_named_and_none_is_set(start: Start) -> None:
    server = start()
    method = server.modules[hooks.LINEAR.module].UnquantizedLinearMethod
    method.apply = lambda self, layer, x, bias, out=None: nn.functional.linear(x, layer.weight)
    del vars(server.modules[FP8])["apply_fp8_linear"]
    line = left_to_sglang(server)
    assert f"{hooks.LINEAR} has the parameters self, layer, x, bias, out, not self, layer, x, bias" in line
    assert f"{hooks.FP8_LINEAR} is not there" in line
    assert set(server.registry.hooks) == {str(hooks.MODEL_LOADED)}


def test_a_method_that_another_plugin_hooked_is_named(start: Start) -> None:
    def around(function: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    line = left_to_sglang(start(others=[(str(hooks.LINEAR), around)]))
    assert f"another plugin of SGLang's has hooked {hooks.LINEAR};" in line
    assert "SGLANG_PLUGINS=cute_aot" in line


def other_load_model(runner: Any) -> None:
    runner.by_another, runner.model = True, runner._make()


@pytest.mark.parametrize("what", ["method", "class"])
def test_what_another_plugin_loads_models_with_is_called_and_the_model_served(start: Start, what: str) -> None:
    def replaces(runner: Any) -> tuple[str, Any]:
        name, _, _ = str(hooks.MODEL_LOADED).rpartition(".")
        if what == "method":
            return str(hooks.MODEL_LOADED), other_load_model
        return name, type("OtherRunner", (runner,), {"load_model": other_load_model})

    server = start(replaces=replaces)
    runner = server.serve(server.linear(HIDDEN, HIDDEN))
    assert runner.by_another
    assert server.registry.problems == []
    assert "serves 1 of 1 linear layers (1 signatures" in server.lines[0]


def test_an_sglang_without_runners_is_one_line(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    monkeypatch.setitem(sys.modules, hooks.MODEL_LOADED.module, None)
    install(Plugin())
    assert [f"{hooks.MODEL_LOADED} is not there" in line for line in server.lines] == [True]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"cpu_offload_gb": 4}, "offloaded to the CPU"),
        ({"offload_group_size": 2}, "offloaded to the CPU"),
        ({"torchao_config": "int4wo-128"}, "--torchao-config replaces weights"),
        ({"enable_deterministic_inference": True}, "--enable-deterministic-inference asks"),
        ({"rl_on_policy_target": "fsdp"}, "--rl-on-policy-target asks"),
        ({"setting": '{"cute_aot": '}, "--json-model-override-args is no JSON"),
        ({"setting": {"cute_aot": 7}}, "the archive of cute_aot of --json-model-override-args must be a path"),
    ],
)
def test_servers_that_ask_for_what_the_archive_does_not_do_are_left(start: Start, more: Any, message: str) -> None:
    assert message in left_to_sglang(start(), **more)


def test_a_server_without_an_argument_that_is_read_is_left(start: Start) -> None:
    server = start()
    runner = server.modules[hooks.MODEL_LOADED.module].ModelRunner
    server_args = arguments(json.dumps(MINE))
    del server_args.torchao_config
    runner(server_args, nn.ModuleList)
    assert "AttributeError" in server.lines[0]


@pytest.mark.parametrize("what", ["preload", "entry", "device"])
def test_a_library_that_fails_while_the_model_is_loaded_leaves_all_layers(
    start: Start, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    server = start()
    device_is_gone(monkeypatch, what)
    assert "the device is gone" in left_to_sglang(server)


# --- twice, and again ---


def test_loading_the_plugin_twice_changes_nothing(start: Start) -> None:
    from runtime.sglang import register

    server = start()
    install(Plugin(load=None))  # type: ignore[arg-type]
    register()
    server.registry.apply_hooks()
    assert server.registry.problems == []
    layer = server.linear(HIDDEN, HIDDEN)
    server.serve(layer)
    layer(*tensors((5, HIDDEN)))
    assert len(server.asked) == len(server.lines) == len(server.lib.calls) == 1


def test_a_draft_model_is_served_by_the_archive_of_its_target(start: Start) -> None:
    """Also where SGLang has put other arguments in place of the setting."""
    server = start()
    target, draft = server.linear(HIDDEN, HIDDEN), server.linear(INNER, HIDDEN)
    server.serve(target)
    server.serve(draft, setting={"hot_vocab_size": 7}, draft=True)
    (x,) = tensors((5, HIDDEN))
    target(x), draft(x)
    assert server.lib.calls == [(HIDDEN, HIDDEN, "none"), (INNER, HIDDEN, "none")]
    assert ["serves 1 of 1 linear layers (1 signatures" in line for line in server.lines] == [True, True]
    assert len(server.asked) == 1


def test_a_second_server_in_the_process_keeps_the_first_served(start: Start, tmp_path: Path) -> None:
    server = start()
    first, second, third = (server.linear(HIDDEN, HIDDEN) for _ in range(3))
    server.serve(first)
    server.lib = library(tmp_path, SERVED)  # the same contents, opened again
    server.serve(second)
    assert server.lib.closed
    server.serve(third, setting="{}")
    (x,) = tensors((5, HIDDEN))
    first(x), second(x)
    assert torch.equal(third(x)[0], nn.functional.linear(x, third.weight))
    assert first._cute_aot_plain == second._cute_aot_plain
    assert server.registry.problems == []


# --- settings, and the distribution ---


def test_settings_name_archives_in_order() -> None:
    found = settings_of(arguments('{"cute_aot": ["universal", "model.aot"], "rope_theta": 7}'))
    assert found is not None
    assert found.paths == (str(runtime.universal()), "model.aot")


def test_importing_the_plugin_imports_neither_torch_nor_sglang() -> None:
    code = "import sys, runtime; assert 'runtime.sglang' not in sys.modules; import runtime.sglang; "
    code += "assert not {'torch', 'sglang', 'runtime.torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_distribution_names_the_plugin_for_sglang() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."sglang.srt.plugins"]\ncute_aot = "runtime.sglang:register"\n' in text
    point = metadata.EntryPoint("cute_aot", "runtime.sglang:register", "sglang.srt.plugins")
    assert point.load()() is None
