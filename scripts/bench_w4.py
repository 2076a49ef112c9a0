"""Check and time GEMMs of 4-bit weights against our own and torch's bf16 of the same shape, in one run on one GPU.

The archive is one of benchmarks/w4.yaml, tuned: it has each layer with weights of 4 bits and in bf16. A line is one
layer at one M: microseconds, how many times as long reading B and its scales would take at `READ_BYTES_PER_US`, and how
many times as fast as ours and torch's in bf16. Exit status 1 if any result is wrong. Needs a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from report import ends, geomean, out_argument, write

import runtime
from aot.tune import measure
from aot.tune.gemm.operands import OperandSet, Weights
from runtime.container.archive import Archive
from runtime.errors import KernelMiss
from runtime.gemm.fallback import plain_product
from runtime.gemm.operation import GEMM
from runtime.gemm.signature import Signature
from runtime.numbers.weights import FORMATS
from runtime.tables.dispatch import Dispatch

READ_BYTES_PER_US = 4.3e6  # of an H200, cold
TOKENS = (1, 8, 16, 32, 64, 128)
_REGIMES = ((1, 16), (17, 64), (65, 1 << 30))
_GRAPH_US = 800.0


def run(library: Any, s: Signature, m: int, l2_bytes: int, repeats: int) -> dict[str, Any]:
    """One signature at one M: correctness, then times."""
    import torch

    plain = dataclasses.replace(s, b="bf16", scaling="none")

    def ours(o: OperandSet) -> None:
        library.gemm(o.a, o.b, scale_b=o.extras["scale_b"], out=o.d)

    error = measure.check(s, m, Weights(s, m, 0, seed=m), {"ours": ours})["ours"]
    quantised = Weights(s, m, l2_bytes, seed=m).operands(m)
    wide = Weights(plain, m, 0, seed=m)
    wide.b += [wide.b[0].clone() for _ in range(3 * l2_bytes // wide.b[0].nbytes)]
    in_bf16 = wide.operands(m)
    pairs: Any = [
        (quantised[i % len(quantised)], in_bf16[i % len(in_bf16)]) for i in range(max(map(len, (quantised, in_bf16))))
    ]
    contenders = {
        "ours": lambda pair: ours(pair[0]),
        "bf16": lambda pair: library.gemm(pair[1].a, pair[1].b, out=pair[1].d),
        "torch": lambda pair: plain_product(torch, pair[1].a, pair[1].b, (), pair[1].d),
    }
    floor = s.bytes(m) + quantised[0].extras["scale_b"].nbytes
    times = measure.time_interleaved(contenders, pairs, floor / READ_BYTES_PER_US, repeats, _GRAPH_US)
    us = {name: times[name].us for name in contenders}
    return {
        "signature": s.key(),
        "m": m,
        "function": library.entry(s).best(m),
        "error": error,
        "us": round(us["ours"], 3),
        "spread": round(times["ours"].spread, 4),
        "of_read": round(us["ours"] * READ_BYTES_PER_US / floor, 3),
        "bf16_us": round(us["bf16"], 3),
        "torch_us": round(us["torch"], 3),
        "speedup": round(us["bf16"] / us["ours"], 4),
        "torch_speedup": round(us["torch"] / us["ours"], 4),
    }


def summarise(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each format and range of M the geometric mean and the worst of what is gained over our bf16."""
    lines = []
    for word in FORMATS:
        for low, high in _REGIMES:
            ratios = [r["speedup"] for r in results if r["signature"].endswith(word) and low <= r["m"] <= high]
            if ratios:
                mean = round(geomean(ratios), 3)
                lines.append(
                    {"format": word, "m": [low, high], "cases": len(ratios), "mean": mean, "worst": min(ratios)}
                )
    return lines


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--tokens", type=lambda t: [int(x) for x in t.split(",")], default=list(TOKENS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case after this time")
    out_argument(parser)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    environment = measure.environment()
    library = runtime.load(options.archive)
    environment["archive_sha256"] = library.digest
    with Archive.open(options.archive) as archive:
        table = Dispatch.from_json(archive.table(GEMM.name), GEMM)
    asked = [e.signature for e in table.entries if e.signature.scaling in FORMATS and e.signature.epilogue == "none"]
    print(" ".join(f"{k}={v}" for k, v in environment.items()))
    print(f"{'signature':60s} {'M':>4s} {'us':>8s} {'x read':>7s} {'x bf16':>7s} {'x torch':>7s} error")
    results = []
    for m in options.tokens:
        for s in asked:
            if time.monotonic() > end:
                continue
            try:
                found = run(library, s, m, environment["l2_bytes"], options.repeats)
            except KernelMiss as miss:
                print(f"{s.key():60s} {m:4d} {str(miss).splitlines()[0]}")
                continue
            results.append(found)
            library.forget_captures()
            figures = (
                f"{found['us']:8.2f} {found['of_read']:7.2f} {found['speedup']:7.2f} {found['torch_speedup']:7.2f}"
            )
            print(f"{s.key():60s} {m:4d} {figures} {found['error']}", flush=True)
    summary = summarise(results)
    for line in summary:
        print(" ".join(f"{k}={v}" for k, v in line.items()))
    write(options.out, environment, summary=summary, results=results)
    return 1 if any(isinstance(r["error"], str) for r in results) else 0


if __name__ == "__main__":
    sys.exit(ends(main))
