"""Tuning that was interrupted, that goes on, or that comes after another: what is kept, and the history of it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aot.tune import history, run
from aot.tune.jobs import Answer, Job
from aot.tune.journal import Journal
from aot.tune.options import TuneError, TuneOptions
from aot.tune.run import tune_archive
from aot.tune.write import Writer
from aot.verify import archive as verify
from runtime.container.archive import Archive
from runtime.device.gpus import Gpu
from runtime.gemm.operation import GEMM
from runtime.gemm.signature import Signature
from runtime.tables.dispatch import Dispatch

from .recording_driver import entry, gemm_record, signature, write_archive
from .simulated_gpu import BASELINE, GPU, machine
from .simulated_tuning import scripted, tuned
from .tuned_tables import source as source
from .tuned_tables import table


def interrupt_at(n: int, error: type[BaseException] = KeyboardInterrupt) -> Callable[[Job], None]:
    def before(job: Job) -> None:
        if job.signature.n == n:
            raise error

    return before


# --- what comes in between ---


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


@pytest.mark.parametrize("error", [KeyboardInterrupt, TuneError])
@pytest.mark.parametrize("taken_up", [3, None])
def test_tuning_that_has_not_taken_up_all_of_before_leaves_the_output_as_it_is(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken_up: int | None, error: type[BaseException]
) -> None:
    """What ends it comes while answers of before are taken up, or while the first new one is measured."""
    out = tmp_path / "tuned.aot"
    assert tuned(source, out, before=interrupt_at(2048)).interrupted
    before, real, asked = out.read_bytes(), Journal.answer, list[Job]()

    def answer(journal: Journal, job: Job) -> Answer | None:
        asked.append(job)
        if len(asked) == taken_up:
            raise error
        return real(journal, job)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "answer", answer)
        ends = pytest.raises(TuneError) if error is TuneError else contextlib.nullcontext()
        with ends:
            assert tuned(source, out, before=interrupt_at(2048, error)).interrupted
    assert taken_up is None or out.read_bytes() == before
    assert [row.state for row in table(out).values()] == [row.state for row in table_of(before, tmp_path).values()]
    tuned(source, out)
    assert {row.state for row in table(out).values()} == {"tuned"}


@pytest.mark.parametrize("missing", [False, True])
def test_tuning_that_finds_part_of_what_the_output_has_writes_only_where_that_is_missing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: bool
) -> None:
    """As where fewer GPUs go on with it: something is new, but what is complete is less than the output has."""
    out, journal, done = tmp_path / "tuned.aot", tmp_path / "tuned.aot.tuning", list[Job]()
    assert tuned(source, out, before=interrupt_at(2048), done=done).interrupted
    head, *lines = journal.read_text().splitlines(keepends=True)
    of = {name: value for name, value in json.loads(head).items() if name != "format"}
    gone = {Journal(tmp_path / "other", of)._key(job) for job in done if job.signature.n == 512}
    kept = [line for line in lines if json.loads(line).get("job") not in gone]
    assert 1 < len(kept) == len(lines) - len(gone)
    journal.write_text("".join([head, *kept]))
    if missing:
        out.unlink()
    monkeypatch.setattr(run, "_WRITE_EVERY_S", -1.0)
    again = list[Job]()

    def before(job: Job) -> None:
        if len(again) == 2:
            raise KeyboardInterrupt

    assert tuned(source, out, before=before, done=again).interrupted
    assert {job.signature.n for job in again} <= {512, 2048}
    states = {n: row.state for n, row in table(out).items()}
    assert states == {512: "ranked" if missing else "tuned", 1024: "tuned", 2048: "ranked"}


def table_of(archive: bytes, folder: Path) -> dict[int, Any]:
    (folder / "before.aot").write_bytes(archive)
    return table(folder / "before.aot")


def test_jobs_that_differ_in_anything_have_keys_of_their_own() -> None:
    job = Job(Signature("bf16", "bf16", "bf16", "f32", "none", 512, 512), ("a", "b"), (16,), 16, True)
    other = Signature("bf16", "bf16", "bf16", "f32", "none", 512, 1024)
    changed: dict[str, Any] = {"signature": other, "names": ("a",), "check": (), "m": 17, "sustained": False}
    changed["glances"] = ((16, ("a",)),)
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
    assert sum('"job"' in line for line in journal.read_text().splitlines()) == after
    with journal.open("a") as file:
        file.write('{"job": "cut sh')
    second: list[Job] = []
    with pytest.raises(Killed):
        tuned(source, tmp_path / "tuned.aot", before=killed_after(2, second), done=second)
    journal.write_text(journal.read_text()[:-1])  # of the last line the end alone is missing
    third: list[Job] = []
    tuned(source, tmp_path / "tuned.aot", done=third)
    assert sorted(job.key() for job in first + second[:-1] + third) == sorted(job.key() for job in whole)
    assert (tmp_path / "tuned.aot").read_bytes() == (tmp_path / "at_once.aot").read_bytes()
    assert not journal.exists()


def test_a_gpu_measures_for_one_signature_while_the_next_job_of_another_is_found(source: Path, tmp_path: Path) -> None:
    jobs: list[Job] = []
    tuned(source, tmp_path / "tuned.aot", done=jobs)
    order = [job.signature.n for job in jobs]
    last = {n: len(order) - order[::-1].index(n) for n in order}
    assert order[:4] == [512, 1024, 512, 1024]
    assert order.index(2048) > min(last[512], last[1024])


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


OTHER = Gpu("another", 78, 4000)

# --- kinds of GPU ---


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
        tuned(path, path, kind=Gpu("another", 114, 2039), before=interrupt_at(2048, Killed))
    with Archive.open(path) as archive:
        assert len(Dispatch.from_json(archive.table("gemm"), GEMM).entries) == 5  # two of three for the other kind
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


def test_tuning_on_another_kind_times_at_no_more_points(source: Path, tmp_path: Path) -> None:
    """What it begins with are not all points of before, of which some were added."""
    first, second = list[Job](), list[Job]()
    tuned(source, tmp_path / "one.aot", done=first)
    tuned(tmp_path / "one.aot", tmp_path / "both.aot", kind=Gpu("another", 114, 2039), done=second)
    assert 0 < sum(job.m > 0 for job in second) <= sum(job.m > 0 for job in first)
