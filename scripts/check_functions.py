"""Check and time the functions of a spec, on a GPU, from an archive, where no DSL is installed:

python scripts/check_functions.py build/quack.aot --spec examples/quack/spec.py --rows 1,64,4096 --json build/quack.json

Checks are those of `aot tune --spec`. Times are device time by CUDA-graph replays over operands of three times L2, and
the rate is that of all tensors, each moved once. Exit status 1 where a function is wrong, 2 where the DSL is there and
`--with-dsl` does not say that it may be.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import tempfile
from pathlib import Path
from typing import Any

import report
import torch

import runtime
from aot.providers import spec_file
from aot.tune import function_check, measure
from aot.tune.functions import check_archive
from runtime.errors import AotError

REPEATS, GRAPH_US = 9, 500.0
MOST_SETS = 64
DSL = ("cutlass", "quack", "triton")


def times(library: runtime.Library, name: str, function: Any, rows: int, l2_bytes: int) -> dict[str, Any]:
    """Microseconds of a launch with `rows` in every free extent, and GB/s."""
    generator = torch.Generator(device="cuda").manual_seed(rows)
    steps = {n: function.symbols()[n].divisibility for n in function.extents()}
    extents = {n: -(-rows // step) * step for n, step in steps.items()}
    first = function_check.arguments(function, extents, generator)
    moved = sum(x.numel() * x.element_size() for x in first if isinstance(x, torch.Tensor))
    sets = min(MOST_SETS, max(1, math.ceil(3 * l2_bytes / moved)))
    operands: Any = [first, *(function_check.arguments(function, extents, generator) for _ in range(sets - 1))]
    launch = library.functions[name]

    def run(given: Any) -> None:
        launch(*given, stream=torch.cuda.current_stream())

    found = measure.time_interleaved({name: run}, operands, max(1.0, moved / 4.8e6), REPEATS, GRAPH_US)[name]
    return {"name": name, "rows": rows, "us": found.us, "spread": found.spread, "gb_per_s": moved / found.us / 1e3}


def main() -> int:
    """Check and time; exit status 1 if a function is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--rows", default="1,64,4096", help="extents to time at")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--with-dsl", action="store_true", help="go on where the DSL is installed")
    options = parser.parse_args()
    there = [name for name in DSL if importlib.util.find_spec(name)]
    print(f"installed of the DSL and what is written in it: {', '.join(there) or 'nothing'}")
    if "cutlass" in there and not options.with_dsl:
        raise AotError("the DSL is installed here, so this would not show that none is needed; give --with-dsl")
    spec = spec_file.load(options.spec)
    with tempfile.TemporaryDirectory() as folder:
        checked = check_archive(options.archive, Path(folder) / "checked.aot", spec)
    for name, cases in checked.right.items():
        print(f"right at {cases} shapes  {name}")
    for name, reason in checked.wrong.items():
        print(f"WRONG  {name}: {reason}")
    rows = []
    with runtime.load(options.archive) as library:
        targets = {name.rpartition(".")[2] for name in checked.right}
        known = {n: f for t in targets for n, f in function_check.names_of(spec.functions, t).items()}
        for name in checked.right:
            for m in map(int, options.rows.split(",")):
                row = times(library, name, known[name], m, checked.environment["l2_bytes"])
                print(f"{row['us']:9.2f} us  {row['gb_per_s']:7.0f} GB/s  {m:6d} rows  {name}")
                rows.append(row)
        torch.cuda.synchronize()
    report.write(options.json, checked.environment, right=checked.right, wrong=checked.wrong, rows=rows)
    return 1 if checked.wrong else 0


if __name__ == "__main__":
    raise SystemExit(report.ends(main))
