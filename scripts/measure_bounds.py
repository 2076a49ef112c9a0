"""What bounds a GEMM on the chip, ours and torch's: hardware counters of one launch of each, with cold caches, by ncu.

Needs a GPU and Nsight Compute. Each kernel is replayed alone for every group of counters, so clocks are those of an
idle GPU: shares of cycles are what to read, and for time under load there are the other scripts.
"""

from __future__ import annotations

import argparse
import csv
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from report import out_argument, write

import runtime
from aot import measure
from aot.baseline import baseline
from aot.operands import Weights, gemm_options
from runtime.archive import Archive
from runtime.dispatch import Dispatch
from runtime.signature import Signature

_SHARE = ".avg.pct_of_peak_sustained_elapsed"
# What a result calls a counter, the counter, and what turns ncu's base units into the result's.
COUNTERS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "mega_cycles": ("sm__cycles_elapsed.max", 1e-6),
    "tensor_pipe": ("sm__pipe_tensor_cycles_active" + _SHARE, 1e-2),
    "shared_reads": ("l1tex__data_bank_reads" + _SHARE, 1e-2),
    "shared_writes": ("l1tex__data_bank_writes" + _SHARE, 1e-2),
    "l2": ("lts__t_sectors" + _SHARE, 1e-2),
    "mb_into_sms": ("l1tex__m_xbar2l1tex_read_bytes.sum", 1e-6),
    "memory": ("dram__throughput" + _SHARE, 1e-2),
    "mb_read": ("dram__bytes_read.sum", 1e-6),
}
_NCU = ("ncu", "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off")
_NCU_CONTROL = ("--cache-control", "all", "--clock-control", "none")


def signatures(archive: Path) -> dict[str, Signature]:
    """Those of an archive's gemm table by key."""
    with Archive.open(archive) as opened:
        return {e.signature.key(): e.signature for e in Dispatch.from_json(opened.table("gemm")).entries}


def launch_both(archive: Path, key: str, m: int) -> None:
    """Launch ours and torch's where the profiler looks, ours first; both have run before."""
    signature = signatures(archive)[key]
    library = runtime.load(archive)
    operands = Weights(signature, m, 0, seed=0).operands(m)[0]
    theirs = baseline(signature, operands)[1]
    for profiled in (False, True):
        if profiled:
            torch.cuda.profiler.start()
        library.gemm(operands.a, operands.b, out=operands.d, **gemm_options(signature, operands))
        theirs(operands)
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def profile(archive: Path, key: str, m: int) -> list[dict[str, Any]]:
    """The counters of each kernel that a case launches; the first is ours."""
    metrics = ",".join(name for name, _ in COUNTERS.values())
    child = [sys.executable, __file__, str(archive), key, "--tokens", str(m), "--launch-only"]
    command = [*_NCU, *_NCU_CONTROL, "--metrics", metrics, *child]
    said = subprocess.run(command, capture_output=True, text=True)
    start = said.stdout.find('"ID"')
    if said.returncode or start < 0:
        raise SystemExit(f"ncu failed for {key} at M = {m}:\n{said.stdout[-2000:]}\n{said.stderr[-2000:]}")
    _, *rows = csv.DictReader(io.StringIO(said.stdout[start:]))  # the first one has units
    found = []
    for place, row in enumerate(rows):
        values = {
            label: round(float(row[name].replace(",", "")) * factor, 4) for label, (name, factor) in COUNTERS.items()
        }
        who = {"who": "torch" if place else "ours", "kernel": row["Kernel Name"]}
        found.append({"signature": key, "m": m} | who | values)
    return found


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("signature", nargs="+", help="keys of signatures in the archive")
    parser.add_argument("--tokens", type=lambda t: [int(x) for x in t.split(",")], default=[256, 4096])
    parser.add_argument("--launch-only", action="store_true", help=argparse.SUPPRESS)
    out_argument(parser)
    options = parser.parse_args()
    if options.launch_only:
        launch_both(options.archive, options.signature[0], options.tokens[0])
        return 0
    if unknown := set(options.signature) - set(signatures(options.archive)):
        parser.error(f"{options.archive} has no {', '.join(sorted(unknown))}; aot ls lists what it has")
    results = []
    for key in options.signature:
        for m in options.tokens:
            results += profile(options.archive, key, m)
            for row in results[-2:]:
                print(" ".join(f"{k}={str(v)[:60]}" for k, v in row.items()), flush=True)
    environment = measure.environment() | {"archive_sha256": runtime.load(options.archive).digest}
    write(options.out, environment, counters={k: name for k, (name, _) in COUNTERS.items()}, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
