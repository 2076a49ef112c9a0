"""What tuning writes, with the GPU replaced by a simulated one: choices, rejections, interruptions, kinds of GPU."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from aot.search.legal import summation
from aot.search.provider import provider
from aot.tune import history, run
from aot.tune.jobs import Answer, Job
from aot.tune.journal import Journal
from aot.tune.options import TuneError, TuneOptions
from aot.tune.pool import Pool
from aot.tune.run import tune_archive
from aot.tune.timing import Timing
from aot.tune.write import Writer
from aot.verify import archive as verify
from runtime.container.archive import Archive
from runtime.device.gpus import Gpu
from runtime.gemm.operation import GEMM
from runtime.gemm.signature import Signature
from runtime.program.record import Record
from runtime.tables.dispatch import Dispatch

from .recording_driver import entry, gemm_record, signature, write_archive
from .simulated_gpu import BASELINE, GPU, SimulatedGpu, machine
from .simulated_tuning import by_m, scripted, tuned, wrong_are

NAMES = ["slow", "quick", "wrong"]
NONE: Mapping[str, str] = {}
EQUAL = [(16, "wrong"), (99, "quick"), (None, "slow")]  # what gives equal bits, by the builder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    candidates = [[16, NAMES], [512, NAMES]]
    rows = [
        entry(signature(n, 512), [(None, "wrong")], candidates=candidates, invariant=EQUAL) | {"state": "ranked"}
        for n in (512, 1024, 2048)
    ]
    path = tmp_path / "candidates.aot"
    write_archive(path, [gemm_record(n) for n in [*NAMES, "no_candidate"]], rows)
    return path


def table(path: Path) -> dict[int, Any]:
    with Archive.open(path) as archive:
        entries = Dispatch.from_json(archive.table("gemm"), GEMM, archive.functions.targets_by_name()).entries
        return {e.signature.n: e for e in entries}


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
    times = {"also": (1.0, 1.02), "many": (1.02, 1.0), "none": (0.9, 1.1)}
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


# --- what was tuned before ---


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


def test_what_serves_already_serves_where_it_is_nearly_the_best(half_tuned: Path, tmp_path: Path) -> None:
    tuned(half_tuned, tmp_path / "tuned.aot", scripted(NEARLY))
    assert table(tmp_path / "tuned.aot")[1024].ranges == ((None, "zealous"),)
    with Archive.open(tmp_path / "tuned.aot") as archive:
        assert set(archive.functions) == {"early", "zealous"}
        assert archive.table("tuning")["environments"][-1]["tolerance"] == 0.01


def test_what_no_longer_serves_has_no_lead(half_tuned: Path, tmp_path: Path) -> None:
    report = tuned(half_tuned, tmp_path / "tuned.aot", scripted(NEARLY, wrong=wrong_are("early")))
    assert report.rejected.keys() == {"early"}
    assert report.unserved == ["bf16_bf16_bf16_f32_none_n512_k512 on sm_90a"]
    assert table(tmp_path / "tuned.aot")[1024].ranges == ((None, "new"),)


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


# --- what comes in between ---


def interrupt_at(n: int, error: type[BaseException] = KeyboardInterrupt) -> Callable[[Job], None]:
    def before(job: Job) -> None:
        if job.signature.n == n:
            raise error

    return before


def test_interrupted_tuning_keeps_what_was_measured_and_goes_on_later(source: Path, tmp_path: Path) -> None:
    assert tuned(source, tmp_path / "half.aot", before=interrupt_at(2048)).interrupted
    rows = table(tmp_path / "half.aot")
    assert [rows[n].state for n in (512, 1024, 2048)] == ["tuned", "tuned", "ranked"]
    # The rest waits with what is known by now: "wrong" is out of its candidates and ranges.
    assert rows[2048].candidates == ((16, ("slow", "quick")), (512, ("slow", "quick")))
    assert rows[2048].ranges == ((None, "slow"),)
    assert rows[2048].invariant_ranges == ((99, "quick"), (None, "slow"))
    report = tuned(tmp_path / "half.aot", tmp_path / "whole.aot")
    assert {key for key, _ in report.measured} == {"bf16_bf16_bf16_f32_none_n2048_k512"}
    assert {row.state for row in table(tmp_path / "whole.aot").values()} == {"tuned"}
    with Archive.open(tmp_path / "whole.aot") as archive:
        assert len(archive.table("tuning")["environments"]) == 2
        assert len(history.tunings(archive)) == 3
    with pytest.raises(TuneError, match="are tuned; build it again"):
        tuned(tmp_path / "whole.aot", tmp_path / "again.aot")


def test_jobs_that_differ_in_anything_have_keys_of_their_own() -> None:
    job = Job(Signature("bf16", "bf16", "bf16", "f32", "none", 512, 512), ("a", "b"), (16,), 16, True)
    other = Signature("bf16", "bf16", "bf16", "f32", "none", 512, 1024)
    changed: dict[str, Any] = {"signature": other, "names": ("a",), "check": (), "m": 17, "sustained": False}
    assert changed.keys() == {field.name for field in dataclasses.fields(Job)}
    others = [dataclasses.replace(job, **{field: value}) for field, value in changed.items()]
    assert len({job.key(), *(other.key() for other in others)}) == 1 + len(changed)
    assert job.without({"b": "wrong"}) == dataclasses.replace(job, names=("a",))


class Killed(BaseException):
    pass


def test_a_process_that_is_killed_loses_little(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_WRITE_EVERY_S", -1.0)
    with pytest.raises(Killed):
        tuned(source, tmp_path / "half.aot", before=interrupt_at(2048, Killed))
    rows = table(tmp_path / "half.aot")
    assert [rows[n].state for n in (512, 1024, 2048)] == ["tuned", "tuned", "ranked"]


def killed_after(jobs: int, done: list[Job]) -> Callable[[Job], None]:
    def before(job: Job) -> None:
        if len(done) == jobs:
            raise Killed

    return before


@pytest.mark.parametrize("after", [0, 1, 7, 20])
@pytest.mark.parametrize("error", [Killed, KeyboardInterrupt])
def test_the_same_command_goes_on_and_gives_the_same_table(
    source: Path, tmp_path: Path, after: int, error: type[BaseException]
) -> None:
    tuned(source, tmp_path / "at_once.aot")
    whole: list[Job] = []
    tuned(source, tmp_path / "counted.aot", done=whole)
    first: list[Job] = []

    def before(job: Job) -> None:
        if len(first) == after:
            raise error

    try:
        assert tuned(source, tmp_path / "tuned.aot", before=before, done=first).interrupted
    except Killed:
        assert error is Killed
    journal = tmp_path / "tuned.aot.tuning"
    assert len(journal.read_text().splitlines()) == 1 + after
    with journal.open("a") as file:
        file.write('{"job": "cut sh')
    second: list[Job] = []
    with pytest.raises(Killed):
        tuned(source, tmp_path / "tuned.aot", before=killed_after(2, second), done=second)
    journal.write_text(journal.read_text()[:-1])  # of the last line the end alone is missing
    third: list[Job] = []
    tuned(source, tmp_path / "tuned.aot", done=third)
    assert first + second[:-1] + third == whole
    assert (tmp_path / "tuned.aot").read_bytes() == (tmp_path / "at_once.aot").read_bytes()
    assert not journal.exists()


def test_a_journal_of_other_options_is_begun_anew(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        tuned(source, tmp_path / "tuned.aot", before=interrupt_at(2048, Killed))
    jobs: list[Job] = []
    tuned(source, tmp_path / "tuned.aot", options=TuneOptions(repeats=3), done=jobs)
    assert {job.signature.n for job in jobs} == {512, 1024, 2048}


def test_the_journal_is_of_the_file_that_is_tuned_though_another_takes_its_name(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    real = run.entries_to_tune

    def replace(*given: Any) -> Any:
        (tmp_path / "new.aot").write_bytes(b"another archive")
        (tmp_path / "new.aot").replace(source)
        return real(*given)

    monkeypatch.setattr(run, "entries_to_tune", replace)
    with pytest.raises(Killed):
        tuned(source, tmp_path / "tuned.aot", before=interrupt_at(1024, Killed))
    head = json.loads((tmp_path / "tuned.aot.tuning").read_text().splitlines()[0])
    assert head["archive"] == digest


def test_answers_of_another_tuning_with_the_same_output_are_none_of_this_one(tmp_path: Path) -> None:
    """Two at a time append to one file, of which the second wrote the head."""
    job = Job(Signature.from_json(signature(512, 512)), ("quick",), (1,))
    one = Journal(tmp_path / "journal", {"archive": "one"})
    other = Journal(tmp_path / "journal", {"archive": "other"})
    one.keep(job, Answer())
    other.keep(dataclasses.replace(job, m=3), Answer())
    again = Journal(tmp_path / "journal", {"archive": "other"})
    assert again.answer(job) is None
    assert again.answer(dataclasses.replace(job, m=3)) is not None


@pytest.mark.parametrize("every_s", [-1.0, 60.0])
def test_ctrl_c_while_writing_comes_after_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_s: float
) -> None:
    real = Writer.write

    def write(self: Writer, *given: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        real(self, *given)

    monkeypatch.setattr(run, "_WRITE_EVERY_S", every_s)
    monkeypatch.setattr(Writer, "write", write)
    report = tuned(source, tmp_path / "half.aot")
    assert report.interrupted == (every_s < 0)
    states = [row.state for row in table(tmp_path / "half.aot").values()]
    assert states.count("tuned") == (1 if every_s < 0 else 3)


# --- kinds of GPU ---

OTHER = Gpu("another", 78, 4000)


def test_an_archive_tuned_on_one_kind_is_tuned_for_another_beside_it(source: Path, tmp_path: Path) -> None:
    tuned(source, tmp_path / "first.aot")
    tuned(
        tmp_path / "first.aot", tmp_path / "both.aot", scripted({"quick": 2.0, "slow": 3.0, BASELINE: 1.0}), kind=OTHER
    )
    with Archive.open(tmp_path / "both.aot") as archive:
        found = Dispatch.from_json(archive.table("gemm"), GEMM, archive.functions.targets_by_name())
    assert [(e.signature.n, e.gpu) for e in found.entries] == [(n, g) for n in (512, 1024, 2048) for g in (GPU, OTHER)]
    for e in found.entries:
        assert [name for _, name in e.ranges] == (["quick", "slow"] if e.gpu == GPU else ["quick"])
    for kind in (GPU, OTHER):
        with pytest.raises(TuneError, match="are tuned; build it again"):
            tuned(tmp_path / "both.aot", tmp_path / "again.aot", kind=kind)


@pytest.mark.parametrize("tuned_first", [True, False])
@pytest.mark.parametrize("kind", [GPU, Gpu("another", 114, 2039)])
def test_candidates_beside_what_was_tuned_before_become_one_entry(tmp_path: Path, tuned_first: bool, kind: Gpu) -> None:
    before = entry(signature(512, 512), [(None, "slow")], gpu=Gpu("another", 114, 2039))
    waits = entry(signature(512, 512), [(None, "slow")], candidates=[[16, ["slow", "quick"]]]) | {"state": "ranked"}
    rows = [before, waits] if tuned_first else [waits, before]
    write_archive(tmp_path / "both.aot", [gemm_record(n) for n in ("slow", "quick")], rows)
    tuned(tmp_path / "both.aot", tmp_path / "tuned.aot", kind=kind)
    with Archive.open(tmp_path / "tuned.aot") as archive:
        found = Dispatch.from_json(archive.table("gemm"), GEMM).entries
    assert {(e.gpu, e.state) for e in found} == {(kind, "tuned"), (before["gpu"], "tuned")}
    assert len(found) == len({e.gpu for e in found})
    assert next(e for e in found if e.gpu == kind).best(16) == "quick"


def test_a_gpu_of_another_target_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(TuneError, match=r"compute capability 10\.0, the archive has sm_90a"):
        tune_archive(source, tmp_path / "t.aot", machine=machine(scripted())._replace(capability=(10, 0)))


# --- history ---


def test_the_history_says_what_was_seen_and_servers_do_not_read_it(source: Path, tmp_path: Path) -> None:
    tuned(source, tmp_path / "tuned.aot")
    with Archive.open(tmp_path / "tuned.aot") as archive:
        rows = history.tunings(archive)
        assert list(archive.tables) == ["gemm", "history", "tuning"]
        assert [len(block.blobs) for block in archive.blocks if block.kind == "tables"] == [1, 1, 1]
        assert {c.subject: c.detail for c in verify.verify(archive)}["history table"] == "3 tunings"
    assert [row["signature"][-9:] for row in rows] == ["n512_k512", "1024_k512", "2048_k512"]
    point, names = rows[0]["points"][0], rows[0]["names"]
    assert point["m"] == 16
    assert {names[i]: ticks for i, ticks, *_ in point["finalists"]} == {"wrong": 195, "quick": 200, "slow": 220}
    assert rows[1]["rejected"] == [
        [rows[1]["names"].index("wrong"), "bf16_bf16_bf16_f32_none_n1024_k512 M=1: it is wrong"]
    ]


def test_what_is_written_on_the_way_keeps_the_history_of_before(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output may be the input, and the tuning may be killed."""
    path = tmp_path / "tuned.aot"
    tuned(source, path)
    monkeypatch.setattr(run, "_WRITE_EVERY_S", -1.0)
    with pytest.raises(Killed):
        tuned(path, path, kind=Gpu("another", 114, 2039), before=interrupt_at(1024, Killed))
    with Archive.open(path) as archive:
        assert len(Dispatch.from_json(archive.table("gemm"), GEMM).entries) == 4
        assert len(history.tunings(archive)) == 3
        assert [len(block.blobs) for block in archive.blocks if block.kind == "tables"] == [1, 1, 1]
    tuned(path, path, kind=Gpu("another", 114, 2039))
    with Archive.open(path) as archive:
        assert {row["gpu"] for row in history.tunings(archive)} == {"made up", "another"}


