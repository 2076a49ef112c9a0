"""Keep the brief times in tuned archives' histories as a file of times, which estimates are fitted to.

    python scripts/keep_times.py tuned.aot --gpu "NVIDIA H200" -o benchmarks/drawn_h200.json.xz

`aot.tune.times` says how such a file reads. Needs no GPU.
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from typing import Any

import report  # also puts the checkout on the path

from aot.tune import history
from runtime.container.archive import Archive
from runtime.errors import AotError
from runtime.gemm.operation import GEMM


def kept(archive: Archive, gpu: str) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """For each signature the functions that were timed on such a GPU, and the times at each M in their order."""
    names: list[list[str]] = []
    results: list[dict[str, Any]] = []
    for row in history.tunings(archive):
        if history.operation_of(row) != GEMM.name or row["gpu"] != gpu:
            continue
        by_m = {point["m"]: history.measured(row["names"], point).short_us() for point in row["points"]}
        names.append(sorted({name for us in by_m.values() for name in us}))
        for m, us in sorted(by_m.items()):
            times = [None if name not in us else float(f"{us[name]:.4g}") for name in names[-1]]
            results.append({"signature": row["signature"], "m": m, "names": len(names) - 1, "us": times, "best": {}})
    return names, results


def main() -> int:
    """Read and write."""
    parser = report.options_to_write(__doc__, "the file to write, compressed with xz")
    parser.add_argument("archive", type=Path)
    parser.add_argument("--gpu", required=True, help="the GPU whose times are wanted, by name")
    options = parser.parse_args()

    def work() -> None:
        with Archive.open(options.archive) as archive:
            names, results = kept(archive, options.gpu)
            machines = archive.table("tuning")["environments"]
        if not results:
            raise AotError(f"{options.archive}: has no times of {options.gpu}; `aot ls` says where it was tuned")
        environments = [machine for machine in machines if machine["gpu"] == options.gpu]
        content = {"gpu": options.gpu, "environments": environments, "names": names, "results": results}
        data = json.dumps(content, separators=(",", ":")).encode()
        options.output.write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))

    return report.ends(work)


if __name__ == "__main__":
    sys.exit(report.ends(main))
