"""scripts/bench_random.py and summarise_random.py without a GPU: what a case says, how a run ends, what sums up."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import bench_random
import peers
import random_cases
import summarise_random
import sweep_variants
import torch
import yaml
from peers import deep_gemm

from aot.tune import measure
from aot.tune.gemm.operands import OperandSet, Weights, reference
from runtime.errors import ArgumentError, KernelMiss
from runtime.gemm.signature import Signature

PLAIN = Signature("bf16", "bf16", "bf16", "f32", "none", 64, 128)
FUSED = Signature("bf16", "bf16", "bf16", "f32", "bias+relu", 64, 128)
BLOCK = Signature("e4m3", "e4m3", "bf16", "f32", "none", 256, 384, scaling="block")
US = {"ours": 10.0, "torch": 12.0, "torch again": 12.6, "against": 8.0, "on_slower": 9.0, "deep_gemm": 11.0}
GOOD, SLOW, WRONG = "a.good", "a.slow", "a.wrong"
SCREENED = {GOOD: 9.0, SLOW: 20.0, WRONG: 5.0}


def case(signature: Signature = PLAIN, m: int = 5) -> random_cases.Case:
    return random_cases.Case(random_cases.Layer(signature, ("model:layer",), 8192), m)


class Library:
    """An archive that computes on the CPU, by the reference."""

    digest = "d" * 64

    def __init__(self, signature: Signature = PLAIN, factor: float = 1.0, error: Exception | None = None) -> None:
        self.signature, self.factor, self.error = signature, factor, error
        self.functions = dict.fromkeys(SCREENED)
        self.forgotten = 0

    def gemm(self, a: Any, b: Any, *, out: Any, **more: Any) -> None:
        if self.error:
            raise self.error
        words = {k: v for k, v in more.items() if isinstance(v, torch.Tensor)}
        out.copy_(reference(self.signature, OperandSet(a, b, out, words)) * self.factor)

    def gemm_of(self, o: OperandSet) -> None:
        self.gemm(o.a, o.b, out=o.d)

    def entry(self, signature: Signature) -> Any:
        return SimpleNamespace(best=lambda m: f"best at {m}")

    def forget_captures(self) -> None:
        self.forgotten += 1


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands on the CPU and times from `US`; launches run once, as a capture would."""

    def weights(signature: Signature, m: int, l2_bytes: int, seed: int) -> Weights:
        return Weights(signature, m, l2_bytes, seed, device="cpu")

    def time_interleaved(launches: Any, operands: Any, *_: Any) -> dict[str, Any]:
        for launch in launches.values():
            launch(operands[0])
        us = {name: US.get(name) or SCREENED[name.removeprefix("candidate: ")] for name in launches}
        return {name: measure.Timing(found, 0.01) for name, found in us.items()}

    monkeypatch.setattr(bench_random, "Weights", weights)
    monkeypatch.setattr(measure, "time_interleaved", time_interleaved)
    monkeypatch.setattr(bench_random, "baseline", lambda signature, example: ("torch.mm", lambda o: None))


