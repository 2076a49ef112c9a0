"""Check and time GEMMs of 4-bit weights against our own and torch's bf16 of the same shape, in one run on one GPU.

The archive is one of benchmarks/w4.yaml, tuned: it has each layer with weights of 4 bits and in bf16. A line is one
layer at one M: microseconds, how many times as long as reading B and its scales takes at an H200's `FLOOR`, and how
many times as fast as ours and torch's in bf16. With `--peers marlin` vLLM's Marlin takes part, on the same weights in
its own layout: its result is checked as ours is, and what is wrong is not timed. Where it cannot run, nothing is run.
Exit status 1 if any result of ours is wrong, 2 if a peer is missing. Needs a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers import CACHE, Peer, Settings, guarded, load, written
from report import ends, geomean, out_argument, write

import runtime
from aot.search.h200 import FLOOR
from aot.tune import measure
from aot.tune.gemm.operands import OperandSet, Weights
from runtime.container.archive import Archive
from runtime.errors import KernelMiss
from runtime.gemm.fallback import plain_product
from runtime.gemm.operation import GEMM
from runtime.gemm.signature import Signature
from runtime.numbers.weights import FORMATS
from runtime.tables.dispatch import Dispatch

TOKENS = (1, 8, 16, 32, 64, 128)
_REGIMES = ((1, 16), (17, 64), (65, 1 << 30))
_GRAPH_US = 800.0
OURS, BF16, TORCH = "ours", "bf16", "torch"
PEERS = ("marlin",)  # of `peers.PEERS`, those that take weights of 4 bits


def run(library: Any, peers: Mapping[str, Peer], s: Signature, m: int, l2_bytes: int, repeats: int) -> dict[str, Any]:
    """One signature at one M: correctness, then times."""
    import torch

    plain = dataclasses.replace(s, b="bf16", scaling="none")

    def ours(o: OperandSet) -> None:
        library.gemm(o.a, o.b, scale_b=o.extras["scale_b"], out=o.d)

    found, others = _checked(ours, peers, s, m)
    quantised = Weights(s, m, l2_bytes, seed=m).operands(m)
    for launch in others.values():
        for o in quantised:  # it lays out what it takes at the first, which no capture may hold
            launch(o)
    wide = Weights(plain, m, 0, seed=m)
    wide.b += [wide.b[0].clone() for _ in range(3 * l2_bytes // wide.b[0].nbytes)]
    in_bf16 = wide.operands(m)
    pairs: Any = [
        (quantised[i % len(quantised)], in_bf16[i % len(in_bf16)]) for i in range(max(map(len, (quantised, in_bf16))))
    ]
    contenders: dict[str, Any] = {
        OURS: lambda pair: ours(pair[0]),
        BF16: lambda pair: library.gemm(pair[1].a, pair[1].b, out=pair[1].d),
        TORCH: lambda pair: plain_product(torch, pair[1].a, pair[1].b, (), pair[1].d),
        **{name: lambda pair, launch=launch: launch(pair[0]) for name, launch in others.items()},
    }
    floor = s.bytes(m) + quantised[0].extras["scale_b"].nbytes
    times = measure.time_interleaved(contenders, pairs, floor / FLOOR.memory_bytes_per_us, repeats, _GRAPH_US)
    us = {name: round(of.us, 3) for name, of in times.items()}
    return {
        "signature": s.key(),
        "m": m,
        "function": library.entry(s).best(m),
        **found,
        "us": us.pop(OURS),
        "spread": round(times[OURS].spread, 4),
        "of_read": round(times[OURS].us * FLOOR.memory_bytes_per_us / floor, 3),
        **{f"{name}_us": of for name, of in us.items()},
    }


def _checked(
    ours: measure.Launch, peers: Mapping[str, Peer], s: Signature, m: int
) -> tuple[dict[str, Any], dict[str, measure.Launch]]:
    """The error of ours and each peer, or why there is none; and launches of peers that are right, for other
    operands."""
    said = {name: reason for name, peer in peers.items() if (reason := peer.refuse(s))}
    able = [name for name in peers if name not in said]
    tried = {name: guarded(written(_launch(peers[name], s, m))) for name in able}
    errors = measure.check(s, m, Weights(s, m, 0, seed=m), {OURS: ours, **tried})
    right = {name: guarded(_launch(peers[name], s, m)) for name in able if not isinstance(errors[name], str)}
    found = {name: e if isinstance(e, str) else round(e, 6) for name, e in (said | errors).items()}
    return {"error": found.pop(OURS), **{f"{name}_error": e for name, e in found.items()}}, right


def _launch(peer: Peer, s: Signature, m: int) -> measure.Launch:
    (launch,) = peer.launches(s, m).values()
    return launch


def ratio(result: Mapping[str, Any], over: str) -> float | None:
    """How many times as long as ours another takes; None if it was not timed."""
    return result[f"{over}_us"] / result["us"] if f"{over}_us" in result else None


def summarise(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each format, range of M and other, our bf16 or a peer, the geometric mean and the worst of what is gained."""
    lines = []
    for over in (BF16, *PEERS):
        for word in FORMATS:
            for low, high in _REGIMES:
                of = [r for r in results if r["signature"].endswith(word) and low <= r["m"] <= high]
                ratios = [x for r in of if (x := ratio(r, over)) is not None]
                if ratios:
                    figures = {"cases": len(ratios), "mean": round(geomean(ratios), 3), "worst": round(min(ratios), 4)}
                    lines.append({"format": word, "over": over, "m": [low, high], **figures})
    return lines


