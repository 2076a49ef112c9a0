"""What bounds a GEMM on the chip, ours and torch's: hardware counters of a few launches of each, with cold caches.

`--peer` adds a kernel of another library, by the name that bench_peers.py gives its candidates.

Needs a GPU and Nsight Compute (ncu). Each kernel is replayed alone for every group of counters, from an idle GPU:
shares of cycles are what to read, and for time under load there are the other scripts. Cycles over time is the clock,
which only kernels of some hundred microseconds are long enough to bring down.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peers import CACHE, PEERS, Settings, load
from report import out_argument, patch_argument, write

import runtime
from aot import measure
from aot.baseline import baseline
from aot.operands import OperandSet, Weights, gemm_options
from runtime.archive import Archive
from runtime.dispatch import Dispatch
from runtime.signature import Signature

_SHARE = ".avg.pct_of_peak_sustained_elapsed"
# What a result calls a counter, the counter, and what turns ncu's base units into the result's.
COUNTERS = {
    "us": ("gpu__time_duration.sum", 1e-3),
    "mega_cycles": ("sm__cycles_elapsed.max", 1e-6),
    "ctas": ("launch__grid_size", 1),
    "sms_active": ("sm__cycles_active" + _SHARE, 1e-2),
    "mega_cycles_of_the_longest_sm": ("sm__cycles_active.max", 1e-6),
    "tensor_pipe": ("sm__pipe_tensor_cycles_active" + _SHARE, 1e-2),
    "shared_reads": ("l1tex__data_bank_reads" + _SHARE, 1e-2),
    "shared_writes": ("l1tex__data_bank_writes" + _SHARE, 1e-2),
    "l2": ("lts__t_sectors" + _SHARE, 1e-2),
    "l2_mega_sectors": ("lts__t_sectors.sum", 1e-6),
    # Read by several SMs of a GPC at once, and served once: because a cluster multicasts, or because requests met.
    "multicast_mega_sectors": ("lrc__request_sectors_op_read_coalescing_achieved_type_programmatic.sum", 1e-6),
    "merged_mega_sectors": ("lrc__request_sectors_op_read_coalescing_achieved_type_hardware.sum", 1e-6),
    "mb_into_sms": ("l1tex__m_xbar2l1tex_read_bytes.sum", 1e-6),
    "memory": ("dram__throughput" + _SHARE, 1e-2),
    "mb_read": ("dram__bytes_read.sum", 1e-6),
}
_NCU = ("ncu", "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off")
NCU_CONTROL = ("--cache-control", "all", "--clock-control", "none")
_LAUNCHES = 3
_SEPARATOR = "spin_kernel"  # what torch.cuda._sleep launches

Case = tuple[str, int]
Candidate = tuple[str, str]  # a peer, and the name of one of its candidates


def signatures(archives: Sequence[Path]) -> dict[str, Signature]:
    """Those of the archives' gemm tables by key."""
    found: dict[str, Signature] = {}
    for path in archives:
        with Archive.open(path) as archive:
            found |= {e.signature.key(): e.signature for e in Dispatch.from_json(archive.table("gemm")).entries}
    return found


def launch_all(archives: Sequence[Path], cases: Sequence[Case], peers: Sequence[Candidate]) -> None:
    """Launch ours, torch's and the peers' in turn where the profiler looks, a separator behind each.

    All have run before.
    """
    known, library = signatures(archives), runtime.load(archives)
    candidates = [(load(name, Settings(CACHE, workers=1)), variant) for name, variant in peers]
    for key, m in cases:
        signature = known[key]
        operands = Weights(signature, m, 0, seed=0).operands(m)[0]
        launches = [_ours(library, signature), baseline(signature, operands)[1]]
        for peer, variant in candidates:
            offered = peer.launches(signature, m)
            if variant not in offered:
                raise SystemExit(f"{peer.name} has no {variant!r} for {key} at M = {m}; it has {', '.join(offered)}")
            launches.append(offered[variant])
        for profiled in (False, True):
            if profiled:
                torch.cuda.profiler.start()
            for _ in range(_LAUNCHES if profiled else 1):
                for launch in launches:
                    launch(operands)
                    torch.cuda._sleep(1)
            torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def _ours(library: runtime.Library, signature: Signature) -> Callable[[OperandSet], Any]:
    return lambda o: library.gemm(o.a, o.b, out=o.d, **gemm_options(signature, o))


def counted(metrics: Sequence[str], child: Sequence[str], control: Sequence[str] = ()) -> list[dict[str, str]]:
    """What ncu says of each kernel that the command `child` launches where the profiler looks.

    Raises:
        SystemExit: there is no ncu, or it failed.
    """
    if shutil.which(_NCU[0]) is None:
        raise SystemExit(f"{_NCU[0]}, Nsight Compute, is not on the path")
    said = subprocess.run([*_NCU, *control, "--metrics", ",".join(metrics), *child], capture_output=True, text=True)
    start = said.stdout.find('"ID"')
    if said.returncode or start < 0:
        raise SystemExit(f"ncu failed:\n{said.stdout[-2000:]}\n{said.stderr[-2000:]}")
    _, *rows = csv.DictReader(io.StringIO(said.stdout[start:]))  # the first one has units
    return rows


