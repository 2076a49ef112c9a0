"""What `scripts/bench_sglang.py` counts, measures and compares, as far as that needs neither SGLang nor a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from runtime.plugin.hooks import mark

from .command_line import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import bench_sglang
import compilations
import report


class Linear(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 512), requires_grad=False)
        self.quant_method = SimpleNamespace()
        if name:
            setattr(self.weight if name == bench_sglang.WEIGHT_MARK else self, name, 1)


class Experts(nn.Module):
    def __init__(self, served: bool) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.zeros(4, 64, 512), requires_grad=False)

        def fused() -> None:
            pass

        if served:
            mark(fused)
        self.quant_method = SimpleNamespace(runner=SimpleNamespace(fused_func=fused))


def model(served: bool) -> nn.Module:
    names = [*bench_sglang.LAYER_MARKS, bench_sglang.WEIGHT_MARK] if served else ["", "", ""]
    return nn.ModuleList([*map(Linear, [*names, ""]), Experts(served), Experts(False), nn.Linear(8, 8)])


class StandInEngine:
    """An engine whose tokens and log-probabilities follow from its archive, and whose scheduler is in this process."""

    ended = 0

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        overrides = json.loads(settings["json_model_override_args"])
        self.layers, self.served = overrides.get("num_hidden_layers"), "cute_aot" in overrides
        self.model = model(self.served and overrides["cute_aot"] != ["lacking.aot"])

    def collective_rpc(self, method: str, **words: Any) -> None:
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=self.model))
        getattr(bench_sglang, method)(SimpleNamespace(tp_worker=worker), **words)

    def generate(self, input_ids: list[list[int]], sampling_params: dict[str, Any], **words: Any) -> list[Any]:
        count = sampling_params["max_new_tokens"]
        logprobs = [(None, ids[0], None) for ids in input_ids]
        tokens = [*range(count - 1), 99 if self.served else 98]
        steps = [[first, *((-1.0 - self.served, 5, None) for _ in range(511))] for first in logprobs]
        return [{"output_ids": tokens, "meta_info": {"input_token_logprobs": each}} for each in steps]

    def shutdown(self) -> None:
        StandInEngine.ended += 1


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The status and the result of the script with these words."""
    entrypoints = ModuleType("sglang.srt.entrypoints")
    entrypoints.engine = SimpleNamespace(Engine=StandInEngine)  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints", entrypoints)
    monkeypatch.setattr(report, "commit", lambda: "unknown")
    monkeypatch.setattr(bench_sglang, "_environment", dict)
    ticks = iter(range(10**6))
    monkeypatch.setattr(bench_sglang.time, "perf_counter", lambda: float(next(ticks) ** 2))
    (tmp_path / "config.json").write_text("{}")
    out = tmp_path / "out.json"

    def run(*words: str) -> tuple[int, Any]:
        monkeypatch.setattr(sys, "argv", ["bench_sglang.py", str(tmp_path), *words, "--out", str(out)])
        StandInEngine.ended = 0
        return report.ends(bench_sglang.main), json.loads(out.read_text()) if out.exists() else None

    return run


def test_layers_and_experts_are_counted_by_what_the_plugin_marks() -> None:
    assert bench_sglang.served_layers(model(True)) == {"layers": 4, "served": 3, "experts": 2, "experts_served": 1}
    assert bench_sglang.served_layers(model(False)) == {"layers": 4, "served": 0, "experts": 2, "experts_served": 0}


def test_both_engines_are_measured_compared_and_ended(run: Any) -> None:
    status, found = run("--archive", "a.aot", "--layers", "3", "--batches", "1,2", "--prompts", "8")
    assert (status, StandInEngine.ended) == (0, 2)
    assert [found[name]["served"] for name in ("stock", "served")] == [0, 3]
    assert found["model_layers"] == 3
    assert set(found["served"]["decode"]) == {"1", "2"}
    assert found["compared"]["log-probabilities, mean difference"] == 1.0
    assert found["compared"]["greedy tokens before the first other"] == bench_sglang.ANSWER_TOKENS - 1


def test_an_archive_that_serves_nothing_is_status_1(run: Any) -> None:
    assert run("--archive", "lacking.aot")[0] == 1


def test_stock_alone_needs_no_archive(run: Any) -> None:
    status, found = run()
    assert status == 0
    assert "served" not in found


def test_an_engine_is_ended_when_it_fails(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **words: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(StandInEngine, "generate", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        run()
    assert StandInEngine.ended == 1


def test_a_folder_without_a_config_is_refused(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").unlink()
    assert run()[0] == 2
    assert "has no config.json" in capsys.readouterr().err


# --- what schedulers compile ---


def compile_with(monkeypatch: pytest.MonkeyPatch, counted: Any) -> None:
    monkeypatch.setattr(compilations, "counted", lambda: counted)


@pytest.mark.parametrize("ours", [0, 1])
def test_a_compiler_that_our_kernels_start_is_status_1(run: Any, monkeypatch: pytest.MonkeyPatch, ours: int) -> None:
    by = {"ours": {"gcc": 1}} if ours else {"triton": {"ptxas": 2}}
    compile_with(monkeypatch, {"ours": ours, "by": by})
    status, found = run("--archive", "a.aot")
    assert status == ours
    assert found["stock"]["compilations"] == found["served"]["compilations"] == {"ours": ours, "by": by}


def test_a_scheduler_that_nobody_watched_leaves_no_count(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_with(monkeypatch, None)
    status, found = run()
    assert (status, found["stock"]["compilations"]) == (0, None)
    assert "compilations: not counted" in capsys.readouterr().out


def test_all_schedulers_of_an_engine_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a process of its own, with a file of its own."""

    def call_two(method: str, folder: str) -> None:
        for process in (7, 8):
            monkeypatch.setattr(bench_sglang.os, "getpid", lambda process=process: process)
            getattr(bench_sglang, method)(None, folder)

    compile_with(monkeypatch, {"ours": 1, "by": {"ours": {"gcc": 1}}})
    assert bench_sglang._compiled(SimpleNamespace(collective_rpc=call_two)) == {"ours": 2, "by": {"ours": {"gcc": 2}}}


def test_a_scheduler_is_watched_before_it_imports_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Managers(ModuleType):
        def __getattr__(self, name: str) -> Any:
            order.append(name)
            return SimpleNamespace(Scheduler=SimpleNamespace(), run_scheduler_process=lambda *_: order.append("run"))

    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, Managers(name))
    monkeypatch.setattr(compilations, "watch", lambda: order.append("watch"))
    bench_sglang.scheduler_process(SimpleNamespace(json_model_override_args="{}"))
    assert (order[0], "scheduler" in order, order[-1]) == ("watch", True, "run")
