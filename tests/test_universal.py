"""Which functions `aot build --universal` takes for a form, and how good what they choose is, on kept times."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from aot.problem import manifest
from aot.search import universal
from aot.search.costs import Machine
from aot.search.estimates import Correction, Estimates
from aot.search.h200 import H200
from aot.search.legal import summation, unsuited
from aot.search.provider import PROVIDERS, provider
from aot.search.universal import Chosen, Measured, choices_of
from aot.search.variants import Variant
from aot.tune import choose, times
from aot.tune.options import TuneOptions
from aot.tune.write import FOR_EQUAL_BITS
from runtime.device.gpus import Gpu
from runtime.gemm.signature import Signature
from runtime.gemm.universal import Universal
from runtime.limits import MAX_COST_RESULTS

from .drawn_layers import GPUS, layers, others, part_of
from .pages import choosing
from .published_layers import of_model

ROOT = Path(__file__).parent.parent
TIMES = ROOT / "benchmarks" / "variants_h200.json.xz"
MANIFEST = ROOT / "manifests" / "universal" / "sm_90a.yaml"
PLAIN = Signature("bf16", "bf16", "bf16", "f32", "none", 6144, 4096)
ROWS = Signature("e4m3", "e4m3", "bf16", "f32", "none", 6144, 4096, scaling="row_column")
FOLDS = 3


@cache
def measured(form: Signature) -> list[Measured]:
    """Problems of a form of which all variants were timed, not the most likely alone."""
    found = [m for s, m in times.load(TIMES, "sm_90a") if universal.alike(s, form) and s.scaling == form.scaling]
    most = max(len(m.us) for m in found)
    return [m for m in found if len(m.us) > most * 0.9]


def folds(form: Signature) -> list[tuple[list[Measured], list[Measured]]]:
    """The problems in two: to choose by, and of N and K that those do not have."""
    shapes = sorted({(m.n, m.k) for m in measured(form)})
    random.Random(0).shuffle(shapes)
    parts = [set(shapes[i::FOLDS]) for i in range(FOLDS)]
    return [
        ([m for m in measured(form) if (m.n, m.k) not in part], [m for m in measured(form) if (m.n, m.k) in part])
        for part in parts
    ]


@cache
def chosen_by(form: Signature, fold: int) -> Chosen:
    return universal.choose(form, "sm_90a", 40, (), folds(form)[fold][0])


def losses(form: Signature, corrections: Mapping[int, Mapping[Variant, Correction]] | None = None) -> list[float]:
    """Logarithms of the time of what is chosen over that of the best of all variants, at N and K that were left out."""
    found = []
    for fold, (_, left_out) in enumerate(folds(form)):
        of = chosen_by(form, fold)
        estimates = Estimates(of.variants, (corrections or {}).get(fold, of.corrections))
        for at in left_out:
            us = estimates.us(dataclasses.replace(form, n=at.n, k=at.k), at.m)
            timed = [(t, at.us[choices_of(v)]) for t, v in zip(us, of.variants, strict=True) if choices_of(v) in at.us]
            found.append(math.log(min(timed)[1] / min(at.us.values())))
    return found


def mean(of: Sequence[float]) -> float:
    return math.exp(math.fsum(of) / len(of)) - 1


@pytest.mark.parametrize(
    ("form", "most", "worst", "said"),
    [
        pytest.param(PLAIN, 0.047, 0.25, "| {} in bf16,", marks=pytest.mark.long),
        (ROWS, 0.040, 0.29, ", {} in e4m3 by row and column |"),
    ],
    ids=["bf16", "e4m3"],
)
def test_what_is_chosen_for_shapes_never_seen_is_near_the_best_of_all(
    form: Signature, most: float, worst: float, said: str
) -> None:
    """Of 600 and of 409 variants on an H200, at M = 128 to 8192."""
    found = losses(form)
    assert len(found) > 100
    assert said.format(f"{mean(found):.1%}") in choosing()
    assert mean(found) < most
    assert max(found) < worst


Ranges = dict[str, list[float]]  # by GPU, in each range of M


def behind_at_layers(chosen: Chosen, count: int) -> tuple[Ranges, Ranges]:
    """By how much the best of the first functions is behind the best of all at layers of part 0, and by how much that
    is which they choose: geometric means."""
    variants = chosen.variants[:count]
    estimates = Estimates(variants, chosen.corrections)
    best, choice = Ranges(), Ranges()
    for gpu in GPUS:
        found: list[list[tuple[float, float]]] = [[], [], []]
        for s, at in layers()[gpu]:
            timed = {i: at.us[c] for i, v in enumerate(variants) if (c := choices_of(v)) in at.us}
            if part_of()[s.n, s.k] == 0 and timed:
                us, least = estimates.us(s, at.m, at.machine), min(at.us.values())
                losses = (math.log(t / least) for t in (min(timed.values()), timed[min(timed, key=us.__getitem__)]))
                found[(at.m > 64) + (at.m > 511)].append((next(losses), next(losses)))
        best[gpu], choice[gpu] = ([mean([x[i] for x in of]) for of in found] for i in range(2))
    return best, choice


@pytest.mark.long
def test_twice_as_many_functions_choose_better_at_layers_that_were_left_out() -> None:
    files = [*times.load(TIMES, "sm_90a"), *times.load(TIMES.with_name("ragged_h200.json.xz"), "sm_90a")]
    known = [at for s, at in files if universal.alike(s, PLAIN)]
    chosen = universal.choose(PLAIN, "sm_90a", 2 * 64, (), [*known, *others(0)])
    few, many = (behind_at_layers(chosen, count) for count in (64, 128))
    for gpu in GPUS:
        for of_few, of_many in zip(few, many, strict=True):
            assert all(more < less for more, less in zip(of_many[gpu], of_few[gpu], strict=True))
    on_h200, on_h100 = ([[f"{x:.1%}" for x in of[gpu]] for of in (few[1], many[1])] for gpu in GPUS)
    ranges = ("up to M = 64", "to 511", "above")
    by_count = (
        ", ".join(f"{a} ({b}) {where}" for a, b, where in zip(*pair, ranges, strict=True))
        for pair in zip(on_h200, on_h100, strict=True)
    )
    assert "64 functions {}; 128 functions {} |".format(*by_count) in choosing()


@pytest.mark.parametrize("form", [pytest.param(PLAIN, marks=pytest.mark.long), ROWS], ids=["bf16", "e4m3"])
def test_what_was_measured_of_one_function_says_nothing_of_another(form: Signature) -> None:
    """Shuffled among the functions the corrections do harm; tests/test_packaged.py says what they are worth."""
    shuffled: list[float] = []
    for seed in range(8):
        given: dict[int, dict[Variant, Correction]] = {}
        for fold in range(FOLDS):
            lines = list(chosen_by(form, fold).corrections.values())
            random.Random(seed).shuffle(lines)
            given[fold] = dict(zip(chosen_by(form, fold).corrections, lines, strict=True))
        shuffled.append(mean(losses(form, given)))
    assert sum(shuffled) / len(shuffled) > mean(losses(form)) + 0.01


Losses = dict[
    tuple[int, int, int], float
]  # by N, K and M, the logarithm of the time taken over that of the best of all


def tuned_for_equal_bits(form: Signature) -> tuple[Losses, Losses, int, int]:
    """What `aot tune` would choose among all variants of 15 N and K timed at most M: what callers lose who want equal
    bits, and the others; the functions that the others are served with, and how many more the first are."""
    variants = {choices_of(v): v for p in PROVIDERS for v in provider(p).variants("sm_90a", form)}
    by_shape: dict[tuple[int, int], list[Measured]] = {}
    for at in sorted(measured(form), key=lambda at: at.m):
        by_shape.setdefault((at.n, at.k), []).append(at)
    names = {c: v.name() for c, v in variants.items()}
    every = {
        shape: choose.Times([at.m for at in cases], [{names[c]: us for c, us in at.us.items()} for at in cases])
        for shape, cases in by_shape.items()
        if len(cases) >= 5
    }
    assert len(every) == 15
    kept = choose.cover(list(every.values()), TuneOptions().tolerance)
    alike: dict[tuple[int, int], choose.Times] = {}
    for shape, of in every.items():
        classes: dict[str, list[str]] = {}
        for c, v in variants.items():
            if all(names[c] in us for us in of.us) and (word := summation(v, shape[1])) is not None:
                classes.setdefault(word, []).append(names[c])

        def curve(name: str, ms: Sequence[int], of: choose.Times = of) -> list[float]:
            return [of.us[of.ms.index(m)][name] for m in ms]

        best = choose.best_class(of, classes.values(), curve, kept, FOR_EQUAL_BITS)
        alike[shape] = choose.Times(of.ms, [{name: us[name] for name in best} for us in of.us])
    chosen = choose.cover(list(alike.values()), FOR_EQUAL_BITS, kept)
    equal, others = Losses(), Losses()
    for shape, of in every.items():
        ranges = choose.ranges(alike[shape], chosen, FOR_EQUAL_BITS)
        usual = choose.ranges(of, kept, TuneOptions().tolerance)
        for m, us in zip(of.ms, of.us, strict=True):
            equal[(*shape, m)] = math.log(us[choose.serving(ranges, m)] / min(us.values()))
            others[(*shape, m)] = math.log(us[choose.serving(usual, m)] / min(us.values()))
    return equal, others, len(kept), len(chosen - kept)


@pytest.mark.parametrize(
    ("form", "cost", "worst", "at", "functions"),
    [(PLAIN, 0.017, 0.41, (1280, 8192, 128), (43, 3)), (ROWS, 0.155, 1.28, (1280, 8192, 128), (36, 0))],
    ids=["bf16", "e4m3"],
)
def test_what_equal_bits_at_every_m_cost_once_tuned(
    form: Signature, cost: float, worst: float, at: tuple[int, int, int], functions: tuple[int, int]
) -> None:
    """In bf16 alike functions take turns, in e4m3, where none are known to be alike, one serves every M."""
    equal, others, *counts = tuned_for_equal_bits(form)
    assert mean([*equal.values()]) == pytest.approx(cost, abs=0.002)
    assert mean([*others.values()]) == pytest.approx(0.001, abs=0.001)
    assert max(equal, key=lambda place: equal[place]) == at
    assert math.exp(equal[at]) - 1 == pytest.approx(worst, abs=0.01)
    assert (*counts,) == functions


@pytest.mark.parametrize(
    ("form", "cost"), [pytest.param(PLAIN, 0.006, marks=pytest.mark.long), (ROWS, 0.350)], ids=["bf16", "e4m3"]
)
def test_what_equal_bits_at_every_m_cost_where_they_are_predicted(form: Signature, cost: float) -> None:
    """Against what is predicted without them, at N and K that were left out."""
    found = []
    for fold, (_, left_out) in enumerate(folds(form)):
        of = chosen_by(form, fold)
        choices, table = {v.name(): choices_of(v) for v in of.variants}, table_of([of])
        for at in left_out:
            entry = table.entry(dataclasses.replace(form, n=at.n, k=at.k), (9, 0), Gpu("NVIDIA H200", 132, 4917))
            assert entry is not None
            ours, best = (at.us.get(choices[e.best(at.m)]) for e in (entry.only_invariant(), entry))
            if ours is not None and best is not None:
                found.append(math.log(ours / best))
    assert len(found) > 100
    assert mean(found) == pytest.approx(cost, abs=0.002)


def test_what_was_not_timed_is_as_far_from_its_estimate_as_its_twin_or_as_others_and_a_little_slower() -> None:
    both = [v for v in provider("own").variants("sm_90a", PLAIN) if v.options.get("nonpersistent")]
    others = {universal.twin_choices(v): v for v in provider("own").variants("sm_90a", PLAIN) if v not in both}
    twin = next(v for v in both if universal.twin_choices(v) in others)
    apart, timed = next(v for v in both if v != twin), others[universal.twin_choices(twin)]
    at = Measured(PLAIN.n, PLAIN.k, 96, {choices_of(timed): 30.0})
    us = universal.filled([timed, twin, apart], [20.0, 19.0, 40.0], at.us)
    assert us == pytest.approx([30.0, 28.5, 60.0 * 1.05])


def test_a_time_corrects_an_estimate_beside_others_alone_and_on_its_own_machine() -> None:
    few, many = (
        next(v for v in chosen_by(PLAIN, 0).variants if v.family == f"sm90_{f}") for f in ("small_m", "persistent")
    )
    alone = Measured(PLAIN.n, PLAIN.k, 64, {choices_of(few): 30.0})
    assert universal.corrections([few, many], PLAIN, [alone]) == {}
    both = dataclasses.replace(alone, us={choices_of(few): 30.0, choices_of(many): 31.0})
    slower = dataclasses.replace(both, machine=Machine(H200.multiprocessors, H200.memory_gbps / 2))
    one, other = (universal.corrections([few, many], PLAIN, [at]) for at in (both, slower))
    assert one.keys() == other.keys() == {few, many}
    assert one != other


def test_functions_cover_few_rows_and_many() -> None:
    families = [v.family for v in chosen_by(PLAIN, 0).variants]
    assert len(families) == 40
    assert min(families.count(name) for name in ("sm90_small_m", "sm90_persistent")) >= 12


def test_a_function_counts_for_nothing_where_it_cannot_compute() -> None:
    """Swapped gates take N in multiples of 128."""
    gated = dataclasses.replace(PLAIN, epilogue="swiglu")
    (first,) = universal.choose(gated, "sm_90a", 1).variants
    swapped = next(v for v in provider("own").variants("sm_90a", gated) if v.options.get("swap"))
    us = {choices_of(first): 2.0, choices_of(swapped): 1.0}
    timed = [Measured(n, 4096, m, us) for n in (7168, 28672) for m in (132, 200, 259, 600, 1100)]
    assert swapped in universal.choose(gated, "sm_90a", 8, (), timed).variants
    (only,) = universal.choose(gated, "sm_90a", 1).variants
    assert unsuited(only, dataclasses.replace(gated, n=7232)) is None, "one function serves what most do"
    odd = [dataclasses.replace(at, n=at.n + 64) for at in timed]
    assert swapped not in universal.choose(gated, "sm_90a", 8, (), odd).variants


def test_choosing_is_the_same_each_time_and_each_function_is_there_once() -> None:
    again = universal.choose(PLAIN, "sm_90a", 40, (), folds(PLAIN)[0][0])
    assert again == chosen_by(PLAIN, 0)
    assert len(set(again.variants)) == len(again.variants)


def test_a_form_that_overlaps_more_shares_the_functions_of_the_other() -> None:
    weights = dataclasses.replace(PLAIN, overlap="weights")
    serial, early = universal.choose_all([weights, PLAIN], "sm_90a", 8)
    assert (serial.form.overlap, early.form.overlap) == ("serial", "weights")
    assert early.variants[: len(serial.variants)] == serial.variants
    own = early.variants[len(serial.variants) :]
    assert len(own) == 2
    assert all(v.options["overlap"] != "serial" for v in own)


def test_where_there_is_no_room_for_both_a_form_has_the_first_functions_of_the_other() -> None:
    weights, kept = dataclasses.replace(PLAIN, overlap="weights"), chosen_by(PLAIN, 0).variants
    found = universal.choose(weights, "sm_90a", MAX_COST_RESULTS - 4, kept).variants
    assert found[:4] == kept[:4]
    assert len(found) <= MAX_COST_RESULTS
    assert len(set(found) - set(kept)) > MAX_COST_RESULTS - len(kept)


def test_a_regime_counts_as_much_as_another_however_many_problems_it_has() -> None:
    assert universal.weights([1, 64, 65, 512, 9000, 600]) == [150, 150, 300, 100, 100, 100]
    assert universal.weights([]) == []


def test_a_form_without_estimates_has_no_functions() -> None:
    assert universal.choose_all([PLAIN], "sm_100a", 8) == []


def table_of(chosen: Sequence[Chosen]) -> Universal:
    targets = {v.name(): v.target for c in chosen for v in c.variants}
    return Universal.from_json(json.loads(json.dumps(universal.table(chosen))), targets)


@pytest.mark.parametrize(
    "form",
    [
        PLAIN,
        dataclasses.replace(PLAIN, epilogue="swiglu"),
        dataclasses.replace(ROWS, scaling="block"),
        dataclasses.replace(ROWS, scaling="block", epilogue="swiglu"),
        dataclasses.replace(ROWS, d="e4m3", epilogue="swiglu"),
    ],
    ids=Signature.key,
)
def test_the_table_serves_the_extents_that_functions_compute_and_no_others(form: Signature) -> None:
    (of,) = universal.choose_all([form], "sm_90a", 6)
    table = table_of([of])
    for n in (8, 16, 24, 32, 48, 64, 96, 128, 160, 256, 320, 512, 1000, 1024, 6144, 1 << 27, 1 << 28):
        for k in (8, 16, 24, 32, 64, 128, 136, 200, 4096):
            wanted = dataclasses.replace(form, n=n, k=k)
            suited = {v.name() for v in of.variants if unsuited(v, wanted) is None}
            found = table.entry(wanted, (9, 0), Gpu("NVIDIA H200", 132, 4917))
            assert set(found.names if found else ()) == suited, (n, k)


def test_the_table_gives_the_estimates_with_what_was_measured() -> None:
    of = chosen_by(PLAIN, 0)
    found = table_of([of]).entry(PLAIN, (9, 0), Gpu("NVIDIA H200", 132, 4917))
    assert found is not None
    for m in (1, 100, 5000):
        estimated = dict(
            zip((v.name() for v in of.variants), Estimates(of.variants, of.corrections).us(PLAIN, m), strict=True)
        )
        assert found.us(m) == estimated
        assert found.best(m) == min(estimated, key=lambda name: estimated[name])
    shared = {v.name() for v in of.variants if v.options.get("stream_k")}
    assert shared
    (row,) = universal.table([of])["forms"]
    numbers = dict(zip((name for name, *_ in row["functions"]), row["equal_bits"], strict=True))
    assert {name for name, number in numbers.items() if not number} == shared
    for v, w in itertools.combinations(of.variants, 2):
        if v.name() not in shared and w.name() not in shared:
            assert (numbers[v.name()] == numbers[w.name()]) is (summation(v) == summation(w))


def test_the_packaged_manifest_names_the_forms_that_models_ask_for() -> None:
    forms = universal.forms(p.signature for p in manifest.load(MANIFEST).problems())
    plain = {(s.a, s.epilogue, s.overlap) for s in forms if s.scaling == "none"}
    words = [
        (a, e, o)
        for a in ("bf16", "f16")
        for e in ("none", "bias", "residual", "swiglu")
        for o in ("serial", "weights")
    ]
    assert plain == set(words)
    assert {(s.scaling, s.overlap) for s in forms if s.a == "e4m3"} == {
        (s, o) for s in ("tensor", "row_column", "block") for o in ("serial", "weights")
    }


@pytest.mark.long  # chooses for every form
def test_no_linear_layer_of_these_models_is_left() -> None:
    """As transformers has them, q, k, v, gate and up apart, and as vLLM does, whether tuned for or not."""
    forms = [p.signature for p in manifest.load(MANIFEST).problems() if p.signature.overlap == "serial"]
    table = table_of(universal.choose_all(forms, "sm_90a", 1))
    for name in ("llama-3.1-8b", "qwen3-8b", "qwen3-8b-fp8", "qwen2.5-7b", "gemma-3-1b", "gemma-3-27b", "mistral-7b"):
        for signature in of_model(name):
            found = table.entry(signature, (9, 0), Gpu("NVIDIA H200", 132, 4917))
            if "geglu" not in signature.epilogue:
                assert found is not None, f"{name}: {signature.key()}"
