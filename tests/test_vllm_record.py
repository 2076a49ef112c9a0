"""What the plugin records of a worker, in modules shaped like vLLM's; on the CPU."""

from __future__ import annotations

import json
import time
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from aot.problem import recorded
from runtime.plugin import periodic

from . import vllm_stand_in
from .recording_driver import signature
from .torch_stand_in import HIDDEN, INNER, VOCAB, key, near, tensors
from .vllm_stand_in import PADDED, Server, Start, fp8_layer

start = vllm_stand_in.start  # a fixture


@pytest.fixture
def record(start: Start, tmp_path: Path) -> Any:
    """Records a worker with these layers, what `make` gives of the server; the server, the worker and the file."""

    def record(make: Any, runner: str = "v1", setting: Any = None, **engine: Any) -> tuple[Server, Any, Path]:
        server = start()
        config = server.config({"cute_aot": {"record": str(tmp_path / "records")} | (setting or {})})
        config.runner = runner
        vars(config.parallel_config).update(engine)
        worker = server.serve(*make(server), config=config)
        return server, worker, tmp_path / "records" / "worker-0-0.json"

    return record


def written(worker: Any, path: Path) -> Any:
    worker.shutdown()
    return json.loads(path.read_text())


def mlp_of(server: Server) -> Any:
    return server.modules["vllm.model_executor.models"].Mlp(INNER, HIDDEN)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_steps_are_counted_as_layers_see_them_once_the_worker_is_warm(record: Any, runner: str) -> None:
    _, worker, path = record(lambda server: [server.linear(HIDDEN, HIDDEN)], runner)
    worker.model_runner.step(1)
    assert worker.compile_or_warm_up_model() == "warm"
    results = [worker.model_runner.step(tokens) for tokens in (1, 3, PADDED + 1)]
    assert None not in results
    found = written(worker, path)
    assert found["tokens"] == {str(PADDED): 2, str(2 * PADDED): 1}
    assert found["logits"] == {}
    names = ("model", "engine", "rank", "tensor_parallel", "pipeline_parallel")
    assert [found[name] for name in names] == ["org/some-model", 0, 0, 1, 1]


def test_rows_of_logits_are_counted_and_the_head_is_what_gives_them(record: Any) -> None:
    server, worker, path = record(lambda s: [s.linear(HIDDEN, HIDDEN), s.embedding(VOCAB, HIDDEN), s.head(8, HIDDEN)])
    processor = server.modules["vllm.model_executor.layers.logits_processor"].LogitsProcessor()
    worker.compile_or_warm_up_model()
    x, y = tensors((5, HIDDEN), (2, HIDDEN))
    embedding = worker.model[1]
    assert near(processor(embedding, x), x.float() @ embedding.weight.float().T)
    processor(embedding, x)
    processor(embedding, y)
    found = written(worker, path)
    assert found["layers"] == [{"name": "0", "signature": key(HIDDEN, HIDDEN)}]
    assert found["heads"] == [{"name": "1", "signature": key(VOCAB, HIDDEN)}]
    assert found["logits"] == {"2": 1, "5": 2}


def test_layers_are_those_that_the_plugin_would_ask_for(record: Any) -> None:
    def make(server: Server) -> list[Any]:
        second = server.linear(INNER, HIDDEN, bias=True)
        second.input_is_parallel, second.tp_rank = True, 1  # whose bias another rank adds
        own = server.linear(HIDDEN, HIDDEN, method=server.own_method())
        scaled = server.linear(HIDDEN, HIDDEN, method=types.SimpleNamespace())
        gemm = types.SimpleNamespace(config=fp8_layer("block", 256, 384))
        scaled.quant_method = types.SimpleNamespace(fp8_linear=gemm, process_weights_after_loading=lambda layer: None)
        odd = server.linear(HIDDEN, HIDDEN)
        del odd.weight
        return [mlp_of(server), server.linear(HIDDEN, HIDDEN, bias=True), second, own, scaled, odd]

    _, worker, path = record(make)
    found = written(worker, path)
    assert found["layers"] == [
        {"name": "0.gate_up_proj", "signature": key(2 * INNER, HIDDEN, "swiglu")},
        {"name": "0.down_proj", "signature": key(HIDDEN, INNER)},
        {"name": "1", "signature": key(HIDDEN, HIDDEN, "bias")},
        {"name": "2", "signature": key(INNER, HIDDEN)},
        {"name": "4", "signature": "e4m3_e4m3_bf16_f32_none_n256_k384_block"},
    ]
    (own, odd), counts = zip(*found["left"].items(), strict=True)
    assert counts == (1, 1)
    assert own == "Linear computed by OwnMethod"
    assert "AttributeError" in odd


def test_norms_are_noted(record: Any) -> None:
    def make(server: Server) -> list[Any]:
        rms_norm = server.modules["vllm.model_executor.layers.layernorm"].RMSNorm
        return [rms_norm(HIDDEN), server.linear(HIDDEN, HIDDEN), rms_norm(HIDDEN, dtype=torch.float32)]

    _, worker, path = record(make)
    worker.compile_or_warm_up_model()
    found = written(worker, path)
    assert found["norms"] == [{"name": "0", "signature": f"bf16_bf16_bf16_rmsnorm_n{HIDDEN}_residual_bf16"}]


