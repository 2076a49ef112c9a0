"""Check and time an archive's GEMMs against cuBLAS, over the layers of real models; needs a GPU.

Each line is one layer at one M: the median of interleaved CUDA-graph replays on cold L2, with what torch takes in the
same run and what torch takes against itself (noise); up to 16 tokens also what reading B alone takes (`cold_read`).
Exit status 1 if any result is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cold_read
from report import ends, geomean, out_argument, patch_argument, write

import runtime
from aot.problem import manifest as manifests
from aot.tune import measure
from aot.tune.gemm.baseline import baseline
from aot.tune.gemm.operands import OperandSet, Weights, gemm_options
from runtime.gemm.signature import Signature

TOKENS = (1, 3, 16, 64, 128, 256, 333, 512, 1024, 2048, 4096, 8192)
REGIMES = (  # all from 128 up is counted twice, since that is what 8-bit inputs are judged by
    ("M = 1..64", 1, 64),
    ("M = 65..511", 65, 511),
    ("M >= 512", 512, 1 << 30),
    ("M >= 128", 128, 1 << 30),
)
_READ_TOKENS = 16  # up to which a GEMM should take what reading B takes


def problems(paths: list[Path]) -> dict[Signature, tuple[str, int]]:
    """Distinct signatures of the manifests, each with the layers that have it and the largest M that any asks for."""
    found: dict[Signature, tuple[str, int]] = {}
    for path in paths:
        for problem in manifests.load(path).problems():
            names, most = found.get(problem.signature, ("", 0))
            names = f"{names} {path.stem}:{'+'.join(problem.names)}".strip()
            found[problem.signature] = names, max(most, *problem.tokens)
    return found


def run(
    library: Any,
    signature: Signature,
    m: int,
    l2_bytes: int,
    repeats: int,
    sustained: bool,
    peers: dict[Signature, Any],
) -> dict[str, Any]:
    """One signature at one M: correctness, then times. `peers` keeps what torch runs: to compile it takes seconds."""

    def launch(o: OperandSet) -> None:
        library.gemm(o.a, o.b, out=o.d, **gemm_options(signature, o))

    weights = Weights(signature, m, 0, seed=m)
    launch(weights.operands(m)[0])  # a miss is the caller's
    error = measure.check(signature, m, weights, {"ours": launch})["ours"]
    operands = Weights(signature, m, l2_bytes, seed=m).operands(m)
    if signature not in peers:
        peers.clear()
        peers[signature] = baseline(signature, operands[0])
    name, torch_launch = peers[signature]
    floor = measure.expected_us(signature, m)
    contenders: dict[str, Callable[[OperandSet], Any]] = {"ours": launch, "torch": torch_launch}
    readers = cold_read.readers() if m <= _READ_TOKENS and signature.b_major == "k" else {}
    reads = {f"read {name}": _of_b(reader) for name, reader in readers.items()}
    everyone = contenders | {"torch again": torch_launch} | reads
    times = measure.time_interleaved(everyone, operands, floor, repeats, graph_us=1000.0)
    ours, theirs, again = (times[k] for k in ("ours", "torch", "torch again"))
    found = {
        "signature": signature.key(),
        "types": kind(signature),
        "m": m,
        "error": error,
        "us": round(ours.us, 3),
        "spread": round(ours.spread, 4),
        "torch": name,
        "torch_us": round(theirs.us, 3),
        "torch_spread": round(theirs.spread, 4),
        "speedup": round(theirs.us / ours.us, 4),
        "noise": round(again.us / theirs.us, 4),
        "tflops": round(signature.flops(m) / ours.us / 1e6, 1),
        "gb_per_s": round(signature.bytes(m) / ours.us / 1e3, 1),
    }
    if reads:
        fastest = min((times[name] for name in reads), key=lambda timing: timing.us)
        found |= {"read_us": round(fastest.us, 3), "read_spread": round(fastest.spread, 4)}
    if sustained and measure.power_bound(signature, m):
        us = {name: times[name].us for name in contenders}
        ours, theirs = measure.time_sustained(contenders, operands, floor, us).values()
        time.sleep(measure.RECOVER_S)
        found |= {
            "sustained_us": round(ours.us, 3),
            "sustained_spread": round(ours.spread, 4),
            "torch_sustained_us": round(theirs.us, 3),
            "sustained_speedup": round(theirs.us / ours.us, 4),
        }
    return found


def _of_b(read: cold_read.Reader) -> Callable[[OperandSet], None]:
    return lambda o: read(o.b)


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("manifest", type=Path, nargs="+")
    patch_argument(parser)
    parser.add_argument("--tokens", type=lambda t: [int(x) for x in t.split(",")], default=list(TOKENS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sustained", action="store_true", help="time what power bounds under sustained load too")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case after this time")
    out_argument(parser)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    environment = measure.environment()
    library = runtime.load([options.archive, *options.patch])
    environment["archive_sha256"] = library.digest
    l2_bytes = environment["l2_bytes"]
    print(" ".join(f"{k}={v}" for k, v in environment.items()))
    columns = ("us", "TFLOP/s", "GB/s", "torch us", "x torch", "error")
    print(f"{'layer':52s} {'M':>5s} " + " ".join(f"{c:>9s}" for c in columns))
    results = []
    peers: dict[Signature, Any] = {}
    left_out = []
    asked = itertools.product(problems(options.manifest).items(), options.tokens)
    for (signature, (label, _)), m in ((p, m) for p, m in asked if m <= p[1][1]):
        if time.monotonic() > end:
            left_out.append({"signature": signature.key(), "m": m})
            continue
        try:
            found = run(library, signature, m, l2_bytes, options.repeats, options.sustained, peers)
            found |= {"layers": label, "function": library.entry(signature).best(m)}
        except runtime.KernelMiss as miss:
            print(f"{label[:52]:52s} {m:5d} {str(miss).splitlines()[0]}")
            results.append({"signature": signature.key(), "m": m, "layers": label, "error": str(miss)})
            continue
        results.append(found)
        error = found["error"] if isinstance(found["error"], str) else f"{found['error']:9.2e}"
        print(
            f"{label[:52]:52s} {m:5d} {found['us']:9.2f} {found['tflops']:9.1f} {found['gb_per_s']:9.0f} "
            f"{found['torch_us']:9.2f} {found['speedup']:9.3f} {error}",
            flush=True,
        )
    if left_out:
        print(f"{len(left_out)} cases left out: the {options.minutes} minutes are over")
    summary = summarise(results)
    for line in summary:
        print(" ".join(f"{k}={v}" for k, v in line.items()))
    write(options.out, environment, summary=summary, left_out=left_out, results=results)
    return 1 if any(isinstance(r["error"], str) for r in results) else 0


def kind(signature: Signature) -> str:
    """What figures of signatures may be averaged over: A's element type, and what is unusual."""
    usual = {"d": "bf16" if signature.a == "e4m3" else signature.a, "epilogue": "none", "scaling": "none"}
    usual |= {"b_major": "k", "overlap": "serial"}
    return " ".join(
        [signature.a, *(getattr(signature, f) for f, word in usual.items() if getattr(signature, f) != word)]
    )


def summarise(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Geomean, worst and best of the speedups over torch for each kind of signature and range of M."""
    lines = []
    measured = [r for r in results if "speedup" in r]
    for types in sorted({r["types"] for r in measured}):
        for label, low, high in REGIMES:
            picked = [r for r in measured if r["types"] == types and low <= r["m"] <= high]
            if picked:
                ratios = [r["speedup"] for r in picked]
                sustained = [r["sustained_speedup"] for r in picked if "sustained_speedup" in r]
                lines.append(
                    {
                        "types": types,
                        "regime": label,
                        "cases": len(picked),
                        "geomean": round(geomean(ratios), 3),
                        "worst": min(ratios),
                        "best": max(ratios),
                        "noise_geomean": round(geomean(r["noise"] for r in picked), 3),
                        "largest_spread": max(r["spread"] for r in picked),
                        "wrong": sum(isinstance(r["error"], str) for r in picked),
                        "sustained_cases": len(sustained),
                        "sustained_geomean": round(geomean(sustained), 3) if sustained else None,
                        "sustained_worst": min(sustained, default=None),
                    }
                )
    return lines


if __name__ == "__main__":
    sys.exit(ends(main))
