"""Requests of random lengths through an engine of vLLM's: throughput when all come at once, and how long each waits for
its first token (TTFT) and for every next one (ITL) when they come at random times.

Lengths are log-uniform, times those of a Poisson process, both drawn by a seed: two runs get the same requests.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

PROMPT_TOKENS, ANSWER_TOKENS = (16, 2048), (8, 256)  # from, to
AT_ONCE, IN_TURN = 128, 192  # requests
PER_S = 16.0  # of those that come in turn: a quarter of what two H100s take of an 8B model


@dataclass(frozen=True)
class Request:
    """What one user asks for: when, in seconds after the first could; token ids; how many tokens to answer with."""

    at_s: float
    prompt: tuple[int, ...]
    answer_tokens: int


def drawn(seed: str, count: int, per_s: float = math.inf) -> list[Request]:
    """So many requests in the order of their times, `per_s` a second on average or all at once."""
    draw = random.Random(seed)
    at, requests = 0.0, []
    for _ in range(count):
        at += draw.expovariate(per_s) if math.isfinite(per_s) else 0.0
        prompt = tuple(draw.randrange(10, 30000) for _ in range(_log_uniform(draw, *PROMPT_TOKENS)))
        requests.append(Request(at, prompt, _log_uniform(draw, *ANSWER_TOKENS)))
    return requests


def _log_uniform(draw: random.Random, least: int, most: int) -> int:
    return round(math.exp(draw.uniform(math.log(least), math.log(most))))


def served(
    engine: Any,
    requests: Sequence[Request],
    sampling: Callable[[int], Any],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, list[float]]:
    """The seconds at which each request's tokens came, by its number, from the first request's time on.

    `engine` is an LLMEngine with nothing else to do; `sampling` makes its parameters for so many tokens.
    """
    came: dict[str, list[float]] = {}
    waiting = list(enumerate(requests))[::-1]
    began = clock()
    while waiting or engine.has_unfinished_requests():
        now = clock() - began
        while waiting and waiting[-1][1].at_s <= now:
            number, request = waiting.pop()
            prompt = {"prompt_token_ids": list(request.prompt)}
            engine.add_request(str(number), prompt, sampling(request.answer_tokens))
        if not engine.has_unfinished_requests():
            sleep(max(0.0, waiting[-1][1].at_s - (clock() - began)))
            continue
        outputs = engine.step()
        now = clock() - began
        for output in outputs:
            times = came.setdefault(output.request_id.partition("-")[0], [])  # vLLM puts a suffix behind its name
            times += [now] * (len(output.outputs[0].token_ids) - len(times))
    return came


def waits(requests: Sequence[Request], came: dict[str, list[float]]) -> dict[str, float]:
    """Milliseconds to the first token and between tokens, the median and the 99th percentile of all."""
    first = [came[str(number)][0] - request.at_s for number, request in enumerate(requests)]
    between = [b - a for times in came.values() for a, b in itertools.pairwise(times)]
    return {
        f"{name}_p{percent}_ms": round(1e3 * _percentile(values, percent), 3)
        for name, values in (("ttft", first), ("itl", between))
        for percent in (50, 99)
    }


def _percentile(values: Iterable[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def measured(engine: Any, sampling: Callable[[int], Any], repeats: int, **clocks: Any) -> dict[str, Any]:
    """Both kinds of traffic, so many times each with other requests, after some that warm up."""
    served(engine, drawn("warm", 16), sampling, **clocks)
    tokens_per_s, waited = [], []
    for repeat in range(repeats):
        requests = drawn(f"at once {repeat}", AT_ONCE)
        came = served(engine, requests, sampling, **clocks)
        tokens = sum(len(r.prompt) + r.answer_tokens for r in requests)
        tokens_per_s.append(round(tokens / max(times[-1] for times in came.values()), 1))
        requests = drawn(f"in turn {repeat}", IN_TURN, PER_S)
        waited.append(waits(requests, served(engine, requests, sampling, **clocks)))
    return {
        "at_once": {"tokens_per_s": statistics.median(tokens_per_s), "all": tokens_per_s},
        "in_turn": {name: [each[name] for each in waited] for name in waited[0]},
    }