def test_the_command_makes_a_manifest_of_the_file(record: Any) -> None:
    server, worker, path = record(lambda s: [mlp_of(s), mlp_of(s), s.head(VOCAB, HIDDEN)])
    worker.compile_or_warm_up_model()
    worker.model_runner.step(1)
    processor = server.modules["vllm.model_executor.layers.logits_processor"].LogitsProcessor()
    processor(worker.model[2], *tensors((3, HIDDEN)))
    worker.shutdown()
    found = recorded.manifest_from_workers(path.parent, targets=["sm_90a"])
    assert (found.model, found.layers) == ("some-model", 2)
    assert [(gemm.name, gemm.signature.key(), gemm.per, gemm.traffic) for gemm in found.gemms] == [
        ("gate_up_proj", key(2 * INNER, HIDDEN, "swiglu"), "layer", ((PADDED, 1),)),
        ("down_proj", key(HIDDEN, INNER), "layer", ((PADDED, 1),)),
        ("lm_head", key(VOCAB, HIDDEN), "model", ((3, 1),)),
    ]


def test_layers_of_encoders_are_left_out(record: Any) -> None:
    server, worker, path = record(lambda s: [])
    model = nn.ModuleDict({"vision": server.linear(INNER, HIDDEN), "text": server.linear(HIDDEN, HIDDEN)})
    worker.model = model
    model.get_language_model = lambda: model["text"]
    worker.load_model()
    assert written(worker, path)["layers"] == [{"name": "text", "signature": key(HIDDEN, HIDDEN)}]


def test_nothing_is_served_where_no_archive_is_named(record: Any) -> None:
    server, worker, _ = record(lambda s: [mlp_of(s)])
    x = tensors((5, HIDDEN))[0]
    worker.model[0](x)
    assert (server.asked, server.lib.calls) == ([], [])
    (line,) = server.lines
    assert "records what the model runs in" in line


def test_a_worker_that_is_served_is_recorded_as_one_that_is_not(record: Any) -> None:
    server, worker, path = record(lambda s: [s.linear(HIDDEN, HIDDEN)], setting={"archive": "model.aot"})
    worker.compile_or_warm_up_model()
    worker.model_runner.step(1)
    worker.model[0](*tensors((5, HIDDEN)))
    assert server.lib.calls == [(HIDDEN, HIDDEN, "none")]
    found = written(worker, path)
    assert found["layers"] == [{"name": "0", "signature": key(HIDDEN, HIDDEN)}]
    assert found["tokens"] == {str(PADDED): 1}


def test_activations_are_recorded_before_they_are_fused(start: Start, tmp_path: Path) -> None:
    swiglu = signature(2 * INNER, HIDDEN, epilogue="swiglu")
    server = start([swiglu, signature(HIDDEN, INNER)])
    worker = server.serve(mlp_of(server), config={"cute_aot": {"archive": "m.aot", "record": str(tmp_path / "r")}})
    worker.model[0](*tensors((5, HIDDEN)))
    assert server.lib.calls[0] == (2 * INNER, HIDDEN, "swiglu")
    found = written(worker, tmp_path / "r" / "worker-0-0.json")
    assert found["layers"][0]["signature"] == key(2 * INNER, HIDDEN, "swiglu")


def test_the_file_is_written_while_the_worker_serves(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic.Periodic.__init__, "__defaults__", (0.01,))
    _, worker, path = record(lambda s: [s.linear(HIDDEN, HIDDEN)])
    worker.compile_or_warm_up_model()
    worker.model_runner.step(1)
    for _ in range(1000):
        if path.exists() and json.loads(path.read_text())["tokens"]:  # never half a file
            break
        time.sleep(0.01)
    else:
        pytest.fail("no file")
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    worker.shutdown()


def test_a_runner_that_is_not_known_is_one_line_of_the_log(record: Any) -> None:
    server, worker, path = record(lambda s: [])
    worker.shutdown()
    path.unlink()
    again = server._worker(worker.vllm_config, nn.ModuleList())
    again.model_runner = object()
    again.load_model()
    assert "records nothing: the model runner builtins.object is none that is known" in server.lines[-1]
    again.shutdown()
    assert not path.exists()


@pytest.mark.parametrize("split", [{"enable_dbo": True}, {"ubatch_size": 2}])
def test_batches_in_halves_are_not_recorded(record: Any, split: dict[str, Any]) -> None:
    server, worker, path = record(lambda s: [s.linear(HIDDEN, HIDDEN)], **split)
    worker.shutdown()
    assert "records nothing: with dual-batch overlap" in server.lines[0]
    assert not path.exists()


def test_a_step_that_cannot_be_counted_ends_the_record_and_not_the_server(record: Any) -> None:
    server, worker, _ = record(lambda s: [s.linear(HIDDEN, HIDDEN)])
    worker.compile_or_warm_up_model()
    assert worker.model_runner._model_forward(input_ids=torch.zeros(1)) is None
    assert "records nothing: KeyError" in server.lines[-1]
    assert worker.model_runner.step(1) == (3, PADDED)
