"""How well tunings of one build agree: what finalists take beside each other at the same M, briefly and under load.

    aot tune model.aot -o one.aot --sustained       # on one GPU, then on another of its kind
    python scripts/compare_tunings.py one.aot another.aot --out build/tunings.json

Of each pair of tunings, over all M where both have two finalists or more under load: by how much the logarithms of
their brief times, beside the others' mean, differ (the root of the mean square); what slowdowns under load are beside
the others'; and how these correlate from one tuning to the other. Needs no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import report  # also puts the checkout on the path

from aot.tune import history
from aot.tune.halving import Measured
from runtime.container.archive import Archive
from runtime.errors import AotError

Points = Mapping[tuple[str, int], Measured]


def points(path: Path) -> tuple[Points, str]:
    """What an archive's history has by signature and M, and the GPUs it is of."""
    with Archive.open(path) as archive:
        rows = history.tunings(archive)
        found = {(r["signature"], p["m"]): history.measured(r["names"], p) for r in rows for p in r["points"]}
    return found, ", ".join(sorted({r["gpu"] for r in rows}))


def beside(us: Mapping[str, float]) -> dict[str, float]:
    """Each number less the mean of all."""
    mean = math.fsum(us.values()) / len(us)
    return {name: x - mean for name, x in us.items()}


def pairs(one: Points, other: Points) -> Iterator[tuple[float, float, float]]:
    """By how much a finalist's brief times differ, and its slowdown in one tuning and the other, beside the others'."""
    for place in one.keys() & other.keys():
        a, b = one[place].slowdowns(), other[place].slowdowns()
        if len(both := sorted(a.keys() & b.keys())) > 1:
            briefly = [dict(found[place].times) for found in (one, other)]
            apart = beside({name: math.log(briefly[0][name].us / briefly[1][name].us) for name in both})
            loads = beside({name: a[name] for name in both}), beside({name: b[name] for name in both})
            yield from ((apart[name], loads[0][name], loads[1][name]) for name in both)


def rms(of: list[float]) -> float:
    return math.sqrt(math.fsum(x * x for x in of) / len(of))


def compared(tunings: Sequence[tuple[Points, str]]) -> dict[str, Any]:
    """The figures of all pairs of tunings.

    Raises:
        AotError: no two of them have what is compared.
    """
    found = [pair for (a, _), (b, _) in itertools.combinations(tunings, 2) for pair in pairs(a, b)]
    if not found:
        raise AotError("no M has two finalists under load in two of these archives; tune with --sustained")
    apart, one, other = (list(of) for of in zip(*found, strict=True))
    together = math.fsum(a * b for a, b in zip(one, other, strict=True)) / len(found)
    return {
        "gpus": sorted({gpu for _, gpu in tunings}),
        "tunings": len(tunings),
        "finalists": len(found),
        "brief_times_differ_by": round(rms(apart), 4),
        "slowdowns": [round(rms(one), 4), round(rms(other), 4)],
        "correlation_of_slowdowns": round(together / (rms(one) * rms(other) or 1.0), 3),
    }


def main() -> int:
    """Compare and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archives", type=Path, nargs="+")
    report.out_argument(parser)
    options = parser.parse_args()
    result = compared([points(path) for path in options.archives])
    for name, value in result.items():
        print(f"{name:28} {value}")
    report.write(options.out, {"gpu": ", ".join(result["gpus"])}, **result)
    return 0


if __name__ == "__main__":
    sys.exit(report.ends(main))