def test_no_history_leaves_it_out(source: Path, tmp_path: Path) -> None:
    tuned(source, tmp_path / "tuned.aot", options=TuneOptions(history=False))
    with Archive.open(tmp_path / "tuned.aot") as archive:
        assert "history" not in archive.tables


def test_a_history_that_is_too_large_loses_the_slowest_of_what_was_screened() -> None:
    point = {"m": 1, "baseline": ["t", 1, 1, 0, 0], "finalists": [[0, 1, 1, 0, 0]]}
    screened = [[i, 7919 * i * i % 10007 + i] for i in range(1, 2000)]
    row = {
        "signature": "s",
        "target": "t",
        "gpu": "g",
        "names": [],
        "points": [point | {"screened": screened}],
        "rejected": [],
    }
    whole = {"schema": 1, "tunings": [row]}
    assert history.fitted(whole, 1 << 20) == whole
    fitted = history.fitted(whole, 2000)
    assert fitted is not None
    left = fitted["tunings"][0]["points"][0]["screened"]
    assert 0 < len(left) < 2000
    assert left == screened[: len(left)]
    assert history.fitted(whole, 10) is None


@pytest.mark.parametrize("damage", ["names", "points", "rejected", "gpu"])
def test_a_damaged_history_is_found(source: Path, tmp_path: Path, damage: str) -> None:
    tuned(source, tmp_path / "tuned.aot")
    with Archive.open(tmp_path / "tuned.aot") as archive:
        found = json.loads(json.dumps(archive.table("history")))
        found["tunings"][1][damage] = {"names": [], "points": [{"m": 0}], "rejected": [[99, "x"]], "gpu": 7}[damage]

        class Damaged:
            path, tables = archive.path, archive.tables

            def table(self, name: str) -> Any:
                return found

        with pytest.raises(Exception, match=r"table history: tunings\[1\]"):
            history.tunings(Damaged())  # type: ignore[arg-type]


# --- what a timing is ---


def test_a_kernel_with_two_speeds_is_judged_by_the_mean() -> None:
    two = Timing.of([10.0, 10.1, 10.05, 13.0, 13.1, 10.0])
    assert two.bimodal
    assert two.us == pytest.approx(sum(two.samples) / 6)
    assert not Timing.of([10.0, 10.1, 10.2, 10.3, 10.4, 10.5]).bimodal
    assert not Timing.of([10.0, 10.1, 10.05, 10.02, 10.0, 30.0]).bimodal  # one outlier is no speed
    assert Timing.of([3.0, 1.0, 2.0]).us == 2.0
    assert Timing.of([3.0, 1.0, 2.0]).spread == 1.0
