"""How fast `aot build` compiles: a cold build with a fresh cache, then the same again with nothing to do.

Prints one line and writes it as JSON with its environment. Whole commands are timed, start-up and packing included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import ROOT, ends, out_argument, version, write

_DISTRIBUTIONS = ("nvidia-cutlass-dsl", "nvidia-cutlass-operators", "nvidia-matmul-heuristics", "torch", "zstandard")


def main() -> None:
    """Build twice and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("manifests", nargs="*", type=Path, default=[ROOT / "manifests/llama-3.1-8b.yaml"])
    parser.add_argument("--target", action="append", help="may be repeated; default: sm_90a")
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--keep", type=Path, help="copy the archive here")
    out_argument(parser)
    options = parser.parse_args()
    targets = options.target or ["sm_90a"]
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "bench.aot"
        arguments = [*map(str, options.manifests), "-o", str(archive), "--cache", f"{folder}/cache", "--no-tune"]
        arguments += ["--candidates", str(options.candidates), "--jobs", str(options.jobs), "--json"]
        arguments += [part for target in targets for part in ("--target", target)]
        cold_s, cold = _build(arguments)
        cpu_s = _cpu_s()  # tells a slow build from one that shared its cores
        rebuild_s, again = _build(arguments)
        if options.keep:
            shutil.copyfile(archive, options.keep)
    if again["compiled"]:
        sys.exit(f"error: the second build compiled {again['compiled']} kernels again")
    result = {
        "manifests": " ".join(path.name for path in options.manifests),
        "targets": " ".join(targets),
        "jobs": options.jobs,
        "variants": cold["compiled"],
        "failures": len(cold["failures"]),
        "cold_s": round(cold_s, 2),
        "cold_cpu_s": round(cpu_s, 2),
        "variants_per_s_per_core": round(cold["compiled"] / cold_s / options.jobs, 3),
        "rebuild_s": round(rebuild_s, 2),
        "archive_bytes": cold["bytes"],
        "bytes_per_kernel": round(cold["bytes"] / cold["functions"]),
    }
    print(
        f"{result['variants']} variants  {cold_s:.1f} s ({cpu_s:.1f} s of CPU)  "
        f"{result['variants_per_s_per_core']:.2f} variants/s/core  rebuild {rebuild_s:.2f} s  "
        f"{result['bytes_per_kernel']:,} bytes a kernel  {result['failures']} failures"
    )
    environment = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0))}
    write(options.out, environment | {name: version(name) for name in _DISTRIBUTIONS}, results=result)


def _build(arguments: list[str]) -> tuple[float, dict[str, Any]]:
    """Seconds that one `aot build` took, and what it reported."""
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "aot", "build", *arguments], cwd=ROOT, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(done.returncode)
    return time.monotonic() - begun, json.loads(done.stdout)


def _cpu_s() -> float:
    """Seconds of CPU that finished child processes took, theirs included."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(ends(main))
