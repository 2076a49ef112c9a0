"""What `scripts/bench_vllm.py` makes of weights, and of two runs, as far as that needs neither vLLM nor a GPU."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from runtime import ArgumentError

from . import universal_archives
from .command_line import ROOT
from .vllm_mxfp4_stand_in import NAMES, numbers, numbers_of_int4

sys.path.insert(0, str(ROOT / "scripts"))

import bench_vllm
import compilations
import reloads
import report
import traffic
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
    monkeypatch: pytest.MonkeyPatch, folder: Path, statuses: tuple[int, ...], *more: str
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
                model = Path(command[command.index(bench_vllm.__file__) + 1]).name
                file.write_text(json.dumps(result | {"model": model, "unquantised": False}))
        return dict(zip(commands, statuses, strict=True))

    monkeypatch.setattr(turns, "run", run)
    monkeypatch.setattr(report, "commit", lambda: "unknown")
    models = [str(folder / name) for name in ("a", "b")]
    for model in models:
        Path(model).mkdir()
        (Path(model) / "config.json").write_text("{}")
    out = folder / "both.json"
    words = [*models, *BOTH, "--timeout", "70", "--engine", '{"kv_cache_memory_bytes": 5}', "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench_vllm.py", *words, *more])
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


def test_all_engines_get_the_same_lengths_and_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = "--lengths", "5", "--traffic", "2", "--traffic-seed", "-- a b", "--stock-again", "A=b"
    _, commands, _ = run_both(monkeypatch, tmp_path, (0,) * 6, *words)
    found = [command[command.index(bench_vllm.__file__) + 1 :] for command in commands.values()]
    options = [bench_vllm._options().parse_args(words) for words in found]
    assert {(each.lengths, each.traffic, each.traffic_seed) for each in options} == {(5, 2, "-- a b")}


def test_stock_runs_again_as_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    again = "--stock-again", "TORCH_BLAS_PREFER_CUBLASLT=1", "--stock-again", "A=b"
    status, commands, document = run_both(monkeypatch, tmp_path, (0,) * 6, *again)
    assert list(commands)[:3] == ["0 a, stock", "0 a, served", "0 a, stock again"]
    assert commands["0 a, stock again"][:4] == ["env", "TORCH_BLAS_PREFER_CUBLASLT=1", "A=b", sys.executable]
    assert not any("archive" in word for word in commands["0 a, stock again"])
    run = document["runs"][0]
    assert run["again_with"] == ["TORCH_BLAS_PREFER_CUBLASLT=1", "A=b"]
    assert [run[n]["compared"][bench_vllm.MEAN_DIFFERENCE] for n in ("served", "stock again")] == [0.5, 1.0]
    assert status == 0


def test_an_engine_that_is_further_from_stock_than_stock_again_twice_is_status_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    means = iter([1.01, 0.5] * 2)

    def compare(figures: dict[str, Any], name: str, against: Any) -> None:
        figures["compared"] = {"with": name, bench_vllm.MEAN_DIFFERENCE: next(means)}

    monkeypatch.setattr(bench_vllm, "_compare", compare)
    assert run_both(monkeypatch, tmp_path, (0,) * 6, "--stock-again", "A=b")[0] == 1
    assert "mean difference to stock is 1.01, not within 1.0" in capsys.readouterr().out


@pytest.mark.parametrize(("agree", "status"), [(8.5, 0), (8.0, 0), (7.9, 1)])
def test_where_both_stocks_read_a_text_alike_greedy_tokens_tell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], agree: float, status: int
) -> None:
    """As with TORCH_BLAS_PREFER_CUBLASLT=1, under which GEMMs of few tokens alone are computed otherwise."""
    found = iter([(0.01, agree), (0.0, 16.0)] * 2)

    def compare(figures: dict[str, Any], name: str, against: Any) -> None:
        mean, greedy = next(found)
        figures["compared"] = {"with": name, bench_vllm.MEAN_DIFFERENCE: mean, bench_vllm.GREEDY: greedy}

    monkeypatch.setattr(bench_vllm, "_compare", compare)
    assert run_both(monkeypatch, tmp_path, (0,) * 6, "--stock-again", "A=b")[0] == status
    assert ("than stock's are 7.9, fewer than 8.0" in capsys.readouterr().out) == bool(status)


def test_stock_again_without_the_first_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_vllm.py", "model", "--stock-again", "A=b"])
    assert report.ends(bench_vllm.main) == 2
    assert "--stock-again takes --beside-stock" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["TORCH_BLAS_PREFER_CUBLASLT", "=1"])
def test_what_is_no_variable_of_an_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    status, commands, _ = run_both(monkeypatch, tmp_path, (), "--stock-again", word)
    assert (status, commands) == (2, {})
    assert f"--stock-again takes NAME=VALUE, found {word!r}" in capsys.readouterr().err


def test_two_runs_without_an_archive_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_vllm.py", "model", "--beside-stock"])
    assert report.ends(bench_vllm.main) == 2
    assert "--beside-stock takes --archive" in capsys.readouterr().err


# --- one engine, in this process, that computes ---

VOCAB, WIDTH, LAYERS = 512, 64, 3
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def in_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.T


def in_bf16(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.bfloat16().float() @ weight.bfloat16().float().T).bfloat16().float()


def in_bf16_by_halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In another order: K in two parts, of which each is rounded."""
    half = WIDTH // 2
    return (in_bf16(x[:, :half], weight[:, :half]) + in_bf16(x[:, half:], weight[:, half:])).bfloat16().float()


