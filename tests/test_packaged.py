"""The archive that comes with the package: what it serves, and how good what it predicts is at shapes it never saw."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import pytest

import runtime
from aot.pack.forms import read
from aot.problem import manifest
from aot.search import packaged, universal
from aot.search.estimates import Correction, Estimates
from aot.search.gemm import GEMM
from aot.search.legal import of_name
from aot.search.m_values import points
from aot.search.provider import PROVIDERS, provider
from aot.search.universal import Measured, choices_of
from aot.search.variants import Variant
from aot.tune import times
from aot.verify import archive as verify
from runtime import Library, native
from runtime.container.archive import Archive
from runtime.device.gpus import H100, H200
from runtime.gemm.signature import Signature
from runtime.gemm.universal import PREDICTED, WORDS, PredictedEntry, machine_of
from runtime.numbers.epilogue import Epilogue
from runtime.serve.layers import open_archives

from . import pace
from .command_line import ROOT
from .drawn_layers import GPUS, PARTS, layers, others, part_of
from .pages import choosing
from .published_layers import of_model
from .recording_driver import RecordingDriver

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_BYTES = 1_500_000
FOLDS = 4
REGIMES = (1, 64), (65, 511), (512, 8192)


@pytest.fixture(scope="module")
def archive() -> Archive:
    return Archive.open(runtime.universal())


def test_it_is_small_and_sound(archive: Archive) -> None:
    assert runtime.universal().stat().st_size <= MOST_BYTES
    assert [found for found in verify.verify(archive) if not found.ok] == []


def test_what_it_would_choose_is_a_candidate_of_what_is_built() -> None:
    """On an H200, a router's tile of few tokens is 1.3 times as fast at 600 rows as what estimates list there."""
    router = Signature.of_key("bf16_bf16_bf16_f32_none_n128_k2048")
    assert router is not None
    ms, target = points([256, 1024]), "sm_90a"
    found = packaged.chosen(router, ms, target)
    assert "sm90_small_m.bf16_bf16_bf16_f32.tile64x64" in found[min(ms, key=lambda m: abs(m - 600))]
    for limit, are_there in ((8, True), (1, False)):
        (by_m,) = GEMM.shortlist({router: [256, 1024]}, target, limit).by_signature.values()
        names = {m: [v.name() for v in variants] for m, variants in by_m}
        assert all(found[m] in names[m] for m in ms) == are_there
        assert max(map(len, names.values())) <= limit + are_there
    assert packaged.chosen(router, ms, "sm_80") == {}


def test_it_serves_the_forms_of_the_manifest_by_checked_kernels_that_providers_know(archive: Archive) -> None:
    gemms = manifest.load(ROOT / "manifests/universal/sm_90a.yaml").gemms
    table = read(archive)
    assert table is not None
    assert {form.signature(256, 512) for _, form in table.forms} == set(
        universal.forms([gemm.signature for gemm in gemms])
    )
    for words, form in table.forms:
        on_h100 = words[:7] == PLAIN[:7] or "swiglu" in words  # with overlap too
        assert form.checked_on == (H100.name if on_h100 else H200.name,)
        known = {v.name() for p in PROVIDERS for v in provider(p).variants("sm_90a", form.signature(4096, 4096))}
        assert {f.name for f in form.functions} <= known


def test_pages_say_how_many_functions_it_has(archive: Archive) -> None:
    table = read(archive)
    assert table is not None
    assert f"Its {len(archive.functions)} kernels were right" in " ".join((ROOT / "README.md").read_text().split())
    wide = {len(f.functions) for words, f in table.forms if "swiglu" in words}
    comment = " ".join((ROOT / "manifests/universal/sm_90a.yaml").read_text().replace("\n#", "").split())
    assert f"{min(wide)} where A, B and D have 16 bits, {max(wide)} with SwiGLU and overlap" in comment


