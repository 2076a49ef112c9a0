"""What `scripts/study_screening.py` says of brief times."""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import study_screening as study

from aot.tune import roofline, session
from runtime.gemm.signature import Signature

from .command_line import ROOT
from .pages import choosing

Times = Sequence["float | None"]


def test_a_clock_that_neighbours_share_is_taken_out() -> None:
    chance, clock, turns = random.Random(1), 0.0, list[tuple[str, float]]()
    true = {f"f{i}": 100.0 + i for i in range(20)}
    for _ in range(8):
        for name in chance.sample(list(true), len(true)):
            clock = 0.9 * clock + chance.gauss(0, 0.02)
            turns.append((name, true[name] * math.exp(clock + chance.gauss(0, 0.003))))

    def off(us: dict[str, float]) -> float:
        return statistics.pstdev(math.log(us[name] / true[name]) for name in true)

    medians = {name: statistics.median(us for n, us in turns if n == name) for name in true}
    assert off(study.steady(turns)) < 0.7 * off(medians)


def case(bound: bool, paused: Sequence[Times], look: Times) -> dict[str, Any]:
    us = {"paused": paused, "loaded": [[10.0, 20.0, 30.0]] * 2, "look": [look], "long": [[10.0, 20.0, 30.0]]}
    return {"power_bound": bound, "us": us}


def test_times_are_compared_beside_each_other_and_a_look_together() -> None:
    faster = [9.0, 18.0, 27.0 * math.exp(0.03)]
    (bound,) = study.summarise([case(True, [faster, [9.0, 18.0, 27.0]], [11.0, 22.0, None])])
    off = pytest.approx(0.03 / math.sqrt(3), abs=1e-4)
    assert bound["paused"] == {"problems": 1, "off": off, "twice": off}
    assert bound["loaded"] == {"problems": 1, "off": 0.0, "twice": 0.0}
    assert bound["look"] == {"problems": 1, "off": 0.0, "together": 0.0}
    assert study.off_together(case(True, [faster] * 2, [11.0, 22.0, None]), "look") == pytest.approx(math.log(1.1))


def test_problems_that_power_bounds_are_told_apart_and_ways_may_lack() -> None:
    cases = [case(of, [[1.0, 2.0, 3.0]] * 2, [1.0, 2.0, 3.0]) for of in (True, False, False)]
    del cases[2]["us"]["look"]
    lines = study.summarise(cases)
    assert [(line["power_bound"], line["paused"]["problems"], line["look"]["problems"]) for line in lines] == [
        (True, 1, 1),
        (False, 2, 1),
    ]
    assert [line["power_bound"] for line in study.summarise(cases[1:])] == [False]


def test_pages_and_constants_say_what_an_h100_showed() -> None:
    results = study.read(ROOT / "benchmarks" / "screening_h100.json.xz")["results"]
    bound, other = study.summarise(results)
    paused, loaded, look = (bound[way] for way in study.WAYS)
    assert (
        f"one beside the others is {paused['off']:.1%} off what it takes in long runs, though two such screenings "
        f"differ by {paused['twice']:.1%}. Screened after load it is {loaded['off']:.1%} off, two differing by "
        f"{loaded['twice']:.1%}; in looks between the points {look['off']:.1%}, with all times of a look off by "
        f"{look['together']:.1%} together ({paused['problems']}, {loaded['problems']} and {look['problems']} problems "
        f"from M = 290 on four H100s;"
    ) in choosing()
    brief = other["look"]["together"]
    assert (look["together"], brief) == pytest.approx((session._CLOCK, session._BRIEF), abs=0.005)
    where = (ROOT / "aot" / "tune" / "session.py").read_text()
    assert f"(`scripts/study_screening.py`: {look['together']:.1%} and {brief:.1%})" in where
    said = " ".join((ROOT / "aot" / "tune" / "roofline.py").read_text().replace("\n#", "").split())
    total = paused["problems"] + other["paused"]["problems"]
    assert f"Of {total} problems on H100s" in said
    assert f"by {paused['off']:.1%} above this (root mean square), and by {other['paused']['off']:.1%} below" in said
    near = [case for case in results if not case["power_bound"] and is_bound(case)]
    found = [case for case in near if "paused" in case["us"]]
    off = study._rms(found, "paused")
    said = f"On H100s functions are {off:.1%} off there after a pause ({len(found)} problems of M = 150)."
    assert said in choosing()
    assert {case["m"] for case in near} == {150}
    for case in results:
        signature = Signature.of_key(case["signature"])
        assert signature is not None
        assert (roofline.over_memory(signature, case["m"]) > roofline.OVER_MEMORY) is case["power_bound"]
        assert not case["power_bound"] or roofline.power_bound(signature, case["m"])
        assert case["m"] >= 290 or not case["power_bound"]


def is_bound(case: Mapping[str, Any]) -> bool:
    """Whether tuning would put the GPU under load there."""
    signature = Signature.of_key(case["signature"])
    return signature is not None and roofline.power_bound(signature, case["m"])
