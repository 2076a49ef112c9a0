"""What predicted times are worth, on times recorded on an H200, and what a calibration promises."""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable

import pytest

from aot.tune import calibrate, points, session
from aot.tune.calibrate import Calibration, Observation, Predictions
from runtime import native
from runtime.gemm.signature import Signature

from .pace import assert_takes_less_than
from .pages import choosing
from .recorded_times import Recorded, at_random_m, estimates, family, recorded

CALIBRATED_AT = (128, 512, 2048, 8192)
BETWEEN = (256, 1024, 4096)
Regrets = list[float]  # the time of the chosen over the best of all, less 1


def observations(of: Recorded, ms: Iterable[int]) -> list[Observation]:
    return [Observation(of.signature, m, name, us) for m in ms if m in of.us for name, us in of.us[m].items()]


def shuffled(found: list[Observation]) -> list[Observation]:
    """Each function with the measured over the estimated time of another, of the same problem and M."""
    places = defaultdict(list)
    for i, o in enumerate(found):
        places[o.signature, o.m].append(i)
    chance, mixed = random.Random(0), list(found)
    for of_one in places.values():
        for i, j in zip(of_one, chance.sample(of_one, len(of_one)), strict=True):
            (signature, m, name, _), other = found[i], found[j]
            ratio = other.us / estimates(signature)(other.name, m)
            mixed[i] = Observation(signature, m, name, estimates(signature)(name, m) * ratio)
    return mixed


def regret(of: Recorded, m: int, predict: Callable[[str, int], float]) -> float:
    us = of.us[m]
    return us[min(us, key=lambda name: predict(name, m))] / min(us.values()) - 1


def between(change: Callable[[list[Observation]], list[Observation]]) -> Regrets:
    """The regrets at M values between those that every function was measured at."""
    found = []
    for of in recorded():
        known = [m for m in CALIBRATED_AT if m in of.us]
        if len(known) < 2:
            continue
        predictions = Calibration(change(observations(of, known)), estimates, family).of(of.signature)
        found += [regret(of, m, predictions.us) for m in BETWEEN if m in of.us and m < known[-1]]
    return found


def left_out(change: Callable[[list[Observation]], list[Observation]]) -> Regrets:
    """The regrets for N and K that were not measured: of every fourth problem, by what was measured of the others."""
    forms = defaultdict(list)
    for of in recorded():
        s = of.signature
        forms[s.a, s.epilogue, s.overlap].append(of)
    found = []
    for alike in forms.values():
        known = [o for i, of in enumerate(alike) if i % 4 for o in observations(of, of.us)]
        calibration = Calibration(change(known), estimates, family)
        for of in alike[::4]:
            predictions = calibration.of(of.signature)
            found += [regret(of, m, predictions.us) for m in of.us]
    return found


def to_choose_by(predictions: Predictions) -> Callable[[str, int], float]:
    return lambda name, m: predictions.curve(name, [m])[0]


def looked_at(rounds: int, place: int) -> tuple[Regrets, Regrets]:
    """The regrets at M that were looked at in so many rounds, and at others. Each fourth M is one of those where the
    best 24 functions were measured, from `place` on, the first and the last too; two further is a look. Times of a look
    are off by 5% together, as the clock scatters, and by 1.5% beside each other."""
    found, elsewhere, chance = list[float](), list[float](), random.Random(place)
    for of in at_random_m():
        ms = sorted(of.us)
        known = {ms[0], ms[-1], *ms[place::4]}
        between = [m for m in ms[(place + 2) % 4 :: 4] if m not in known]
        best = [(m, sorted(of.us[m], key=of.us[m].__getitem__)[:24]) for m in known]
        seen = [Observation(of.signature, m, name, of.us[m][name]) for m, names in best for name in names]
        measured = Calibration(seen, estimates, family).of(of.signature)
        looks, predictions = dict[int, dict[str, float]](), measured
        for _ in range(rounds):
            for m, names in points.to_look_at(predictions, of.us[ms[0]], between, looks):
                clock = chance.gauss(0, 0.05)
                us = {name: of.us[m][name] * math.exp(clock + chance.gauss(0, 0.015)) for name in names}
                us["torch"] = math.exp(clock + chance.gauss(0, 0.015))
                looks[m] = dict(session._beside(looks.get(m, {}), us, "torch"))
            taken = ((m, name, us) for m, at in looks.items() for name, us in at.items() if name != "torch")
            seen = [Observation(of.signature, *look) for look in taken]
            predictions = measured.looked_at(seen, lambda m: 0.05)
        found += [regret(of, m, to_choose_by(predictions)) for m in between]
        elsewhere += [regret(of, m, to_choose_by(predictions)) for m in ms if m not in known and m not in between]
    return found, elsewhere


