"""What trees add to estimates, on kept times of tunings, at N x K that they were not fitted to."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot.search import boosted, estimates
from aot.search.estimates import Estimates
from aot.search.gemm import GEMM
from aot.search.h200 import H200
from aot.search.provider import PROVIDERS, provider
from aot.search.universal import choices_of
from aot.search.variants import Variant
from aot.tune import times
from aot.tune.calibrate import Calibration, Observation
from runtime import native
from runtime.gemm.signature import Signature

from .pages import choosing

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
GPUS = "h200", "h100"
PLAIN = Signature("bf16", "bf16", "bf16", "f32", "none", 6144, 4096)
NATIVE = pytest.mark.skipif(native.trees is None, reason="runtime._native was not built")


class Tuning(NamedTuple):
    """Microseconds by M and function of one signature, and what the functions were compiled from."""

    signature: Signature
    us: dict[int, dict[str, float]]
    variants: dict[str, Variant]


@cache
def unseen(gpu: str) -> tuple[Tuning, ...]:
    """The tunings of N x K that no tree has seen."""
    found: dict[Signature, Tuning] = {}
    for signature, at in times.load(BENCHMARKS / f"drawn_{gpu}.json.xz", "sm_90a"):
        if boosted.is_unseen(signature.n, signature.k):
            if signature not in found:
                found[signature] = Tuning(signature, {}, {})
            by_choices = _variants(signature)
            found[signature].variants.update({by_choices[c].name(): by_choices[c] for c in at.us})
            found[signature].us[at.m] = {by_choices[c].name(): us for c, us in at.us.items()}
    return tuple(found.values())


@cache
def _variants(signature: Signature) -> dict[object, Variant]:
    return {choices_of(v): v for p in PROVIDERS for v in provider(p).variants("sm_90a", signature)}


Predict = Callable[[Tuning, int], dict[str, float]]


def alone(of: Tuning, m: int) -> dict[str, float]:
    """Estimates, without trees."""
    names = list(of.variants)
    return dict(zip(names, _alone(tuple(of.variants.values()))(of.signature, m), strict=True))


def with_trees(of: Tuning, m: int) -> dict[str, float]:
    return {name: us * _correction(of.variants[name], of.signature)(m) for name, us in alone(of, m).items()}


def shuffled(of: Tuning, m: int) -> dict[str, float]:
    """Estimates, and what trees say of another function that was timed there."""
    names, before, after = list(of.us[m]), alone(of, m), with_trees(of, m)
    others = random.Random(m).sample(names, len(names))
    return {name: before[name] * after[other] / before[other] for name, other in zip(names, others, strict=True)}


_correction = cache(GEMM.correction)


@cache
def _alone(variants: tuple[Variant, ...]) -> Callable[[Signature, int], list[float]]:
    return Estimates(variants).us


def mean(losses: Sequence[float]) -> float:
    return math.expm1(math.fsum(losses) / len(losses))


def never_timed(gpu: str, predict: Predict) -> float:
    """How far the choice is behind the best of what was timed, at all problems."""
    return mean([_loss(of.us[m], predict(of, m)) for of in unseen(gpu) for m in of.us])


def between(gpu: str, predict: Predict) -> float:
    """The same at each M between the first and the last, from M = 65, left out of what calibrates the predictions."""
    found = [_loss(of.us[m], _calibrated(of, m, predict)) for of in unseen(gpu) for m in sorted(of.us)[1:-1] if m > 64]
    assert len(found) > 90
    return mean(found)


def _calibrated(of: Tuning, left_out: int, predict: Predict) -> dict[str, float]:
    """Predictions at an M, by the times at all others."""

    estimated = {m: predict(of, m) for m in of.us}

    def guess(signature: Signature) -> Callable[[str, int], float]:
        return lambda name, m: estimated[m][name]

    seen = [Observation(of.signature, m, n, us) for m in of.us if m != left_out for n, us in of.us[m].items()]
    by = Calibration(seen, guess, lambda name: [of.variants[name].family]).of(of.signature)
    return {name: by.us(name, left_out) for name in of.us[left_out]}


def _loss(us: dict[str, float], predicted: dict[str, float]) -> float:
    return math.log(us[min(us, key=lambda name: predicted[name])] / min(us.values()))


def compared(behind: Callable[[str, Predict], float], without: str) -> str:
    """How far choices are behind with trees on the first GPU and the second, and without, which must be further."""
    found = [(behind(gpu, with_trees), behind(gpu, alone)) for gpu in GPUS]
    assert all(after < 0.8 * before for after, before in found)
    (on_h200, alone_there), (on_h100, alone_here) = found
    return f"by {on_h200:.1%} ({on_h100:.1%}), {without} {alone_there:.1%} ({alone_here:.1%})"


def test_choices_for_weights_that_were_never_timed_are_nearer_to_the_best() -> None:
    assert compared(never_timed, "by estimates alone") in choosing()


@pytest.mark.parametrize("gpu", GPUS)
def test_what_trees_say_of_other_functions_is_worse_than_nothing(gpu: str) -> None:
    assert never_timed(gpu, shuffled) > never_timed(gpu, alone)


def test_predictions_between_timed_m_are_nearer_to_the_best() -> None:
    assert compared(between, "without trees") in choosing()


# --- trees ---


@NATIVE
def test_native_code_and_python_add_up_the_same() -> None:
    variants = [v for v in GEMM.variants("sm_90a", PLAIN) if boosted.is_known(v)][::29]
    assert len({v.family for v in variants}) == len(boosted.FAMILIES)
    for m in (1, 65, 777, 8192):
        for v in variants:
            added = boosted.added(boosted.features(v, PLAIN, m, H200), boosted.trees())
            assert GEMM.correction(v, PLAIN)(m) == math.exp(added)


@NATIVE
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((2, [(2, 1.0, -1, -1)], [0.0], [0]), "node 0 asks for no feature"),
        ((2, [(-1, 1.0, -1, -1)], [0.0], [0]), "node 0 asks for no feature"),
        ((2, [(0, 1.0, 0, -1)], [0.0], [0]), "a side that is no leaf or later node"),
        ((2, [(0, 1.0, -1, 1)], [0.0], [0]), "a side that is no leaf or later node"),
        ((2, [(0, 1.0, -1, -2)], [0.0], [0]), "a side that is no leaf or later node"),
        ((2, [(0, 1.0, -1, -(1 << 31))], [0.0], [0]), "a side that is no leaf or later node"),
        ((2, [], [0.0], [0]), "root 0 is no node or leaf"),
        ((2, [], [0.0], [-2]), "root -2 is no node or leaf"),
        ((2, [[0, 1.0, -1, -1]], [0.0], [0]), "a node is a tuple"),
        ((65, [], [], []), "too large"),
    ],
)
def test_native_code_refuses_trees_that_lead_nowhere(given: tuple[Any, ...], reason: str) -> None:
    """Which the file of this package never has: what it says is followed without looking."""
    with pytest.raises(ValueError, match=reason):
        native.trees(*given)


@NATIVE
@pytest.mark.parametrize("values", [(), (1.0,), (1.0, 2.0, 3.0), ("1", 2.0), 5])
def test_native_code_takes_a_value_for_each_feature(values: Any) -> None:
    trees = native.trees(2, [(1, 5.0, -1, -2)], [1.0, 2.0], [0, 0, -2])
    assert (trees.added((0, 5)), trees.added([0, 6.0])) == (4.0, 6.0)
    with pytest.raises((ValueError, TypeError)):
        trees.added(values)


def test_kernels_that_none_was_fitted_to_keep_their_estimates() -> None:
    for types, scaling, epilogue in (
        ("bf16", "block_weight", "none"),
        ("e4m3", "none", "none"),
        ("e4m3", "block", "swiglu"),
    ):
        signature = Signature(types, "e4m3", "bf16", "f32", epilogue, 6144, 4096, scaling=scaling)
        variants = GEMM.variants("sm_90a", signature)[:20]
        assert variants
        assert all(GEMM.correction(variant, signature)(16) == 1.0 for variant in variants)


def test_programs_that_would_be_too_large_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = [v for v in GEMM.variants("sm_90a", PLAIN) if boosted.is_known(v)][:40]
    whole = Estimates(variants)
    monkeypatch.setattr(estimates, "MAX_COST_NODES", 400)
    cut = Estimates(variants)
    assert len(cut._programs) > 2 * len(whole._programs)
    assert cut.us(PLAIN, 333) == whole.us(PLAIN, 333)


@NATIVE
@given(st.randoms(use_true_random=False))
def test_trees_of_what_is_known_of_features_add_up_the_same(chance: random.Random) -> None:
    def tree(depth: int) -> Any:
        if chance.random() < 0.2 or depth == 0:
            leaves.append(chance.uniform(-1, 1))
            return -len(leaves)
        here = len(nodes)
        nodes.append((0, 0.0, 0, 0))
        sides = tree(depth - 1), tree(depth - 1)
        nodes[here] = chance.randrange(4), chance.choice([0.25, 0.5, 0.75]), *sides
        return here

    nodes: list[tuple[int, float, int, int]] = []
    leaves: list[float] = []
    roots = [tree(chance.randrange(6)) for _ in range(chance.randrange(5))]
    trees = native.trees(4, nodes, leaves, roots)
    values = [chance.choice([0.0, 0.25, 0.4, 0.5, 0.6, 1.0]) for _ in range(4)]
    known = [value if chance.random() < 0.5 else None for value in values]
    rest = [value for value, of in zip(values, known, strict=True) if of is None]
    assert trees.given(known).added(rest) == trees.added(values)
    assert trees.given(values).added([]) == trees.added(values)
    with pytest.raises(ValueError, match="a value for each feature"):
        trees.given(known[:3])


def test_without_native_code_tuning_has_no_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = next(v for v in GEMM.variants("sm_90a", PLAIN) if boosted.is_known(v))
    with_native = boosted.correction(variant, PLAIN)(16)
    monkeypatch.setattr(native, "trees", None)
    assert GEMM.correction(variant, PLAIN)(16) == 1.0
    assert boosted.correction(variant, PLAIN)(16) == with_native, "which ranking goes by"


def test_a_tree_is_followed_to_a_leaf() -> None:
    variant = next(v for v in GEMM.variants("sm_90a", PLAIN) if v.family == "sm90_persistent")
    place = boosted.FEATURES.index("m")
    tree = [place, 100, 0.5, [boosted.FEATURES.index("split_k"), 1, -0.5, 9.0]]
    at = {m: boosted.added(boosted.features(variant, PLAIN, m, H200), [tree, tree, 0.25]) for m in (100, 101)}
    assert at == {100: 1.25, 101: -0.75}


def test_trees_of_other_features_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads(boosted.FILE.read_bytes())
    (tmp_path / "boosted.json").write_text(json.dumps(content | {"features": ["m"]}))
    monkeypatch.setattr(boosted, "FILE", tmp_path / "boosted.json")
    with pytest.raises(ValueError, match=r"run scripts/fit_trees\.py again"):
        boosted.trees.__wrapped__()


def test_one_weight_in_five_is_left_out() -> None:
    sizes = [(n, k) for n in range(256, 32_768, 256) for k in range(512, 16_384, 512)]
    share = sum(boosted.is_unseen(n, k) for n, k in sizes) / len(sizes)
    assert share == pytest.approx(0.2, abs=0.02)
    assert len(unseen("h200")) >= 5
