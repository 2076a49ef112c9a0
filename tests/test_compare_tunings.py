"""scripts/compare_tunings.py: how well tunings of one build agree."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from aot.tune.halving import Measured
from aot.tune.timing import Timing
from runtime.errors import AotError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import compare_tunings


def at(us: dict[str, float], slowdowns: dict[str, float]) -> compare_tunings.Points:
    """A tuning of one M."""
    times = tuple((name, Timing(t, 0.0)) for name, t in us.items())
    load = {name: Timing(us[name] * math.exp(of), 0.0) for name, of in slowdowns.items()}
    return {("key", 512): Measured(512, times, "torch.mm", Timing(9.0, 0.0), len(us), load)}


def test_slowdowns_that_two_tunings_share_correlate_and_others_do_not() -> None:
    us = {"a": 10.0, "b": 10.0, "c": 10.0, "d": 10.0}
    one, same = at(us, {"a": 0.1, "b": -0.1, "c": 0.1, "d": -0.1}), at(us, {"a": 0.2, "b": 0.0, "c": 0.2, "d": 0.0})
    found = compare_tunings.compared([(one, "H100"), (same, "H100")])
    assert (found["brief_times_differ_by"], found["slowdowns"], found["correlation_of_slowdowns"]) == (0, [0.1, 0.1], 1)
    other = at(us, {"a": 0.1, "b": 0.1, "c": -0.1, "d": -0.1})
    assert compare_tunings.compared([(one, "H100"), (other, "H200")])["correlation_of_slowdowns"] == 0


def test_brief_times_are_compared_beside_each_other() -> None:
    """Another clock makes all longer, and says nothing."""
    load = {"a": 0.1, "b": 0.2}
    one, other = at({"a": 10.0, "b": 10.0}, load), at({"a": 20.0, "b": 20.0 * math.exp(0.02)}, load)
    assert compare_tunings.compared([(one, ""), (other, "")])["brief_times_differ_by"] == pytest.approx(0.01)


def test_tunings_without_load_are_refused() -> None:
    one = at({"a": 10.0, "b": 11.0}, {})
    with pytest.raises(AotError, match="tune with --sustained"):
        compare_tunings.compared([(one, ""), (one, "")])
