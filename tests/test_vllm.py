"""What the plugin takes of a model, and what it leaves to vLLM, in modules shaped like vLLM's; computed on the CPU.

Libraries are those of tests/torch_stand_in.py: real ones, whose `gemm` computes with torch.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn
from torch._inductor.utils import run_and_get_code

import runtime
from runtime.container.archive import Archive
from runtime.plugin.served import RequiredError
from runtime.vllm import hooks
from runtime.vllm.plugin import Plugin, install
from runtime.vllm.settings import settings_of

from . import vllm_stand_in
from .command_line import ROOT
from .recording_driver import RecordingDriver, entry, operands_record, signature, write_archive
from .torch_stand_in import HIDDEN, INNER, ONE, VOCAB, OnCpu, device_is_gone, library, near, tensors
from .vllm_stand_in import MINE, SERVED, Server, Start, stand_in

start = vllm_stand_in.start  # a fixture

# --- what is taken ---


def test_layers_and_head_that_the_archive_has_are_served(start: Start) -> None:
    server = start()
    one, up, head = server.linear(HIDDEN, HIDDEN), server.linear(INNER, HIDDEN), server.head(VOCAB, HIDDEN)
    server.serve(one, up, head)
    (x,) = tensors((5, HIDDEN))
    for layer in (one, up, head):
        assert near(layer(x), x.float() @ layer.weight.float().T)
        assert layer.processed
    assert server.lib.calls == [(HIDDEN, HIDDEN, "none"), (INNER, HIDDEN, "none"), (VOCAB, HIDDEN, "none")]
    assert near(one(x[None]), (x.float() @ one.weight.float().T)[None])
    served = len(server.lib.calls)
    with pytest.raises(RuntimeError, match="dtype"):  # what vLLM says of it, and not the archive
        one(x.float())
    one(x[0])
    assert len(server.lib.calls) == served
    (line,) = server.lines
    assert "serves 2 of 2 linear layers and 1 of 1 heads (3 signatures preloaded, for 3 numbers of tokens" in line
    options = {"on_miss": "torch", "on_slower": "torch", "capture_workspaces": "shared", "require_signed": None}
    assert server.asked == [(("model.aot",), options)]


@pytest.mark.parametrize("split", [{"enable_dbo": True}, {"ubatch_size": 2}])
def test_graphs_that_two_streams_replay_at_once_share_no_workspace(start: Start, split: dict[str, Any]) -> None:
    server = start()
    config = server.config(MINE)
    vars(config.parallel_config).update(split)
    server.serve(server.linear(HIDDEN, HIDDEN), config=config)
    ((_, options),) = server.asked
    assert options["capture_workspaces"] == "own"


def test_what_the_archive_lacks_stays_vllms_and_is_named(start: Start) -> None:
    server = start()
    one, lacking = server.linear(HIDDEN, HIDDEN), server.linear(HIDDEN, INNER)
    server.serve(one, lacking, server.linear(HIDDEN, INNER))
    x, y = tensors((5, HIDDEN), (5, INNER))
    assert torch.equal(lacking(y), nn.functional.linear(y, lacking.weight))
    one(x)
    assert server.lib.calls == [(HIDDEN, HIDDEN, "none")]
    (line,) = server.lines
    assert (
        "serves 1 of 3 linear layers; vLLM computes the rest: 2 x no kernel for bf16_bf16_bf16_f32_none_n64_k96" in line
    )


def test_kernels_that_were_never_run_are_left(start: Start) -> None:
    server = start(state="ranked")
    layer = server.linear(HIDDEN, HIDDEN)
    server.serve(layer)
    layer(*tensors((5, HIDDEN)))
    assert server.lib.calls == []
    assert "serves 0 of 1 linear layers" in server.lines[0]
    assert "never run on a GPU" in server.lines[0]


def test_a_bias_is_computed_by_the_archive_where_it_has_that(start: Start) -> None:
    server = start()
    biased, other = server.linear(HIDDEN, HIDDEN, bias=True), server.linear(INNER, HIDDEN, bias=True)
    server.serve(biased, other)
    (x,) = tensors((5, HIDDEN))
    assert near(biased(x), x.float() @ biased.weight.float().T + biased.bias.float())
    assert torch.equal(other(x), nn.functional.linear(x, other.weight, other.bias))
    assert server.lib.calls == [(HIDDEN, HIDDEN, "bias+none")]
    other.quant_method.apply(other, x)  # as a row-parallel layer's other ranks call it
    assert server.lib.calls[1:] == [(INNER, HIDDEN, "none")]
    assert "serves 1 of 2 linear layers" in server.lines[0]
    assert "1 x no kernel for bf16_bf16_bf16_f32_bias_n96_k64" in server.lines[0]


def test_a_bias_that_only_the_first_rank_adds_is_not_asked_of_others(start: Start) -> None:
    server = start()
    layer = server.linear(INNER, HIDDEN, bias=True)
    layer.input_is_parallel, layer.tp_rank = True, 1
    server.serve(layer)
    assert "serves 1 of 1 linear layers" in server.lines[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: layer.weight.data.t(), "strides"),
        (
            lambda layer: torch.empty(HIDDEN * HIDDEN + 1, dtype=torch.bfloat16)[1:].view(HIDDEN, HIDDEN),
            "multiples of 16",
        ),
        (lambda layer: layer.weight.data.to("meta"), "on meta, and the library serves cpu"),
        (lambda layer: layer.weight.data.double(), "element type torch.float64"),
        (lambda layer: layer.weight.data.float(), "no kernel for f32"),
        (lambda layer: layer.weight.data[0], "no matrix"),
    ],
)
def test_weights_that_no_kernel_reads_are_left(start: Start, change: Any, reason: str) -> None:
    server = start()
    layer = server.linear(HIDDEN, HIDDEN)
    layer.weight = nn.Parameter(change(layer), requires_grad=False)
    server.serve(layer)
    assert "serves 0 of 1 linear layers" in server.lines[0]
    assert reason in server.lines[0]


def test_overlap_is_promised_where_an_entry_with_it_was_tuned(start: Start) -> None:
    early = signature(HIDDEN, HIDDEN, overlap="weights"), signature(HIDDEN, HIDDEN, epilogue="bias", overlap="weights")
    server = start([*SERVED, *early])
    one, up, biased = server.linear(HIDDEN, HIDDEN), server.linear(INNER, HIDDEN), server.linear(HIDDEN, HIDDEN, True)
    server.serve(one, up, biased)
    (x,) = tensors((5, HIDDEN))
    for layer in (one, up, biased):
        layer(x)
    assert server.lib.overlaps == ["weights", "serial", "weights"]
    biased.quant_method.apply(biased, x)
    assert server.lib.overlaps[3:] == ["weights"]
    compiled = torch.compile(nn.Sequential(one, up), fullgraph=True, backend="aot_eager", dynamic=True)
    compiled(x)
    assert server.lib.overlaps[4:] == ["weights", "serial"]


def test_overlap_is_not_promised_where_it_is_predicted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start([*SERVED, signature(HIDDEN, HIDDEN, overlap="weights")])
    monkeypatch.setattr(type(server.lib), "is_tuned", lambda self, of: of.overlap == "serial")
    one = server.linear(HIDDEN, HIDDEN)
    server.serve(one)
    one(*tensors((5, HIDDEN)))
    assert server.lib.overlaps == ["serial"]


def test_methods_with_an_apply_of_their_own_are_left(start: Start) -> None:
    server = start()
    server.serve(server.linear(HIDDEN, HIDDEN, method=server.own_method()))
    assert "1 x OwnMethod has an apply of its own" in server.lines[0]


def test_an_embedding_counts_as_a_head_only_where_there_is_no_other(start: Start) -> None:
    server = start()
    server.serve(server.embedding(VOCAB, HIDDEN))
    server.serve(server.embedding(VOCAB, HIDDEN), server.head(VOCAB, HIDDEN))
    assert "serves 1 of 1 embeddings (1" in server.lines[0]
    assert "serves 1 of 1 heads (1" in server.lines[1]


def test_code_that_inductor_generates_calls_the_library_itself(start: Start) -> None:
    server = start([*SERVED, signature(2 * INNER, HIDDEN, epilogue="swiglu"), signature(HIDDEN, INNER)])
    one, mlp = server.linear(HIDDEN, HIDDEN, bias=True), server.modules["vllm.model_executor.models"].Mlp(INNER, HIDDEN)
    server.serve(one, mlp)
    step = lambda x: mlp(one(x))  # noqa: E731
    compiled = torch.compile(step, fullgraph=True, dynamic=True, options={"fx_graph_cache": False})
    x, other = tensors((5, HIDDEN), (9, HIDDEN))
    with torch.inference_mode():
        found, (code,) = run_and_get_code(compiled, x)
        lines = [line.strip() for line in code.splitlines()]
        assert near(found, step(x))
        assert near(compiled(other), step(other))
    assert sum(line.startswith("cute_aot_gemm_") and "out=buf" in line for line in lines) == 3
    assert not any("torch.ops.cute_aot" in line for line in lines if not line.startswith("#"))


def test_compiled_code_calls_the_operator_with_any_m(start: Start) -> None:
    server = start()
    one, lacking = server.linear(HIDDEN, HIDDEN, bias=True), server.linear(HIDDEN, INNER)
    up = server.linear(INNER, HIDDEN)
    server.serve(one, lacking, up)
    graphs = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: lacking(up(one(x) * 2)), fullgraph=True, backend=backend)
    for m in (5, 7):
        (x,) = tensors((m, HIDDEN))
        torch._dynamo.mark_dynamic(x, 0)
        with torch.inference_mode():
            assert near(compiled(x), lacking(up(one(x) * 2)))
    (graph,) = graphs
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("cute_aot" in str(target) for target in called) == 2
    assert nn.functional.linear in called or torch._C._nn.linear in called


def test_preload_plans_for_the_sizes_that_vllm_captures(start: Start) -> None:
    server = start()
    server.serve(server.linear(HIDDEN, HIDDEN), sizes=(8, 1, 4))
    (held,) = [server.lib.stats().plans_held]
    assert held >= 3
    assert server.lib.stats().kernels_loaded == 1  # of the layer that the model has, and no other


def test_more_sizes_than_plans_are_kept_are_loaded_and_not_planned(start: Start) -> None:
    server = start()
    layer = server.linear(HIDDEN, HIDDEN)
    server.serve(layer, sizes=tuple(range(1, 5000)))
    assert "1 signatures preloaded, for 0 numbers of tokens planned" in server.lines[0]
    layer(*tensors((5, HIDDEN)))
    assert len(server.lib.calls) == 1


# --- what goes wrong is one line, and vLLM computes ---


def left_to_vllm(server: Server, **more: Any) -> str:
    """The one line that says why nothing is served."""
    layer = server.linear(HIDDEN, HIDDEN)
    worker = server.serve(layer, **more)
    (x,) = tensors((5, HIDDEN))
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight))
    assert server.lib.calls == []
    assert not any(name.startswith("_cute_aot") for name in vars(layer))
    config = worker.vllm_config
    assert config.compute_hash() == stand_in_hash(config)
    (line,) = server.lines
    assert "\n" not in line
    assert "serves nothing, vLLM's kernels do: " in line
    return line


def stand_in_hash(config: Any) -> str:
    fresh = stand_in()["vllm.config.vllm"].VllmConfig(config.additional_config)
    return str(fresh.compute_hash())


def test_engines_that_name_no_archive_are_not_touched(start: Start) -> None:
    for config in ({}, {"other": 1}, object()):
        server = start()
        before = {hook: method_of(server, hook) for hook in hooks.HOOKS if hook is not hooks.WORKER}
        worker = server._worker(server.config(config), nn.ModuleList())
        worker.load_model()
        assert {hook: method_of(server, hook) for hook in before} == before
        assert server.lines == []
        assert server.asked == []


def method_of(server: Server, hook: hooks.Hook) -> Any:
    return vars(getattr(server.modules[hook.module], hook.owner))[hook.method]


def test_archives_that_nobody_signed_are_left_alone(start: Start, tmp_path: Path) -> None:
    setting = {"archive": str(runtime.universal()), "require_signed": str(tmp_path)}
    line = left_to_vllm(start(load=runtime.load), config={"cute_aot": setting})
    assert "securesystemslib" in line or f"{tmp_path}: has no file named" in line


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (None, "No such file|cannot be opened|not there"),
        (b"not an archive at all", "archive"),
        ("universal", "archive|digest|damaged|truncated"),
    ],
)
def test_archives_that_cannot_be_opened_are_named(start: Start, tmp_path: Path, contents: Any, message: str) -> None:
    path = tmp_path / "other.aot"
    if contents == "universal":
        whole = runtime.universal().read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif contents is not None:
        path.write_bytes(contents)
    line = left_to_vllm(start(load=runtime.load), config={"cute_aot": str(path)})
    assert str(path) in line


@pytest.mark.parametrize("more", [{}, {"experts": "no"}], ids=["no file", "no setting"])
def test_an_engine_does_not_start_without_an_archive_that_it_requires(start: Start, more: Any, tmp_path: Path) -> None:
    server = start(load=runtime.load)
    config = {"cute_aot": {"archive": str(tmp_path / "none.aot"), "required": "archive", **more}}
    with pytest.raises(RequiredError, match=r"serves nothing: .*; 'required' is 'archive', so vLLM does not start"):
        server.serve(server.linear(HIDDEN, HIDDEN), config=config)


@pytest.mark.parametrize("words", [{"recorded": "folder"}, {"require_sign": "keys"}, {"required": False}])
def test_an_engine_starts_where_another_word_is_misspelt(start: Start, words: Any) -> None:
    left_to_vllm(start(), config={"cute_aot": {"archive": "model.aot", **words}})


@pytest.mark.parametrize(
    "words", [{"required": "archives"}, {"required": True}, {"requird": "archive"}, {"requires": 1}]
)
def test_an_engine_does_not_start_where_what_it_requires_is_misspelt(start: Start, words: Any) -> None:
    server = start()
    with pytest.raises(RequiredError, match=r"serves nothing: .*, so vLLM does not start"):
        server.serve(server.linear(HIDDEN, HIDDEN), config={"cute_aot": {"archive": "model.aot", **words}})


def test_an_engine_does_not_start_where_a_layer_is_left_that_it_requires(start: Start) -> None:
    for required in ("archive", "layers"):
        server = start()
        layers = nn.ModuleList([server.linear(HIDDEN, HIDDEN), server.linear(HIDDEN, 3 * HIDDEN)])
        config = {"cute_aot": {"archive": "model.aot", "required": required}}
        refused = pytest.raises(RequiredError, match=r"serves 1 of 2 .*'required' is 'layers', so vLLM does not start")
        with refused if required == "layers" else contextlib.nullcontext():
            server.serve(layers, config=config)
        assert "serves 1 of 2 linear layers" in server.lines[0]
        server.lib.close()  # which a traceback keeps


@pytest.mark.parametrize("required", ["archive", "layers"])
def test_an_engine_does_not_start_where_the_archive_that_it_requires_serves_none(start: Start, required: str) -> None:
    server = start()
    config = {"cute_aot": {"archive": "model.aot", "required": required}}
    words = rf"0 of 1 linear layers.*'required' is '{required}', so vLLM does not start: build an archive .*aot build"
    with pytest.raises(RequiredError, match=words):
        server.serve(server.linear(HIDDEN, 3 * HIDDEN), config=config)
    server.lib.close()  # which a traceback keeps


def test_an_engine_does_not_start_where_an_embedding_that_is_no_head_is_all_that_is_served(start: Start) -> None:
    server = start()
    config = {"cute_aot": {"archive": "model.aot", "required": "archive"}}
    with pytest.raises(RequiredError, match="serves 0 of 1 heads"):
        server.serve(server.embedding(VOCAB, HIDDEN), server.head(3 * HIDDEN, HIDDEN), config=config)
    server.lib.close()  # which a traceback keeps


def test_an_engine_starts_with_an_embedding_that_the_archive_lacks_and_nobody_calls(start: Start) -> None:
    server = start()
    config = {"cute_aot": {"archive": "model.aot", "required": "layers"}}
    server.serve(server.embedding(3 * HIDDEN, HIDDEN), server.head(VOCAB, HIDDEN), config=config)
    assert "serves 1 of 1 heads" in server.lines[0]


def test_unknown_versions_are_refused_unless_that_is_allowed(start: Start) -> None:
    line = left_to_vllm(start(version="0.26.1"))
    assert "knows vLLM 0.25.0, found 0.26.1" in line
    assert "'strict': false" in line


def test_unknown_versions_are_taken_with_strict_false(start: Start) -> None:
    server = start(version="0.26.1")
    server.serve(server.linear(HIDDEN, HIDDEN), config={"cute_aot": {"archive": "model.aot", "strict": False}})
    assert "serves 1 of 1 linear layers" in server.lines[0]


def test_builds_of_a_known_version_are_taken(start: Start) -> None:
    server = start(version="0.25.0+cu130")
    server.serve(server.linear(HIDDEN, HIDDEN))
    assert "serves 1 of 1 linear layers" in server.lines[0]


def test_hooks_that_are_missing_or_changed_are_named_and_none_is_set(start: Start) -> None:
    server = start()
    method = server.modules[hooks.LINEAR.module].UnquantizedLinearMethod
    method.apply = changed = lambda self, layer, x: nn.functional.linear(x, layer.weight)
    server.linear.forward = lambda self, x: self.quant_method.apply(self, x)
    del server.modules[hooks.HEAD.module].UnquantizedEmbeddingMethod.process_weights_after_loading
    line = left_to_vllm(server)
    assert f"{hooks.LINEAR} has the parameters self, layer, x, not self, layer, x, bias" in line
    assert f"{hooks.HEAD_LOADED} is not there" in line
    assert method.apply is changed


def test_a_vllm_without_workers_is_one_line(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()
    monkeypatch.setitem(sys.modules, hooks.WORKER.module, None)
    install(Plugin())
    assert [f"{hooks.WORKER} is not there" in line for line in server.lines] == [True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda server, config: vars(server.modules["vllm.envs"]).update(VLLM_BATCH_INVARIANT=True), "BATCH_INVARIANT"),
        (lambda server, config: vars(config.offload_config.uva).update(cpu_offload_gb=4), "offloaded to the CPU"),
        (lambda server, config: vars(config.offload_config.prefetch).update(offload_group_size=2), "offloaded"),
        (lambda server, config: delattr(config, "offload_config"), "AttributeError"),
    ],
)
def test_engines_that_ask_for_what_the_archive_does_not_do_are_left(start: Start, change: Any, message: str) -> None:
    server = start()
    config = server.config(MINE)
    change(server, config)
    assert message in left_to_vllm(server, config=config)


@pytest.mark.parametrize("what", ["preload", "entry", "device"])
def test_a_library_that_fails_while_the_model_is_loaded_leaves_all_layers(
    start: Start, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    server = start()
    device_is_gone(monkeypatch, what)
    assert "the device is gone" in left_to_vllm(server)


@pytest.mark.parametrize("required", ["", "archive", "layers"])
def test_an_archive_for_another_gpu_alone_is_one_line_or_no_start(start: Start, tmp_path: Path, required: str) -> None:
    server = start()
    signatures = [ONE, signature(VOCAB, HIDDEN)]
    records = [operands_record(f"f{i}", of, target="sm_100a") for i, of in enumerate(signatures)]
    entries = [entry(of, [(None, f"f{i}")], target="sm_100a") for i, of in enumerate(signatures)]
    path = tmp_path / "other.aot"
    driver = RecordingDriver(kernels=write_archive(path, records, entries))
    server.lib = OnCpu(Archive.open(path), driver)
    layers, config = (server.linear(HIDDEN, HIDDEN), server.head(VOCAB, HIDDEN)), {"archive": str(path)}
    config |= {"required": required} if required else {}
    refused = pytest.raises(RequiredError, match=f"'required' is '{required}', so vLLM does not start")
    with refused if required else contextlib.nullcontext():
        server.serve(*layers, config={"cute_aot": config})
    (line,) = server.lines
    assert "serves 0 of 1 linear layers and 0 of 1 heads; vLLM computes the rest: 2 x " in line
    assert "has kernels for sm_100a; this GPU has compute capability 9.0; build the archive for it too" in line
    (x,) = tensors((5, HIDDEN))
    for layer in layers:
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight))
    assert server.lib.calls == []
    server.lib.close()  # which a traceback keeps


# --- no compiler is started ---


def watched(folder: Path, *compiling: str) -> Any:
    """What `tests.watched_server` prints; Inductor has to compile anew in it, in its own process as in vLLM."""
    ways = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-m", "tests.watched_server", *compiling]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **ways}, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_no_compiler_is_started_for_an_archive_at_start_and_under_load(tmp_path: Path) -> None:
    """Of three layers at seven numbers of tokens, and once in a graph, around which torch compiles for itself."""
    products, kernels, launches, compiled = watched(tmp_path)
    assert (products, kernels, launches) == (22, 3, 21)
    assert compiled["ours"] == 0
    assert compiled["by"]["other"]["g++"] > 0  # Inductor's


@pytest.mark.parametrize(("when", "least"), [("start", 1), ("load", 21)])
def test_a_compiler_that_an_archive_started_would_be_seen(tmp_path: Path, when: str, least: int) -> None:
    *_, compiled = watched(tmp_path, when)
    assert compiled["ours"] == compiled["by"]["ours"]["gcc"] >= least


# --- twice, and again ---


def test_loading_the_plugin_twice_changes_nothing(start: Start) -> None:
    server = start()
    install(Plugin(load=None))  # type: ignore[arg-type]
    runtime_vllm_register()
    layer = server.linear(HIDDEN, HIDDEN)
    server.serve(layer)
    layer(*tensors((5, HIDDEN)))
    assert len(server.asked) == len(server.lines) == len(server.lib.calls) == 1


def runtime_vllm_register() -> None:
    from runtime.vllm import register

    register()


def test_a_second_engine_in_the_process_keeps_the_first_served(start: Start, tmp_path: Path) -> None:
    server = start()
    first, second, third = (server.linear(HIDDEN, HIDDEN) for _ in range(3))
    server.serve(first)
    server.lib = library(tmp_path, SERVED)  # the same contents, opened again
    server.serve(second)
    assert server.lib.closed
    assert ["serves 1 of 1 linear layers" in line for line in server.lines] == [True, True]
    server.serve(third, config={})
    (x,) = tensors((5, HIDDEN))
    first(x), second(x)
    assert torch.equal(third(x), nn.functional.linear(x, third.weight))
    assert [layer._cute_aot_plain for layer in (first, second)] == [first._cute_aot_plain] * 2
    assert "_cute_aot_plain" not in vars(third)


def test_weights_that_are_loaded_again_are_decided_again(start: Start) -> None:
    server = start()
    layer = server.linear(HIDDEN, HIDDEN)
    worker = server.serve(layer)
    layer.weight.data = torch.randn(HIDDEN, HIDDEN).bfloat16().t()
    worker.load_model()
    assert "_cute_aot_plain" not in vars(layer)
    assert ["serves 1 of 1" in line for line in server.lines] == [True, False]


@pytest.mark.parametrize(
    ("stages", "kind", "counted"), [(1, "generate", True), (2, "generate", False), (1, "pooling", False)]
)
def test_an_embedding_that_is_only_looked_up_is_no_required_layer(
    start: Start, stages: int, kind: str, counted: bool
) -> None:
    server = start([signature(HIDDEN, HIDDEN)])
    config = server.config({"cute_aot": {"archive": "model.aot", "required": "layers"}})
    config.parallel_config.pipeline_parallel_size, config.model_config.runner_type = stages, kind
    layers = server.linear(HIDDEN, HIDDEN), server.embedding(VOCAB, HIDDEN)
    with pytest.raises(RequiredError) if counted else contextlib.nullcontext():
        server.serve(*layers, config=config)


def test_a_layer_without_a_weight_is_one_line_of_the_log(start: Start) -> None:
    server = start()
    layer = server.linear(HIDDEN, HIDDEN)
    server.serve(layer)
    del layer._parameters["weight"]
    layer.quant_method.process_weights_after_loading(layer)
    assert "serves nothing" in server.lines[-1]


def test_a_layer_that_is_no_matrix_is_none_of_those_that_are_required(start: Start) -> None:
    server = start()
    layers = nn.ModuleList([server.linear(HIDDEN, HIDDEN), server.linear(HIDDEN, HIDDEN)])
    layers[1].weight.data = layers[1].weight.data.unsqueeze(1)  # as vLLM does with Mamba's convolutions
    server.serve(layers, config={"cute_aot": {"archive": "model.aot", "required": "layers"}})
    assert "serves 1 of 1 linear layers" in server.lines[0]


def test_numbers_follow_from_settings_and_not_from_which_engine_was_first(start: Start, tmp_path: Path) -> None:
    config = {"cute_aot": {"archive": "model.aot", "require_signed": "keys"}}

    def number(*configs: Any) -> int:
        server, opened = start(), list[Any]()
        for each in configs:
            layer = server.linear(HIDDEN, HIDDEN)
            opened.append(library(tmp_path, SERVED))
            server.lib = opened[-1]
            server.serve(layer, config=each)
        for lib in opened:  # as when a process ends
            lib.close()
        return int(layer._cute_aot_plain)

    assert number({"cute_aot": "model.aot"}, config) == number(config)


# --- the key of the compile cache ---


def test_cache_key_covers_what_generated_code_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.vllm import plugin

    read, real = [], Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        read.append(path.name)
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    plugin._sources()
    assert {"plugin.py", "fp8.py", "operator.py", "direct.py", "lowering.py"} <= set(read)


def test_cache_key_follows_archive_and_layers(start: Start, tmp_path: Path) -> None:
    def key(*layers: Any, signatures: Any = SERVED, **more: Any) -> str:
        server = start(signatures)
        worker = server.serve(*(server.linear(n, HIDDEN) for n in layers), **more)
        found = str(worker.vllm_config.compute_hash())
        assert len(found) == 10
        return found

    keys = [key(HIDDEN), key(HIDDEN, INNER), key(HIDDEN, signatures=SERVED[:1]), key(HIDDEN, config={})]
    assert len(set(keys)) == 4
    assert key(HIDDEN) == keys[0]


def test_cache_key_follows_the_plugin(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.vllm import plugin

    server = start()
    worker = server.serve(server.linear(HIDDEN, HIDDEN))  # whose layers are in the key
    config = worker.vllm_config
    first = config.compute_hash()
    monkeypatch.setattr(plugin, "__version__", "another")
    second = config.compute_hash()
    monkeypatch.setattr(plugin, "_sources", lambda: "others")
    assert len({first, second, config.compute_hash()}) == 3


def test_graphs_of_one_device_name_the_library_of_another(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # libraries of other tests, whose numbers are taken as long as they are there
    numbers = []
    for device in ("cpu", "meta"):
        monkeypatch.setattr(OnCpu, "device", device)
        server = start()
        layer = server.linear(HIDDEN, HIDDEN).to(device)
        server.serve(layer)
        numbers.append(layer._cute_aot_plain)
        server.lib.close()
    assert numbers[0] == numbers[1]


# --- settings, and the distribution ---


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "must be a path, 'universal', or a list"),
        (7, "must be a path"),
        ([], "must be a path"),
        (["model.aot", 7], "must be a path"),
        ({"strict": False}, "must be a path"),
        ({"record": 7}, "record of .* must be a folder's path"),
        ({"record": ""}, "must be a path"),
        ({"archive": "model.aot", "strict": "no"}, "strict of .* must be true or false"),
        (
            {"archive": "model.aot", "path": "x"},
            "has archive, experts, record, require_signed, required and strict, found path",
        ),
        ({"archive": "model.aot", "require_signed": ""}, "require_signed of .* must be the path of a folder of keys"),
        ({"archive": "model.aot", "require_signed": True}, "require_signed of .* must be the path of a folder"),
        ({"archive": "model.aot", "experts": 1}, "experts of .* must be true or false"),
        ({"archive": "model.aot", "required": True}, "required of .* must be 'archive' or 'layers', found True"),
        ({"record": "records", "required": "archive"}, "must be a path, 'universal', or a list"),
    ],
)
def test_settings_that_make_no_sense_are_refused(value: Any, message: str) -> None:
    with pytest.raises(runtime.ArgumentError, match=message):
        settings_of({"cute_aot": value})


def test_the_setting_may_be_called_as_the_distribution_is() -> None:
    found = settings_of({"cute-aot": "model.aot"})
    assert found is not None
    assert found.paths == ("model.aot",)


def test_settings_name_archives_in_order() -> None:
    found = settings_of({"cute_aot": ["universal", "model.aot"]})
    assert found is not None
    assert found.paths == (str(runtime.universal()), "model.aot")


def test_importing_the_plugin_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, runtime; assert 'runtime.vllm' not in sys.modules; import runtime.vllm; "
    code += "assert not {'torch', 'vllm', 'runtime.torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_distribution_names_the_plugin_for_vllm() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\ncute_aot = "runtime.vllm:register"\n' in text
    point = metadata.EntryPoint("cute_aot", "runtime.vllm:register", "vllm.general_plugins")
    assert point.load()() is None
