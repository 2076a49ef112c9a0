"""How contenders take turns, and what samples that were taken so say, on those of two H100s at the limit of power."""

from __future__ import annotations

import json
import lzma
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache

import pytest

from aot.tune import halving
from aot.tune.options import TuneOptions
from aot.tune.timing import Timing, deviation, in_turns, turns, whole_turns

from .command_line import ROOT
from .pages import choosing

TURNS = 5  # that `aot tune` takes of finalists
ALL = ("ours", "against", "torch", "on_slower", "torch again")
Samples = Mapping[str, Sequence[float]]
Taken = Callable[[Mapping[str, Timing]], Mapping[str, Timing]]


@cache
def problems() -> list[tuple[int, Samples]]:
    """M, and the samples of five contenders, turn by turn, as `scripts/bench_random.py --samples` keeps them; these
    were taken without load first."""
    found = json.loads(lzma.decompress((ROOT / "benchmarks" / "turns_h100.json.xz").read_bytes()))
    return [(case["m"], case["samples"]) for case in found["cases"]]


def part(of: Samples, first: int, last: int | None) -> dict[str, Timing]:
    return {name: Timing.of(samples[first:last]) for name, samples in of.items()}


def off(low: int, high: int, taken: Taken, names: Sequence[str] = ALL, turns: int = TURNS) -> float:
    """How far the first turns are off in what one function takes over another: the root mean square of the share, where
    the truth is what the other turns say, one function beside the other."""
    logs = []
    for m, of in problems():
        if low <= m <= high:
            pairs = zip(of["against"][turns:], of["ours"][turns:], strict=True)
            truth = statistics.median(against / ours for against, ours in pairs)
            found = taken(part({name: of[name] for name in names}, 0, turns))
            logs.append(math.log(found["against"].us / found["ours"].us / truth))
    return math.sqrt(math.fsum(x * x for x in logs) / len(logs))


@pytest.mark.parametrize(("low", "high"), [(65, 511), (512, 8192)])
def test_turns_say_more_without_what_their_contenders_share(low: int, high: int) -> None:
    count = sum(low <= m <= high for m, _ in problems())
    with_turns, without = off(low, high, in_turns), off(low, high, dict)
    said = " ".join((in_turns.__doc__ or "").split())
    assert f"{count} of M = {low} to {high}" in said
    assert f"{with_turns:.1%}" in said
    assert f"{without:.1%}" in said
    assert with_turns < 0.9 * without


@pytest.mark.parametrize("names", [ALL[:2], ALL[:3], ALL[:4]])
@pytest.mark.parametrize("turns", [4, 5])
def test_however_few_contenders_there_are(names: Sequence[str], turns: int) -> None:
    for low, high in ((65, 511), (512, 8192)):
        assert off(low, high, in_turns, names, turns) < 0.95 * off(low, high, dict, names, turns)


def test_after_a_pause_turns_tell_something_else() -> None:
    """Of torch over the archive's function, beside what the sixteenth to twentieth turn say."""
    logs: list[list[float]] = [[], [], []]
    for m, of in problems():
        if m >= 512 and len(of["torch"]) >= 20:
            ratios = [torch / ours for torch, ours in zip(of["torch"], of["ours"], strict=True)]
            by_five = [statistics.median(ratios[i : i + TURNS]) for i in (0, 5, 10, 15)]
            for found, us in zip(logs, by_five, strict=False):
                found.append(math.log(us / by_five[3]))
    off = [math.sqrt(math.fsum(x * x for x in of) / len(of)) for of in logs]
    usual = abs(math.fsum(logs[0])) / len(logs[0])
    said = f"later on by {off[0]:.1%}, and by {usual:.1%} on average; the next five by {off[1]:.1%}, and the five after"
    lines = (ROOT / "aot" / "tune" / "halving.py").read_text().replace("\n#", "").split()
    assert f"{said} these by {off[2]:.1%}." in " ".join(lines)


def test_after_a_pause_the_clock_is_high() -> None:
    """The first five turns take 30 ms."""
    logs = [
        math.log(statistics.median(samples[:TURNS]) / statistics.median(samples[15:20]))
        for m, of in problems()
        if m >= 512 and len(of["torch"]) >= 20
        for samples in of.values()
    ]
    less = 1 - math.exp(math.fsum(logs) / len(logs))
    assert f"launches take {less:.0%} less than 90 ms later" in choosing()


def test_what_all_of_a_turn_share_is_taken_out() -> None:
    clock = [1.0, 1.1, 1.1, 1.0, 1.3, 1.1, 1.0]
    found = in_turns({"a": Timing.of([9 * c for c in clock]), "b": Timing.of([10 * c for c in clock])})
    assert found["a"].us / found["b"].us == pytest.approx(0.9)
    assert found["b"].us == pytest.approx(11)


def test_a_disturbed_sample_changes_nobody_else() -> None:
    taken = {"a": Timing.of([9.0, 9.0, 90.0, 9.0, 9.0]), "b": Timing.of([10.0] * 5), "c": Timing.of([11.0] * 5)}
    assert in_turns(taken) == taken
    two = in_turns({"a": taken["a"], "b": taken["b"]})
    assert (two["a"].us, two["b"].us) == pytest.approx((9.0, 10.0))


def test_two_speeds_are_their_own() -> None:
    two = Timing.of([10.0, 10.0, 11.0, 11.0, 11.0])
    calm = {"b": Timing.of([10.0] * 5), "c": Timing.of([10.5] * 5)}
    assert in_turns({"a": two, **calm}) == {"a": two, **calm}
    beside = in_turns({"a": two, "b": calm["b"]})
    assert beside["a"].bimodal
    assert not beside["b"].bimodal
    assert beside["a"].us / beside["b"].us == pytest.approx(1.06, rel=0.002)


