"""Requests of random lengths through an engine of vLLM's: throughput when all come at once, and how long each waits for
its first token (TTFT) and for every next one (ITL) when they come at random times.

Lengths are log-uniform, times those of a Poisson process, both drawn by a seed: two runs get the same requests, which
meet in the same steps. Only runs with other seeds say how much of the slowest waits is due to that.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

PROMPT_TOKENS, ANSWER_TOKENS = (16, 2048), (8, 256)  # from, to
AT_ONCE, IN_TURN = 128, 192  # requests
PER_S = 16.0  # of those that come in turn: a quarter of what two H100s take of an 8B model
USUAL_SEED = "0"
_SLOWEST = 12
_PREFILLED = 0, 1, 256, 512, 1024, 2048  # tokens of prompts in a step, from which steps count together


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
        prompt = tuple(draw.randrange(10, 30000) for _ in range(log_uniform(draw, *PROMPT_TOKENS)))
        requests.append(Request(at, prompt, log_uniform(draw, *ANSWER_TOKENS)))
    return requests


def log_uniform(draw: random.Random, least: int, most: int) -> int:
    """A number from `least` to `most` whose logarithm is as likely to be anywhere between theirs."""
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


@dataclass
class Waits:
    """Seconds that requests waited for their first tokens, and for every next one."""

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)

    def add(self, requests: Sequence[Request], came: dict[str, list[float]]) -> None:
        """Those of some requests, by when their tokens came."""
        self.first_s += [came[str(number)][0] - request.at_s for number, request in enumerate(requests)]
        self.between_s += [b - a for times in came.values() for a, b in itertools.pairwise(times)]

    def figures(self) -> dict[str, float]:
        """Milliseconds to the first token and between tokens: the mean, the median and the 99th percentile of all."""
        found = {}
        for name, values in (("ttft", self.first_s), ("itl", self.between_s)):
            found[f"{name}_mean_ms"] = statistics.fmean(values)
            found |= {f"{name}_p{percent}_ms": _percentile(values, percent) for percent in (50, 99)}
        return {name: round(1e3 * value, 3) for name, value in found.items()}


def steps(requests: Sequence[Request], came: dict[str, list[float]]) -> list[tuple[int, float]]:
    """Tokens of prompts, and seconds, of each step that some request's tokens came before and in.

    A prompt counts for the step that its first token came in: one that did not fit into a step counts for its last.
    """
    lengths: dict[float, int] = {}
    for number, request in enumerate(requests):
        for i, at in enumerate(came[str(number)]):
            lengths[at] = lengths.get(at, 0) + (len(request.prompt) if i == 0 else 0)
    met = {pair for times in came.values() for pair in itertools.pairwise(times)}
    return [(lengths[end], end - begin) for begin, end in itertools.pairwise(sorted(lengths)) if (begin, end) in met]


def by_prefilled(found: Iterable[tuple[int, float]]) -> dict[str, list[float]]:
    """How many steps there are, and the median of their milliseconds, by the least tokens of prompts in them."""
    groups: dict[int, list[float]] = {}
    for tokens, seconds in found:
        groups.setdefault(max(least for least in _PREFILLED if least <= tokens), []).append(1e3 * seconds)
    return {str(least): [len(ms), round(statistics.median(ms), 3)] for least, ms in sorted(groups.items())}


def slowest(found: Sequence[tuple[int, float]]) -> list[list[float]]:
    """The longest steps: milliseconds, and tokens of prompts in the step before, in this and in the next, as an engine
    that schedules ahead gives a step's tokens when the next has begun."""
    tokens = [0, *(of for of, _ in found), 0]
    longest = sorted(range(len(found)), key=lambda i: -found[i][1])[:_SLOWEST]
    return [[round(1e3 * found[i][1], 1), *tokens[i : i + 3]] for i in longest]


def waits(requests: Sequence[Request], came: dict[str, list[float]]) -> dict[str, float]:
    """`Waits.figures` of these requests alone."""
    found = Waits()
    found.add(requests, came)
    return found.figures()


def _percentile(values: Iterable[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def measured(
    engine: Any, sampling: Callable[[int], Any], repeats: int, seed: str = USUAL_SEED, **clocks: Any
) -> dict[str, Any]:
    """Both kinds of traffic, so many times each with other requests, after some that warm up.

    The 99th percentile of one repeat's TTFT is that of two requests; "in_turn_pooled" is of all repeats' requests, and
    "in_turn_steps" and "in_turn_slowest" of all their steps (`by_prefilled`, `slowest`).
    """
    served(engine, drawn("warm", 16), sampling, **clocks)
    tokens_per_s, waited, pooled, every = [], [], Waits(), list[tuple[int, float]]()
    which = "" if seed == USUAL_SEED else f", {seed}"
    for repeat in range(repeats):
        requests = drawn(f"at once {repeat}{which}", AT_ONCE)
        came = served(engine, requests, sampling, **clocks)
        tokens = sum(len(r.prompt) + r.answer_tokens for r in requests)
        tokens_per_s.append(round(tokens / max(times[-1] for times in came.values()), 1))
        requests = drawn(f"in turn {repeat}{which}", IN_TURN, PER_S)
        came = served(engine, requests, sampling, **clocks)
        waited.append(waits(requests, came))
        pooled.add(requests, came)
        every += steps(requests, came)
    return {
        "seed": seed,
        "at_once": {"tokens_per_s": statistics.median(tokens_per_s), "all": tokens_per_s},
        "in_turn": {name: [each[name] for each in waited] for name in waited[0]},
        "in_turn_pooled": pooled.figures(),
        "in_turn_steps": by_prefilled(every),
        "in_turn_slowest": slowest(every),
    }
