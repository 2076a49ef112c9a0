"""What clock and power a GEMM settles at, ours and torch's, launched without pause: what bounds large ones.

A GPU at its power limit lowers its clock until it fits. So where two kernels draw the same power at that limit and both
keep the tensor cores busy, the faster one is the one that takes less energy an operation, and neither gets past it.
With --zeros the same launches run on zeros as well, which take less energy: what they gain is what power costs.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure_bounds import signatures
from report import out_argument, write

import runtime
from aot import measure
from aot.baseline import baseline
from aot.measure import Launch
from aot.operands import OperandSet, Weights, gemm_options
from runtime.signature import Signature

FIELDS = ("clocks.sm", "power.draw.instant", "clocks_event_reasons.sw_power_cap", "temperature.gpu")
LIMITS = ("clocks.max.sm", "enforced.power.limit")
_SETTLE_S = 0.4
_PARTS = 8  # of the time after that, whose medians and spread are given
_QUEUED = 8  # graphs in flight, so that the GPU never waits for Python


def query(fields: tuple[str, ...]) -> list[str]:
    """What nvidia-smi says of these fields."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", "0"]
    return [x.strip() for x in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(",")]


def settle(launch: Launch, operands: list[OperandSet], seconds: float) -> tuple[list[float], list[list[str]]]:
    """Launch for `seconds`: after the first `_SETTLE_S`, microseconds of a launch in each of `_PARTS` parts, and what
    `FIELDS` were."""
    graph = torch.cuda.CUDAGraph()
    launch(operands[0])
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for o in operands:
            launch(o)
    samples: list[list[str]] = []
    done = threading.Event()

    def sample() -> None:
        time.sleep(_SETTLE_S)
        while not done.is_set():
            samples.append(query(FIELDS))

    watcher = threading.Thread(target=sample)
    watcher.start()
    events: list[torch.cuda.Event] = []
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        graph.replay()
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
        if len(events) > _QUEUED:
            events[-_QUEUED].synchronize()
    torch.cuda.synchronize()
    done.set()
    watcher.join()
    first = next(i for i, e in enumerate(events) if events[0].elapsed_time(e) > 1e3 * _SETTLE_S)
    parts = [first + (len(events) - 1 - first) * i // _PARTS for i in range(_PARTS + 1)]
    times = [
        events[a].elapsed_time(events[b]) * 1e3 / ((b - a) * len(operands))
        for a, b in itertools.pairwise(parts)
        if b > a
    ]
    return times, samples


def summary(times: list[float], samples: list[list[str]], flops: int) -> dict[str, Any]:
    """What a result says of a kernel that settled."""
    us = statistics.median(times)

    def middle(column: int) -> float:
        values = sorted(float(s[column]) for s in samples)
        return values[len(values) // 2]

    return {
        "us": round(us, 2),
        "spread": round((max(times) - min(times)) / us, 4),
        "tflops": round(flops / us / 1e6, 1),
        "clock_mhz": middle(0),
        "power_w": middle(1),
        "joules": round(us * 1e-6 * middle(1), 4),
        "power_capped": sum(s[2] == "Active" for s in samples) / len(samples),
        "samples": len(samples),
    }


def compare(
    contenders: dict[str, Launch], operands: list[OperandSet], flops: int, seconds: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What two kernels settle at, in turns A B B A: each finds the GPU as the one before has left it."""
    a, b = contenders
    settle(contenders[b], operands, 2 * _SETTLE_S)
    seen: dict[str, list[tuple[list[float], list[list[str]]]]] = {a: [], b: []}
    for who in (a, b, b, a):
        seen[who].append(settle(contenders[who], operands, seconds / 2))
    for who, turns in seen.items():
        times = [us for turn, _ in turns for us in turn]
        yield who, summary(times, [sample for _, turn in turns for sample in turn], flops)


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("signature", nargs="+", help="keys of signatures in the archive")
    parser.add_argument("--tokens", type=lambda t: [int(x) for x in t.split(",")], default=[4096])
    parser.add_argument("--seconds", type=float, default=3.0, help="for each kernel, in two turns")
    parser.add_argument("--zeros", action="store_true", help="run each on operands of zeros as well")
    out_argument(parser)
    options = parser.parse_args()
    environment = measure.environment() | dict(zip(LIMITS, query(LIMITS), strict=True))
    library = runtime.load(options.archive)
    environment["archive_sha256"] = library.digest
    there = signatures([options.archive])
    if unknown := set(options.signature) - set(there):
        parser.error(f"{options.archive} has no {', '.join(sorted(unknown))}; aot ls lists what it has")
    results = []
    for key in options.signature:
        signature = there[key]
        for m in options.tokens:
            operands = Weights(signature, m, environment["l2_bytes"], seed=0).operands(m)

            def ours(o: OperandSet, s: Signature = signature) -> None:
                library.gemm(o.a, o.b, out=o.d, **gemm_options(s, o))

            name, theirs = baseline(signature, operands[0])
            for values in ("normal", "zero") if options.zeros else ("normal",):
                if values == "zero":
                    for o in operands:
                        o.a.zero_()
                        o.b.zero_()
                contenders = {"ours": ours, name: theirs}
                for who, found in compare(contenders, operands, signature.flops(m), options.seconds):
                    results.append({"signature": key, "m": m, "who": who, "values": values} | found)
                    print(" ".join(f"{k}={v}" for k, v in results[-1].items()), flush=True)
    write(options.out, environment, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
