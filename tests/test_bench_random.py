"""scripts/bench_random.py and summarise_random.py without a GPU: what a case says, how a run ends, what sums up."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import bench_random
import random_cases
import sweep_variants
import yaml

from aot.tune import measure
from aot.tune.timing import Timing, in_turns
from runtime.errors import ArgumentError, KernelMiss

from . import bench_cases
from .bench_cases import FUSED, GOOD, PLAIN, SLOW, US, WRONG, Library, a_result, case, run

without_a_gpu = bench_cases.without_a_gpu  # a fixture
pytestmark = pytest.mark.usefixtures("without_a_gpu")


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


def test_turns_go_on_until_what_is_over_torch_is_known() -> None:
    chance = random.Random(1)

    def times(noise: float, turns: int, clock: float = 0.0) -> dict[str, Timing]:
        shared = [math.exp(chance.gauss(0, clock)) for _ in range(turns)]
        return {name: Timing.of([c * math.exp(chance.gauss(0, noise)) for c in shared]) for name in ("torch", "ours")}

    assert bench_random.are_known(times(0.001, 10))
    assert bench_random.are_known(times(0.001, 10, 0.1)), "all of a turn share the clock"
    assert not bench_random.are_known(times(0.03, 10))
    assert not bench_random.are_known(times(0.001, 3)), "three say little"
    assert bench_random.are_known(times(0.03, 60)), "there were many"


@pytest.mark.parametrize("settle_us", [0.0, 50e3])
def test_a_time_is_that_beside_the_others_of_a_turn(monkeypatch: pytest.MonkeyPatch, settle_us: float) -> None:
    asked = list[Any]()
    clock = [1.0, 1.3, 1.1, 1.2, 1.0, 1.05]
    us = {"ours": 9.0, "torch": 10.0, "torch again": 10.0}

    def time_interleaved(launches: Any, operands: Any, floor: float, repeats: int, *more: Any) -> dict[str, Timing]:
        asked.extend([repeats, *more[2:]])
        return {name: Timing.of([us[name] * c for c in clock][:: -1 if name == "ours" else 1]) for name in launches}

    monkeypatch.setattr(measure, "time_interleaved", time_interleaved)
    monkeypatch.setattr(measure, "power_bound", lambda signature, rows: settle_us > 0)
    result = run(case(), samples=settle_us > 0)
    said = result["contenders"]
    assert asked == [12, settle_us, bench_random.are_known]
    assert result.get("samples", {}).get("torch") == ([10.0, 13.0, 11.0, 12.0, 10.0, 10.5] if settle_us else None)
    turned = in_turns({name: Timing.of([us[name] * c for c in clock][:: -1 if name == "ours" else 1]) for name in us})
    assert [said[name]["us"] for name in ("ours", "torch")] == [round(turned[name].us, 3) for name in ("ours", "torch")]


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


# --- a run ---

CASES = [case(m=m) for m in (1, 2, 3, 4)]


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


def test_cases_of_few_rows_may_be_left_out(command: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert command("--seed", "s", "--count", "6", "--least-m", "512", "--out", str(out)) == 0
    found = json.loads(out.read_text())
    every = random_cases.cases("s", 60, random_cases.load_layers([tmp_path / "models.yaml"]))
    assert [r["m"] for r in found["results"]] == [c.m for c in every if c.m >= 512][:6]
    assert found["drawn"] == "all layers from M = 512"


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
