"""Name the kernels that torch launches for a layer at some M, with tile, cluster and split where the name says them.

    python scripts/which_kernel.py llama-3.1-8b:qkv gemma-2-9b:down --tokens 64,333
    python scripts/which_kernel.py --behind build/random.json --below 0.97

The second looks at the cases of a result of `bench_random.py` where the archive is behind. Times are of single launches
on cold L2, by CUPTI through torch.profiler: they tell kernels apart, and are no figures to compare by. Needs a GPU.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import random_cases
import summarise_random
import torch
from random_cases import Case, Layer
from report import ends, out_argument, write
from summarise_random import OURS, TORCH
from torch.autograd import DeviceType

from aot.tune import measure
from aot.tune.gemm.baseline import baseline
from aot.tune.gemm.operands import OperandSet, Weights
from aot.tune.measure import Launch
from runtime.errors import AotError

# nvjet_sm90_tst_TILE_KxSTAGES_CLUSTER_..., as cuBLAS 12 and 13 call their Hopper kernels; older ones say tilesize.
_NVJET = re.compile(r"nvjet_(?:sm\d+_)?[a-z]+_(\d+x\d+)_(\d+)x(\d+)_(\d+x\d+)_(\w+)")
_XMMA = re.compile(r"tilesize(\d+x\d+)x(\d+)")
_LEAST_LAUNCHES = 8


def parts(kernel: str) -> dict[str, Any]:
    """What a kernel's name says: tile, elements of K in a stage, stages, cluster, whether K is split."""
    if found := _NVJET.search(kernel):
        tile, k, stages, cluster, rest = found.groups()
        said = {"tile": tile, "tile_k": int(k), "stages": int(stages), "cluster": cluster}
        return said | {"split_k": "splitk" in rest.lower()}
    if found := _XMMA.search(kernel):
        return {"tile": found[1], "tile_k": int(found[2]), "split_k": "splitk" in kernel.lower()}
    return {}


def kernels(events: Iterable[tuple[str, float]], launches: int) -> list[dict[str, Any]]:
    """Each kernel with its median time, and how often a launch runs it.

    `events` are (name, microseconds) of all that ran on the device in `launches` launches.
    """
    times: dict[str, list[float]] = {}
    for name, us in events:
        times.setdefault(name, []).append(us)
    found = []
    for name, took in times.items():
        figures = {"us": round(statistics.median(took), 2), "per_launch": round(len(took) / launches, 2)}
        found.append({"kernel": name, **parts(name), **figures})
    return found


def profile(launch: Launch, operands: Sequence[OperandSet]) -> list[dict[str, Any]]:
    """The kernels of a launch, over operands that together exceed L2."""
    rounds = -(-_LEAST_LAUNCHES // len(operands))
    launch(operands[0])
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for o in list(operands) * rounds:
            launch(o)
        torch.cuda.synchronize()
    events = [(e.name, e.time_range.elapsed_us()) for e in profiled.events() if e.device_type == DeviceType.CUDA]
    return kernels(events, len(operands) * rounds)


def named(names: Sequence[str], tokens: Sequence[int], layers: Sequence[Layer]) -> list[Case]:
    """The layers of these names, such as llama-3.1-8b:qkv, or keys of signatures, at each M.

    Raises:
        KeyError: there is no layer of a name.
    """
    by_name = {name: layer for layer in layers for name in (*layer.names, layer.signature.key())}
    return [Case(by_name[name], m) for name in names for m in tokens]


def behind(document: dict[str, Any], below: float, layers: Sequence[Layer]) -> list[Case]:
    """The cases of a result file where the archive is below this share of torch's speed, the worst first."""
    by_key = {layer.signature.key(): layer for layer in layers}
    found: dict[Case, float] = {}
    for result in document["results"]:
        ratio = summarise_random.ratio(result, OURS, TORCH)
        if ratio is not None and ratio < below and result["signature"] in by_key:
            case = Case(by_key[result["signature"]], result["m"])
            found[case] = min(ratio, found.get(case, ratio))
    return sorted(found, key=lambda case: found[case])


def main() -> int:
    """Profile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layer", nargs="*", help="MODEL:LAYER of the files, or the key of a signature")
    files = "manifests or files such as benchmarks/models.yaml to find layers in; all of this checkout"
    parser.add_argument("--layers", type=Path, nargs="+", default=random_cases.default_paths(), help=files)
    parser.add_argument("--tokens", type=lambda t: [int(x) for x in t.split(",")], default=[16, 64, 256, 1024])
    parser.add_argument("--behind", type=Path, help="a result of bench_random.py, whose slow cases are looked at")
    parser.add_argument("--below", type=float, default=summarise_random.SLOWER, help="of torch's speed (0.97)")
    out_argument(parser)
    options = parser.parse_args()
    if bool(options.layer) == bool(options.behind):
        parser.error("name layers or give --behind RESULT, one of the two")
    try:
        layers = random_cases.load_layers(options.layers)
        if options.behind:
            asked = behind(summarise_random.read([options.behind])[0], options.below, layers)
        else:
            asked = named(options.layer, options.tokens, layers)
        environment = measure.environment()
    except KeyError as unknown:
        parser.error(f"no layer is called {unknown}; names are as in bench_random.py's first column")
    except (AotError, ValueError) as error:
        parser.error(str(error))
    results: list[dict[str, Any]] = []
    for case in asked:
        signature, m = case.layer.signature, case.m
        operands = Weights(signature, m, environment["l2_bytes"], seed=m).operands(m)
        name, launch = baseline(signature, operands[0])
        found = profile(launch, operands)
        results.append({"layers": case.layer.label, "signature": signature.key(), "m": m, "torch": name, "ran": found})
        print(f"{case.layer.label[:44]:44s} {m:5d} {name}")
        for kernel in found:
            said = " ".join(f"{k}={v}" for k, v in kernel.items() if k not in ("kernel", "us", "per_launch"))
            print(f"{kernel['us']:12.2f} us x {kernel['per_launch']:g}  {said}  {kernel['kernel'][:100]}", flush=True)
    write(options.out, environment, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(ends(main))
