"""Time every function of an archive that computes a problem, and say how good the ranking with no GPU is.

Build the archive with as many candidates as the ranking may put in order, and do not tune it. For each signature and M
all functions of that form are timed briefly, on cold L2; the best 8 again in turn with torch. Then, for the order that
`aot.rank` gives them: how much longer the best of its first few takes than the best of all. These times are also what
the estimates of `aot.providers` are fitted to. Functions serve any N and K, so an archive of one problem for each form
will do, with `--manifest` for the layers to time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import bench_gemm
import torch
from report import geomean, out_argument, write

import runtime
from aot import measure, rank
from aot.baseline import baseline
from aot.measure import Launch
from aot.operands import OperandSet, Weights
from aot.providers import PROVIDERS, provider
from aot.variants import Variant
from runtime.archive import Archive
from runtime.dispatch import Dispatch
from runtime.signature import Signature

TARGET = "sm_90a"
TOKENS = (1, 8, 16, 32, 64, 128, 192, 256, 333, 512, 1024, 2048, 4096, 8192)
FIRST = (1, 4, 8, 12, 24)
_AT_ONCE = 40  # graphs are captured before they are replayed, and each takes memory
_SCREEN_GRAPH_US, _FINAL_GRAPH_US, _FINALISTS = 120.0, 600.0, 8


def variants(signature: Signature, names: Iterable[str]) -> dict[str, Variant]:
    """Of these functions the variants that compute `signature`, by name."""
    there = set(names)
    legal = (v for p in PROVIDERS for v in provider(p).variants(TARGET, signature))
    return {v.name(): v for v in legal if v.name() in there}


def launcher(library: Any, name: str) -> Launch:
    """A launch of one function on torch's current stream."""
    function = library.functions[name]

    def launch(o: OperandSet) -> None:
        function(*o.tensors(), stream=torch.cuda.current_stream())

    return launch


def sweep(library: Any, signature: Signature, m: int, found: dict[str, Variant], l2_bytes: int) -> dict[str, Any]:
    """Microseconds of each function, of the best ones again, and what the ranking loses."""
    operands = Weights(signature, m, l2_bytes, seed=0).operands(m)
    floor, names = measure.expected_us(signature, m), list(found)
    screen: dict[str, float] = {}
    for start in range(0, len(names), _AT_ONCE):
        part = {name: launcher(library, name) for name in names[start : start + _AT_ONCE]}
        times = measure.time_interleaved(part, operands, floor, 1, _SCREEN_GRAPH_US)
        screen |= {name: round(t.us, 2) for name, t in times.items()}
    best = sorted(screen, key=lambda n: screen[n])[:_FINALISTS]
    final = {name: launcher(library, name) for name in best} | {"torch": baseline(signature, operands[0])[1]}
    times = measure.time_interleaved(final, operands, floor, 7, _FINAL_GRAPH_US)
    timed = [v for name, v in found.items() if name in screen]
    loss = []
    for limit in FIRST:
        first = rank.shortlist(timed, [(signature, m)], TARGET, limit).candidates[signature, m]
        loss.append(round(min(screen[v.name()] for v in first) / screen[best[0]], 4))
    us = {name: round(t.us, 3) for name, t in times.items()}
    return {"signature": signature.key(), "m": m, "best": us, "loss": loss, "us": screen}


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--tokens", type=lambda t: [int(x) for x in t.split(",")], default=list(TOKENS))
    parser.add_argument(
        "--form", default="bf16_bf16_bf16_f32_none", help="how the keys of the signatures to take begin"
    )
    whose = "time the layers of this manifest in place of the archive's; may be repeated"
    parser.add_argument("--manifest", type=Path, action="append", default=[], help=whose)
    parser.add_argument("--minutes", type=float, default=5.0, help="begin no problem after this time")
    out_argument(parser)
    options = parser.parse_args()
    environment = measure.environment()
    with Archive.open(options.archive) as archive:
        table = Dispatch.from_json(archive.table("gemm"))
    given = list(bench_gemm.problems(options.manifest)) if options.manifest else [e.signature for e in table.entries]
    signatures = [s for s in given if s.key().startswith(options.form)]
    library = runtime.load(options.archive)
    results: list[dict[str, Any]] = []
    began = time.monotonic()
    for m in options.tokens:
        for signature in signatures:
            if time.monotonic() - began > 60 * options.minutes:
                break
            found = variants(signature, library.functions)
            results.append(sweep(library, signature, m, found, environment["l2_bytes"]))
            library.forget_captures()
            us = dict(results[-1]["best"])
            torch_us = us.pop("torch")
            best = min(us, key=lambda name: us[name])
            line = f"{m:5d} {us[best]:9.2f} {torch_us / us[best]:6.3f} {results[-1]['loss']} {best}"
            print(f"{signature.key():60s} {line}", flush=True)
    summary = {n: round(geomean(r["loss"][i] for r in results), 4) for i, n in enumerate(FIRST)}
    print("the best of the first ... over the best of all:", json.dumps(summary))
    write(options.out, environment, first=list(FIRST), summary=summary, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
