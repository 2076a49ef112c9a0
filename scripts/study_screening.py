"""How far off are the brief times that `aot tune` chooses by? Takes those of some problems, and long ones beside them.

Of each layer and M of the tables below, the functions of an archive of candidates that the ranking puts first are timed
twice briefly after a pause, as tuning did once; twice briefly under load, as it does where power bounds; a few of them
beside torch, as it looks between its points; and for long under load, in turns of a random order, each sample over what
its neighbours took of what they take usually. "power_bound" of a result is whether operations take 1.15 times as long
as memory. Needs a GPU.

    python scripts/study_screening.py --of benchmarks/screening_h100.json.xz

needs none: it summarises times that were taken before.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from report import ends, out_argument, write
from sweep_variants import TARGET, launcher, read, variants

import runtime
from aot.search import rank
from aot.tune import measure, roofline
from aot.tune.gemm.baseline import baseline
from aot.tune.gemm.operands import Weights
from aot.tune.timing import in_turns
from runtime.gemm.signature import Signature

LAYERS = ((27392, 4096), (5120, 12800), (1280, 8192), (4096, 11008), (5120, 4096), (2048, 4096), (2560, 9728))
TOKENS = (150, 290, 420, 600, 850, 1200, 1700, 2400, 3400, 5000)
WAYS = ("paused", "loaded", "look")  # of which the first two are taken twice
_FUNCTIONS, _OF_A_LOOK = 24, 6
_PAUSE_S, _LOAD_US, _LOOK_LOAD_US, _LONG_LOAD_US = 0.1, 50e3, 25e3, 150e3
_BRIEF_GRAPH_US, _LONG_GRAPH_US = 100.0, 1000.0
_PAUSED, _LOADED, _LOOKED, _LONG = 2, 3, 4, 8  # turns
_NEIGHBOURS = 4  # on either side
_ROUNDS = 20


def steady(turns: Sequence[tuple[str, float]]) -> dict[str, float]:
    """What each function takes, from samples in the order they were taken: the mean of their logarithms without what
    neighbours share, such as the clock, whichever functions these are of."""
    logs = [math.log(us) for _, us in turns]
    usual = {name: statistics.fmean(math.log(us) for n, us in turns if n == name) for name, _ in turns}
    for _ in range(_ROUNDS):
        rest = [log - usual[name] for log, (name, _) in zip(logs, turns, strict=True)]
        clock = [statistics.fmean(rest[max(0, i - _NEIGHBOURS) : i + _NEIGHBOURS + 1]) for i in range(len(rest))]
        own: dict[str, list[float]] = {}
        for log, shared, (name, _) in zip(logs, clock, turns, strict=True):
            own.setdefault(name, []).append(log - shared)
        usual = {name: statistics.fmean(of) for name, of in own.items()}
    return {name: math.exp(log) for name, log in usual.items()}


def study(library: Any, signature: Signature, m: int, names: Sequence[str], l2_bytes: int) -> dict[str, Any]:
    """Microseconds of each function, in the order of `names`, by each way to take them."""
    operands, floor = Weights(signature, m, l2_bytes, seed=0).operands(m), measure.expected_us(signature, m)
    launches = {name: launcher(library, name) for name in names}
    of_torch = {"torch": baseline(signature, operands[0])[1]}
    us: dict[str, list[dict[str, float]]] = {}
    for way in ("paused", "loaded") * 2:
        time.sleep(_PAUSE_S)
        if way == "paused":
            found = measure.time_interleaved(launches, operands, floor, _PAUSED, _BRIEF_GRAPH_US)
        else:
            graphs = measure.capture(launches, operands, floor, max(_BRIEF_GRAPH_US, len(operands) * floor))
            found = measure.time_in_turn(graphs, _LOADED, _LOAD_US, warm_up=0)
        us.setdefault(way, []).append({name: t.us for name, t in in_turns(found).items()})
    graphs = measure.capture(launches | of_torch, operands, floor, _LONG_GRAPH_US)
    measure.time_in_turn(graphs, 1, _LONG_LOAD_US)
    order, chance = list[str](), random.Random(m)
    for graph in graphs.values():
        graph.events.clear()
    for _ in range(_LONG):
        order += chance.sample(list(graphs), len(graphs))
    for name in order:
        graphs[name].replay()
    torch.cuda.synchronize()
    samples = {name: iter(graph.timing().samples) for name, graph in graphs.items()}
    long = steady([(name, next(samples[name])) for name in order])
    few = {name: launches[name] for name in names[:_OF_A_LOOK]} | of_torch
    graphs = measure.capture(few, operands, floor, max(_BRIEF_GRAPH_US, len(operands) * floor))
    look = in_turns(measure.time_in_turn(graphs, _LOOKED, _LOOK_LOAD_US, warm_up=0))
    us |= {"look": [{name: t.us for name, t in look.items()}], "long": [long]}
    everyone = [name for name in (*names, "torch") if name in long]
    return {
        "signature": signature.key(),
        "m": m,
        "power_bound": roofline.over_memory(signature, m) > roofline.OVER_MEMORY,
        "us": {way: [[_rounded(at.get(n)) for n in everyone] for at in of] for way, of in us.items()},
    }


def _rounded(us: float | None) -> float | None:
    return None if us is None else float(f"{us:.4g}")


def errors(case: Mapping[str, Any], way: str, turn: int = 0, beside: str = "long") -> list[float]:
    """By what logarithm each function's time by a way differs from what it takes for long, beside the others'; or from
    its next time by the same way."""
    taken = case["us"][way][turn]
    truth = case["us"]["long"][0] if beside == "long" else case["us"][way][turn + 1]
    found = [math.log(us / of) for us, of in zip(taken, truth, strict=True) if us and of]
    return [error - statistics.median(found) for error in found]


def off_together(case: Mapping[str, Any], way: str) -> float:
    """By what logarithm a way is off for all functions together."""
    taken, truth = case["us"][way][0], case["us"]["long"][0]
    return statistics.fmean(math.log(us / of) for us, of in zip(taken, truth, strict=True) if us and of)


def rms(values: Sequence[float]) -> float:
    """The root mean square."""
    return math.sqrt(math.fsum(v * v for v in values) / len(values))


def summarise(cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For problems whose operations take 1.15 times as long as memory, and others: by how much times of a way are off,
    root mean square; two of a way beside each other; and by how much all functions of a look are off together. A file
    may lack some ways."""
    lines = []
    for bound in (True, False):
        line: dict[str, Any] = {"power_bound": bound}
        for way in WAYS:
            if of := [case for case in cases if case["power_bound"] is bound and way in case["us"]]:
                line[way] = {"problems": len(of), "off": _rms(of, way)}
                if len(of[0]["us"][way]) > 1:
                    line[way]["twice"] = _rms(of, way, beside=way)
                else:
                    line[way]["together"] = round(statistics.pstdev(off_together(case, way) for case in of), 4)
        if len(line) > 1:
            lines.append(line)
    return lines


