"""Time every function of an archive that computes a problem, and say how good the ranking with no GPU is.

Build the archive with as many candidates as the ranking may put in order, and do not tune it. For each signature and M
all functions of that form are timed briefly, on cold L2; the best 8 again in turn with torch. Then, for the order that
`aot.search.rank` gives: how much longer the best of its first few takes than the best of all. These times are also what
the estimates of `aot.providers` are fitted to. Functions serve any N and K, so an archive of one problem for each form
will do, with `--manifest` for the layers to time.

    python scripts/sweep_variants.py --times benchmarks/variants_h200.json.xz

needs no GPU: it asks the ranking again, about times that were taken before.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench_gemm
import torch
from report import ends, geomean, out_argument, write

import runtime
from aot.search import boosted, rank
from aot.search.legal import of_name, unsuited
from aot.search.variants import Variant
from aot.tune import measure
from aot.tune.gemm.baseline import baseline
from aot.tune.gemm.operands import OperandSet, Weights
from aot.tune.measure import Launch
from runtime.container.archive import Archive
from runtime.errors import ArgumentError
from runtime.gemm.operation import GEMM
from runtime.gemm.signature import Signature
from runtime.tables.dispatch import Dispatch

TARGET = "sm_90a"
TOKENS = (1, 8, 16, 32, 64, 128, 192, 256, 333, 512, 1024, 2048, 4096, 8192)
FIRST = (1, 4, 8, 12, 24)
_AT_ONCE = 40  # graphs are captured before they are replayed, and each takes memory
_SCREEN_GRAPH_US, _FINAL_GRAPH_US, _FINALISTS = 120.0, 600.0, 8


def variants(signature: Signature, names: Iterable[str]) -> dict[str, Variant]:
    """Of these functions the variants that compute `signature`, by name; also of those that no build chooses."""
    legal = (v for v in map(of_name, dict.fromkeys(names)) if v is not None and v.target == TARGET)
    return {v.name(): v for v in legal if unsuited(v, signature) is None}


def launcher(library: Any, name: str) -> Launch:
    """A launch of one function on torch's current stream."""
    function = library.functions[name]

    def launch(o: OperandSet) -> None:
        function(*o.arguments(), stream=torch.cuda.current_stream())

    return launch


def losses(us: Mapping[str, float], timed: Sequence[Variant], signature: Signature, m: int) -> list[float]:
    """The time of the best of the first few by the ranking over that of the best of all, for each of `FIRST`."""
    best = min(us[v.name()] for v in timed)
    found = []
    for limit in FIRST:
        first = rank.shortlist(timed, [(signature, m)], TARGET, limit).candidates[signature, m]
        found.append(round(min(us[v.name()] for v in first) / best, 4))
    return found


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
    loss = losses(screen, [v for name, v in found.items() if name in screen], signature, m)
    us = {name: round(t.us, 3) for name, t in times.items()}
    return {"signature": signature.key(), "m": m, "best": us, "loss": loss, "us": screen}


def read(path: Path) -> dict[str, Any]:
    """A file of times."""
    try:
        found: dict[str, Any] = json.loads(lzma.decompress(path.read_bytes()))
    except (OSError, lzma.LZMAError, ValueError) as error:
        raise ArgumentError(f"{path}: {error}; name a file such as benchmarks/variants_h200.json.xz") from None
    return found


