"""What a GEMM's launch costs besides its products: times against K, of the kernel that serves and of torch.

A line through the times, t = fixed + slope * K, splits a launch in what it pays once (beginning, filling a pipeline,
storing D, ending) and what it pays for each column of K. torch may take another kernel for each K: how far its times
are from its line says whether it did. Needs a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from measure_bounds import case_arguments, given_cases
from report import out_argument, write

import runtime
from aot import measure
from aot.baseline import baseline
from aot.operands import OperandSet, Weights
from runtime.dtypes import DTYPES

_REPEATS, _GRAPH_US = 9, 400.0
_EIGHTHS = (2, 3, 4, 5, 6, 7, 8, 10, 12)  # of the signature's K
_STAGE_BYTES = 128  # of a row's K: the least that a kernel multiplies at once


def line(us_by_k: Mapping[int, float]) -> dict[str, float]:
    """The least-squares line through times in us by K: us paid once, us for 1,024 columns, and the farthest time's
    distance from it as a share of that time.

    Raises:
        ValueError: fewer than two values of K.
    """
    slope, fixed = statistics.linear_regression(list(us_by_k), list(us_by_k.values()))
    off = max(abs(us - fixed - slope * k) / us for k, us in us_by_k.items())
    return {"fixed_us": round(fixed, 2), "us_per_1024": round(slope * 1024, 3), "off": round(off, 4)}


def call(function: Any, o: OperandSet) -> None:
    """One launch of a function of an archive."""
    function(*o.tensors(), stream=torch.cuda.current_stream())


def lengths(k: int, stage: int) -> Sequence[int]:
    """The values of K, in whole stages, that the line of a problem of `k` columns goes through.

    Raises:
        ValueError: a quarter of `k` is less than two stages.
    """
    if k < 8 * stage:
        raise ValueError(f"K = {k} is too short to be cut; it needs {8 * stage} columns")
    return [k * eighths // 8 // stage * stage for eighths in _EIGHTHS]


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    case_arguments(parser)
    out_argument(parser)
    options = parser.parse_args()
    archives, known, cases = given_cases(parser, options)
    library = runtime.load(archives)
    environment = measure.environment() | {"archive_sha256": library.digest}
    results: list[dict[str, Any]] = []
    for key, m in cases:
        signature = known[key]
        function = library.entry(signature).best(m)
        found: dict[str, dict[int, measure.Timing]] = {}
        stage = _STAGE_BYTES // DTYPES[signature.a].bytes
        try:
            several = lengths(signature.k, stage)
        except ValueError as error:
            parser.error(f"{key}: {error}")
        for k in (stage, *several):
            shorter = dataclasses.replace(signature, k=k)
            operands = Weights(shorter, m, environment["l2_bytes"], seed=0).operands(m)
            name, theirs = baseline(shorter, operands[0])
            contenders: dict[str, measure.Launch] = {
                function: functools.partial(call, library.functions[function]),
                name: theirs,
            }
            floor_us = measure.expected_us(shorter, m)
            timings = measure.time_interleaved(contenders, operands, floor_us, _REPEATS, _GRAPH_US)
            if missing := set(contenders) - set(timings):
                raise SystemExit(f"{', '.join(missing)} cannot be launched for {key} with K = {k}")
            for who, timing in timings.items():
                found.setdefault(who, {})[k] = timing
            library.forget_captures()
        if len(found) > 2:
            raise SystemExit(f"torch has several ways for {key}, by K: {', '.join(found)}; they are not of one line")
        for who, by_k in found.items():
            us = {k: timing.us for k, timing in by_k.items() if k != stage}
            row = {"signature": key, "m": m, "who": who, "one_stage_us": round(by_k[stage].us, 2), **line(us)}
            row["spread"] = round(max(timing.spread for timing in by_k.values()), 4)
            results.append(row | {"us": {k: round(timing.us, 2) for k, timing in by_k.items()}})
            print(" ".join(f"{k}={v}" for k, v in results[-1].items()), flush=True)
    write(options.out, environment, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