def run(found: random_cases.Case, others: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    libraries = {"ours": Library(found.layer.signature), **(others or {})}
    with_defaults = {"peers": {}, "candidates": None, "l2_bytes": 0, "repeats": 7} | more
    result: dict[str, Any] = bench_random.Bench(libraries, **with_defaults).run(found)
    return result


# --- one case ---


def test_a_case_says_what_each_took_and_how_wrong_it_is() -> None:
    result = run(case(), {"against": Library(), "on_slower": Library()})
    assert (result["signature"], result["m"], result["group"]) == (PLAIN.key(), 5, "16 bits")
    said = result["contenders"]
    assert {name: found["us"] for name, found in said.items()} == {
        "ours": 10.0,
        "against": 8.0,
        "on_slower": 9.0,
        "torch": 12.0,
    }
    assert 0 < said["ours"]["error"] < 3e-3
    assert said["ours"]["variant"] == "best at 5"
    assert said["torch"]["variant"] == "torch.mm"
    assert result["noise"] == 1.05


def test_epilogues_reach_the_archive() -> None:
    result = run(case(FUSED))
    assert result["contenders"]["ours"]["error"] < 3e-3
    assert result["group"] == "16 bits, fused"


def test_a_wrong_result_is_said_and_not_timed() -> None:
    said = run(case(), {"ours": Library(factor=1.02), "against": Library()})["contenders"]
    assert "relative error" in said["ours"]["wrong"]
    assert "us" not in said["ours"]
    assert said["against"]["us"] == 8.0
    raises = run(case(), {"ours": Library(error=ArgumentError("a is on another device"))})["contenders"]
    assert "a is on another device" in raises["ours"]["wrong"]


def test_what_is_not_served_is_counted_with_its_reason() -> None:
    miss = Library(error=KernelMiss("no kernel for this\nnearest: that"))
    said = run(case(), {"against": miss})["contenders"]
    assert said["against"] == {"unserved": "no kernel for this"}
    assert said["ours"]["us"] == 10.0
    assert run(case(), {"ours": miss})["contenders"] == {"ours": {"unserved": "no kernel for this"}}


def test_the_best_of_candidates_is_the_fastest_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = {GOOD: 1.0, SLOW: 1.0, WRONG: 1.5}
    monkeypatch.setattr(sweep_variants, "variants", lambda signature, names: dict.fromkeys(names))

    def launcher(library: Any, name: str) -> Any:
        return lambda o: Library(factor=factors[name]).gemm(o.a, o.b, out=o.d)

    monkeypatch.setattr(sweep_variants, "launcher", launcher)
    said = run(case(), candidates=Library())["contenders"]
    assert (said["best_of"]["variant"], said["best_of"]["us"], said["best_of"]["candidates"]) == (GOOD, 9.0, 3)
    assert said["best_of"]["wrong"].startswith(f"{WRONG}: relative error")
    monkeypatch.setattr(sweep_variants, "variants", lambda signature, names: {})
    none = run(case(), candidates=Library())["contenders"]["best_of"]
    assert none == {"candidates": 0, "unserved": "none of 3 functions computes it"}


MANY = [f"b.{number:02d}" for number in range(20)]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Who is timed at each look at the candidates `MANY`, of which each takes its number more than 20 us; but the first
    look has 19 five microseconds before itself, and 15 before all."""
    timed: list[list[str]] = []

    def time_interleaved(launches: Any, *_: Any) -> dict[str, Any]:
        us = {name: US.get(name) or 20.0 + int(name[-2:]) for name in launches}
        if not timed:
            us |= {MANY[15]: 1.0, MANY[19]: 19.0 + 5.0, MANY[0]: 20.0 + 6.5}
        timed.append(sorted(name.removeprefix("candidate: ") for name in launches))
        return {name: measure.Timing(found, 0.01) for name, found in us.items()}

    monkeypatch.setattr(sweep_variants, "variants", lambda signature, names: dict.fromkeys(MANY))
    monkeypatch.setattr(sweep_variants, "launcher", lambda library, name: Library().gemm_of)
    monkeypatch.setattr(measure, "time_interleaved", time_interleaved)
    return timed


def test_candidates_that_a_short_look_put_behind_are_looked_at_again(
    looks: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(US, "ours", 30.0)
    said = run(case(), candidates=Library())["contenders"]["best_of"]
    first, second, final = looks
    assert first == MANY
    assert set(second) == {*MANY[:10], MANY[15], MANY[19]}
    assert {*MANY[:4]} == {name for name in final if name in MANY}
    assert (said["variant"], said["us"], said["candidates"]) == (MANY[0], 20.0, 20)


@pytest.mark.parametrize("chosen", ["b.17", "of no candidate"])
def test_the_best_of_candidates_is_no_slower_than_what_is_served(
    looks: list[list[str]], monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    monkeypatch.setitem(US, "ours", 18.0)
    monkeypatch.setitem(US, "candidate: b.17", 17.5)
    monkeypatch.setattr(Library, "entry", lambda *_: SimpleNamespace(best=lambda m: chosen))
    said = run(case(), candidates=Library())["contenders"]
    assert (said["ours"]["variant"], said["ours"]["us"]) == (chosen, 18.0)
    assert ("b.17" in looks[-1]) == (chosen == "b.17"), "it is timed as the others are"
    assert (said["best_of"]["variant"], said["best_of"]["us"]) == (chosen, 17.5 if chosen == "b.17" else 18.0)


def test_captures_are_forgotten_after_a_case() -> None:
    libraries = {"ours": Library(), "against": Library()}
    bench_random.Bench(libraries, {}, None, 0, 7).forget()
    assert [library.forgotten for library in libraries.values()] == [1, 1]


# --- DeepGEMM ---


@pytest.fixture
def fake_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The module, with a GEMM that computes by the reference and keeps what it is given."""
    calls: list[tuple[Any, ...]] = []

    def fp8_gemm_nt(a: Any, b: Any, d: Any, *, disable_ue8m0_cast: bool) -> None:
        assert disable_ue8m0_cast
        calls.append((a, b))
        d.copy_(reference(BLOCK, OperandSet(a[0], b[0], d, {"scale_a": a[1], "scale_b": b[1]})))

    module = ModuleType("deep_gemm")
    module.__dict__["fp8_gemm_nt"] = fp8_gemm_nt
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "")
    return calls