class Layer(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n, WIDTH), requires_grad=False)
        self.quant_method, self._cute_aot_plain = SimpleNamespace(), 1


class Engine:
    """An engine whose next token depends on the last one alone."""

    def __init__(self, product: Product) -> None:
        self.product = product
        layers = [nn.ModuleDict({"up": Layer(WIDTH), "down": Layer(WIDTH)}) for _ in range(LAYERS)]
        embedding = nn.Embedding(VOCAB, WIDTH)
        embedding.weight.requires_grad_(False)
        self.model = nn.ModuleDict({"embed": embedding, "layers": nn.ModuleList(layers), "head": Layer(VOCAB)})

    def apply_model(self, function: Any) -> list[Any]:
        return [function(self.model)]

    def _logprobs(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.model["embed"](tokens % VOCAB)
        for layer in self.model["layers"]:
            x = x + self.product(nn.functional.silu(self.product(x, layer["up"].weight)), layer["down"].weight)
        x = x / x.square().mean(-1, keepdim=True).sqrt()
        return self.product(x, self.model["head"].weight).log_softmax(-1)

    def generate(self, prompts: list[dict[str, list[int]]], sampling: Any, use_tqdm: bool) -> list[Any]:
        given = [torch.tensor(prompt["prompt_token_ids"]) for prompt in prompts]
        said = [torch.stack([tokens[-1] for tokens in given])]
        for _ in range(sampling.max_tokens):
            said.append(self._logprobs(said[-1]).argmax(-1))
        answers = torch.stack(said[1:], 1).tolist()
        return [self._output(tokens, answer, sampling) for tokens, answer in zip(given, answers, strict=True)]

    def _output(self, tokens: torch.Tensor, answer: list[int], sampling: Any) -> Any:
        found = SimpleNamespace(prompt_token_ids=tokens.tolist(), outputs=[SimpleNamespace(token_ids=answer)])
        if hasattr(sampling, "prompt_logprobs"):
            of_next = self._logprobs(tokens[:-1]).gather(-1, tokens[1:, None] % VOCAB).flatten().tolist()
            steps = [{int(t): SimpleNamespace(logprob=x)} for t, x in zip(tokens[1:], of_next, strict=True)]
            found.prompt_logprobs = [None, *steps]
        return found


class Runs:
    """Runs the script in `folder` with an engine of this process, and reads what it writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch, self.folder = monkeypatch, folder
        self.compiled: compilations.Counted | None = {"ours": 0, "by": {"vllm": {"ptxas": 12}}}
        (folder / "config.json").write_text("{}")
        for name, function in (("watch", lambda: None), ("counted", lambda: self.compiled)):
            monkeypatch.setattr(compilations, name, function)
        monkeypatch.setattr(bench_vllm, "_environment", dict)
        monkeypatch.setattr(bench_vllm, "_sampling", SimpleNamespace)
        monkeypatch.setattr(report, "commit", lambda: "unknown")

    def __call__(self, product: Product, name: str, *words: str) -> tuple[int, dict[str, Any]]:
        out = self.folder / name
        small = ["--batches", "1", "--prompts", "8", "--tokens", "4", "--repeats", "1"]
        self._monkeypatch.setattr(bench_vllm, "_engine", lambda *_: Engine(product))
        self._monkeypatch.setattr(sys, "argv", ["bench_vllm.py", str(self.folder), *small, *words, "--out", str(out)])
        return report.ends(bench_vllm.main), json.loads(out.read_text()) if out.exists() else {}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    return Runs(monkeypatch, tmp_path)


def test_answers_may_differ_as_gemms_do_and_not_by_a_layer(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice the difference of two ways that stock may compute GEMMs lets other rounding pass, and no lost layer."""
    stock, usual = str(runs.folder / "stock.json"), bench_vllm.MEAN_DIFFERENCE
    assert runs(in_bf16, "stock.json")[0] == 0
    status, other = runs(in_bf16_by_halves, "other.json", "--against", stock)
    assert status == 0
    most = 2 * other["compared"][usual]
    limited = "--against", stock, "--most-difference", str(most)
    capsys.readouterr()
    status, served = runs(in_float32, "served.json", "--archive", "a.aot", *limited)
    assert 0 < served["compared"][usual] <= most
    assert (status, "not within" in capsys.readouterr().out) == (0, False)
    status, zeroed = runs(in_float32, "zeroed.json", "--archive", "a.aot", "--zero", "layers.1.down.weight", *limited)
    assert status == 1
    mean = zeroed["compared"][usual]
    assert mean > 3 * most
    assert f"{runs.folder.name}: {usual} to stock.json is {mean}, not within {most}\n" in capsys.readouterr().out
    assert runs(in_float32, "again.json", "--zero", "layers.1.down.weight", "--against", stock)[0] == 0


def test_answers_that_are_no_numbers_are_within_no_limit(runs: Runs) -> None:
    runs(in_float32, "stock.json")
    limited = "--against", str(runs.folder / "stock.json"), "--most-difference", "1000"
    assert runs(lambda x, weight: in_float32(x, weight) * float("nan"), "broken.json", *limited)[0] == 1


def test_a_limit_without_another_run_is_refused(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs(in_float32, "stock.json", "--most-difference", "0.1") == (2, {})
    assert "--most-difference takes --against or --beside-stock" in capsys.readouterr().err


@pytest.mark.parametrize(("most", "status"), [("0.4", 1), ("0.5", 0)])
def test_each_model_beside_stock_is_held_to_the_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], most: str, status: int
) -> None:
    found, commands, document = run_both(monkeypatch, tmp_path, (0, 0, 0, 0), "--most-difference", most)
    assert found == status
    assert not any("--most-difference" in word for command in commands.values() for word in command)
    lines = [line for line in capsys.readouterr().out.splitlines() if "not within" in line]
    usual = bench_vllm.MEAN_DIFFERENCE
    assert lines == [f"{name}: {usual} to stock is 0.5, not within {most}" for name in ("a", "b") if status]
    assert len(document["runs"]) == 2