def line(found: Mapping[str, Any], others: tuple[str, ...]) -> str:
    """A case, aligned: microseconds of ours, over a read, and how many times as long each other takes."""
    cells = [f"{found['us']:8.2f} {found['of_read']:7.2f}"]
    cells += ["      -" if (x := ratio(found, over)) is None else f"{x:7.2f}" for over in others]
    wrong = [f"{name}: {found[f'{name}_error']}" for name in PEERS if isinstance(found.get(f"{name}_error"), str)]
    return " ".join([f"{found['signature']:60s} {found['m']:4d}", *cells, str(found["error"]), *wrong])


def _peers(asked: str) -> list[str]:
    names = [name for name in asked.split(",") if name]
    if unknown := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; known are {', '.join(PEERS)}")
    return names


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--tokens", type=lambda t: [int(x) for x in t.split(",")], default=list(TOKENS))
    parser.add_argument("--peers", type=_peers, default=[], help=f"of {','.join(PEERS)}; none unless said")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case after this time")
    out_argument(parser)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    environment = measure.environment()
    peers = {name: load(name, Settings(CACHE, 1)) for name in options.peers}
    said = {name: {"versions": peer.versions(), "search": peer.search} for name, peer in peers.items()}
    library = runtime.load(options.archive)
    environment["archive_sha256"] = library.digest
    with Archive.open(options.archive) as archive:
        table = Dispatch.from_json(archive.table(GEMM.name), GEMM)
    asked = [e.signature for e in table.entries if e.signature.scaling in FORMATS and e.signature.epilogue == "none"]
    print(" ".join(f"{k}={v}" for k, v in environment.items()))
    others = (BF16, TORCH, *peers)
    print(f"{'signature':60s} {'M':>4s} {'us':>8s} {'x read':>7s} {' '.join(f'x {name:>5s}' for name in others)} error")
    results = []
    for m in options.tokens:
        for s in asked:
            if time.monotonic() > end:
                continue
            try:
                found = run(library, peers, s, m, environment["l2_bytes"], options.repeats)
            except KernelMiss as miss:
                print(f"{s.key():60s} {m:4d} {str(miss).splitlines()[0]}")
                continue
            results.append(found)
            library.forget_captures()
            print(line(found, others), flush=True)
            more = {"peers": said} if said else {}
            write(options.out, environment, **more, summary=summarise(results), results=results)
    for of in summarise(results):
        print(" ".join(f"{k}={v}" for k, v in of.items()))
    return 1 if any(isinstance(r["error"], str) for r in results) else 0


if __name__ == "__main__":
    sys.exit(ends(main))
