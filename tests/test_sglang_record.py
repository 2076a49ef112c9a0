"""What the plugin records of a scheduler, in modules shaped like SGLang's; on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from aot.problem import recorded
from runtime.sglang import hooks

from . import sglang_stand_in
from .recording_driver import signature
from .sglang_runner_stand_in import batch
from .sglang_stand_in import LAYERS, QUANTIZATION, Server, Start
from .torch_stand_in import HIDDEN, INNER, VOCAB, Graphs, key, tensors

start = sglang_stand_in.start  # a fixture
Make = Callable[[Server], list[Any]]


@pytest.fixture
def record(start: Start, tmp_path: Path) -> Any:
    """Records a scheduler whose model has the layers that `make` gives of the server; the server, its model runner, and
    what ends the record and reads the file."""

    def record(
        make: Make, setting: Any = None, name: str = "worker-0-0", **more: Any
    ) -> tuple[Server, Any, Callable[[], Any]]:
        server = start(more.pop("signatures", sglang_stand_in.SERVED))
        words = {"record": str(tmp_path / "records")} | (setting or {})
        runner = server.serve(*make(server), setting={"cute_aot": words}, **more)

        def written() -> Any:
            server.serve(setting="{}")  # the next one of this process, which is not recorded
            return json.loads((tmp_path / "records" / f"{name}.json").read_text())

        return server, runner, written

    return record


def layers(server: Server) -> list[Any]:
    return [server.linear(HIDDEN, HIDDEN), server.head(VOCAB, HIDDEN)]


# --- steps ---


def test_steps_are_counted_as_layers_see_them_and_captures_are_not(record: Any) -> None:
    _, runner, written = record(layers, disable_piecewise_cuda_graph=False)
    runner.init_device_graphs()
    ran = [runner.step(each) for each in (batch(3), batch(4), batch(5), batch(9, 2), batch(17, 3), batch(0))]
    assert ran == [(4, True), (4, True), (5, False), (16, True), (17, False), (1, True)]
    found = written()
    assert found["tokens"] == {"1": 1, "4": 2, "5": 1, "16": 1, "17": 1}
    assert found["logits"] == {"1": 1, "2": 1, "3": 1, "4": 2, "5": 1}
    assert found["heads"] == [{"name": "1", "signature": key(VOCAB, HIDDEN)}]
    names = ("model", "engine", "rank", "tensor_parallel", "pipeline_parallel")
    assert [found[name] for name in names] == ["org/some-model", 0, 0, 1, 1]
    assert found["written_by"].endswith(" in SGLang 0.5.13")


def test_tokens_that_are_verified_at_once_are_rows_too(record: Any) -> None:
    _, runner, written = record(layers, speculative_num_draft_tokens=3)
    runner.init_device_graphs()
    runner.step(batch(3))
    found = written()
    assert (found["tokens"], found["logits"]) == ({"12": 1}, {"12": 1})


def test_graphs_that_are_captured_anew_in_a_step_are_not_counted(record: Any) -> None:
    _, runner, written = record(layers)
    runner.init_device_graphs()
    runner.graph_runner.stale = True
    runner.step(batch(2))
    found = written()
    assert (found["tokens"], found["logits"]) == ({"2": 1}, {"2": 1})


def test_a_step_that_fails_or_has_no_tokens_is_not_counted(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, runner, written = record(layers)
    runner.step(batch(0))

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(runner, "run_model", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.step(batch(2))
    monkeypatch.undo()
    runner.logits(torch.zeros(7, HIDDEN).bfloat16(), runner.model[1])  # of no step
    runner.step(batch(3))
    found = written()
    assert (found["tokens"], found["logits"]) == ({"3": 1}, {"3": 1})


def test_draft_models_are_not_counted(record: Any) -> None:
    server, runner, written = record(layers)
    draft = server.serve(server.linear(INNER, HIDDEN), server.head(VOCAB, HIDDEN), setting="{}", draft=True)
    for each in (runner, draft):
        each.init_device_graphs()
    draft.step(batch(1))
    runner.step(batch(2))
    found = written()
    assert (found["tokens"], found["logits"]) == ({"2": 1}, {"2": 1})
    assert [each["name"] for each in found["layers"] + found["heads"]] == ["0", "1"]


def test_a_stage_of_a_pipeline_without_a_head_counts_no_logits(record: Any) -> None:
    ranks = {"tp_rank": 1, "tp_size": 2, "pp_rank": 1, "pp_size": 2, "dp_rank": 3}
    _, runner, written = record(lambda s: [s.linear(HIDDEN, HIDDEN)], name="worker-3-3", ranks=ranks)
    runner.init_device_graphs()
    runner.step(batch(2))
    found = written()
    assert (found["tokens"], found["logits"], found["heads"]) == ({"2": 1}, {}, [])
    assert (found["tensor_parallel"], found["pipeline_parallel"]) == (2, 2)


def test_an_embedding_that_is_tied_is_the_head(record: Any) -> None:
    _, runner, written = record(lambda s: [s.embedding(VOCAB, HIDDEN), s.linear(HIDDEN, HIDDEN)])
    runner.step(batch(2))
    found = written()
    assert found["layers"] == [{"name": "1", "signature": key(HIDDEN, HIDDEN)}]
    assert found["heads"] == [{"name": "0", "signature": key(VOCAB, HIDDEN)}]


def test_a_head_that_torch_compiles_is_left_alone(record: Any) -> None:
    """Compiled code depends on nothing that is counted: it is the same in a step and outside."""
    server, runner, written = record(layers)
    graphs = Graphs()

    compiled = torch.compile(server.logits, fullgraph=True, backend=graphs)
    x = torch.ones(5, HIDDEN).bfloat16()
    assert torch.equal(compiled(x, runner.model[1]), server.logits(x, runner.model[1]))
    runner.logits = compiled
    runner.step(batch(5))
    assert len(graphs) == 1
    found = written()
    assert (found["tokens"], found["logits"]) == ({"5": 1}, {})


# --- layers ---


def test_layers_are_those_that_the_plugin_would_ask_for(record: Any) -> None:
    def make(server: Server) -> list[Any]:
        own = server.linear(HIDDEN, HIDDEN, method=server.modules[f"{QUANTIZATION}.unquant"].OwnMethod())
        return [server.mlp(INNER, HIDDEN), server.scaled_mlp(INNER, HIDDEN), server.linear(8, HIDDEN, bias=True), own]

    _, runner, written = record(make)
    runner.step(batch(2))
    found = written()
    assert found["layers"] == [
        {"name": "0.gate_up_proj", "signature": key(2 * INNER, HIDDEN, "swiglu")},
        {"name": "0.down_proj", "signature": key(HIDDEN, INNER)},
        {"name": "1.gate_up_proj", "signature": key(2 * INNER, HIDDEN)},
        {"name": "1.down_proj", "signature": key(HIDDEN, INNER)},
        {"name": "2", "signature": key(8, HIDDEN, "bias")},
    ]
    assert found["left"] == {"Linear computed by OwnMethod": 1}


@pytest.mark.parametrize("archive", [False, True])
def test_layers_in_fp8_are_recorded_with_their_scaling(record: Any, archive: bool) -> None:
    def make(server: Server) -> list[Any]:
        """What makes them: methods choose their function when hooks are in place."""
        linear = server.modules[f"{QUANTIZATION}.fp8"].Fp8Linear
        kinds = [("block", {}), ("row_column", {}), ("tensor", {"static": True}), ("tensor", {})]
        return [lambda scaling=scaling, more=more: linear(256, 384, scaling, **more) for scaling, more in kinds]

    _, runner, written = record(make, {"archive": "model.aot"} if archive else None)
    runner.step(batch(2))
    found = written()
    scalings = {each["name"]: each["signature"].removeprefix("e4m3_e4m3_bf16_f32_none_") for each in found["layers"]}
    assert scalings == {"0": "n256_k384_block", "1": "n256_k384_row_column", "2": "n256_k384_tensor"}
    assert found["left"] == {"no kernel has one scale for the weight and one for each token": 1}


def test_layers_in_fp8_that_another_function_computes_are_left_out(record: Any) -> None:
    def make(server: Server) -> list[Any]:
        module = server.modules[f"{QUANTIZATION}.fp8"]
        module.Fp8LinearMethod.chosen = "another_linear"
        return [lambda: module.Fp8Linear(256, 384, "block")]

    _, runner, written = record(make)
    runner.step(batch(2))
    assert list(written()["left"]) == ["Fp8LinearMethod chose a GEMM with block scales that the plugin does not know"]


def test_activations_are_recorded_as_they_run(record: Any) -> None:
    """Before they are fused, and not where adapters or hooks come between."""
    swiglu, plain = (key(2 * INNER, HIDDEN, epilogue) for epilogue in ("swiglu", "none"))
    served = [signature(2 * INNER, HIDDEN, epilogue="swiglu"), signature(HIDDEN, INNER)]
    left: tuple[dict[str, Any], ...] = {"enable_lora": True}, {"forward_hooks": [{}]}
    for more, expected in (({}, swiglu), *((each, plain) for each in left)):
        server, runner, written = record(
            lambda s: [s.mlp(INNER, HIDDEN)], {"archive": "model.aot"}, signatures=served, **more
        )
        runner.model[0](*tensors((5, HIDDEN)))
        assert (server.lib.calls[0] == (2 * INNER, HIDDEN, "swiglu")) == (not more)
        runner.step(batch(2))
        assert written()["layers"][0]["signature"] == expected


def test_layers_of_encoders_are_left_out(record: Any) -> None:
    class Model(nn.Module):
        def __init__(self, server: Server) -> None:
            super().__init__()
            self.vision, self.model = server.linear(INNER, HIDDEN), nn.ModuleList([server.linear(HIDDEN, HIDDEN)])
            self.lm_head = server.head(VOCAB, HIDDEN)

    server, runner, written = record(lambda s: [])
    runner._make = lambda: Model(server)
    runner.load_model()
    runner.step(batch(2))
    found = written()
    assert found["layers"] == [{"name": "model.0", "signature": key(HIDDEN, HIDDEN)}]
    assert found["heads"] == [{"name": "lm_head", "signature": key(VOCAB, HIDDEN)}]


def test_a_head_in_f32_has_no_signature(record: Any) -> None:
    _, runner, written = record(layers, enable_fp32_lm_head=True)
    runner.step(batch(2))
    found = written()
    assert (found["heads"], found["left"]) == ([], {"--enable-fp32-lm-head asks for f32": 1})


# --- beside what is served; and the manifest ---


def test_nothing_is_served_where_no_archive_is_named(record: Any) -> None:
    server, runner, _ = record(layers)
    runner.model[0](*tensors((5, HIDDEN)))
    runner.step(batch(2))
    assert (server.asked, server.lib.calls) == ([], [])
    assert str(hooks.LINEAR) not in server.registry.hooks
    (line,) = server.lines
    assert "records what the model runs in" in line


def test_a_scheduler_that_is_served_is_recorded_as_one_that_is_not(record: Any) -> None:
    server, runner, written = record(layers, {"archive": "model.aot"})
    runner.init_device_graphs()
    runner.step(batch(3))
    assert server.lib.calls == 3 * [(VOCAB, HIDDEN, "none")]  # in captures
    runner.model[0](*tensors((5, HIDDEN)))
    assert server.lib.calls[3:] == [(HIDDEN, HIDDEN, "none")]
    assert server.registry.problems == []
    found = written()
    assert found["layers"] == [{"name": "0", "signature": key(HIDDEN, HIDDEN)}]
    assert (found["tokens"], found["logits"]) == ({"4": 1}, {"4": 1})


def test_the_command_makes_a_manifest_of_the_file(record: Any, tmp_path: Path) -> None:
    _, runner, written = record(lambda s: [s.mlp(INNER, HIDDEN), s.mlp(INNER, HIDDEN), s.head(VOCAB, HIDDEN)])
    runner.init_device_graphs()
    runner.step(batch(3))
    runner.step(batch(64, 3))
    written()
    found = recorded.manifest_from_workers(tmp_path / "records", targets=["sm_90a"])
    assert (found.model, found.layers) == ("some-model", 2)
    assert [(gemm.name, gemm.signature.key(), gemm.per, gemm.traffic) for gemm in found.gemms] == [
        ("gate_up_proj", key(2 * INNER, HIDDEN, "swiglu"), "layer", ((4, 1), (64, 1))),
        ("down_proj", key(HIDDEN, INNER), "layer", ((4, 1), (64, 1))),
        ("lm_head", key(VOCAB, HIDDEN), "model", ((3, 1), (4, 1))),
    ]


# --- what is not recorded ---


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"enable_two_batch_overlap": True}, "layers see parts of a batch, or several"),
        ({"enable_pdmux": True}, "layers see parts of a batch, or several"),
        ({"enable_dp_attention": True}, "layers see other rows than requests have tokens"),
        ({"moe_a2a_backend": "deepep"}, "layers see other rows"),
        ({"moe_dense_tp_size": 1}, "layers see other rows"),
        ({"enable_attn_tp_input_scattered": True}, "layers see other rows"),
        ({"attn_cp_size": 2}, "layers see other rows"),
        ({"torchao_config": "int4wo-128"}, "--torchao-config replaces weights"),
    ],
)
def test_servers_whose_counts_would_mean_nothing_are_not_recorded(
    record: Any, tmp_path: Path, more: dict[str, Any], says: str
) -> None:
    server, runner, _ = record(layers, **more)
    assert [f"records nothing: {says}" in line for line in server.lines] == [True]
    runner.step(batch(2))
    assert not (tmp_path / "records").exists()


def test_a_server_that_is_not_recorded_is_served(record: Any) -> None:
    server, _, _ = record(layers, {"archive": "model.aot"}, enable_dp_attention=True)
    assert "records nothing: " in server.lines[0]
    assert "serves 1 of 1 linear layers and 1 of 1 heads" in server.lines[1]


def test_a_graph_that_the_plugin_does_not_know_ends_the_record_and_not_the_server(record: Any) -> None:
    class Other:
        def can_run(self, forward_batch: Any) -> bool:
            return True

        def replay(self, forward_batch: Any) -> int:
            return 8

    server, runner, _ = record(layers)
    runner.graph_runner = Other()
    assert runner.step(batch(2)) == (8, True)
    assert "records nothing: a CUDA graph was replayed in a way that the plugin does not know" in server.lines[-1]
    assert runner.step(batch(2)) == (8, True)
    assert len(server.lines) == 2


def test_a_step_that_cannot_be_counted_ends_the_record_and_not_the_server(record: Any) -> None:
    server, runner, _ = record(layers)
    odd = batch(2)
    del odd.batch_size, odd.input_ids
    runner.graph_runner = type("Graphs", (), {"can_run": lambda *_: True, "replay": lambda *_: 8})()
    assert runner.step(odd) == (8, True)
    assert "records nothing: AttributeError" in server.lines[-1]


def test_methods_that_are_missing_are_named_and_the_model_runs(start: Start, tmp_path: Path) -> None:
    server = start()
    del server.modules[f"{LAYERS}.logits_processor"].LogitsProcessor._get_logits
    runner = server.serve(server.linear(HIDDEN, HIDDEN), setting={"cute_aot": {"record": str(tmp_path)}})
    assert f"records nothing: {hooks.LOGITS} is not there" in server.lines[0]
    assert runner.step(batch(2)) == (2, False)
    assert list(tmp_path.glob("worker*")) == []
