"""What bounds the speed-ups of engines and of experts, computed from result files: tables of `render_benchmarks.py`.

A bound is the time of what stays as it is, and of products that read their weights as fast as an H200 reads at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from statistics import NormalDist, geometric_mean
from typing import Any, NamedTuple

from report import AGAIN, ROOT

from aot.search.h200 import FLOOR
from aot.tune.grouped_gemm.rows import SKEW

RESULTS = ROOT / "benchmarks" / "results"
BATCHES = "1", "16", "64"

# --- a decode step of Llama-3.1-8B ---

LAYERS, HEAD_BYTES = 32, 128_256 * 4096 * 2
LAYER = tuple(n * k for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)))  # weights of each GEMM


class Served(NamedTuple):
    """A run of engines.json, bytes of a weight, and which of the run's engines without the archives is compared."""

    run: int
    weight_bytes: int
    stock: str = "stock"


DECODED = {
    "bf16": Served(4, 2),
    "fp8 by channel and token": Served(17, 1),
    "fp8 by blocks, stock with CUTLASS": Served(11, 1),
    "fp8 by blocks, stock with DeepGEMM": Served(11, 1, AGAIN),
}
GEMMS = {"stock": "GEMMs", "served": "this project's"}
# What a step is for besides, by the purposes of kernel_times.py, and what a column says of it.
ELSE = {
    "attention": ("attention",),
    "norms": ("norms",),
    "activations": ("activations",),
    "quantising": ("quantising",),
    "others": ("others", "copies", "positions"),
}


def load(name: str) -> Any:
    """A result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def study(name: str) -> Any:
    """The answer of a study of studies_h200.json."""
    (found,) = (s for s in load("studies_h200")["studies"] if s["study"] == name)
    return found["answer"]


def cold_read_us(count: float) -> float:
    """Microseconds that reading so many bytes from memory takes at least."""
    return between(count / 2**20, [(float(mib), us) for mib, us in study("a cold read").items()])


def step_us(run: Any, who: str, batch: str) -> float:
    """Microseconds of a decode step."""
    return int(batch) * 1e6 / float(run[who]["decode"][batch]["tokens_per_s"])


class Decoding(NamedTuple):
    """A step of decoding by one way to serve, in microseconds: `parts`, of stock and of ours, are GEMMs and each of
    `ELSE` in steps that were profiled, `steps` whole ones without the profiler. `read_us` is what reading the weights
    takes at least; `could` how many times as fast as stock ours could be if its GEMMs took no longer than that and a
    step all that it takes besides; `was` how many times as fast it was. In bf16 our GEMMs are with our norms.
    """

    parts: list[tuple[float, float]]
    steps: tuple[float, float]
    read_us: float
    could: float
    was: float


def decoding(label: str, batch: str) -> Decoding:
    """See `Decoding`."""
    of = DECODED[label]
    run = load("engines")["runs"][of.run]
    stock, ours = (run[who]["profile"][batch] for who in (of.stock, "served"))
    parts = [(stock[GEMMS["stock"]], ours[GEMMS["served"]])]
    parts += [(sum(stock.get(w, 0.0) for w in whats), sum(ours.get(w, 0.0) for w in whats)) for whats in ELSE.values()]
    read = LAYERS * sum(cold_read_us(count * of.weight_bytes) for count in LAYER) + cold_read_us(HEAD_BYTES)
    steps = step_us(run, of.stock, batch), step_us(run, "served", batch)
    besides = steps[1] - parts[0][1]
    at_most = min(read, parts[0][1])  # less than a read where weights are loaded while other kernels run
    return Decoding(parts, steps, read, steps[0] / (at_most + besides), steps[0] / steps[1])


# --- a decode step of layers of Qwen3-30B-A3B, whose experts were timed alone ---

QWEN = 13  # the run of engines.json
# The runs whose norms and packed rows native code launches by what holds them: of traffic those that speak for it.
LAUNCHED_WHOLE = 10, 15, 18
QWEN_LAYER_WEIGHTS, QWEN_HEAD_WEIGHTS = 5120 * 2048 + 2048 * 4096, 151_936 * 2048  # dense ones, in 16 bits
DENSE_OVER_FLOOR = 1.15  # of their floor, what stock's dense layers are taken to need, as cuBLAS does in Llama's


def qwen_decoding() -> tuple[list[float], list[float]]:
    """How many times as fast as stock a step of each batch could be with experts and dense layers at their floors, and
    how many times as fast it was."""
    run = load("engines")["runs"][QWEN]
    layers = run["stock"]["experts"]
    dense = 2 * (layers * QWEN_LAYER_WEIGHTS + QWEN_HEAD_WEIGHTS) / FLOOR.memory_bytes_per_us * (DENSE_OVER_FLOOR - 1)
    experts = [r for r in load("moe_h200")["results"] if r["model"] == "Qwen3-30B-A3B"]
    could, was = [], []
    for batch in BATCHES:
        speed = {who: run[who]["decode"][batch]["tokens_per_s"] for who in ("stock", "served")}
        step_us = int(batch) * 1e6 / speed["stock"]
        theirs, floor = (
            between(int(batch), [(r["tokens"], us) for r, us in zip(experts, of, strict=True)])
            for of in ([r["us"]["vllm"] for r in experts], [r["floor_us"] for r in experts])
        )
        could.append(step_us / (step_us - layers * (theirs - floor) - dense))
        was.append(speed["served"] / speed["stock"])
    return could, was


def between(x: float, points: Iterable[tuple[float, float]]) -> float:
    """y at x, on a line in log x and log y through the points next to it, the first or the last two beyond these."""
    found = sorted(points)
    after = min(max(sum(at <= x for at, _ in found), 1), len(found) - 1)
    (x0, y0), (x1, y1) = found[after - 1], found[after]
    share = math.log(x / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) * (1 - share) + math.log(y1) * share)


# --- experts alone ---


class Grouped(NamedTuple):
    """A grouped GEMM's experts: how many there are, and how many of them a token has."""

    groups: int
    top_k: int


