"""Tuning forms of a universal table: every function is checked, and times correct the estimates that choose."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from aot.pack.write import Package
from aot.search import universal
from aot.search.costs import Machine
from aot.search.estimates import Estimates
from aot.search.provider import PROVIDERS, provider
from aot.search.variants import Variant
from aot.tune import forms, history
from aot.tune.jobs import Job
from aot.tune.options import TuneError
from aot.tune.write import TuneReport
from runtime.container.archive import Archive
from runtime.device.gpus import Gpu
from runtime.gemm.signature import Signature
from runtime.gemm.universal import PredictedEntry, Universal
from runtime.numbers.scaling import SCALE_BLOCK

from .recording_driver import cubin, entry, gemm_record, signature, table
from .simulated_gpu import BASELINE, GPU, SimulatedGpu, machine
from .simulated_tuning import tuned, wrong_are

PLAIN = Signature("bf16", "bf16", "bf16", "f32", "none", 6144, 4096)
BIAS = dataclasses.replace(PLAIN, epilogue="bias")
NOBODY = wrong_are()


def checked(table: dict[str, Any], gpus: Sequence[str]) -> dict[str, Any]:
    return table | {"forms": [form | ({"checked_on": gpus} if gpus else {}) for form in table["forms"]]}


def checked_on(path: Path) -> list[tuple[str, ...]]:
    """Of each form the kinds of GPU on which its functions were found right."""
    return [form.checked_on for _, form in read(path).forms]


def write(
    path: Path,
    chosen: Sequence[universal.Chosen],
    rows: Sequence[dict[str, object]] = (),
    gpus: Sequence[str] = (),
) -> Path:
    package = Package()
    for name, target in {v.name(): v.target for c in chosen for v in c.variants}.items():
        package.add_function(gemm_record(name, target=target), cubin(name))
    package.set_table("gemm", table(list(rows)))
    package.set_table("universal", checked(universal.table(chosen), gpus))
    package.write(path)
    return path


@pytest.fixture(scope="module")
def chosen() -> list[universal.Chosen]:
    return universal.choose_all([PLAIN, BIAS], "sm_90a", 10)


@pytest.fixture
def source(tmp_path: Path, chosen: list[universal.Chosen]) -> Path:
    return write(tmp_path / "universal.aot", chosen)


def biased(name: str) -> float:
    """The true time over the estimated one of a function, the same for alike functions of both forms."""
    plain = name.replace(".bias", "")
    return math.exp(random.Random(plain).gauss(0, 0.15))


def truth(chosen: Sequence[universal.Chosen]) -> Callable[[str, Signature, int], float]:
    variants = {v.name(): v for c in chosen for v in c.variants}
    estimates = {name: Estimates([v]) for name, v in variants.items()}

    def time_of(name: str, s: Signature, m: int) -> float:
        return 50.0 if name == BASELINE else estimates[name].us(s, m)[0] * biased(name)

    return time_of


def gpu(chosen: Sequence[universal.Chosen], wrong: Callable[[Signature, str], str | None] = NOBODY) -> SimulatedGpu:
    return SimulatedGpu(truth(chosen), wrong=wrong)


def unlike(of: SimulatedGpu) -> SimulatedGpu:
    """A GPU to which functions are what their opposites are to another."""
    return SimulatedGpu(lambda name, s, m: of.time_of(name, s, m) / biased(name) ** 2, wrong=of.wrong)


def read(path: Path) -> Universal:
    with Archive.open(path) as archive:
        return Universal.from_json(archive.table("universal"), archive.functions.targets_by_name())


def predicted(path: Path, wanted: Signature) -> PredictedEntry:
    found = read(path).entry(wanted, (9, 0), GPU)
    assert found is not None
    return found


def test_all_functions_are_checked_and_marked_so(source: Path, tmp_path: Path, chosen: list[universal.Chosen]) -> None:
    done: list[Job] = []
    report = tuned(source, tmp_path / "tuned.aot", gpu(chosen), done=done)
    assert isinstance(report, TuneReport)
    assert (report.forms, report.measured, report.rejected) == (2, [], {})
    assert checked_on(tmp_path / "tuned.aot") == [("made up",)] * 2
    for c in chosen:
        mine = [job for job in done if job.signature.epilogue == c.form.epilogue]
        checks = [job for job in mine if not job.m]
        assert len({(job.signature.n, job.signature.k) for job in checks}) == 3
        for job in mine:
            assert set(job.names) == {v.name() for v in c.variants}
            assert job.check == ((1, 3, 17, 333) if not job.m else (job.m,))
    times = [job for job in done if job.m]
    assert all(job.sustained for job in times)
    assert len(times) == 48, "alike forms share what is measured"
    assert [sum(low <= job.m <= high for job in times) for low, high in ((1, 64), (65, 511), (512, 8192))] == [16] * 3
    assert max(job.signature.flops(job.m) for job in times) <= 2**39


def test_functions_of_other_extents_are_checked_at_their_own(tmp_path: Path) -> None:
    """Swapped gates take N in multiples of 128, at which no tile of the others hangs over."""
    gated = dataclasses.replace(PLAIN, epilogue="swiglu")
    chosen = universal.choose_all([gated], "sm_90a", 10)
    by_swap = {v.name(): bool(v.options.get("swap")) for v in chosen[0].variants}
    assert {*by_swap.values()} == {False, True}
    done: list[Job] = []
    report = tuned(write(tmp_path / "forms.aot", chosen), tmp_path / "tuned.aot", gpu(chosen), done=done)
    assert isinstance(report, TuneReport)
    checks = [(job.signature.n, {by_swap[name] for name in job.names}) for job in done if not job.m]
    of_others, of_swapped = ([(n * times, {swap}) for times in (1, 9, 37)] for n, swap in ((16, False), (128, True)))
    assert sorted(checks, key=lambda check: check[0]) == sorted(of_others + of_swapped, key=lambda check: check[0])
    assert all({by_swap[name] for name in job.names} == {False, True} for job in done if job.m)


def losses(path: Path, chosen: Sequence[universal.Chosen], form: Signature) -> list[float]:
    """How far what is predicted best is behind the best, in logarithms, at problems that tuning does not draw."""
    us = truth(chosen)
    names = next([v.name() for v in c.variants] for c in chosen if c.form.epilogue == form.epilogue)
    chance, found = random.Random(5), []
    for _ in range(60):
        m = round(2 ** chance.uniform(0, 13))
        wanted = dataclasses.replace(form, n=chance.randrange(8, 400) * 64, k=chance.randrange(8, 200) * 64)
        best = min(us(name, wanted, m) for name in names)
        found.append(math.log(us(predicted(path, wanted).best(m), wanted, m) / best))
    return found


@pytest.mark.parametrize("form", [PLAIN, BIAS], ids=["none", "bias"])
def test_times_correct_the_estimates_of_every_alike_form(
    source: Path, tmp_path: Path, chosen: list[universal.Chosen], form: Signature
) -> None:
    before = losses(source, chosen, form)
    tuned(source, tmp_path / "tuned.aot", gpu(chosen))
    after = losses(tmp_path / "tuned.aot", chosen, form)
    assert sum(after) / 60 < 0.015
    assert sum(before) / 60 > 5 * sum(after) / 60


def test_times_of_another_gpu_correct_estimates_for_that_gpu(
    tmp_path: Path, chosen: list[universal.Chosen], source: Path
) -> None:
    """Here every function takes what is estimated for a GPU of fewer SMs: there is nothing to correct."""
    small = Gpu("small", 60, 1500)
    estimates = {v.name(): Estimates([v]) for c in chosen for v in c.variants}
    machine = Machine(small.multiprocessors, small.memory_gbps)

    def time_of(name: str, s: Signature, m: int) -> float:
        return 50.0 if name == BASELINE else estimates[name].us(s, m, machine)[0]

    tuned(source, tmp_path / "tuned.aot", SimulatedGpu(time_of, noise=0.0), kind=small)
    for m, n, k in ((3, 4096, 4096), (100, 8192, 1024), (2000, 3072, 8192)):
        wanted = dataclasses.replace(PLAIN, n=n, k=k)
        found = read(tmp_path / "tuned.aot").entry(wanted, (9, 0), small)
        assert found is not None
        for name, us in found.us(m).items():
            assert us == pytest.approx(time_of(name, wanted, m), rel=0.001), (name, m)


def test_a_wrong_function_is_in_no_form_and_not_in_the_archive(
    source: Path, tmp_path: Path, chosen: list[universal.Chosen]
) -> None:
    wrong = chosen[0].variants[3].name()
    report = tuned(source, tmp_path / "tuned.aot", gpu(chosen, wrong_are(wrong)))
    assert set(report.rejected) == {wrong}
    with Archive.open(tmp_path / "tuned.aot") as archive:
        assert wrong not in archive.functions
        assert len(archive.functions) == sum(len(c.variants) for c in chosen) - 1
    found = predicted(tmp_path / "tuned.aot", PLAIN)
    assert wrong not in found.names
    assert set(found.us(100)) == set(found.names)


def test_a_form_without_a_right_function_is_dropped(
    source: Path, tmp_path: Path, chosen: list[universal.Chosen]
) -> None:
    wrong = wrong_are(*(v.name() for v in chosen[1].variants))
    tuned(source, tmp_path / "tuned.aot", gpu(chosen, wrong))
    assert [words[4] for words, _ in read(tmp_path / "tuned.aot").forms] == [chosen[0].form.epilogue]
    nothing = wrong_are(*(v.name() for c in chosen for v in c.variants))
    tuned(source, tmp_path / "none.aot", gpu(chosen, nothing))
    with Archive.open(tmp_path / "none.aot") as archive:
        assert "universal" not in archive.tables
        assert not archive.functions


def test_what_was_interrupted_is_not_marked_and_goes_on_later(
    source: Path, tmp_path: Path, chosen: list[universal.Chosen]
) -> None:
    jobs: list[Job] = []

    def before(job: Job) -> None:
        jobs.append(job)
        if len(jobs) == 40:
            raise KeyboardInterrupt

    assert tuned(source, tmp_path / "tuned.aot", gpu(chosen), before=before).interrupted
    assert checked_on(tmp_path / "tuned.aot") == [(), ()]
    left: list[Job] = []
    tuned(source, tmp_path / "tuned.aot", gpu(chosen), done=left)
    assert checked_on(tmp_path / "tuned.aot") == [("made up",)] * 2
    assert len(left) == 2 * 3 + 48 - 39
    whole = tmp_path / "whole.aot"
    tuned(source, whole, gpu(chosen))
    with Archive.open(whole) as a, Archive.open(tmp_path / "tuned.aot") as b:
        assert a.table("universal") == b.table("universal")


def test_what_is_checked_on_a_kind_is_not_checked_again(
    source: Path, tmp_path: Path, chosen: list[universal.Chosen]
) -> None:
    tuned(source, tmp_path / "one.aot", gpu(chosen))
    with pytest.raises(TuneError, match="its forms were tuned on this kind of GPU"):
        tuned(tmp_path / "one.aot", tmp_path / "two.aot", gpu(chosen))
    tuned(tmp_path / "one.aot", tmp_path / "two.aot", unlike(gpu(chosen)), kind=Gpu("another", 114, 2039))
    assert checked_on(tmp_path / "two.aot") == [("made up", "another")] * 2
    with Archive.open(tmp_path / "one.aot") as one, Archive.open(tmp_path / "two.aot") as two:
        assert one.table("universal")["programs"] == two.table("universal")["programs"], "the first kind's corrections"


def test_entries_and_forms_are_tuned_together(tmp_path: Path, chosen: list[universal.Chosen]) -> None:
    names = [v.name() for v in chosen[0].variants]
    rows = [entry(signature(512, 512), [(None, names[0])], candidates=[[16, names]]) | {"state": "ranked"}]
    source = write(tmp_path / "both.aot", chosen, rows)
    report = tuned(source, tmp_path / "tuned.aot", gpu(chosen))
    assert report.forms == 2
    assert report.measured
    assert checked_on(tmp_path / "tuned.aot") == [("made up",)] * 2
    with Archive.open(tmp_path / "tuned.aot") as archive:
        assert set(names) <= set(archive.functions), "what loses for the entry is the form's still"
        assert archive.table("gemm")["entries"][0]["state"] == "tuned"


def test_forms_that_another_kind_checked_wait_for_the_entries(tmp_path: Path, chosen: list[universal.Chosen]) -> None:
    names = [v.name() for v in chosen[0].variants]
    rows = [entry(signature(512, 512), [(None, names[0])], candidates=[[16, names]]) | {"state": "ranked"}]
    another = Gpu("another", 114, 2039)
    source = write(tmp_path / "both.aot", chosen, rows, gpus=["made up"])
    report = tuned(source, tmp_path / "entries.aot", gpu(chosen), kind=another)
    assert (report.forms, report.forms_left) == (0, 2)
    assert report.measured
    assert checked_on(tmp_path / "entries.aot") == [("made up",)] * 2
    report = tuned(tmp_path / "entries.aot", tmp_path / "all.aot", gpu(chosen), kind=another)
    assert (report.forms, report.forms_left, report.measured) == (2, 0, [])
    assert checked_on(tmp_path / "all.aot") == [("made up", "another")] * 2
    with pytest.raises(TuneError, match="are tuned; build it again"):
        tuned(tmp_path / "all.aot", tmp_path / "more.aot", gpu(chosen), kind=another)


def test_entries_of_another_target_do_not_hide_that_forms_are_tuned(
    tmp_path: Path, chosen: list[universal.Chosen]
) -> None:
    variant = dataclasses.replace(chosen[0].variants[0], target="sm_100a")
    package = Package()
    package.add_function(gemm_record(variant.name(), target="sm_100a"), cubin(variant.name()))
    for v in {v.name(): v for c in chosen for v in c.variants}.values():
        package.add_function(gemm_record(v.name(), target=v.target), cubin(v.name()))
    rows = [entry(signature(512, 512), [(None, variant.name())], target="sm_100a")]
    package.set_table("gemm", table(rows))
    package.set_table("universal", checked(universal.table(chosen), ["made up"]))
    package.write(tmp_path / "both.aot")
    with pytest.raises(TuneError, match="its forms were tuned on this kind of GPU"):
        tuned(tmp_path / "both.aot", tmp_path / "tuned.aot", gpu(chosen))


def test_forms_of_other_targets_stay_as_they_are(tmp_path: Path, chosen: list[universal.Chosen]) -> None:
    names = {v.name(): "sm_100a" for v in chosen[0].variants}
    variants = [dataclasses.replace(v, target="sm_100a") for v in chosen[0].variants]
    other = [[v.name(), 8, 8, 1 << 20] for v in variants]
    package = Package()
    for c in chosen:
        for v in c.variants:
            package.add_function(gemm_record(v.name()), cubin(v.name()))
    for v in variants:
        package.add_function(gemm_record(v.name(), target="sm_100a"), cubin(v.name()))
    obj = universal.table(chosen)
    row = obj["forms"][0] | {"target": "sm_100a", "functions": other}
    row.pop("equal_bits", None)
    obj["forms"].append(row)
    package.set_table("gemm", table([]))
    package.set_table("universal", obj)
    package.write(tmp_path / "two.aot")
    assert len(names) == len(other)
    report = tuned(tmp_path / "two.aot", tmp_path / "tuned.aot", gpu(chosen))
    assert report.forms == 2
    assert checked_on(tmp_path / "tuned.aot") == [("made up",), ("made up",), ()], "the other ran nowhere"
    with Archive.open(tmp_path / "tuned.aot") as archive:
        after = archive.table("universal")
    kept = after["forms"][2]
    assert {k: v for k, v in kept.items() if k != "program"} == {k: v for k, v in row.items() if k != "program"}
    assert after["programs"][kept["program"]] == obj["programs"][row["program"]]


@pytest.mark.parametrize("known", [False, True])
def test_functions_that_no_provider_knows_are_checked_and_keep_their_estimates(
    tmp_path: Path, chosen: list[universal.Chosen], known: bool
) -> None:
    package, kept = Package(), chosen[0].variants[0].name() if known else "kept"
    for name in ("one", "other", kept):
        package.add_function(gemm_record(name), cubin(name))
    costs = {"constants": [7, 9], "operations": "", "operands": [], "results": [6, 7, 6]}
    words = {"a": "bf16", "b": "bf16", "d": "bf16", "accumulator": "f32", "epilogue": "none", "scaling": "none"}
    row = {
        "form": words | {"b_major": "k", "overlap": "serial", "batched": False},
        "target": "sm_90a",
        "functions": [["one", 8, 8, 1 << 20], ["other", 8, 8, 1 << 20], [kept, 8, 8, 1 << 20]],
        "equal_bits": [1, 2, 2],
        "program": 0,
    }
    package.set_table("gemm", table([]))
    package.set_table("universal", {"schema": 2, "forms": [row], "programs": [costs]})
    package.write(tmp_path / "foreign.aot")
    backend = SimulatedGpu(lambda name, s, m: 5.0, wrong=wrong_are("one"))
    assert tuned(tmp_path / "foreign.aot", tmp_path / "tuned.aot", backend).forms == 1
    left = predicted(tmp_path / "tuned.aot", PLAIN)
    assert left.us(3) == {"other": 9.0, kept: 7.0}
    assert left.invariant == ("other", kept)
    assert checked_on(tmp_path / "tuned.aot") == [("made up",)]


def foreign(path: Path, functions: Sequence[tuple[str, int, int, int]]) -> Path:
    package = Package()
    for name, *_ in functions:
        package.add_function(gemm_record(name), cubin(name))
    costs = {"constants": [7], "operations": "", "operands": [], "results": [6] * len(functions)}
    words = {"a": "bf16", "b": "bf16", "d": "bf16", "accumulator": "f32", "epilogue": "none", "scaling": "none"}
    form = words | {"b_major": "k", "overlap": "serial", "batched": False}
    row = {"form": form, "target": "sm_90a", "functions": [list(f) for f in functions], "program": 0}
    row["equal_bits"] = [1] * len(functions)
    package.set_table("gemm", table([]))
    package.set_table("universal", {"schema": 2, "forms": [row], "programs": [costs]})
    package.write(path)
    return path


def test_no_function_is_asked_for_more_columns_than_it_takes(tmp_path: Path) -> None:
    source = foreign(tmp_path / "foreign.aot", [("wide", 8, 8, 1 << 20), ("narrow", 8, 8, 2048)])
    done: list[Job] = []
    backend = SimulatedGpu(
        lambda name, s, m: 5.0, wrong=lambda s, name: "it faults" if name == "narrow" and s.n > 2048 else None
    )
    assert tuned(source, tmp_path / "tuned.aot", backend, done=done).rejected == {}
    assert {job.names for job in done} == {("wide",), ("wide", "narrow")}


def test_extents_that_no_problem_is_small_enough_for_end_the_search(tmp_path: Path) -> None:
    source = foreign(tmp_path / "foreign.aot", [("vast", 1 << 20, 1 << 20, 1 << 30)])
    with Archive.open(source) as archive:
        (task,) = forms.to_tune(archive, (9, 0), GPU)
    assert task.problems == ()


def test_the_history_has_the_problems(source: Path, tmp_path: Path, chosen: list[universal.Chosen]) -> None:
    tuned(source, tmp_path / "tuned.aot", gpu(chosen))
    with Archive.open(tmp_path / "tuned.aot") as archive:
        rows = history.tunings(archive)
    assert sum(len(row["points"]) for row in rows) == 48
    assert {row["gpu"] for row in rows} == {"made up"}


def test_problems_are_of_extents_that_every_function_takes() -> None:
    signature = Signature("e4m3", "e4m3", "bf16", "f32", "swiglu", 6144, 4096, scaling="block")
    (of,) = universal.choose_all([signature], "sm_90a", 4)
    targets = {v.name(): v.target for v in of.variants}
    ((_, form),) = Universal.from_json(universal.table([of]), targets).forms
    every: list[Variant] = [v for p in PROVIDERS for v in provider(p).variants("sm_90a", signature)]
    assert {v.name() for v in of.variants} <= {v.name() for v in every}
    for m, n, k in forms._problems(form, 0, 40):
        assert 1 <= m <= 8192
        assert all(n % f.n_multiple == 0 and k % f.k_multiple == 0 for f in form.functions)
        assert (n % SCALE_BLOCK, k % SCALE_BLOCK) == (0, 0)  # else there is no kernel of torch's to compare with


def test_a_machine_of_another_target_is_refused(source: Path, tmp_path: Path, chosen: list[universal.Chosen]) -> None:
    from aot.tune.run import tune_archive

    other = machine(gpu(chosen))._replace(capability=(10, 0))
    with pytest.raises(TuneError, match=r"compute capability 10\.0"):
        tune_archive(source, tmp_path / "x.aot", None, None, other)
