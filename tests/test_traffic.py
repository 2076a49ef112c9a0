"""scripts/traffic.py: the requests that it draws, and what it says of the tokens that an engine gives."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from .command_line import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import traffic


@dataclass
class Engine:
    """An engine that gives every request one token a step, each step in `step_s` of a clock that it moves."""

    step_s: float
    now: float = 0.0
    left: dict[str, int] = field(default_factory=dict)
    given: dict[str, list[int]] = field(default_factory=dict)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 1e-6  # or rounding would leave it just before

    def add_request(self, name: str, prompt: dict[str, Any], tokens: int) -> None:
        self.left[f"{name}-x"], self.given[f"{name}-x"] = tokens, []

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        self.now += self.step_s
        outputs = []
        for name in list(self.left):
            tokens = self.given[name]
            tokens.append(1)
            if len(tokens) == self.left[name]:
                del self.left[name]
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=list(tokens))]))
        return outputs


def _served(engine: Engine, requests: list[traffic.Request]) -> dict[str, list[float]]:
    return traffic.served(engine, requests, lambda tokens: tokens, engine.clock, engine.sleep)


def test_every_token_has_the_time_at_which_it_came() -> None:
    requests = [traffic.Request(0.0, (1, 2), 3), traffic.Request(0.15, (3,), 2), traffic.Request(10.0, (4,), 1)]
    came = _served(Engine(0.1), requests)
    assert came["0"] == pytest.approx([0.1, 0.2, 0.3])
    assert came["1"] == pytest.approx([0.3, 0.4])  # asked for at 0.15, and the engine looks at 0.2
    assert came["2"] == pytest.approx([10.1])


def test_waits_are_to_the_first_token_and_between_tokens() -> None:
    requests = [traffic.Request(0.0, (1,), 3), traffic.Request(1.0, (1,), 1)]
    found = traffic.waits(requests, {"0": [0.5, 0.6, 0.8], "1": [1.5]})
    assert found["ttft_p50_ms"] == 500
    assert found["itl_p50_ms"] == 150
    assert 199 <= found["itl_p99_ms"] <= 200
    slower = traffic.waits(requests, {"0": [0.5, 0.6, 1.8], "1": [1.5]})
    assert slower["itl_p99_ms"] > 1000


def test_means_are_of_all_requests_and_of_all_tokens() -> None:
    requests = [traffic.Request(0.0, (1,), 3), traffic.Request(1.0, (1,), 1), traffic.Request(2.0, (1,), 1)]
    found = traffic.waits(requests, {"0": [0.5, 0.6, 0.8], "1": [1.5], "2": [4.0]})
    assert found["ttft_mean_ms"] == 1000
    assert found["itl_mean_ms"] == 150


def test_steps_take_what_lies_between_tokens_and_count_prompts_that_they_begin() -> None:
    requests = [traffic.Request(0.0, (1,) * 9, 3), traffic.Request(0.0, (1,) * 600, 2), traffic.Request(9.0, (1,), 2)]
    came = {"0": [0.1, 0.2, 0.5], "1": [0.5, 0.6], "2": [9.1, 9.3]}
    found = traffic.steps(requests, came)
    assert [tokens for tokens, _ in found] == [0, 600, 0, 0]
    assert [seconds for _, seconds in found] == pytest.approx([0.1, 0.3, 0.1, 0.2]), (
        "not from 0.6 to 9.1, when it waited"
    )
    assert traffic.by_prefilled(found) == {"0": [3, 100], "512": [1, 300]}
    assert traffic.by_prefilled([(1, 0.1), (255, 0.3), (256, 0.4)]) == {"1": [2, 200], "256": [1, 400]}


def test_two_runs_get_the_same_requests() -> None:
    assert traffic.drawn("a", 50, 4.0) == traffic.drawn("a", 50, 4.0) != traffic.drawn("b", 50, 4.0)


def test_lengths_and_times_are_as_promised() -> None:
    requests = traffic.drawn("a", 2000, 4.0)
    assert requests[-1].at_s == pytest.approx(500, rel=0.1)
    assert all(16 <= len(r.prompt) <= 2048 and 8 <= r.answer_tokens <= 256 for r in requests)
    assert {r.at_s for r in traffic.drawn("a", 5)} == {0.0}


def test_measured_counts_tokens_of_prompts_and_answers() -> None:
    engine = Engine(0.01)
    found = traffic.measured(engine, lambda tokens: tokens, 1, clock=engine.clock, sleep=engine.sleep)
    requests = traffic.drawn("at once 0", traffic.AT_ONCE)
    tokens = sum(len(r.prompt) + r.answer_tokens for r in requests)
    steps = max(r.answer_tokens for r in requests)
    assert found["at_once"]["tokens_per_s"] == pytest.approx(tokens / (steps * 0.01), rel=1e-3)
    assert found["in_turn"]["itl_p50_ms"] == [pytest.approx(10)]
    assert {ms for _, ms in found["in_turn_steps"].values()} == {10}


def _asked(monkeypatch: pytest.MonkeyPatch, *seed: str) -> tuple[list[list[traffic.Request]], Any]:
    """The requests of two repeats, without those that warm up, and what is said of them."""
    asked: list[list[traffic.Request]] = []

    def serve(engine: Engine, requests: list[traffic.Request], sampling: Any, **clocks: Any) -> Any:
        asked.append(requests)
        first_s = float(len(asked))
        return {str(i): [r.at_s + first_s, r.at_s + first_s + 1.0] for i, r in enumerate(requests)}

    monkeypatch.setattr(traffic, "served", serve)
    found = traffic.measured(Engine(0.01), lambda tokens: tokens, 2, *seed)
    return asked[1:], found


def test_requests_without_a_seed_are_those_of_earlier_results(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, found = _asked(monkeypatch)
    in_turn = [traffic.drawn(f"in turn {i}", traffic.IN_TURN, traffic.PER_S) for i in range(2)]
    at_once = [traffic.drawn(f"at once {i}", traffic.AT_ONCE) for i in range(2)]
    assert asked == [at_once[0], in_turn[0], at_once[1], in_turn[1]]
    assert found["seed"] == "0"


def test_another_seed_draws_other_requests_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    (usual, _), (others, found) = _asked(monkeypatch, "0"), _asked(monkeypatch, "monday")
    assert found["seed"] == "monday"
    assert not any(each in usual for each in others)
    assert _asked(monkeypatch, "monday")[0] == others


def test_percentiles_are_of_each_repeat_and_of_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third and the fifth that are served come in turn, and wait so many seconds for a first token."""
    _, found = _asked(monkeypatch)
    assert found["in_turn"]["ttft_p50_ms"] == [3000, 5000]
    assert found["in_turn"]["ttft_p99_ms"] == [3000, 5000]
    assert found["in_turn_pooled"]["ttft_p50_ms"] == 4000
    assert found["in_turn_pooled"]["ttft_p99_ms"] == 5000
    assert found["in_turn_pooled"].keys() == found["in_turn"].keys()