# --- lengths that are new to an engine, and traffic ---


class Slower(Engine):
    """An engine that takes a millisecond a token, and half a second more for each length that it never had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(in_float32)
        self.now, self.events, self.prompts = 0.0, list[int | str](), list[list[int]]()
        monkeypatch.setattr(bench_vllm.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(bench_vllm, "Turns", lambda given: SimpleNamespace(turn=self.turn))

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        self.events.append("turn")
        yield

    def generate(self, prompts: list[dict[str, list[int]]], sampling: Any, use_tqdm: bool) -> list[Any]:
        for given in (prompt["prompt_token_ids"] for prompt in prompts):
            self.now += 1e-3 * (len(given) + sampling.max_tokens - 1) + 0.5 * (len(given) not in self.events)
            self.events.append(len(given))
            self.prompts.append(given)
        return super().generate(prompts, sampling, use_tqdm)


@pytest.fixture
def slower(runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """An engine of which three lengths were measured, what was written of it, and what was printed."""
    engine = Slower(monkeypatch)
    monkeypatch.setattr(sys.modules[__name__], "Engine", lambda product: engine)
    lengths = ",".join(map(str, bench_vllm.drawn_lengths(3)))
    status, figures = runs(in_float32, "stock.json", "--lengths", "3", "--prompts", lengths)
    assert status == 0
    return SimpleNamespace(engine=engine, figures=figures, out=capsys.readouterr().out)


def test_lengths_are_new_when_they_are_first_prefilled_and_known_the_second_time(slower: Any) -> None:
    """Also where --prompts has the same lengths."""
    found = slower.figures["lengths"]
    assert found["tokens"] == bench_vllm.drawn_lengths(3)
    again_s = [1e-3 * tokens for tokens in found["tokens"]]
    assert found["again_s"] == pytest.approx(again_s)
    assert found["new_s"] == pytest.approx([s + 0.5 for s in again_s])
    new, again = (1e3 * report.geomean(found[name]) for name in ("new_s", "again_s"))
    assert f"prefill of 3 new lengths: {new:.3f} ms, of the same again: {again:.3f} ms\n" in slower.out


def test_engines_take_turns_for_each_length_after_one_that_each_knows(slower: Any) -> None:
    known, *others = bench_vllm.WARM_LENGTHS
    of_each = [["turn", known, tokens, tokens] for tokens in bench_vllm.drawn_lengths(3)]
    expected = ["turn", known, *others, *(event for turn in of_each for event in turn), "turn"]
    assert slower.engine.events[: len(expected)] == expected


def test_no_prompt_comes_twice(slower: Any) -> None:
    beginnings = [tuple(prompt[:8]) for prompt in slower.engine.prompts]  # of which a cache of prefixes knows one
    assert len(set(beginnings)) == len(beginnings)


def test_lengths_are_different_and_beyond_graphs_and_fewer_are_the_first_of_more() -> None:
    found = bench_vllm.drawn_lengths(1000)
    assert len({*found, *bench_vllm.WARM_LENGTHS}) == 1000 + len(bench_vllm.WARM_LENGTHS)
    assert all(513 <= tokens <= 4000 for tokens in found)
    assert found[:20] == bench_vllm.drawn_lengths(20)
    assert sum(tokens < (513 * 4000) ** 0.5 for tokens in found[:100]) == pytest.approx(50, abs=15)


def _figures(**more: Any) -> dict[str, Any]:
    return {"decode": {}, "prefill": {}, "answers": {"text_logprobs": [[-1.0]], "tokens": [[5]]}, **more}


def test_lengths_are_compared_each_with_its_own() -> None:
    stock = _figures(lengths={"tokens": [600, 3000], "new_s": [0.2, 0.9], "again_s": [0.1, 0.3]})
    served = _figures(lengths={"tokens": [600, 3000], "new_s": [0.1, 1.8], "again_s": [0.1, 0.1]})
    found = bench_vllm.compared(served, stock)
    assert found["prefill of new lengths, x"] == 1.0
    assert found["prefill of the same again, x"] == pytest.approx(3**0.5, abs=1e-4)
    fewer = _figures(lengths={"tokens": [600], "new_s": [0.1], "again_s": [0.1]})
    assert bench_vllm.compared(fewer, stock)["prefill of new lengths, x"] == 2.0
    assert not any("again" in name for name in bench_vllm.compared(_figures(), stock))


def test_traffic_is_compared_with_that_of_the_same_seed_alone() -> None:
    rates = {"at_once": {"tokens_per_s": 10.0}}
    stock, served, other = (_figures(traffic=rates | seed) for seed in ({}, {"seed": "0"}, {"seed": "1"}))
    assert bench_vllm.compared(served, stock)["traffic at once, x"] == 1.0
    assert "traffic at once, x" not in bench_vllm.compared(other, stock)


def test_traffic_is_drawn_by_the_seed_that_is_given(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "llm_engine", None, raising=False)
    monkeypatch.setattr(traffic, "measured", lambda engine, sampling, *given: given)
    assert runs(in_float32, "a.json", "--traffic", "2", "--traffic-seed", "b")[1]["traffic"] == [2, "b"]
    assert runs(in_float32, "b.json", "--traffic", "2")[1]["traffic"] == [2, "0"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--lengths", "1001"), "--lengths takes 0 to 1000, found 1001"),
        (("--lengths", "-1"), "--lengths takes 0 to 1000, found -1"),
        (("--traffic-seed", "b"), "--traffic-seed takes --traffic"),
        (("--profile", "-1"), "--profile takes 0 steps or more, found -1"),
    ],
)
def test_lengths_and_seeds_that_draw_nothing_are_refused(
    runs: Runs, capsys: pytest.CaptureFixture[str], words: tuple[str, str], says: str
) -> None:
    assert runs(in_float32, "stock.json", *words) == (2, {})
    assert says in capsys.readouterr().err


# --- what an engine compiled ---


@pytest.mark.parametrize(
    ("compiled", "status", "says"),
    [
        (
            {"ours": 0, "by": {"vllm": {"ptxas": 12}}},
            0,
            'compilations: 0 for this project\'s kernels; {"vllm": {"ptxas": 12}}',
        ),
        ({"ours": 1, "by": {"ours": {"gcc": 1}}}, 1, "compilations: 1 for this project's kernels"),
        (None, 0, "compilations: not counted"),
    ],
)
def test_a_compiler_that_our_kernels_start_is_status_1(
    runs: Runs, capsys: pytest.CaptureFixture[str], compiled: Any, status: int, says: str
) -> None:
    runs.compiled = compiled
    found, figures = runs(in_float32, "stock.json")
    assert (found, figures["compilations"]) == (status, compiled)
    assert says in capsys.readouterr().out


def test_one_worker_that_nobody_watched_leaves_no_count() -> None:
    counts: list[Any] = [{"ours": 0, "by": {}}, None]
    assert bench_vllm._compiled(SimpleNamespace(apply_model=lambda function: counts)) is None
    assert bench_vllm._compiled(SimpleNamespace(apply_model=lambda function: counts[:1])) == counts[0]


def test_an_engine_is_watched_from_before_it_is_made_until_all_was_measured(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **words: Any) -> Any:
            order.append(name)
            return function(*arguments, **words)

        return call

    for module, name in ((compilations, "watch"), (bench_vllm, "_answers"), (compilations, "counted")):
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    monkeypatch.setattr(Engine, "__init__", noted("Engine", Engine.__init__))
    assert runs(in_float32, "stock.json")[0] == 0
    assert order == ["watch", "Engine", "_answers", "counted"]


# --- archives that are loaded again ---


def test_archives_are_loaded_again_before_answers_are_given(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    universal_archives.write(runs.folder / "a.aot")
    seen: list[Any] = []

    def under_traffic(engine: Any, files: reloads.Files, sampling: Any, minutes: float) -> dict[str, Any]:
        seen.append((files.paths, [Path(path).exists() for path in files.paths], minutes))
        return {"reloads": 3}

    monkeypatch.setattr(reloads, "under_traffic", under_traffic)
    words = "--archive", str(runs.folder / "a.aot"), "--reload-minutes", "8"
    status, figures = runs(in_float32, "served.json", *words)
    assert (status, figures["reloads"]) == (0, {"reloads": 3})
    ((paths, there, minutes),) = seen
    assert (there, minutes) == ([True], 8)
    assert paths != [str(runs.folder / "a.aot")]
    assert "reloads" not in runs(in_float32, "alone.json", *words[:2])[1]


def test_reloads_without_an_archive_are_refused(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert runs(in_float32, "stock.json", "--reload-minutes", "8") == (2, {})
    assert "--reload-minutes takes --archive" in capsys.readouterr().err


def test_only_the_engine_with_archives_loads_them_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, commands, _ = run_both(monkeypatch, tmp_path, (0, 0, 0, 0), "--reload-minutes", "8")
    assert [any("--reload-minutes=8" in word for word in command) for command in commands.values()] == [False, True] * 2


_ENDS_ITS_CHILD = """
import bench_vllm, multiprocessing, tempfile, time, weakref
with tempfile.TemporaryDirectory():  # has a finalizer too, as copies of archives have
    class Manager: pass
    manager, child = Manager(), multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    weakref.finalize(manager, child.terminate)
"""


def test_an_engine_ends_with_the_script_where_archives_were_copied_before_it_began() -> None:
    """vLLM ends its engines by finalizers, which the interpreter runs when it ends; before that it would wait for them
    if those of temporary folders were the first that there were."""
    words = [sys.executable, "-c", _ENDS_ITS_CHILD]
    assert subprocess.run(words, cwd=ROOT / "scripts", timeout=40, check=False).returncode == 0