def of_times(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the ranking loses, as `sweep` says it, where all variants were timed before (`whole`)."""
    found: dict[int, dict[str, Variant]] = {}
    results = []
    for case in content["results"]:
        if not case["whole"]:
            continue
        signature, names = Signature.from_json(case["signature"]), content["names"][case["names"]]
        if case["names"] not in found:
            found[case["names"]] = variants(signature, names)
        us = {name: t for name, t in zip(names, case["us"], strict=True) if t is not None}
        timed = [v for name, v in found[case["names"]].items() if name in us]
        finalists = {name: t for name, t in case["best"].items() if name in us}
        fastest = min(finalists, key=lambda name: finalists[name])
        best = {fastest: finalists[fastest], "torch": case["best"]["torch"]}
        loss = losses(us, timed, signature, case["m"])
        results.append({"signature": signature.key(), "m": case["m"], "best": best, "loss": loss})
    return results


def summarise(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each form, which is a key without N and K and what was promised: mean and worst loss; and the same of N x K
    that no tree was fitted to, which the ranking goes by."""
    forms: dict[str, list[Mapping[str, Any]]] = {}
    for r in results:
        form = re.sub(r"_n\d+_k\d+|_launch$|_weights$", "", r["signature"])
        forms.setdefault(form, []).append(r)
        signature = Signature.of_key(r["signature"])
        if signature is not None and boosted.is_unseen(signature.n, signature.k):
            forms.setdefault(f"{form}, unseen", []).append(r)
    lines = []
    for form, of_form in forms.items():
        by_limit = list(zip(*(r["loss"] for r in of_form), strict=True))
        means = [round(geomean(loss), 4) for loss in by_limit]
        lines.append({"form": form, "cases": len(of_form), "geomean": means, "worst": [max(loss) for loss in by_limit]})
    return lines


def options() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, nargs="?", help="not needed with --times")
    parser.add_argument("--times", type=Path, help="times that were taken before, of which the ranking is asked again")
    parser.add_argument("--tokens", type=lambda t: [int(x) for x in t.split(",")], default=list(TOKENS))
    parser.add_argument(
        "--form", default="bf16_bf16_bf16_f32_none", help="how the keys of the signatures to take begin"
    )
    whose = "time the layers of this manifest in place of the archive's, each up to its largest M; may be repeated"
    parser.add_argument("--manifest", type=Path, action="append", default=[], help=whose)
    parser.add_argument("--minutes", type=float, default=5.0, help="begin no problem after this time")
    out_argument(parser)
    found = parser.parse_args()
    if found.archive is None and found.times is None:
        parser.error("an archive is needed, or --times; make one with aot build --candidates 600 --no-tune")
    return found


def problems(table: Dispatch, asked: argparse.Namespace) -> list[tuple[Signature, int]]:
    """Each signature and M to time, all of one M before the next."""
    most = {e.signature: max(asked.tokens) for e in table.entries}
    if asked.manifest:
        most = {signature: m for signature, (_, m) in bench_gemm.problems(asked.manifest).items()}
    return [(s, m) for m in asked.tokens for s in most if m <= most[s] and s.key().startswith(asked.form)]


def main() -> int:
    """Run and report."""
    asked = options()
    environment: dict[str, Any] = {}
    if asked.times is not None:
        results = of_times(read(asked.times))
    else:
        environment = measure.environment()
        results = run(asked, environment["l2_bytes"])
    summary = summarise(results)
    for line in summary:
        print(line["form"], *(f"{n}: {mean}" for n, mean in zip(FIRST, line["geomean"], strict=True)))
    write(asked.out, environment, first=list(FIRST), summary=summary, results=results)
    return 0


def run(asked: argparse.Namespace, l2_bytes: int) -> list[dict[str, Any]]:
    """Time what was asked for, on this machine's GPU."""
    with Archive.open(asked.archive) as archive:
        table = Dispatch.from_json(archive.table(GEMM.name), GEMM)
    library = runtime.load(asked.archive)
    results: list[dict[str, Any]] = []
    end = time.monotonic() + 60 * asked.minutes
    for signature, m in problems(table, asked):
        found = variants(signature, library.functions)
        if not found or time.monotonic() > end:
            continue
        results.append(sweep(library, signature, m, found, l2_bytes))
        library.forget_captures()
        us = dict(results[-1]["best"])
        torch_us = us.pop("torch")
        best = min(us, key=lambda name: us[name])
        line = f"{m:5d} {us[best]:9.2f} {torch_us / us[best]:6.3f} {results[-1]['loss']} {best}"
        print(f"{signature.key():60s} {line}", flush=True)
    return results


if __name__ == "__main__":
    sys.exit(ends(main))