def test_spreads_are_those_of_what_was_taken() -> None:
    clock = [1.0, 1.1, 1.1, 1.0, 1.3]
    taken = {"a": Timing.of([9 * c for c in clock]), "b": Timing.of([10 * c for c in clock])}
    assert [timing.spread for timing in in_turns(taken).values()] == [timing.spread for timing in taken.values()]


def test_without_turns_of_all_nothing_is_taken_out() -> None:
    one = {"a": Timing.of([1.0, 1.0, 2.0, 2.0, 2.0])}
    uneven = one | {"b": Timing.of([1.0, 2.0, 3.0])}
    bare = {"a": Timing(1.0, 0.1), "b": Timing(2.0, 0.1)}
    assert [in_turns(of) for of in ({}, one, uneven, bare)] == [{}, one, uneven, bare]


def test_how_far_off_a_median_is_follows_from_its_samples() -> None:
    chance = random.Random(2)
    found = [[math.exp(chance.gauss(0, 0.02)) for _ in range(40)] for _ in range(400)]
    scatter = math.sqrt(math.fsum(math.log(statistics.median(of)) ** 2 for of in found) / len(found))
    assert scatter == pytest.approx(math.fsum(map(deviation, found)) / len(found), rel=0.1)
    assert deviation([1.0, 1.0, 1.0]) == math.inf


def test_finalists_are_compared_without_what_their_turns_share() -> None:
    of = max(
        (of for m, of in problems() if m >= 512), key=lambda of: abs(math.log(beside(of, in_turns) / beside(of, dict)))
    )

    class Recorded:
        baseline, power_bound = "torch", False

        def time(self, names: Collection[str], *_: float) -> dict[str, Timing]:
            return {name: timing for name, timing in part(of, 0, TURNS).items() if name in names}

        def sustained(self, us: Mapping[str, float]) -> dict[str, Timing]:
            raise AssertionError("nobody asked for it")

    found = halving.measure(Recorded(), 512, ["ours", "against"], TuneOptions(finalists=2))
    assert found is not None
    times = dict(found.times)
    three = {name: of[name] for name in ("ours", "against", "torch")}
    twice = {name: [*samples[:TURNS]] * 2 for name, samples in three.items()}  # none leads by more than its noise
    assert times["against"].us / times["ours"].us in (beside(three, in_turns), beside(twice, in_turns, 2 * TURNS))
    assert times["against"].us / times["ours"].us != beside(three, dict)


def test_screenings_of_functions_that_power_bounds_are_three_turns_without_what_these_share() -> None:
    of = max(
        (of for m, of in problems() if m >= 512),
        key=lambda of: abs(math.log(beside(two_of(of), in_turns, 3) / beside(of, dict, 3))),
    )

    class Recorded:
        baseline, power_bound = "torch", True

        def time(self, names: Collection[str], repeats: int, *_: float) -> dict[str, Timing]:
            return {name: timing for name, timing in part(of, 0, repeats).items() if name in names}

        def sustained(self, us: Mapping[str, float]) -> dict[str, Timing]:
            raise AssertionError("nobody asked for it")

    found = halving.measure(Recorded(), 512, ["ours", "against"], TuneOptions(finalists=2))
    assert found is not None
    two = two_of(of)
    assert found.screened["against"] / found.screened["ours"] == beside(two, in_turns, 3) != beside(two, dict, 3)


def test_looks_are_four_turns_without_what_these_share() -> None:
    of = max(
        (of for m, of in problems() if m >= 512),
        key=lambda of: abs(math.log(beside(of, in_turns, 4) / beside(of, dict, 4))),
    )
    asked = list[float]()

    class Recorded:
        baseline, power_bound = "against", True

        def time(
            self, names: Collection[str], repeats: int, graph_us: float, settle_us: float = 0.0
        ) -> dict[str, Timing]:
            asked.append(repeats)
            return {name: timing for name, timing in part(of, 0, repeats).items() if name in names}

        def sustained(self, us: Mapping[str, float]) -> dict[str, Timing]:
            raise AssertionError("nobody asked for it")

    us = halving.glance(Recorded(), ["ours"])
    assert asked == [4]
    two = {name: of[name] for name in ("ours", "against")}
    assert us["against"] / us["ours"] == beside(two, in_turns, 4) != beside(two, dict, 4)


def two_of(of: Samples) -> Samples:
    return {name: of[name] for name in ("ours", "against")}


def beside(of: Samples, taken: Taken, turns: int = TURNS) -> float:
    found = taken(part(of, 0, turns))
    return found["against"].us / found["ours"].us


def test_every_contender_has_every_place_in_two_rounds() -> None:
    orders = list(turns(3, 6))
    assert orders == [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1], [2, 0, 1], [1, 0, 2]]
    for place in range(4):
        assert {order[place] for order in turns(4, 8)} == {0, 1, 2, 3}
    assert list(turns(1, 2)) == [[0], [0]]
    assert list(turns(0, 2)) == [[], []]


@pytest.mark.parametrize("count", range(1, 8))
def test_whole_turns_give_each_contender_each_place_as_often(count: int) -> None:
    repeats = whole_turns(count, 7)
    places = Counter((who, place) for order in turns(count, repeats) for place, who in enumerate(order))
    assert len(places) == count**2
    assert set(places.values()) == {repeats // count}
    assert 7 <= repeats < 7 + 2 * count