def mean(regrets: Regrets) -> float:
    return math.exp(math.fsum(map(math.log1p, regrets)) / len(regrets)) - 1


def same(found: list[Observation]) -> list[Observation]:
    return found


def nothing(found: list[Observation]) -> list[Observation]:
    return []


@pytest.mark.long
def test_between_measured_m_the_choice_is_near_the_best() -> None:
    """The winner at the next measured M above is behind by more than 10%."""
    regrets = between(same)
    assert len(regrets) == 148
    alone = mean(between(nothing))
    said = f"choice is {mean(regrets):.1%} behind the best at M that were left out, and estimates alone {alone:.1%};"
    assert said in choosing()
    assert mean(regrets) < 0.036
    assert max(regrets) < 0.25


def test_looks_between_the_points_halve_what_the_choice_is_behind_there() -> None:
    """Where many functions were predicted, the one that was predicted to be the best was mostly predicted too well."""

    def after(rounds: int) -> list[Regrets]:
        of_all = [looked_at(rounds, place) for place in range(4)]
        return [[x for of in of_all for x in of[which]] for which in (0, 1)]

    (before, elsewhere_before), (looks, elsewhere) = after(0), after(2)
    assert len(looks) > 90
    assert mean(looks) < 0.35 * mean(before)
    assert max(looks) < max(before)
    assert mean(elsewhere) < 1.1 * mean(elsewhere_before)
    assert (
        f"the choice is {mean(looks):.1%} behind the best at M that were looked at, without looks {mean(before):.1%}, "
        f"and at M a fifth away {mean(elsewhere):.1%} and {mean(elsewhere_before):.1%} ("
    ) in choosing()


def test_what_a_look_is_off_by_together_is_mostly_taken_for_the_clock() -> None:
    of = at_random_m()[0]
    low, middle, high = sorted(of.us)[5:8]
    names = sorted(of.us[low], key=of.us[low].__getitem__)[:6]
    measured = Calibration(observations(of, [low, high]), estimates, family).of(of.signature)
    own = dict(zip(names, (1.04, 0.97, 1.0, 0.99, 1.02, 0.98), strict=True))
    seen = [Observation(of.signature, middle, n, 1.1 * ratio * measured.us(n, middle)) for n, ratio in own.items()]

    def ratios(off: float) -> list[float]:
        looked = measured.looked_at(seen, lambda m: off)
        return [looked.us(name, middle) / measured.us(name, middle) for name in names]

    alone, together = ratios(0.0), ratios(0.05)
    assert alone == pytest.approx([1.1 * ratio for ratio in own.values()])
    assert statistics.geometric_mean(together) < 1.02
    assert [ratio / together[0] for ratio in together] == pytest.approx([ratio / alone[0] for ratio in alone])


def test_a_look_is_at_what_may_be_the_best_and_at_two_or_more() -> None:
    of = at_random_m()[0]
    low, middle, high = sorted(of.us)[5:8]
    measured = Calibration(observations(of, [low, high]), estimates, family).of(of.signature)
    order = sorted(of.us[low], key=lambda name: measured.us(name, middle))
    ((m, names),) = points.to_look_at(measured, of.us[low], [middle], {})
    assert (m, list(names)) == (middle, order[: len(names)])
    assert 2 <= len(names) <= 6
    far = [order[0], *[n for n in order if measured.us(n, middle) > 1.5 * measured.us(order[0], middle)][:3]]
    assert points.to_look_at(measured, far, [middle], {}) == ((middle, tuple(far[:2])),)
    assert points.to_look_at(measured, order, [middle], {middle: {order[0]: 1.0}}) == ()
    ((_, others),) = points.to_look_at(measured, order, [middle], {middle: {order[-1]: 1.0}})
    assert others == names


