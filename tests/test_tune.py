"""What tuning writes, with the GPU replaced by a simulated one: choices, rejections, interruptions, kinds of GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from aot.pack import build_table
from aot.pack.tables import operation_entries
from aot.pack.write import Package
from aot.search.legal import summation
from aot.search.provider import provider
from aot.tune import choose, points, session
from aot.tune.jobs import Answer, Job
from aot.tune.options import TuneError, TuneOptions
from aot.tune.pool import Pool
from aot.tune.timing import Timing
from aot.tune.worker import do
from runtime.container.archive import Archive
from runtime.gemm.signature import Signature
from runtime.program.record import Record

from . import simulated_gpu
from .recording_driver import entry, gemm_record, signature, write_archive
from .simulated_gpu import BASELINE, GPU, SimulatedGpu
from .simulated_tuning import by_m, scripted, tuned, wrong_are
from .tuned_tables import NAMES, table
from .tuned_tables import source as source

# --- what serves ---


def test_the_fastest_right_function_serves_each_m(source: Path, tmp_path: Path) -> None:
    tuned(source, tmp_path / "tuned.aot")
    row = table(tmp_path / "tuned.aot")[512]
    assert (row.state, row.gpu) == ("tuned", GPU)
    assert [name for _, name in row.ranges] == ["quick", "slow"]
    assert row.best(128) == "quick"
    assert row.best(256) == "slow"
    first = row.timings[0]
    assert (first["m"], first["function"], first["us"], first["runner_up"]) == (16, "quick", 2.0, "slow")
    assert (first["baseline"], first["baseline_us"], first["baseline_spread"]) == (BASELINE, 2.5, 0.0)


def test_points_are_added_where_the_choice_changes(source: Path, tmp_path: Path) -> None:
    jobs: list[Job] = []
    tuned(source, tmp_path / "tuned.aot", scripted(wrong=wrong_are("wrong")), done=jobs)
    ms = [job.m for job in jobs if job.m and job.signature.n == 512]
    assert ms[:6] == [16, 32, 64, 128, 256, 512]
    assert 1 <= len(ms[6:]) <= 5
    assert all(128 < m < 256 for m in ms[6:])


def test_calls_that_a_build_knows_of_weigh_what_is_looked_at_and_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = Signature.from_json(signature(512, 512)).key()
    gemms = [build_table.Problem("up", key, 2, [[16, 7]]), build_table.Problem("down", key, None, [[16, 1], [512, 5]])]
    package = Package()
    with Archive.open(source) as archive:
        package.add_archive(archive, list(archive.functions))
        package.set_table("gemm", archive.table("gemm"))
    package.set_table(build_table.TABLE, build_table.Build([build_table.Model("m", None, None, gemms)]).to_json())
    package.write(source)
    looked_at, kept = dict[int, Any](), dict[str, Any]()
    follow, cover = points.following, choose.cover

    def following(*of: Any) -> Any:
        looked_at[len(looked_at)] = of[3]
        return follow(*of)

    def covering(all_times: Any, *of: Any) -> Any:
        kept.setdefault("seen", [times.seen for times in all_times])
        return cover(all_times, *of)

    monkeypatch.setattr(points, "following", following)
    monkeypatch.setattr(choose, "cover", covering)
    tuned(source, tmp_path / "tuned.aot")
    assert {16: 15, 512: 5} in looked_at.values()
    assert None in looked_at.values()
    assert kept["seen"] == [{16: 15, 512: 5}, {}, {}]


def test_a_function_that_is_nearly_the_best_serves_alone(source: Path, tmp_path: Path) -> None:
    report = tuned(source, tmp_path / "tuned.aot", options=TuneOptions(tolerance=1.0))
    assert len({name for row in table(tmp_path / "tuned.aot").values() for _, name in row.ranges}) == 1
    exact = tuned(source, tmp_path / "exact.aot", options=TuneOptions(tolerance=0.0))
    assert len({name for row in table(tmp_path / "exact.aot").values() for _, name in row.ranges}) == 2
    assert sum(report.speedups) / len(report.speedups) < sum(exact.speedups) / len(exact.speedups)


@pytest.mark.parametrize(("sustained", "first"), [(True, "slow"), (False, "quick")])
def test_under_sustained_load_the_least_product_of_both_times_wins(
    source: Path, tmp_path: Path, sustained: bool, first: str
) -> None:
    """The quick one is 2% faster in turns of a millisecond, and takes so much power that it is 5% slower for long."""
    times = {"quick": 100.0, "slow": 102.0, BASELINE: 103.0}
    load = {"quick": 1.26, "slow": 1.18, BASELINE: 1.17}
    gpu = scripted(times, wrong=wrong_are("wrong"), bound=True, sustained=load)
    tuned(source, tmp_path / "tuned.aot", gpu, TuneOptions(sustained=sustained))
    row = table(tmp_path / "tuned.aot")[512]
    assert row.ranges == ((None, first),)
    timing = row.timings[0]
    if sustained:
        assert (timing["sustained_us"], timing["baseline_sustained_us"]) == (120.36, 120.51)
    else:
        assert "sustained_us" not in timing


def test_where_torch_is_faster_is_written(source: Path, tmp_path: Path) -> None:
    def us(name: str, s: Signature, m: int) -> float:
        return 2.0 if name == BASELINE and m >= 300 else by_m(name, s, m) * (1.2 if m >= 300 else 1.0)

    tuned(source, tmp_path / "tuned.aot", scripted(us, wrong=wrong_are("wrong")))
    ((first, last),) = table(tmp_path / "tuned.aot")[512].torch_faster
    assert 256 < first <= 512
    assert last is None


def test_up_to_where_it_was_tuned_is_written(source: Path, tmp_path: Path) -> None:
    tuned(source, tmp_path / "tuned.aot", scripted(by_m, wrong=wrong_are("wrong")))
    row = table(tmp_path / "tuned.aot")[512]
    assert row.tuned_to == max(timing["m"] for timing in row.timings) > 1
    assert all(entry.tuned_to is None for entry in table(source).values())


def test_where_torch_is_faster_between_the_points_is_found_by_glances(source: Path, tmp_path: Path) -> None:
    """At M = 136 to 200 it takes another kernel, which no point of tuning has."""

    def us(name: str, s: Signature, m: int) -> float:
        if name == BASELINE:
            return 1.5 if 136 <= m <= 200 else 2.2
        return 2.0 if name == "quick" else 3.0

    jobs: list[Job] = []
    tuned(source, tmp_path / "tuned.aot", scripted(us, wrong=wrong_are("wrong")), done=jobs)
    points_of_tuning = {job.m for job in jobs if job.m and job.signature.n == 512}
    assert not any(136 <= m <= 200 for m in points_of_tuning)
    ((first, last),) = table(tmp_path / "tuned.aot")[512].torch_faster
    assert 128 < first <= 144
    assert 192 <= last < 224


def test_a_function_that_fails_at_a_glance_serves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(backend: Any, job: Job, options: TuneOptions) -> Answer:
        return Answer({"quick": "it hangs"}) if job.glances else do(backend, job, options)

    monkeypatch.setattr(simulated_gpu, "do", failing)
    us = {"wrong": 3.0, "quick": 2.0, "slow": 2.1, BASELINE: 2.2}
    report = tuned(source, tmp_path / "tuned.aot", scripted(us, wrong=wrong_are("wrong")))
    assert report.rejected["quick"] == "it hangs"
    assert {name for row in table(tmp_path / "tuned.aot").values() for _, name in row.ranges} == {"slow"}


def test_nothing_is_glanced_at_where_the_baseline_is_never_near(source: Path, tmp_path: Path) -> None:
    jobs: list[Job] = []
    gpu = scripted({"quick": 2.0, "slow": 2.2, "wrong": 2.0, BASELINE: 3.0}, wrong=wrong_are("wrong"))
    tuned(source, tmp_path / "tuned.aot", gpu, done=jobs)
    assert not any(job.glances for job in jobs)


def test_glances_are_at_what_will_serve(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that was not looked at before."""
    monkeypatch.setattr(session, "_ROUNDS", 0)
    jobs: list[Job] = []
    tuned(
        source, tmp_path / "tuned.aot", scripted({"wrong": 1.95, "quick": 2.0, "slow": 2.2, BASELINE: 2.2}), done=jobs
    )
    glanced = {job.signature.n: job for job in jobs if job.glances}
    assert glanced.keys() == {512, 1024, 2048}
    assert all(names == ("quick",) for job in glanced.values() for _, names in job.glances), (
        "wrong once, it serves nowhere"
    )
    (m, _), *_ = glanced[1024].glances
    assert glanced[1024].without({"quick": "why"}).glances[0] == (m, ())