def _rms(cases: Sequence[Mapping[str, Any]], way: str, beside: str = "long") -> float:
    return round(rms([error for case in cases for error in errors(case, way, beside=beside)]), 4)


def main() -> int | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, nargs="?", help="candidates, in bf16")
    parser.add_argument("--of", type=Path, metavar="TIMES", help="summarise this file")
    parser.add_argument("--minutes", type=float, default=3.0, help="begin no problem after this time (3)")
    out_argument(parser)
    options = parser.parse_args()
    if (options.archive is None) == (options.of is None):
        parser.error("name an archive, or --of and a file of times")
    if options.of:
        for line in summarise(read(options.of)["results"]):
            print(json.dumps(line))
        return None
    environment, library = measure.environment(), runtime.load(options.archive)
    end, results = time.monotonic() + 60 * options.minutes, list[dict[str, Any]]()
    problems = [(layer, m) for layer in LAYERS for m in TOKENS]
    random.Random(0).shuffle(problems)
    for (n, k), m in problems:
        if time.monotonic() > end:
            break
        signature = Signature("bf16", "bf16", "bf16", "f32", "none", n, k)
        found = list(variants(signature, library.functions).values())
        first = rank.shortlist(found, [(signature, m)], TARGET, _FUNCTIONS).candidates[signature, m]
        results.append(study(library, signature, m, [v.name() for v in first], environment["l2_bytes"]))
        library.forget_captures()  # their graphs are gone
    for line in summarise(results):
        print(json.dumps(line))
    write(options.out, environment, summary=summarise(results), results=results)
    return None


if __name__ == "__main__":
    sys.exit(ends(main))
