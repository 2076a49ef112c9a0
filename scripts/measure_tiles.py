"""What a tile of sm90_persistent costs besides its products, by hardware counters: functions of an archive by name.

A tensor core of Hopper multiplies 128 x 128 x 64 elements of 16 bits in 512 cycles of its SM. What the SM that is busy
for longest takes beyond that for its tiles is a launch's beginning and end, and what each tile adds; at several M the
two come apart. Needs a GPU and Nsight Compute (ncu); every kernel is launched alone, with cold caches, three times.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure_bounds import NCU_CONTROL, counted, medians
from report import out_argument, write

import runtime
from aot import measure
from aot.operands import Weights
from runtime.signature import Signature

_COUNTERS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "cycles": ("sm__cycles_elapsed.max", 1),
    "cycles_of_the_longest_sm": ("sm__cycles_active.max", 1),
    "tensor_pipe": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", 1e-2),
    "ctas": ("launch__grid_size", 1),
}
_CYCLES, _UNIT = 512, 128 * 128 * 64  # of a tensor core for so many products of 16 bits
_TILE_K = 64
_LAUNCHES = 3
_LAUNCH = "--launch-only"


def tiles_of_an_sm(name: str, m: int, n: int, ctas: int) -> tuple[int, int]:
    """How many tiles the busiest CTA of a function of sm90_persistent has, and the elements of a tile.

    Raises:
        SystemExit: it is no such function, or not all of a tile's K falls to one CTA.
    """
    found = re.search(r"\.sm90_persistent\..*\.tile(\d+)x(\d+)\.cluster(\d)x(\d)\.", name)
    if found is None or ".split_k1" not in name or "stream_k" in name:
        raise SystemExit(f"{name} is no function of sm90_persistent whose CTAs have whole tiles")
    tile_m, tile_n, cluster_m, cluster_n = map(int, found.groups())
    clusters = math.ceil(math.ceil(m / tile_m) / cluster_m) * math.ceil(math.ceil(n / tile_n) / cluster_n)
    return math.ceil(clusters / (ctas // (cluster_m * cluster_n))), tile_m * tile_n


def launch(library: runtime.Library, names: Sequence[str], problems: Sequence[tuple[int, int, int]]) -> None:
    """Launch every function at every problem where the profiler looks; all have run before."""
    for m, n, k in problems:
        o = Weights(Signature("bf16", "bf16", "bf16", "f32", "none", n, k), m, 0, seed=m).operands(m)[0]
        for profiled in (False, True):
            if profiled:
                torch.cuda.profiler.start()
            for name in [name for name in names for _ in range(_LAUNCHES if profiled else 1)]:
                library.functions[name](o.a, o.b, o.d)
            torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def problem(text: str) -> tuple[int, int, int]:
    """`MxNxK` as numbers."""
    try:
        m, n, k = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not MxNxK, as in 1024x8192x1024") from None
    return m, n, k


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("problem", nargs="+", type=problem, help="MxNxK")
    parser.add_argument("--only", action="append", default=[], help="parts of names, one of which a function must have")
    parser.add_argument(_LAUNCH, action="store_true", help=argparse.SUPPRESS)
    out_argument(parser)
    options = parser.parse_args()
    library = runtime.load(options.archive)
    of_family = [n for n in library.functions if n.startswith("own.sm90_persistent.bf16_bf16_bf16_f32.tile")]
    whole = [n for n in of_family if ".split_k1" in n and "stream_k" not in n]
    names = sorted(n for n in whole if not options.only or any(part in n for part in options.only))
    if not names:
        parser.error(
            f"{options.archive} has no function of sm90_persistent with {options.only}; aot ls lists what it has"
        )
    if options.launch_only:
        launch(library, names, options.problem)
        return 0
    child = [sys.executable, __file__, str(options.archive), *("x".join(map(str, p)) for p in options.problem), _LAUNCH]
    child += [f"--only={part}" for part in options.only]
    rows = iter(counted([counter for counter, _ in _COUNTERS.values()], child, NCU_CONTROL))
    results: list[dict[str, Any]] = []
    for m, n, k in options.problem:
        for name in names:
            found = medians([next(rows) for _ in range(_LAUNCHES)], _COUNTERS) | {"kernel": name}
            tiles, elements = tiles_of_an_sm(name, m, n, int(found["ctas"]))
            products = tiles * elements * math.ceil(k / _TILE_K) * _TILE_K * _CYCLES // _UNIT
            found |= {"tiles": tiles, "cycles_besides": found["cycles_of_the_longest_sm"] - products}
            results.append({"m": m, "n": n, "k": k} | found)
            print(" ".join(f"{key}={value}" for key, value in results[-1].items()), flush=True)
    write(options.out, measure.environment() | {"archive_sha256": library.digest}, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