def test_the_invariant_function_has_no_workspace_and_is_the_best_of_those(tmp_path: Path) -> None:
    names = ["spacious", "little", "plain"]
    rows = [entry(signature(512, 512), [(None, "plain")], candidates=[[16, names], [512, names]], state="ranked")]
    records = [
        gemm_record("spacious", workspaces=((1 << 20, None, True),)),
        gemm_record("little"),
        gemm_record("plain"),
    ]
    write_archive(tmp_path / "in.aot", records, rows)
    gpu = scripted({"spacious": 1.0, "little": 2.0, "plain": 3.0, BASELINE: 2.5})
    tuned(tmp_path / "in.aot", tmp_path / "tuned.aot", gpu)
    row = table(tmp_path / "tuned.aot")[512]
    assert (row.ranges, row.invariant_ranges) == (((None, "spacious"),), ((None, "little"),))
    with Archive.open(tmp_path / "tuned.aot") as archive:
        assert set(archive.functions) == {"spacious", "little"}


WORDS = {"few": "uncut", "many": "uncut", "halves": "cut in two", "quarters": "cut in four"}


def tuned_row(
    folder: Path, patch: pytest.MonkeyPatch, times: Mapping[str, tuple[float, float]]
) -> tuple[Any, set[str]]:
    """What is tuned of an entry, and the functions that are kept. `times` has each candidate's up to M = 100, and
    above; those of one of `WORDS` give equal bits."""
    names = list(times)
    patch.setattr(Pool, "summation", lambda pool, name, of: WORDS.get(name))
    rows = [entry(signature(512, 512), [(None, names[0])], candidates=[[16, names], [512, names]], state="ranked")]
    write_archive(folder / "in.aot", [gemm_record(name) for name in names], rows)
    tuned(folder / "in.aot", folder / "tuned.aot", scripted(lambda name, s, m: dict(times).get(name, (1, 1))[m > 100]))
    with Archive.open(folder / "tuned.aot") as archive:
        return table(folder / "tuned.aot")[512], set(archive.functions)