def test_deep_gemm_gets_scales_of_weights_without_padding(fake_deep_gemm: list[Any], tmp_path: Path) -> None:
    peer = peers.load("deep_gemm", peers.Settings(tmp_path, 1))
    said = run(case(BLOCK), peers={"deep_gemm": peer})["contenders"]["deep_gemm"]
    assert (said["us"], said["variant"]) == (11.0, "fp8_gemm_nt")
    assert said["error"] < 3e-3
    assert all(b[1].is_contiguous() and b[1].shape == (2, 3) for _, b in fake_deep_gemm)
    assert all(a[1].stride() == (1, 8) for a, _ in fake_deep_gemm)


def test_deep_gemm_lays_scales_out_once(fake_deep_gemm: list[Any]) -> None:
    (launch,) = deep_gemm.DeepGemm(peers.Settings(Path("unused"), 1)).launches(BLOCK, 5).values()
    operands = Weights(BLOCK, 5, 0, 1, device="cpu").operands(5)[0]
    assert not operands.extras["scale_b"].is_contiguous()
    launch(operands)
    launch(operands)
    assert fake_deep_gemm[0][1][1] is fake_deep_gemm[1][1][1]


def test_deep_gemm_refuses_what_it_has_no_kernel_for(fake_deep_gemm: list[Any]) -> None:
    peer = deep_gemm.DeepGemm(peers.Settings(Path("unused"), 1))
    said = run(case(), peers={"deep_gemm": peer})["contenders"]["deep_gemm"]
    assert said == {"unsupported": "its GEMMs of e4m3 take scales of blocks"}
    assert peer.refuse(BLOCK) is None
    assert peer.refuse(Signature("e4m3", "e4m3", "f16", "f32", "none", 256, 384, scaling="block")) is not None
    assert fake_deep_gemm == []


def test_a_failure_of_deep_gemm_is_its_own(fake_deep_gemm: list[Any]) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("nvcc is missing\nand more")

    sys.modules["deep_gemm"].__dict__["fp8_gemm_nt"] = broken
    peer = deep_gemm.DeepGemm(peers.Settings(Path("unused"), 1))
    said = run(case(BLOCK), peers={"deep_gemm": peer})["contenders"]
    assert said["deep_gemm"]["failed"] == "RuntimeError: nvcc is missing"
    assert said["ours"]["us"] == 10.0


def test_deep_gemm_that_is_not_installed_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("deep_gemm", "vllm", "vllm.third_party.deep_gemm"):
        monkeypatch.setitem(sys.modules, name, None)
    found, said = bench_random.open_peers(SimpleNamespace(deep_gemm=True))  # type: ignore[arg-type]
    assert found == {}
    assert said["deep_gemm"].startswith("absent (")
    assert bench_random.open_peers(SimpleNamespace(deep_gemm=False)) == ({}, {})  # type: ignore[arg-type]


# --- a run ---

CASES = [case(m=m) for m in (1, 2, 3, 4)]