def test_it_comes_with_an_install() -> None:
    """As one of the package's data files, which git keeps though it keeps no other archive."""
    with open(ROOT / "pyproject.toml", "rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["runtime"]
    assert any(runtime.universal().match(pattern) for pattern in patterns)
    assert "!/runtime/universal.aot" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-8b", "gemma-3-4b", "gemma-3-12b"])
def test_no_product_of_these_models_is_left(model: str) -> None:
    """Without an activation that is fused: transformers asks for plain products, as `replace_linears` takes them."""
    layers = [signature for signature in of_model(model) if signature.epilogue in ("none", "bias")]
    assert len(layers) >= 4
    library = Library(open_archives([runtime.universal()]), RecordingDriver())
    for signature in layers:
        found = library.entry(signature)
        assert found.state == PREDICTED
        assert library.checked(found)


@pytest.mark.skipif(native.costs is None, reason="runtime._native was not built")
def test_a_new_shape_is_predicted_in_half_a_millisecond_and_a_new_m_in_a_tenth_of_that() -> None:
    """On the processor; the first call of a kernel loads it besides."""
    library = Library(open_archives([runtime.universal()]), RecordingDriver())
    plain = Signature("bf16", "bf16", "bf16", "f32", "none", 1024, 2048)
    library.entry(plain).best(100)  # reads the table
    unseen = iter(range(1088, 1 << 20, 64))

    def shapes() -> None:
        for _ in range(100):
            library.entry(replace(plain, n=next(unseen))).best(100)

    pace.assert_takes_less_than(100 * 500e-6, shapes)
    entry, others = library.entry(plain), iter(range(101, 1 << 20))
    pace.assert_takes_less_than(100 * 50e-6, lambda: [entry.best(next(others)) for _ in range(100)])


# --- how good its predictions are, at the problems that its functions were timed at ---


@cache
def groups() -> list[list[tuple[Signature, Measured]]]:
    """The problems that it was tuned at, those of alike forms together."""
    found: dict[object, list[tuple[Signature, Measured]]] = {}
    for signature, at in times.load(runtime.universal(), "sm_90a"):
        found.setdefault((universal.likeness(signature), signature.overlap), []).append((signature, at))
    return list(found.values())


Corrected = Callable[[Mapping[Variant, Correction]], Mapping[Variant, Correction]]


@cache
def losses(correct: Corrected, gated: bool | None = None) -> list[tuple[int, float]]:
    """M, and the logarithm of the time of what is chosen over that of the best of the form's functions, at problems
    that corrections know nothing of; of all forms, or of those that have a gate or have none."""
    found = []
    for problems in groups():
        form = problems[0][0]
        if gated not in (None, Epilogue.of(form.epilogue).gated):
            continue
        timed = {c for _, at in problems for c in at.us}
        variants = [v for p in PROVIDERS for v in provider(p).variants("sm_90a", form) if choices_of(v) in timed]
        for fold in range(FOLDS):
            known = [at for i, (_, at) in enumerate(problems) if i % FOLDS != fold]
            estimates = Estimates(variants, correct(universal.corrections(variants, form, known)))
            for signature, at in problems[fold::FOLDS]:
                us = estimates.us(signature, at.m, at.machine)
                there = [(t, at.us[c]) for v, t in zip(variants, us, strict=True) if (c := choices_of(v)) in at.us]
                found.append((at.m, math.log(min(there)[1] / min(at.us.values()))))
    return found


def kept(lines: Mapping[Variant, Correction]) -> Mapping[Variant, Correction]:
    return lines


def left_out(lines: Mapping[Variant, Correction]) -> Mapping[Variant, Correction]:
    return {}


def shuffled(lines: Mapping[Variant, Correction]) -> Mapping[Variant, Correction]:
    given = list(lines.values())
    random.Random(3).shuffle(given)
    return dict(zip(lines, given, strict=True))


def mean(of: Sequence[tuple[int, float]]) -> float:
    return math.fsum(x for _, x in of) / len(of)


def behind(correct: Corrected) -> list[str]:
    """By how much longer what is chosen takes than the best, as a geometric mean in each range of M."""
    by_range = ([x for x in losses(correct) if low <= x[0] <= high] for low, high in REGIMES)
    return [f"{math.expm1(mean(of)):.1%}" for of in by_range]


def test_at_random_shapes_and_m_the_choice_is_near_the_best() -> None:
    """M, N and K of most are drawn log-uniformly; how far it is behind in the three ranges of M is on the page."""
    assert len(losses(kept)) == 496
    assert "{} up to M = 64, {} to 511, {} above;".format(*behind(kept)) in choosing()
    for low, high in REGIMES:
        assert mean([x for x in losses(kept) if low <= x[0] <= high]) < 0.037
    assert mean(losses(kept, gated=False)) < 0.034
    assert mean(losses(kept, gated=True)) < 0.042, "SwiGLU's 64 and 80 functions"


@pytest.mark.long
def test_corrections_are_worth_something_and_harm_where_they_are_shuffled() -> None:
    """3.6% behind with them, 5.0% without, more when shuffled."""
    assert "by estimates alone {}, {}, {} |".format(*behind(left_out)) in choosing()
    assert mean(losses(kept)) < mean(losses(left_out)) - 0.004
    assert mean(losses(shuffled)) > mean(losses(left_out))


# --- the same at layers of models, as two GPUs were tuned with them ---

PLAIN = ("bf16", "bf16", "bf16", "f32", "none", "none", "k", "serial")


def losses_at_layers(correct: Corrected) -> dict[str, list[tuple[int, float]]]:
    """As `losses`, where three or more of the package's functions were timed; one N x K in five is left out."""
    table = read(Archive.open(runtime.universal()))
    assert table is not None
    form = next(f for words, f in table.forms if words[:8] == PLAIN)
    variants = [v for f in form.functions if (v := of_name(f.name)) is not None]
    drawn = [at for s, at in times.load(runtime.universal(), "sm_90a") if universal.alike(s, form.signature(256, 512))]
    found: dict[str, list[tuple[int, float]]] = {gpu: [] for gpu in GPUS}
    for part in range(PARTS):
        known = [*drawn, *others(part)]
        estimates = Estimates(variants, correct(universal.corrections(variants, form.signature(256, 512), known)))
        for gpu in GPUS:
            for s, at in layers()[gpu]:
                timed = {i: at.us[c] for i, v in enumerate(variants) if (c := choices_of(v)) in at.us}
                if part_of()[s.n, s.k] == part and len(timed) > 2:
                    us = estimates.us(s, at.m, at.machine)
                    best = min(timed, key=us.__getitem__)
                    found[gpu].append((at.m, math.log(timed[best] / min(timed.values()))))
    return found


def behind_at_layers(correct: Corrected) -> str:
    found = losses_at_layers(correct)
    by_range = [[mean([x for x in of if low <= x[0] <= high]) for of in found.values()] for low, high in REGIMES]
    said = (f"{math.expm1(a):.1%} ({math.expm1(b):.1%})" for a, b in by_range)
    return "{} up to M = 64, {} to 511, {} above".format(*said)


@pytest.mark.long
def test_at_layers_of_models_times_of_other_layers_tell_what_to_choose() -> None:
    assert f"{behind_at_layers(kept)}; by estimates alone {behind_at_layers(left_out)} |" in choosing()
    with_times, alone = losses_at_layers(kept), losses_at_layers(left_out)
    assert all(mean(with_times[gpu]) < 0.85 * mean(alone[gpu]) for gpu in GPUS)
    assert f"at the {len(part_of())} N x K" in choosing()


# --- and at those whose times it does not have, as an H100 was tuned with them ---


def at_unseen_layers() -> list[tuple[int, float, float]]:
    """M, and the logarithms of the times of what is chosen, of functions that were timed, and of the form's own best,
    over that of the best of all."""
    table = read(Archive.open(runtime.universal()))
    assert table is not None
    found = []
    for s, at in times.load(ROOT / "benchmarks" / "unseen_h100.json.xz", "sm_90a"):
        form = table.form(s, (9, 0))
        if tuple(getattr(s, word) for word in WORDS) != PLAIN or (s.n, s.k) in part_of() or form is None:
            continue
        us = PredictedEntry(s, form, machine_of(H100)).us(at.m)
        choices = {name: choices_of(v) for name in us if (v := of_name(name)) is not None}
        timed = {name: at.us[c] for name, c in choices.items() if c in at.us}
        if len(timed) > 2:
            chosen, best = timed[min(timed, key=us.__getitem__)], min(at.us.values())
            found.append((at.m, math.log(chosen / best), math.log(min(timed.values()) / best)))
    return found


def test_at_layers_that_it_has_no_times_of_the_choice_is_near_the_best_of_all() -> None:
    found = at_unseen_layers()
    of_ranges = [[x for x in found if low <= x[0] <= high] for low, high in REGIMES]
    means = [(math.fsum(c for _, c, _ in of) / len(of), math.fsum(o for _, _, o in of) / len(of)) for of in of_ranges]
    chosen, own = ([f"{math.expm1(mean[i]):.1%}" for mean in means] for i in (0, 1))
    said = "{} up to M = 64, {} to 511, {} above; the form's own best {}, {}, {} |".format(*chosen, *own)
    assert said in choosing()
    assert f"at {len(found)} problems of layers that the package did not time" in choosing()
    assert all(mean < 0.04 for mean, _ in means)