def test_functions_that_give_equal_bits_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another class is the best single one, and what serves by default is of no class."""
    times = {"few": (1.0, 3.0), "many": (3.0, 1.0), "halves": (1.4, 1.4), "quarters": (1.2, 1.3), "none": (0.8, 0.8)}
    row, kept = tuned_row(tmp_path, monkeypatch, times)
    assert row.ranges == ((None, "none"),)
    (first, second) = row.invariant_ranges
    assert (first[1], second) == ("few", (None, "many"))
    assert 64 <= first[0] < 128
    assert kept == {"none", "few", "many"}


@pytest.mark.parametrize(("behind", "more"), [(0.02, False), (0.04, False), (0.08, True)])
def test_a_function_that_serves_anyway_gives_equal_bits_where_it_is_nearly_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: float, more: bool
) -> None:
    """ "many" serves many rows by default; for few, where "none" does, it is `behind` "few"."""
    times = {"few": (1.0, 3.0), "many": (1.0 + behind, 1.0), "none": (0.9, 1.1)}
    row, kept = tuned_row(tmp_path, monkeypatch, times)
    assert [name for _, name in row.ranges] == ["none", "many"]
    assert [name for _, name in row.invariant_ranges] == (["few", "many"] if more else ["many"])
    assert ("few" in kept) is more


def test_of_two_that_give_equal_bits_as_fast_the_one_that_serves_anyway_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(WORDS, "also", "uncut")
    times = {"also": (1.0, 1.02), "many": (1.01, 1.0), "none": (0.9, 1.1)}
    row, kept = tuned_row(tmp_path, monkeypatch, times)
    assert [name for _, name in row.ranges] == ["none", "many"]
    assert row.invariant_ranges == ((None, "many"),)
    assert kept == {"none", "many"}


def test_the_tuner_knows_which_functions_of_an_archive_give_equal_bits() -> None:
    of = Signature.from_json(signature(512, 512))
    variants = [v for v in provider("own").variants("sm_90a", of) if v.integer("split_k") == 1]
    names = ["unknown", "spacious", *(v.name() for v in variants)]

    def record(name: str) -> Record:
        return Record.from_json(gemm_record(name, workspaces=((8, None, True),) if name == "spacious" else ()))

    pool = Pool("sm_90a", names, record, [])
    assert [pool.summation(name, of) for name in names] == ["unknown", None, *(summation(v, 512) for v in variants)]
    assert len({pool.summation(v.name(), of) for v in variants}) == 2, "what shares tiles, and the rest"


@pytest.fixture
def half_tuned(tmp_path: Path) -> Path:
    """N = 512 was tuned before, and has "early" for few rows and "zealous" for many; N = 1024 was not."""
    rows = [
        entry(signature(512, 512), [(64, "early"), (None, "zealous")]) | {"state": "tuned"},
        entry(signature(1024, 512), [(None, "new")], candidates=[[16, ["new", "zealous"]]]) | {"state": "ranked"},
    ]
    path = tmp_path / "half_tuned.aot"
    write_archive(path, [gemm_record(n) for n in ("early", "zealous", "new")], rows)
    return path


NEARLY = {"new": 2.0, "zealous": 2.01, "early": 9.0, BASELINE: 2.5}

# --- what was tuned before ---


def test_what_serves_already_serves_where_it_is_nearly_the_best(half_tuned: Path, tmp_path: Path) -> None:
    tuned(half_tuned, tmp_path / "tuned.aot", scripted(NEARLY))
    assert table(tmp_path / "tuned.aot")[1024].ranges == ((None, "zealous"),)
    with Archive.open(tmp_path / "tuned.aot") as archive:
        assert set(archive.functions) == {"early", "zealous"}
        assert archive.table("tuning")["environments"][-1]["tolerance"] == 0.01


def test_what_no_longer_serves_has_no_lead(half_tuned: Path, tmp_path: Path) -> None:
    report = tuned(half_tuned, tmp_path / "tuned.aot", scripted(NEARLY, wrong=wrong_are("early", "zealous")))
    assert report.rejected.keys() == {"early", "zealous"}
    assert report.unserved == ["bf16_bf16_bf16_f32_none_n512_k512 on sm_90a"]
    assert table(tmp_path / "tuned.aot")[1024].ranges == ((None, "new"),)


def test_what_is_right_of_a_tuned_entry_serves_on(half_tuned: Path, tmp_path: Path) -> None:
    report = tuned(half_tuned, tmp_path / "tuned.aot", scripted(NEARLY, wrong=wrong_are("early")))
    assert (report.rejected.keys(), report.unserved) == ({"early"}, [])
    assert table(tmp_path / "tuned.aot")[512].ranges == ((None, "zealous"),)


def test_an_entry_of_this_kind_of_gpu_gives_way_whatever_rate_its_driver_said(tmp_path: Path) -> None:
    rows = [
        entry(signature(512, 512), [(None, "slow")], gpu=GPU._replace(memory_gbps=GPU.memory_gbps + 1), tuned_to=512),
        entry(signature(512, 512), [(None, "quick")], candidates=[[16, ["quick", "slow"]]]) | {"state": "ranked"},
    ]
    write_archive(tmp_path / "both.aot", [gemm_record(n) for n in ("quick", "slow")], rows)
    tuned(tmp_path / "both.aot", tmp_path / "tuned.aot")
    with Archive.open(tmp_path / "tuned.aot") as archive:
        assert [each.gpu for each in operation_entries(archive)] == [GPU]


def test_functions_of_other_signatures_are_tried_too(half_tuned: Path, tmp_path: Path) -> None:
    tuned(half_tuned, tmp_path / "tuned.aot", scripted(NEARLY | {"early": 1.0}))
    assert table(tmp_path / "tuned.aot")[1024].ranges == ((None, "early"),)


@pytest.mark.parametrize("tolerance", [-0.1, 1.5, float("nan")])
def test_an_absurd_tolerance_is_refused(tolerance: float) -> None:
    with pytest.raises(TuneError, match="tolerance must be 0 to 1"):
        TuneOptions(tolerance=tolerance)


# --- what is wrong ---


def test_a_function_rejected_once_is_in_no_entry_and_not_in_the_archive(source: Path, tmp_path: Path) -> None:
    report = tuned(source, tmp_path / "tuned.aot")
    assert report.rejected == {"wrong": "bf16_bf16_bf16_f32_none_n1024_k512 M=1: it is wrong"}
    with Archive.open(tmp_path / "tuned.aot") as archive:
        assert set(archive.functions) == {"slow", "quick", "no_candidate"}
        assert archive.table("tuning")["environments"][0]["rejected"] == report.rejected


def test_a_signature_without_a_right_function_is_dropped_and_named(source: Path, tmp_path: Path) -> None:
    gpu = scripted(wrong=lambda s, name: "wrong here" if s.n == 1024 or name == "wrong" else None)
    report = tuned(source, tmp_path / "tuned.aot", gpu)
    assert "bf16_bf16_bf16_f32_none_n1024_k512 on sm_90a" in report.unserved
    assert 1024 not in table(tmp_path / "tuned.aot")


def test_a_function_that_is_wrong_where_it_is_timed_does_not_serve(source: Path, tmp_path: Path) -> None:
    """At M = 64, which is not among those that everything is checked at."""
    checked: list[int] = []

    class Late(SimulatedGpu):
        def check(self, s: Signature, m: int, names: Any) -> dict[str, str]:
            checked.append(m)
            return {"wrong": "relative error 1.0"} if m == 64 and "wrong" in names else {}

    report = tuned(source, tmp_path / "tuned.aot", Late(by_m, noise=0.0))
    assert {1, 3, 16, 17, 64, 333, 512} <= set(checked)
    assert report.rejected.keys() == {"wrong"}


def test_a_signature_whose_functions_all_turn_out_wrong_after_some_were_timed_is_dropped(
    source: Path, tmp_path: Path
) -> None:
    class Late(SimulatedGpu):
        def check(self, s: Signature, m: int, names: Any) -> dict[str, str]:
            return dict.fromkeys(names, "relative error 1.0") if m == 64 and s.n == 1024 else {}

    report = tuned(source, tmp_path / "tuned.aot", Late(by_m, noise=0.0))
    assert report.rejected.keys() == set(NAMES)
    assert len(report.unserved) == 3
    assert not table(tmp_path / "tuned.aot")


# --- what a timing is ---


def test_a_kernel_with_two_speeds_is_judged_by_the_mean() -> None:
    two = Timing.of([10.0, 10.1, 10.05, 13.0, 13.1, 10.0])
    assert two.bimodal
    assert Timing.of([10.0, 10.0, 12.0, 12.0, 10.0]).bimodal  # as many samples as are taken by default
    assert two.us == pytest.approx(sum(two.samples) / 6)
    assert not Timing.of([10.0, 10.1, 10.2, 10.3, 10.4, 10.5]).bimodal
    assert not Timing.of([10.0, 10.1, 10.05, 10.02, 10.0, 30.0]).bimodal  # one outlier is no speed
    assert Timing.of([3.0, 1.0, 2.0]).us == 2.0
    assert Timing.of([3.0, 1.0, 2.0]).spread == 1.0
