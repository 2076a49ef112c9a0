"""How good the ranking with no GPU is: where it places the winners that tuning measured.

Reads tuned archives. For each signature and M, the variants of the signature are ranked and the measured winner is
looked up in the order; needs no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from report import out_argument, version, write

from aot import rank
from aot.providers import PROVIDERS, provider
from runtime.archive import Archive
from runtime.dispatch import Dispatch


def places(path: Path) -> list[dict[str, Any]]:
    """The place of each measured winner, 1 being the first, with how many variants there were."""
    found = []
    with Archive.open(path) as archive:
        table = Dispatch.from_json(archive.table("gemm"))
    for entry in table.entries:
        variants = [v for p in PROVIDERS for v in provider(p).variants(entry.target, entry.signature)]
        for timing in entry.timings:
            ranking = rank.rank(variants, entry.signature, timing["m"], entry.target)
            names = [v.name() for v in ranking.variants]
            if timing["function"] in names:
                place = names.index(timing["function"]) + 1
                found.append({"types": entry.signature.a, "m": timing["m"], "place": place, "of": len(names)})
    return found


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and median place, and the share of winners among the first few."""
    at = [f["place"] for f in found]
    shares = {f"in_the_first_{n}": round(sum(p <= n for p in at) / len(at), 3) for n in (1, 4, 8, 12)}
    return {"cases": len(at), "mean": round(statistics.mean(at), 2), "median": statistics.median(at)} | shares


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path, nargs="+")
    out_argument(parser)
    options = parser.parse_args()
    found = [f for path in options.archive for f in places(path)]
    if not found:
        sys.exit("error: no tuned entry of a known variant; tune an archive first")
    results = {
        types: summary([f for f in found if f["types"] == types]) for types in sorted({f["types"] for f in found})
    }
    for types, line in results.items():
        print(types, " ".join(f"{k}={v}" for k, v in line.items()))
    write(options.out, {"nvidia-matmul-heuristics": version("nvidia-matmul-heuristics")}, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
