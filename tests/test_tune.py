"""What tuning writes, with the GPU replaced by canned measurements: winners, rejections, interruptions."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from aot import measure, tune
from aot.measure import Timing
from aot.operands import OperandSet
from aot.tune import Measured, TuneError, TuneReport, tune_archive
from runtime.archive import Archive
from runtime.dispatch import Dispatch, Entry
from runtime.gpus import Gpu

from .recording_driver import RecordingDriver, entry, gemm_record, signature, write_archive
from .recording_driver import table as gemm_table

REAL_TUNER: Any = tune._Tuner
NAMES = ["slow", "quick", "wrong"]


class CannedTuner:
    """Stands in for the tuner: "quick" beats "slow", "wrong" would beat both and is rejected at the second entry."""

    interrupt_at = ""

    def __init__(self, library: Any, report: TuneReport, options: Any) -> None:
        self.report = report

    def check(self, entry: Entry) -> None:
        if entry.signature.n == 1024:
            self.report.rejected["wrong"] = "relative error 1.0"
        if entry.signature.key().endswith(self.interrupt_at or "no such"):
            raise KeyboardInterrupt

    def measure(self, entry: Entry, m: int) -> Measured | None:
        times = {"wrong": 1.0, "quick": 2.0, "slow": 3.0} if m < 512 else {"wrong": 1.0, "slow": 2.0, "quick": 3.0}
        times = {n: us for n, us in times.items() if n in dict(entry.candidates)[16]}
        found = Measured(
            m, tuple((n, Timing(us, 0.01)) for n, us in times.items()), "torch.mm", Timing(2.5, 0.02), len(times)
        )
        self.report.measured.append((entry.signature.key(), found))
        return found


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    candidates = [[16, NAMES], [512, NAMES]]
    rows = [
        entry(signature(n, 512), [(None, "wrong")], candidates=candidates) | {"state": "ranked"}
        for n in (512, 1024, 2048)
    ]
    path = tmp_path / "candidates.aot"
    write_archive(path, [gemm_record(n) for n in [*NAMES, "no_candidate"]], rows)
    monkeypatch.setattr(tune, "_Tuner", CannedTuner)
    monkeypatch.setattr(tune, "Driver", RecordingDriver)
    monkeypatch.setattr(measure, "environment", lambda: {"gpu": "made up", "compute_capability": "9.0", "l2_bytes": 1})
    monkeypatch.setattr(tune.torch.cuda, "get_device_capability", lambda: (9, 0))
    return path


def test_a_function_is_called_with_all_operands_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune.torch.cuda, "current_stream", lambda: 7)
    calls = []
    functions = {"f": lambda *given, stream: calls.append((given, stream))}
    tuner = REAL_TUNER(SimpleNamespace(functions=functions), TuneReport({"l2_bytes": 1}), tune.TuneOptions())
    extras = {"scale_a": "sa", "scale_b": "sb", "bias": "c"}
    tuner._launch("f")(OperandSet("a", "b", "d", extras))
    assert calls == [(("a", "b", "d", "sa", "sb", "c"), 7)]


@pytest.mark.parametrize(("sustained", "first"), [(True, "lean"), (False, "quick")])
def test_under_sustained_load_the_least_product_of_both_times_wins(
    monkeypatch: pytest.MonkeyPatch, sustained: bool, first: str
) -> None:
    """The quick one is 2% faster in turns of a millisecond, and takes so much power that it is 5% slower for long."""
    short = {"quick": 100.0, "lean": 102.0, "torch.mm": 103.0}
    long = {"quick": 126.0, "lean": 120.0, "torch.mm": 121.0}
    weights = SimpleNamespace(operands=lambda m: [OperandSet("a", "b", "d", {})])
    monkeypatch.setattr(tune, "Weights", lambda *given: weights)
    monkeypatch.setattr(tune, "baseline", lambda *given: ("torch.mm", None))
    monkeypatch.setattr(measure, "time_interleaved", lambda c, *rest: {n: Timing(short[n], 0.01) for n in c})
    monkeypatch.setattr(measure, "time_sustained", lambda c, *rest: {n: Timing(long[n], 0.01) for n in c})
    library = SimpleNamespace(functions={"quick": None, "lean": None}, forget_captures=lambda: None)
    tuner = REAL_TUNER(library, TuneReport({"l2_bytes": 1}), tune.TuneOptions(sustained=sustained))
    row = entry(signature(8192, 8192), [(None, "quick")], candidates=[[4096, ["quick", "lean"]]])
    ranked = Dispatch.from_json(gemm_table([row])).entries[0]
    found = tuner.measure(ranked, 4096)
    assert found.times[0][0] == first
    assert set(found.sustained) == (set(long) if sustained else set())
    monkeypatch.setattr(tune, "Driver", RecordingDriver)
    tuned = tune._tuned_entry(ranked, [found])
    assert tuned is not None
    (timing,) = tuned.timings
    if sustained:
        assert (timing["sustained_us"], timing["baseline_sustained_us"]) == (120.0, 121.0)
    else:
        assert "sustained_us" not in timing


def test_every_contender_has_every_place_in_two_rounds() -> None:
    orders = list(measure.turns(3, 6))
    assert orders == [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1], [2, 0, 1], [1, 0, 2]]
    for place in range(4):
        assert {order[place] for order in measure.turns(4, 8)} == {0, 1, 2, 3}
    assert list(measure.turns(1, 2)) == [[0], [0]]
    assert list(measure.turns(0, 2)) == [[], []]


def test_power_bounds_large_problems_only() -> None:
    large = Dispatch.from_json(gemm_table([entry(signature(8192, 8192), [(None, "f")])])).entries[0].signature
    assert [m for m in (16, 128, 512, 4096) if measure.power_bound(large, m)] == [512, 4096]


def table(path: Path) -> dict[int, Entry]:
    with Archive.open(path) as archive:
        entries = Dispatch.from_json(archive.table("gemm"), archive.functions.targets_by_name()).entries
    return {entry.signature.n: entry for entry in entries}


def test_the_fastest_right_function_wins_each_range(source: Path, tmp_path: Path) -> None:
    tune_archive(source, tmp_path / "tuned.aot")
    row = table(tmp_path / "tuned.aot")[512]
    assert (row.state, row.gpu) == ("tuned", Gpu("NVIDIA H200", 132, 4_800))
    assert row.ranges == ((480, "quick"), (None, "slow"))
    first = row.timings[0]
    assert (first["m"], first["function"], first["us"], first["runner_up"]) == (16, "quick", 2.0, "slow")
    assert (first["baseline"], first["baseline_us"], first["baseline_spread"]) == ("torch.mm", 2.5, 0.02)


def test_a_function_that_is_nearly_the_best_serves_alone(source: Path, tmp_path: Path) -> None:
    report = tune_archive(source, tmp_path / "tuned.aot", tune.TuneOptions(tolerance=1.0))
    rows = table(tmp_path / "tuned.aot").values()
    assert len({name for row in rows for _, name in row.ranges}) == 1
    exact = tune_archive(source, tmp_path / "exact.aot", tune.TuneOptions(tolerance=0.0))
    assert len({name for row in table(tmp_path / "exact.aot").values() for _, name in row.ranges}) == 2
    assert sum(report.speedups) < sum(exact.speedups)


class Canned(CannedTuner):
    """Rejects and measures what a test says."""

    rejects: ClassVar[dict[str, str]] = {}
    times: ClassVar[dict[int, dict[str, float]]] = {}  # by N

    def check(self, entry: Entry) -> None:
        self.report.rejected |= self.rejects

    def measure(self, entry: Entry, m: int) -> Measured | None:
        times = tuple((n, Timing(us, 0.01)) for n, us in self.times[entry.signature.n].items())
        found = Measured(m, times, "torch.mm", Timing(2.5, 0.02), len(times))
        self.report.measured.append((entry.signature.key(), found))
        return found


@pytest.fixture
def half_tuned(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """N = 512 was tuned before, and has "early" for few rows and "zealous" for many; N = 1024 was not."""
    rows = [
        entry(signature(512, 512), [(64, "early"), (None, "zealous")]) | {"state": "tuned"},
        entry(signature(1024, 512), [(None, "new")], candidates=[[16, ["new", "zealous"]]]) | {"state": "ranked"},
    ]
    path = tmp_path / "half_tuned.aot"
    write_archive(path, [gemm_record(n) for n in ("early", "zealous", "new")], rows)
    monkeypatch.setattr(tune, "_Tuner", Canned)
    monkeypatch.setattr(Canned, "times", {1024: {"new": 2.0, "zealous": 2.01}})
    return path


def test_what_serves_already_serves_where_it_is_nearly_the_best(half_tuned: Path, tmp_path: Path) -> None:
    tune_archive(half_tuned, tmp_path / "tuned.aot")
    assert table(tmp_path / "tuned.aot")[1024].ranges == ((None, "zealous"),)
    with Archive.open(tmp_path / "tuned.aot") as archive:
        assert set(archive.functions) == {"early", "zealous"}
        assert archive.table("tuning")["environments"][-1]["tolerance"] == 0.01


def test_what_no_longer_serves_has_no_lead(half_tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Canned, "rejects", {"early": "wrong here"})
    report = tune_archive(half_tuned, tmp_path / "tuned.aot")
    assert report.unserved == ["bf16_bf16_bf16_f32_none_n512_k512 on sm_90a"]
    assert table(tmp_path / "tuned.aot")[1024].ranges == ((None, "new"),)


def test_a_point_whose_finalists_are_all_rejected_later_is_left_out(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "_Tuner", Canned)
    monkeypatch.setattr(Canned, "rejects", {"wrong": "relative error 1.0"})
    monkeypatch.setattr(Canned, "times", {512: {"wrong": 1.0}, 1024: {"quick": 2.0}, 2048: {"quick": 2.0}})
    report = tune_archive(source, tmp_path / "tuned.aot")
    assert report.unserved == ["bf16_bf16_bf16_f32_none_n512_k512 on sm_90a"]
    assert set(table(tmp_path / "tuned.aot")) == {1024, 2048}


def test_tolerance_is_of_one_time_where_there_are_two() -> None:
    """In the geometric mean of both the second is 0.8% slower, in their product 1.6%."""
    times = (("a", Timing(100.0, 0.0)), ("b", Timing(101.6, 0.0)))
    long = {"a": Timing(100.0, 0.0), "b": Timing(100.0, 0.0)}
    found = Measured(4096, times, "torch.mm", Timing(100.0, 0.0), 2, long)
    row = entry(signature(8192, 8192), [(None, "a")])
    key = Dispatch.from_json(gemm_table([row])).entries[0].signature, "sm_90a"
    for tolerance, first in ((0.01, "b"), (0.007, "a")):
        assert tune._as_served({key: [found]}, (), tolerance, ["b"])[key][0].times[0][0] == first


@pytest.mark.parametrize("tolerance", [-0.1, 1.5, float("nan")])
def test_an_absurd_tolerance_is_refused(tolerance: float) -> None:
    with pytest.raises(TuneError, match="tolerance must be 0 to 1"):
        tune.TuneOptions(tolerance=tolerance)


def test_contenders_are_replayed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed: list[str] = []

    class Graph:
        def __init__(self, name: str) -> None:
            self.name = name

        def replay(self, timed: bool = True) -> None:
            if timed:
                replayed.append(self.name)

        def timing(self) -> Timing:
            return Timing(1.0, 0.0)

    monkeypatch.setattr(measure, "_capture", lambda contenders, *_: {name: Graph(name) for name in contenders})
    monkeypatch.setattr(measure.torch.cuda, "synchronize", lambda: None)
    none: Any = None
    measure.time_interleaved({"a": none, "b": none, "c": none}, [], 1.0, 3, 1.0)
    assert "".join(replayed) == "abccbabca"


def test_a_function_rejected_once_is_in_no_entry_and_not_in_the_archive(source: Path, tmp_path: Path) -> None:
    report = tune_archive(source, tmp_path / "tuned.aot")
    assert report.rejected == {"wrong": "relative error 1.0"}
    with Archive.open(tmp_path / "tuned.aot") as archive:
        assert set(archive.functions) == {"slow", "quick", "no_candidate"}
        assert archive.table("tuning")["environments"][0]["rejected"] == report.rejected


def test_interrupted_tuning_keeps_what_was_measured_and_goes_on_later(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CannedTuner, "interrupt_at", "n2048_k512")
    assert tune_archive(source, tmp_path / "half.aot").interrupted
    rows = table(tmp_path / "half.aot")
    assert [rows[n].state for n in (512, 1024, 2048)] == ["tuned", "tuned", "ranked"]
    # The rest waits with what is known by now: "wrong" is out of its candidates and ranges.
    assert rows[2048].candidates == ((16, ("slow", "quick")), (512, ("slow", "quick")))
    assert rows[2048].ranges == ((None, "slow"),)
    monkeypatch.setattr(CannedTuner, "interrupt_at", "")
    report = tune_archive(tmp_path / "half.aot", tmp_path / "whole.aot")
    assert {key for key, _ in report.measured} == {"bf16_bf16_bf16_f32_none_n2048_k512"}
    assert {row.state for row in table(tmp_path / "whole.aot").values()} == {"tuned"}
    with Archive.open(tmp_path / "whole.aot") as archive:
        assert len(archive.table("tuning")["environments"]) == 2
    with pytest.raises(TuneError, match="are tuned; build it again"):
        tune_archive(tmp_path / "whole.aot", tmp_path / "again.aot")


class Killed(BaseException):
    pass


def test_a_process_that_is_killed_loses_little(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(self: CannedTuner, entry: Entry) -> None:
        if entry.signature.n == 2048:
            raise Killed

    monkeypatch.setattr(CannedTuner, "check", check)
    monkeypatch.setattr(tune, "_WRITE_EVERY_S", -1.0)
    with pytest.raises(Killed):
        tune_archive(source, tmp_path / "half.aot")
    rows = table(tmp_path / "half.aot")
    assert [rows[n].state for n in (512, 1024, 2048)] == ["tuned", "tuned", "ranked"]


@pytest.mark.parametrize("every_s", [-1.0, 60.0])
def test_ctrl_c_while_writing_comes_after_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_s: float
) -> None:
    real = tune._write

    def write(*given: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        real(*given)

    monkeypatch.setattr(tune, "_WRITE_EVERY_S", every_s)
    monkeypatch.setattr(tune, "_write", write)
    report = tune_archive(source, tmp_path / "half.aot")
    assert report.interrupted == (every_s < 0)
    tuned = [row.state for row in table(tmp_path / "half.aot").values()].count("tuned")
    assert tuned == (1 if every_s < 0 else 3)


def test_a_signature_without_a_right_function_is_dropped_and_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(self: CannedTuner, entry: Entry) -> None:
        if entry.signature.n == 1024:
            self.report.rejected |= dict.fromkeys(NAMES, "wrong here")

    monkeypatch.setattr(CannedTuner, "check", check)
    monkeypatch.setattr(CannedTuner, "measure", lambda self, entry, m: None)
    report = tune_archive(source, tmp_path / "tuned.aot")
    assert "bf16_bf16_bf16_f32_none_n1024_k512 on sm_90a" in report.unserved
    assert 1024 not in table(tmp_path / "tuned.aot")


def test_another_gpu_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune.torch.cuda, "get_device_capability", lambda: (10, 0))
    with pytest.raises(TuneError, match=r"compute capability 10\.0, the archive has sm_90a"):
        tune_archive(source, tmp_path / "tuned.aot")