def test_at_an_m_that_was_looked_at_the_prediction_is_what_was_seen_and_measured_ones_stay() -> None:
    of = at_random_m()[0]
    low, middle, high = sorted(of.us)[5:8]
    name = min(of.us[low], key=of.us[low].__getitem__)
    measured = Calibration(observations(of, [low, high]), estimates, family).of(of.signature)
    us = 1.3 * measured.us(name, middle)
    looked = measured.looked_at([Observation(of.signature, middle, name, us)])
    assert looked.us(name, middle) == pytest.approx(us)
    assert [looked.us(name, m) for m in (low, high)] == pytest.approx([of.us[m][name] for m in (low, high)])
    assert measured.us(name, (low + middle) // 2) < looked.us(name, (low + middle) // 2)
    assert looked.uncertainty(name, middle) < measured.uncertainty(name, middle)
    other = next(n for n in of.us[low] if n != name)
    assert looked.us(other, middle) == measured.us(other, middle) < looked.curve(other, [middle])[0]


def test_for_problems_never_measured_the_choice_is_near_the_best() -> None:
    regrets, alone = left_out(same), mean(left_out(nothing))
    assert len(regrets) == 113
    assert f"problems were timed it is {mean(regrets):.1%} behind, and estimates alone {alone:.1%} (" in choosing()
    assert mean(regrets) < 0.024
    assert max(regrets) < 0.25


@pytest.mark.parametrize(
    ("regrets", "bound"), [pytest.param(between, 0.036, marks=pytest.mark.long), (left_out, 0.024)]
)
def test_what_was_measured_of_other_functions_is_no_calibration(
    regrets: Callable[[Callable[[list[Observation]], list[Observation]]], Regrets], bound: float
) -> None:
    assert mean(regrets(shuffled)) > 1.3 * bound


def test_the_estimate_alone_is_further_behind() -> None:
    alone = [regret(of, m, estimates(of.signature)) for of in recorded() for m in of.us]
    assert 0.035 < mean(alone) < 0.045


# --- what a calibration promises ---

SIGNATURE = Signature("bf16", "bf16", "bf16", "f32", "none", 4096, 4096)
OTHER = Signature("bf16", "bf16", "bf16", "f32", "none", 8192, 4096)


def flat(signature: Signature) -> Callable[[str, int], float]:
    return lambda name, m: 10.0


def predictions(*found: tuple[int, str, float]) -> Predictions:
    seen = [Observation(SIGNATURE, m, name, us) for m, name, us in found]
    return Calibration(seen, flat, lambda name: [name[0]]).of(SIGNATURE)


def test_where_a_function_was_measured_the_prediction_is_what_was_measured() -> None:
    of = predictions((16, "a1", 12.0), (16, "b1", 9.0), (256, "a1", 20.0), (256, "a2", 30.0))
    assert of.us("a1", 16) == pytest.approx(12)
    assert of.us("a1", 256) == pytest.approx(20)
    assert of.us("a2", 256) == pytest.approx(30)
    assert of.curve("a1", [16, 256]) == [of.us("a1", 16), of.us("a1", 256)]


def test_between_two_m_the_prediction_is_between() -> None:
    of = predictions((16, "a1", 10.0), (64, "a1", 20.0))
    assert 10 < of.us("a1", 24) < of.us("a1", 32) < of.us("a1", 48) < 20


def test_what_was_measured_nowhere_is_taken_for_its_relatives() -> None:
    slow = [(16, f"a{i}", 14.0) for i in range(9)]
    quick = [(16, f"b{i}", 10.0) for i in range(9)]
    of = predictions(*slow, *quick)
    assert of.us("a99", 16) > 12.5
    assert of.us("b99", 16) < 11.5
    assert of.us("c99", 16) == pytest.approx(math.sqrt(140))


def test_other_problems_tell_of_one_that_was_not_measured() -> None:
    seen = [Observation(SIGNATURE, 64, name, us) for name, us in (("a1", 8.0), ("a2", 10.0), ("a3", 12.5))]
    of = Calibration(seen, flat, lambda name: []).of(OTHER)
    assert of.us("a1", 64) < of.us("a2", 64) < of.us("a3", 64)


def test_nothing_measured_leaves_the_estimate() -> None:
    assert predictions().us("a1", 77) == 10.0
    assert predictions().uncertainty("a1", 77) > 0.04


def test_uncertainty_grows_with_the_distance_from_what_was_measured() -> None:
    of = predictions((64, "a1", 10.0))
    steps = [of.uncertainty("a1", m) for m in (64, 72, 96, 128, 512)]
    assert steps == sorted(steps)
    assert steps[0] == pytest.approx(0.01)
    assert of.uncertainty("a2", 64) > steps[-1]


@pytest.mark.skipif(native.effect is None, reason="runtime._native was not built")
@pytest.mark.parametrize("reach", [0.5, 4.0, math.inf])
def test_native_code_adds_effects_up_as_python_does(reach: float) -> None:
    chance = random.Random(7)
    several = [
        calibrate._Effect([(float(x), chance.gauss(0, 0.1)) for x in sorted(chance.sample(range(14), count))], reach)
        for count in (1, 2, 9)
    ]
    xs = [*map(float, range(15)), *(chance.uniform(-1, 15) for _ in range(100))]
    guesses = [chance.uniform(1, 100) for _ in xs]
    first, *rest = (effect.native for effect in several)
    assert first.times(tuple(rest), guesses, xs) == calibrate.with_effects(several, guesses, xs)
    assert first.times((), guesses, xs) != first.times(tuple(rest), guesses, xs)


@pytest.mark.skipif(native.effect is None, reason="runtime._native was not built")
def test_native_code_refuses_effects_that_are_none() -> None:
    for xs, values in (([], []), ([1.0], []), ([1.0], [1.0, 2.0]), ([1.0], (1.0,))):
        with pytest.raises(ValueError, match=r"at 1 to 2\^20 places|expected a list of 1"):
            native.effect(xs, values, 1.0)
    for reach in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="reaches somewhere"):
            native.effect([1.0], [1.0], reach)
    with pytest.raises(TypeError):
        native.effect([1.0], ["a"], 1.0)
    effect = native.effect([1.0], [0.5], 1.0)
    for others, guesses in (((), []), ((None,), [1.0]), ((effect,) * 16, [1.0])):
        with pytest.raises(ValueError, match="few effects, and an estimate for each place"):
            effect.times(others, guesses, [2.0])


