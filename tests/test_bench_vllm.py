"""What `scripts/bench_vllm.py` makes of weights, and of two runs, as far as that needs neither vLLM nor a GPU."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from runtime import ArgumentError

from .command_line import ROOT
from .vllm_mxfp4_stand_in import NAMES, numbers, numbers_of_int4

sys.path.insert(0, str(ROOT / "scripts"))

import bench_vllm
import report
import turns

BOTH = ["--archive", "a.aot", "--archive", "b.aot", "--beside-stock", "--layers", "3", "--batches", "1,16"]


class Experts(nn.Module):
    def __init__(self, launches: Any) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(4, 64, 512), requires_grad=False)
        self.quant_method = SimpleNamespace(
            moe_kernel=SimpleNamespace(fused_experts=SimpleNamespace(launches=launches))
        )


def test_weights_are_drawn_so_that_outputs_are_as_large_as_inputs() -> None:
    """Routers too, which choose experts at random then; the extent that products are summed over is the last."""
    model = nn.ModuleDict(
        {"gate": nn.Linear(512, 64, bias=False), "experts": Experts(None), "other": Experts(object())}
    )
    found = bench_vllm.draw(model)
    for weight in (model["gate"].weight, model["experts"].w13_weight):
        assert float(weight.detach().std()) == pytest.approx(512**-0.5, rel=0.02)
    assert (found["experts"], found["experts_served"]) == (2, 1)


def test_layers_in_int4_are_counted_by_who_computes_them() -> None:
    of_vllm, of_ours = (type("Kernel", (), {"__module__": module})() for module in ("vllm.marlin", "runtime.vllm.int4"))
    layers = []
    for kernel, name in ((of_vllm, "qweight"), (of_ours, "qweight"), (of_ours, "weight_packed")):
        layer = nn.Module()
        layer.register_parameter(name, nn.Parameter(torch.zeros(2, 2, dtype=torch.int32), requires_grad=False))
        layer.quant_method = SimpleNamespace(kernel=kernel)
        layers.append(layer)
    found = bench_vllm._served(nn.ModuleList(layers))
    assert (found["layers"], found["served"], found["experts"]) == (3, 2, 0)


@pytest.mark.parametrize("k", [2880, 4096])
def test_weights_in_mxfp4_are_drawn_as_large_as_others(k: int) -> None:
    layer = nn.Module()
    for name, columns in (("w13_weight", k // 2), ("w13_weight_scale", k // 32)):
        layer.register_parameter(name, nn.Parameter(torch.zeros(4, 64, columns, dtype=torch.uint8), False))
    layer.w13_bias = nn.Parameter(torch.zeros(4, 64, dtype=torch.bfloat16), requires_grad=False)
    model = nn.ModuleDict({"experts": layer})
    bench_vllm._draw_weights(model, None)
    weight = numbers(layer.w13_weight.data, layer.w13_weight_scale.data)
    assert 1 / 1.5 < float(weight.std()) * k**0.5 < 1.5
    assert len(layer.w13_weight_scale.unique()) == 3
    assert float(layer.w13_bias.detach().float().std()) == pytest.approx(0.1, rel=0.2)
    bench_vllm._draw_weights(model, "experts.w13_weight")
    assert not layer.w13_weight.any()
    assert layer.w13_weight_scale.all()


@pytest.mark.parametrize("of_experts", [False, True])
@pytest.mark.parametrize("method", NAMES)
def test_weights_in_int4_are_drawn_as_large_as_others(method: str, of_experts: bool) -> None:
    n, k = 64, 4096
    packed, scales, zeros = (n, k // 8), (n, k // 128), (n // 8, k // 128)  # of compressed-tensors' dense layers
    if method == "AutoAWQMoEMethod":
        packed, scales, zeros = (k, n // 8), (k // 128, n), (k // 128, n // 8)
    elif of_experts or method == "AutoGPTQMoEMethod":
        packed, scales, zeros = (k // 8, n), (k // 128, n), (k // 128, n // 8)
    layer, experts = nn.Module(), (3,) if of_experts else ()
    names = [f"{'w13_' if of_experts else ''}{name.removeprefix('_')}" for name in NAMES[method]]
    for name, shape, dtype in zip(
        names, (packed, scales, zeros), (torch.int32, torch.bfloat16, torch.int32), strict=True
    ):
        layer.register_parameter(name, nn.Parameter(torch.zeros(*experts, *shape, dtype=dtype), False))
    layer.g_idx = nn.Parameter(torch.arange(k, dtype=torch.int32), False)
    bench_vllm._draw_weights(nn.ModuleDict({"layer": layer}), None)
    q, s, z = (getattr(layer, name).data for name in names)
    if of_experts:
        q, s, z = q[1], s[1], z[1]
    elif method.startswith("Compressed"):
        q, s, z = q.T, s.T, z.T
    weight = numbers_of_int4(method, q, s, None if method == "AutoGPTQMoEMethod" else z)
    assert 1 / 1.5 < float(weight.std()) * k**0.5 < 1.5
    assert bool((s > 0).all())
    assert torch.equal(layer.g_idx, torch.arange(k, dtype=torch.int32))
    bench_vllm._draw_weights(nn.ModuleDict({"layer": layer}), f"layer.{names[1]}")
    assert not getattr(layer, names[1]).any()


def test_a_model_is_taken_as_it_would_be_unquantised(tmp_path: Path) -> None:
    model = ROOT / "benchmarks" / "gpt-oss-20b"
    with bench_vllm._folder(model, unquantised=False) as folder:
        assert bench_vllm._is_packed(folder)
    with bench_vllm._folder(model, unquantised=True) as folder:
        assert not bench_vllm._is_packed(folder)
        config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["num_local_experts"]) == ("gpt_oss", 32)
    with pytest.raises(ArgumentError, match=r"has no config\.json"), bench_vllm._folder(tmp_path, False):
        pass


def test_layers_of_gptq_are_named_where_the_config_names_none(tmp_path: Path) -> None:
    gptq = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": gptq}))
    with bench_vllm._folder(tmp_path, unquantised=False) as folder:
        found = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert found.pop("modules_in_block_to_quantize")[:2] == ["q_proj", "k_proj"]
    assert found == gptq
    named = gptq | {"modules_in_block_to_quantize": ["self_attn.q_proj"]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": named}))
    with bench_vllm._folder(tmp_path, unquantised=False) as folder:
        assert folder == tmp_path


def run_both(
    monkeypatch: pytest.MonkeyPatch, folder: Path, statuses: tuple[int, ...]
) -> tuple[int, dict[str, list[str]], dict[str, Any]]:
    """The status, the commands of the engines, which end with these statuses, and what was written of them."""
    started: dict[str, list[str]] = {}

    def run(commands: dict[str, list[str]], timeout_s: float) -> dict[str, int]:
        assert timeout_s == 70.0
        started.update(commands)
        for i, (command, status) in enumerate(zip(commands.values(), statuses, strict=True)):
            rates = {batch: {"tokens_per_s": 100.0 * (i + 1)} for batch in ("1", "16")}
            answers = {"text_logprobs": [[-1.0, -2.0 - i]], "tokens": [[5, 6 + i]]}
            result = {"decode": rates, "prefill": {}, "answers": answers, "ready_s": 5.0, "environment": {}}
            if status == 0:
                file = Path(command[command.index("--out") + 1])
                file.write_text(json.dumps(result | {"model": Path(command[2]).name, "unquantised": False}))
        return dict(zip(commands, statuses, strict=True))

    monkeypatch.setattr(turns, "run", run)
    monkeypatch.setattr(report, "commit", lambda: "unknown")
    models = [str(folder / name) for name in ("a", "b")]
    for model in models:
        Path(model).mkdir()
        (Path(model) / "config.json").write_text("{}")
    out = folder / "both.json"
    words = [*models, *BOTH, "--timeout", "70", "--engine", '{"kv_cache_memory_bytes": 5}', "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench_vllm.py", *words])
    return report.ends(bench_vllm.main), started, json.loads(out.read_text()) if out.exists() else {}


def test_each_model_runs_without_and_with_the_archives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, commands, document = run_both(monkeypatch, tmp_path, (0, 0, 0, 0))
    assert status == 0
    assert list(commands) == ["0 a, stock", "0 a, served", "1 b, stock", "1 b, served"]
    stock, served = (bench_vllm._options().parse_args(commands[f"1 b, {name}"][2:]) for name in bench_vllm.BOTH)
    assert stock.model == served.model == [tmp_path / "b"]
    assert (stock.layers, stock.batches, stock.unquantised) == (3, [1, 16], False)
    assert stock.engine == {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 5}
    assert (stock.archive, served.archive) == ([], ["a.aot", "b.aot"])
    assert not stock.beside_stock
    out = capsys.readouterr().out
    assert re.search(r"decode, batch 16, x +2\.0\n", out)
    assert re.search(r"greedy tokens before the first other +1\b", out)
    assert [run["model"] for run in document["runs"]] == ["a", "b"]
    rates = [document["runs"][1][name]["decode"]["1"]["tokens_per_s"] for name in ("stock", "served")]
    assert rates == [300.0, 400.0]
    assert "answers" not in document["runs"][0]["served"]


@pytest.mark.parametrize(
    ("statuses", "says"), [((0, 0, 0, 1), "b, served: exit status 1"), ((0, 0, -9, 0), "b, stock: ended by signal 9")]
)
def test_what_fails_or_takes_too_long_is_status_1_and_the_rest_is_kept(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    statuses: tuple[int, ...],
    says: str,
) -> None:
    status, _, document = run_both(monkeypatch, tmp_path, statuses)
    assert status == 1
    assert [run["model"] for run in document["runs"]] == ["a"]
    assert says in capsys.readouterr().out


def test_two_runs_without_an_archive_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_vllm.py", "model", "--beside-stock"])
    assert report.ends(bench_vllm.main) == 2
    assert "--beside-stock takes --archive" in capsys.readouterr().err
