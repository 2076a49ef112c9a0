"""Decode steps of all of a model's layers, as `aot tune --in-graph` chose them and uniformly; needs a GPU.

    aot tune tuned.aot -o served.aot --in-graph
    python scripts/bench_decode.py served.aot --base tuned.aot --out decode.json
    python scripts/bench_decode.py served.aot --base tuned.aot --write uniform/

Steps are those of `aot/tune/replay.py`, of all layers, each in a CUDA graph, timed in turns. The archive `served.aot`
is called through the operators that servers' plugins call, at the batches given, also such that tuning did not look at.
Uniform are all layers serial, all overlapping, and each with the activation fused, from `tuned.aot`. The exit status is
1 where the archive is more than 1% behind the best of these. With --write, archives that have plugins run uniformly are
written instead, to compare in a server.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from report import ends, out_argument, write

from aot.pack import build_table, tables
from aot.problem.ways import MOST_TOKENS
from aot.tune import in_graph, measure, replay
from aot.tune.block import Block, Seen, blocks
from aot.tune.options import GraphOptions, TuneError
from aot.tune.timing import whole_turns
from runtime.container.archive import Archive
from runtime.device.driver import Driver
from runtime.gemm.signature import Signature
from runtime.plugin import gated
from runtime.plugin.linears import decide, fused, overlap_of
from runtime.serve.library import Library
from runtime.torch.operator import GEMM, register

BAR = 1.01  # of the best uniform time


def entries_of(archive: Archive) -> dict[Signature, Any]:
    """The entries that were tuned on this kind of GPU."""
    driver = Driver(0)
    return in_graph.tuned_here(tables.operation_entries(archive), driver.compute_capability, driver.gpu)


def block_of(archive: Archive, residual: bool) -> Block:
    """The layer of the first model that leaves a choice."""
    found = blocks(build_table.read(archive).models, entries_of(archive), residual)
    if not found:
        raise TuneError(f"{archive.path}: no layer of it was tuned here in more than one way")
    return found[0]


def as_plugins_call(
    lib: Library, block: Block, layer: replay.Layer, activation: gated.Activation
) -> tuple[dict[str, Any], dict[str, str], bool]:
    """What computes each part, the keys of their signatures, and whether gate_up computes the activation, which apart
    from it is one kernel, as in servers and where it was tuned."""
    number, gemms, keys, fuses = register(lib), dict[str, Any](), dict[str, str](), False
    gated.use(number, activation)
    for part in block.ways:
        of = SimpleNamespace(weight=layer.weights[part], bias=layer.biases.get(part))
        decision = decide(lib, of)
        if part == "gate_up":
            decision = fused(lib, of, decision, "swiglu")
        if not decision.asked:
            raise TuneError(f"{lib!r} does not compute {part}: {decision.reason}")
        keys[part], fuses = decision.asked, fuses or bool(decision.fused)
        if decision.fused:
            how = overlap_of(decision.fused), overlap_of(decision.plain), gated.flat(decision.apart)
            gemms[part] = functools.partial(_gated, number, how)
            keys[part] += f", apart at {decision.apart}" if decision.apart else ""
        else:
            gemms[part] = functools.partial(_gemm, number, overlap_of(decision.asked))
    return gemms, keys, fuses


def _gated(number: int, how: Any, a: Any, b: Any, _bias: Any, _residual: Any) -> Any:
    return gated.GATED(number, a, b, "swiglu", *how)


def _gemm(number: int, overlap: str, a: Any, b: Any, bias: Any, _residual: Any) -> Any:
    return GEMM(number, a, b, bias=bias, overlap=overlap)


def runs_at(step: replay.Step, base: Library, served: Library, block: Block) -> dict[str, Callable[[Any], Any]]:
    """What runs a step, by name."""
    uniform = block.uniform()
    with_residual = {ways[-1].parts.residual: ways for ways in block.ways.values()}.get(True)
    if with_residual and "all fused, overlap" in uniform:
        most = uniform["all fused, overlap"]
        adds = (
            next((w for w in of if w.parts.residual and w.overlap == way.overlap), way)
            for of, way in zip(block.ways.values(), most, strict=True)
        )
        uniform["all fused, overlap, residual"] = tuple(adds)
    runs: dict[str, Callable[[Any], Any]] = {
        n: functools.partial(replay.run, step, base, c) for n, c in uniform.items()
    }
    gemms, _, fuses = as_plugins_call(served, block, step.layers[0], step.run.gated)
    runs["archive"] = lambda _: step(gemms, fused=fuses)
    return runs


def measured(runs: Mapping[str, Callable[[Any], Any]], layers: int, m: int, repeats: int) -> dict[str, Any]:
    """One batch: microseconds of a step, and how far results are from those of serial layers."""
    with torch.no_grad():
        results = {name: run(None).float() for name, run in runs.items()}
    serial = results["all serial"]
    times = replay.per_layer(runs, whole_turns(len(runs), repeats), layers)
    us = {name: round(t.us * layers, 2) for name, t in times.items()}
    plugins = {name: t for name, t in us.items() if name != "archive" and "residual" not in name}
    best = min(plugins, key=plugins.__getitem__)
    return {
        "m": m,
        "us": us,
        "spread": {name: round(t.spread, 4) for name, t in times.items()},
        "best_uniform": best,
        "over_best_uniform": round(us["archive"] / us[best], 4),
        "difference": {name: float((x - serial).norm() / serial.norm()) for name, x in results.items()},
        "finite": all(bool(x.isfinite().all()) for x in results.values()),
    }


def write_uniform(base: Path, folder: Path) -> None:
    """An archive for each uniform choice, which plugins then run at every M of a decode step."""
    folder.mkdir(parents=True, exist_ok=True)
    with Archive.open(base) as archive:
        block, entries = block_of(archive, residual=False), entries_of(archive)
        for name, chosen in block.uniform().items():
            seen = Seen(MOST_TOKENS, {choice: float(choice != chosen) for choice in block.choices()})
            # What is not chosen of gate_up is run nowhere.
            rows = in_graph.rows(entries, [(block, [seen])])
            path = folder / f"{name.replace(', ', '_').replace(' ', '_')}.aot"
            in_graph.write(archive, rows, measure.environment(), path)
            print(path)


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="what `aot tune --in-graph` wrote")
    parser.add_argument("--base", type=Path, required=True, help="what it was made of")
    parser.add_argument("--batch", type=lambda t: [int(x) for x in t.split(",")], default=[1, 16, 24, 64])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--context", type=int, default=GraphOptions.context)
    parser.add_argument("--repeats", type=int, default=20, help="of each step, at least")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write uniform archives there, and time nothing")
    out_argument(parser)
    options = parser.parse_args()
    if options.write:
        write_uniform(options.base, options.write)
        return 0
    with Archive.open(options.base) as archive:
        block = block_of(archive, residual=True)
    base, served = map(replay.opened, (options.base, options.archive))
    how = GraphOptions(options.context, options.layers, seed=1)
    layers, neighbours = replay.layers_of(block, how), replay.Neighbours.compiled()
    _, keys, _ = as_plugins_call(served, block, layers[0], neighbours.gated)
    for part, key in keys.items():
        print(f"{part:8} {key}")
    results = []
    for m in options.batch:
        step = replay.Step(block, layers, m, how, neighbours)
        found = measured(runs_at(step, base, served, block), len(layers), m, options.repeats)
        results.append(found)
        print(
            f"batch {m}: {found['over_best_uniform']:.4f} of {found['best_uniform']}; "
            + ", ".join(f"{name} {us:.0f} us" for name, us in found["us"].items()),
            flush=True,
        )
        del step
    environment = measure.environment() | {"base_sha256": base.digest, "archive_sha256": served.digest}
    write(options.out, environment, model=block.model, layers=len(layers), calls=keys, results=results)
    return 0 if all(r["finite"] and r["over_best_uniform"] <= BAR for r in results) else 1


if __name__ == "__main__":
    sys.exit(ends(main))