def profile(archives: Sequence[Path], cases: Sequence[Case], peers: Sequence[Candidate]) -> list[dict[str, Any]]:
    """The counters of each kernel that each case launches, ours first: medians of a few launches."""
    metrics = [name for name, _ in COUNTERS.values()]
    first, *patches = map(str, archives)
    child = [sys.executable, __file__, first, *(f"{key}:{m}" for key, m in cases), "--launch-only"]
    child += [f"--patch={patch}" for patch in patches]
    child += [f"--peer={name}:{variant}" for name, variant in peers]
    # Whose each launch of a case is, and what a peer calls its kernel, which symbols do not say.
    who: list[tuple[str, dict[str, str]]] = [("ours", {}), ("torch", {}), *((n, {"kernel": v}) for n, v in peers)]
    rows = counted(metrics, child, NCU_CONTROL)
    found = []
    launches = _between_separators(rows)
    per_case = len(who) * _LAUNCHES
    if len(launches) != len(cases) * per_case:
        raise SystemExit(f"ncu shows {len(launches)} launches, not {len(cases) * per_case}; were some left out?")
    for case, (key, m) in enumerate(cases):
        of_case = launches[case * per_case : (case + 1) * per_case]
        for place, (name, called) in enumerate(who):
            for kernel in zip(*of_case[place :: len(who)], strict=True):
                found.append({"signature": key, "m": m, "who": name} | medians(kernel, COUNTERS) | called)
    return found


def _between_separators(rows: Sequence[dict[str, str]]) -> list[list[dict[str, str]]]:
    """The kernels of each launch, of which most are one."""
    launches: list[list[dict[str, str]]] = [[]]
    for row in rows:
        if _SEPARATOR in row["Kernel Name"]:
            launches.append([])
        else:
            launches[-1].append(row)
    return launches[:-1]


def medians(rows: Sequence[dict[str, str]], counters: Mapping[str, tuple[str, float]]) -> dict[str, Any]:
    """One kernel's counters over its launches, and (largest - smallest) / median of their times."""
    values = {
        label: [float(row[name].replace(",", "")) * factor for row in rows]
        for label, (name, factor) in counters.items()
    }
    middle = {label: round(statistics.median(found), 4) for label, found in values.items()}
    spread = (max(values["us"]) - min(values["us"])) / middle["us"]
    return {"kernel": rows[0]["Kernel Name"]} | middle | {"spread": round(spread, 4)}


def parse_case(text: str) -> list[Case]:
    """`KEY:M,M` as cases."""
    key, _, tokens = text.partition(":")
    try:
        return [(key, int(m)) for m in tokens.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not KEY:M,M, as in bf16_bf16_bf16_f32_none_n4096_k4096:64,256"
        ) from None


def case_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of scripts that look at some problems of an archive as it is served."""
    parser.add_argument("archive", type=Path)
    parser.add_argument(
        "case", nargs="+", type=parse_case, help="KEY:M,M of a signature in the archive and values of M"
    )
    patch_argument(parser)


def given_cases(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> tuple[list[Path], dict[str, Signature], list[Case]]:
    """The archives, their signatures by key and the cases of `case_arguments`; a key that is none ends the process."""
    archives = [options.archive, *options.patch]
    known = signatures(archives)
    cases = [case for given in options.case for case in given]
    if unknown := {key for key, _ in cases} - set(known):
        parser.error(f"{options.archive} has no {', '.join(sorted(unknown))}; aot ls lists what it has")
    return archives, known, cases


def parse_peer(text: str) -> Candidate:
    """`PEER:CANDIDATE` as both."""
    name, _, variant = text.partition(":")
    if name not in PEERS or not variant:
        raise argparse.ArgumentTypeError(f"{text!r} is not PEER:CANDIDATE with PEER of {', '.join(PEERS)}")
    return name, variant


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    case_arguments(parser)
    parser.add_argument("--peer", type=parse_peer, action="append", default=[], help="PEER:CANDIDATE to launch as well")
    parser.add_argument("--launch-only", action="store_true", help=argparse.SUPPRESS)
    out_argument(parser)
    options = parser.parse_args()
    archives, known, cases = given_cases(parser, options)
    if options.launch_only:
        launch_all(archives, cases, options.peer)
        return 0
    results = profile(archives, cases, options.peer)
    library = runtime.load(archives)
    for row in results:
        if row["who"] == "ours":
            row["kernel"] = library.entry(known[row["signature"]]).best(row["m"])
    for row in results:
        print(" ".join(f"{k}={str(v)[:60]}" for k, v in row.items()))
    environment = measure.environment() | {"archive_sha256": library.digest}
    write(options.out, environment, counters={k: name for k, (name, _) in COUNTERS.items()}, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
