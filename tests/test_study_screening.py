"""What `scripts/study_screening.py` says of brief times."""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import study_screening as study

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
    assert bound["paused"] == pytest.approx(0.03 / math.sqrt(3), abs=1e-4)
    assert bound["paused, twice"] == bound["paused"]
    assert (bound["loaded"], bound["look"], bound["look, together"]) == (0.0, 0.0, 0.0)
    together = study.off_together(case(True, [faster] * 2, [11.0, 22.0, None]), "look")
    assert together == pytest.approx(math.log(1.1))


def test_problems_that_power_bounds_are_told_apart() -> None:
    lines = study.summarise([case(of, [[1.0, 2.0, 3.0]] * 2, [1.0, 2.0, 3.0]) for of in (True, False, False)])
    assert [(line["power_bound"], line["problems"]) for line in lines] == [(True, 1), (False, 2)]