@pytest.mark.skipif(native.effect is None, reason="runtime._native was not built")
def test_without_native_code_predictions_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def several() -> list[float]:
        of = predictions((16, "a1", 12.0), (16, "b1", 9.0), (256, "a1", 20.0), (256, "a2", 30.0))
        return [us for name in ("a1", "a2", "b1", "c1") for us in of.curve(name, [1, 16, 99, 300])]

    asked = list[int]()
    in_python = calibrate.with_effects
    monkeypatch.setattr(calibrate, "with_effects", lambda *given: asked.append(len(given)) or in_python(*given))  # type: ignore[func-returns-value]
    before = several()
    assert asked == [], "native code does it where it can"
    monkeypatch.setattr(native, "effect", None)
    assert several() == before
    assert asked


def test_a_hundred_functions_are_predicted_in_two_seconds() -> None:
    of = next(r for r in recorded() if r.signature.n == 6144 and r.signature.k == 4096)
    calibration = Calibration(observations(of, CALIBRATED_AT), lambda s: estimates.__wrapped__(s), family)
    names = sorted(of.variants)[:100]

    def predicted() -> None:
        predict = calibration.of(of.signature)
        for name in names:
            predict.curve(name, [*range(1, 65), *range(72, 8193, 8)])

    assert_takes_less_than(2.5, predicted)