# By N x K; DeepSeek-V3's rank has 8 of 256 experts, so that its rows count as tokens.
GROUPED = {
    "n1536_k2048": Grouped(128, 8),
    "n2048_k768": Grouped(128, 8),
    "n5760_k2880": Grouped(128, 4),
    "n2880_k2880": Grouped(128, 4),
    "n8192_k6144": Grouped(8, 2),
    "n6144_k4096": Grouped(8, 2),
    "n4096_k7168": Grouped(8, 1),
    "n7168_k2048": Grouped(8, 1),
}
FEW = 128  # tokens, or rows of DeepSeek's rank that 1,024 tokens come to


def grouped_by_tokens() -> dict[tuple[str, str], tuple[float, float]]:
    """How many times as long as ours others take in grouped GEMMs, the mean and the least: by kind and by whose, of few
    tokens (`FEW`) and of more, or of all."""
    found: dict[tuple[str, str], list[float]] = {}
    for result in load("grouped_h200")["results"]:
        kind, (_, of) = result["kind"], _experts_of(result["signature"])
        for rows, us, torch, other in result["cases"]:
            few = rows / of.top_k <= (FEW if of.top_k > 1 else 8 * FEW)
            if kind == "bf16":
                found.setdefault((kind, "torch, few tokens" if few else "torch, more"), []).append(torch / us)
                if not few:
                    found.setdefault((kind, "quack, more"), []).append(other / us)
            else:
                found.setdefault((kind, ""), []).append((torch or other) / us)
    return {of: (geometric_mean(ratios), min(ratios)) for of, ratios in found.items()}


def _experts_of(signature: str) -> tuple[str, Grouped]:
    return next((size, of) for size, of in GROUPED.items() if f"_{size}_" in f"{signature}_")


def _drawn_groups(groups: int, rows: int) -> float:
    """How many groups are expected to have a row, drawn as `aot.tune.grouped_gemm.measures` does: with equal chances,
    and with log-normal ones of this sigma, as often."""
    chances = [math.exp(SKEW * NormalDist().inv_cdf((i + 0.5) / groups)) for i in range(groups)]
    with_a_row = [1 - (1 - chance / sum(chances)) ** rows for chance in chances]
    return (sum(with_a_row) + groups * (1 - (1 - 1 / groups) ** rows)) / 2


def grouped_over_cold_read() -> dict[str, tuple[float, int]]:
    """By kind the time of grouped GEMMs of few tokens over a cold read of the weights of experts that rows are expected
    to be drawn to, or their operations where these take longer: the geometric mean, and of how many cases."""
    found: dict[str, list[float]] = {}
    for result in load("grouped_h200")["results"]:
        if "masked" in result["kind"]:
            continue
        size, of = _experts_of(result["signature"])
        n, k = (int(word[1:]) for word in size.split("_"))
        bits = 8 if "e4m3" in result["kind"] else 16
        for rows, us, *_ in result["cases"]:
            tokens = rows / of.top_k
            if tokens > (FEW if of.top_k > 1 else 8 * FEW):
                continue
            read = cold_read_us(_drawn_groups(of.groups, rows) * n * k * bits / 8)
            found.setdefault(result["kind"], []).append(us / max(read, 2 * rows * n * k / FLOOR.flops_per_us[bits]))
    return {kind: (geometric_mean(of), len(of)) for kind, of in found.items()}