def a_result(m: int, us: float = 10.0, torch_us: float = 12.0, gpu: str = "g1", **more: Any) -> dict[str, Any]:
    said = {"ours": {"us": us, "spread": 0.0, "error": 1e-3}, "torch": {"us": torch_us, "spread": 0.0}}
    found = {"layers": "model:layer", "signature": PLAIN.key(), "m": m, "group": "16 bits", "noise": 1.0, "gpu_id": gpu}
    return found | {"contenders": said} | more


def test_a_run_measures_what_it_has_not_until_time_is_over() -> None:
    results = [a_result(2)]
    measured: list[int] = []

    def measure_one(found: random_cases.Case) -> dict[str, Any]:
        measured.append(found.m)
        return a_result(found.m)

    left = bench_random.measure_all(CASES, results, measure_one, lambda: len(measured) == 2, lambda: None)
    assert measured == [1, 3]
    assert [c.m for c in left] == [4]
    assert [r["m"] for r in results] == [2, 1, 3]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Control-C as Python has it: a shell that runs tests in the background has them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_writes_what_it_has(stop: signal.Signals) -> None:
    results: list[dict[str, Any]] = []
    written: list[int] = []

    def measure_one(found: random_cases.Case) -> dict[str, Any]:
        if found.m == 3:
            os.kill(os.getpid(), stop)
        return a_result(found.m)

    ended = bench_random.run_all(CASES, results, measure_one, 1e18, lambda: written.append(len(results)))
    assert ended == (0, True)
    assert written == [2]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_a_run_that_fails_writes_what_it_has() -> None:
    written: list[int] = []
    results: list[dict[str, Any]] = []

    def measure_one(found: random_cases.Case) -> dict[str, Any]:
        if found.m == 2:
            raise RuntimeError("the device is lost")
        return a_result(found.m)

    with pytest.raises(RuntimeError, match="the device is lost"):
        bench_random.run_all(CASES, results, measure_one, 1e18, lambda: written.append(len(results)))
    assert written == [1]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the script on an archive that serves everything right; `factor` makes it wrong."""
    layers = tmp_path / "models.yaml"
    layers.write_text(
        yaml.safe_dump({"models": [{"model": "m", "source": "s", "layers": [{"name": "x", "n": 64, "k": 128}]}]})
    )

    def call(*arguments: str, gpu: str = "g1", factor: float = 1.0, digest: str = "d" * 64) -> int:
        library = Library(factor=factor)
        library.digest = digest
        loaded.clear()

        def load(path: Any, **words: Any) -> Library:
            loaded.append((path, words))
            return library

        monkeypatch.setattr(bench_random.runtime, "load", load)
        monkeypatch.setattr(measure, "environment", lambda: {"gpu": "a GPU", "gpu_id": gpu, "l2_bytes": 0})
        argv = ["bench_random.py", "some.aot", *arguments, "--layers", str(layers)]
        monkeypatch.setattr(sys, "argv", argv)
        status: int = bench_random.main()
        return status

    loaded: list[Any] = []
    call.loaded = loaded  # type: ignore[attr-defined]
    return call


def test_a_run_goes_on_where_another_stopped(command: Any, tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert command("--seed", "s", "--count", "5", "--out", str(first)) == 0
    assert command("--seed", "s", "--count", "9", "--resume", str(first), "--out", str(second), gpu="g2") == 0
    found = json.loads(second.read_text())
    keys = [(r["signature"], r["m"]) for r in found["results"]]
    assert len(keys) == len(set(keys)) == 9
    assert [r["gpu_id"] for r in found["results"]] == ["g1"] * 5 + ["g2"] * 4
    assert set(found["environments"]) == {"g1", "g2"}
    assert found["left_out"] == 0
    expected = random_cases.cases("s", 9, random_cases.load_layers([tmp_path / "models.yaml"]))
    assert [m for _, m in keys] == [c.m for c in expected]


def test_a_run_goes_on_with_the_same_seed_archive_and_draw_alone(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tmp_path / "first.json"
    assert command("--seed", "s", "--count", "2", "--out", str(first)) == 0

    def refusal(*arguments: str, **named: Any) -> str:
        assert command(*arguments, **named) == 2
        return capsys.readouterr().err

    resume = "--count", "2", "--resume", str(first)
    assert "its seed 's', now 't'" in refusal("--seed", "t", *resume)
    assert f"its archive {'d' * 64!r}, now {'e' * 64!r}" in refusal("--seed", "s", *resume, digest="e" * 64)
    few = "--few", "1x2", "--best-of", "candidates.aot"
    assert "its drawn 'all layers', now 'few layers'" in refusal("--seed", "s", *resume, *few)
    (tmp_path / "other.json").write_text("{}")
    for name in ("other.json", "missing.json"):
        found = refusal("--seed", "s", "--count", "2", "--resume", str(tmp_path / name))
        assert "name a result file of this script" in found


def test_the_seed_is_the_commit_where_none_is_given(command: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(bench_random.report, "commit", lambda: "0123abc+changes")
    out = tmp_path / "out.json"
    assert command("--count", "1", "--out", str(out)) == 0
    assert json.loads(out.read_text())["seed"] == "0123abc"


def test_time_that_is_over_leaves_cases_out(command: Any, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "out.json"
    assert command("--seed", "s", "--count", "4", "--minutes", "-1", "--out", str(out)) == 0
    assert json.loads(out.read_text())["left_out"] == 4
    assert "4 cases left out" in capsys.readouterr().out


def test_a_wrong_result_is_the_exit_status(command: Any) -> None:
    assert command("--seed", "s", "--count", "2", factor=1.5) == 1


def test_archives_are_opened_as_they_are_asked_for(command: Any) -> None:
    assert command("--seed", "s", "--count", "1", "--on-slower", "--against", "b.aot", "--patch", "p.aot") == 0
    own = [Path("some.aot"), Path("p.aot")]
    assert command.loaded == [(own, {}), (own, {"on_slower": "torch"}), (Path("b.aot"), {})]


def test_a_file_of_layers_that_is_wrong_is_one_line(command: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "models.yaml").write_text("models: [{model: m}]")
    assert command("--seed", "s") == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["3", "0x2", "3xmany", "-1x2"])
def test_a_few_layers_are_two_positive_numbers(text: str) -> None:
    assert bench_random.few_argument("3x20") == (3, 20)
    with pytest.raises(Exception, match="is not LAYERSxTOKENS"):
        bench_random.few_argument(text)


def test_a_line_has_a_figure_or_a_reason_for_each(capsys: Any) -> None:
    result = a_result(16)
    result["contenders"] |= {"against": {"us": 15.0}, "deep_gemm": {"unsupported": "no"}}
    text = bench_random.line(result)
    assert text.split() == ["model:layer", "16", "10.00", "12.00", "1.200", "1.00e-03", "1.500", "unsupported"]
    assert len(bench_random.header(["against", "deep_gemm"])) == len(text)
    unserved = a_result(16) | {"contenders": {"ours": {"unserved": "no kernel"}}}
    assert bench_random.line(unserved).endswith("   16 unserved: no kernel")


# --- the summary ---


def document(results: list[dict[str, Any]], archive: str = "a" * 64) -> dict[str, Any]:
    return {"archive": archive, "drawn": "all layers", "seed": "s", "environments": {}, "results": results}


DOCUMENTS = [
    document([a_result(1, 10.0, 20.0), a_result(64, 10.0, 9.0), a_result(100, 10.0, 9.69)]),
    document([a_result(1, 10.0, 5.0, "g2"), a_result(100, 10.0, 9.7, "g2"), a_result(512, 10.0, 40.0, "g2")]),
]


def lines(documents: list[dict[str, Any]]) -> dict[tuple[str, ...], dict[str, Any]]:
    return {(s["who"], s["over"], s["group"], s["regime"]): s for s in summarise_random.summarise(documents)}


def test_the_summary_is_of_all_measurements_with_the_worst_gpu_beside() -> None:
    found = lines(DOCUMENTS)
    few = found["ours", "torch", "all", "M <= 64"]
    assert (few["cases"], few["measured"], few["gpus"]) == (2, 3, 2)
    assert few["geomean"] == round((2.0 * 0.9 * 0.5) ** (1 / 3), 6)
    assert few["lowest"] == 0.5, "of the second GPU; the first has the root of 1.8"
    assert (few["worst"], few["worst_at"]) == (0.5, "model:layer M=1")
    assert (few["slower"], few["most"]) == (round(2 / 3, 6), 1.0)
    many = found["ours", "torch", "all", "M >= 512"]
    assert (many["geomean"], many["worst"], many["slower"], many["gpus"]) == (4.0, 4.0, 0.0, 1)


def test_below_097_is_slower_and_097_is_not() -> None:
    middle = lines(DOCUMENTS)["ours", "torch", "all", "M = 65..511"]
    assert (middle["slower"], middle["most"]) == (0.5, 1.0)
    assert middle["worst"] == 0.969


def test_groups_and_pairs_have_lines_of_their_own() -> None:
    fused = a_result(1, 10.0, 30.0) | {"group": "16 bits, fused"}
    fused["contenders"]["against"] = {"us": 15.0}
    fused["contenders"]["deep_gemm"] = {"unsupported": "no"}
    found = lines([document([a_result(1, 10.0, 20.0), fused])])
    assert found["ours", "torch", "16 bits", "M <= 64"]["geomean"] == 2.0
    assert found["ours", "torch", "16 bits, fused", "M <= 64"]["geomean"] == 3.0
    assert found["ours", "against", "all", "M <= 64"]["geomean"] == 1.5
    assert found["against", "torch", "all", "M <= 64"]["geomean"] == 2.0
    assert {pair for pair in found if "deep_gemm" in pair} == set()


@pytest.mark.parametrize("variant", ["dequantise, torch.mm", "torch.mm, eager swiglu (RuntimeError in torch.compile)"])
def test_what_torch_has_no_kernel_for_flatters_no_mean(variant: str) -> None:
    slow = a_result(2, 10.0, 500.0)
    slow["contenders"]["torch"]["variant"] = variant
    slow["contenders"]["against"] = {"us": 20.0}
    documents = [document([a_result(1, 10.0, 20.0), slow])]
    found = lines(documents)
    assert (found["ours", "torch", "all", "M <= 64"]["geomean"], found["ours", "torch", "all", "M <= 64"]["cases"]) == (
        2.0,
        1,
    )
    assert found["ours", "against", "all", "M <= 64"]["cases"] == 1
    assert "1 not compared with torch, which has no kernel for them" in summarise_random.table(documents)
    fused = a_result(3, 10.0, 20.0)
    fused["contenders"]["torch"]["variant"] = "torch.mm, torch.compile'd swiglu"
    assert not summarise_random.improvised(fused)


def test_archives_are_never_averaged_with_each_other() -> None:
    two = [document([a_result(1, 10.0, 20.0)]), document([a_result(1, 10.0, 5.0)], "b" * 64)]
    assert [s["geomean"] for s in summarise_random.summarise(two) if s["group"] == "all"] == [2.0, 0.5]


def test_the_summary_exits_1_where_any_archive_was_wrong(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    path = tmp_path / "random_a.json"
    monkeypatch.setattr(sys, "argv", ["summarise_random.py", str(path)])

    def status(result: dict[str, Any]) -> int:
        path.write_text(json.dumps(document([a_result(1), result])))
        return summarise_random.main()

    assert status(a_result(2)) == 0
    for name in ("ours", "against", "on_slower", "best_of"):
        assert status(a_result(2, contenders={name: {"wrong": "relative error 1"}})) == 1
        assert f"1 wrong, first {name}: " in capsys.readouterr().out
    assert status(a_result(2, contenders={"ours": {}, "deep_gemm": {"wrong": "relative error 1"}})) == 0
    assert status(a_result(2, contenders={"ours": {"unserved": "no kernel"}})) == 0
    assert "1 not served, first ours: " in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["summarise_random.py", "--json", str(path)])
    capsys.readouterr()
    assert summarise_random.main() == 0
    assert json.loads(capsys.readouterr().out)["summary"][0]["geomean"] == 1.2


def test_a_file_that_is_no_result_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "random_a.json"
    for text in ("[]", "{", '{"results": []}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no result file of"):
            summarise_random.read([path])
    monkeypatch.setattr(sys, "argv", ["summarise_random.py", str(path)])
    with pytest.raises(SystemExit) as ended:
        summarise_random.main()
    assert ended.value.code == 2
