"""How the length of a turn decides which kernel looks fastest: candidates and torch, timed in turns of several lengths.

A GPU lowers its clock some time after a load begins that takes more power than it may. In turns shorter than that all
contenders share one clock; in longer ones each has the clock that its own power leaves. Needs a GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
from report import out_argument, write

import runtime
from aot import measure
from aot.baseline import baseline
from aot.operands import OperandSet, Weights
from aot.tune.session import candidates_at
from runtime.archive import Archive
from runtime.dispatch import Dispatch

Contenders = tuple[dict[str, measure.Contender], float]  # and the least that a launch takes, in microseconds

_GRAPH_US = 500.0
_LEAST_REPEATS, _MOST_REPEATS = 3, 5
_LONG_TURN_MS = 50.0


def contenders(archive: Path, library: Any, key: str, m: int, count: int, environment: dict[str, Any]) -> Contenders:
    """Graphs of the candidates that are fastest in short turns, and of torch, by name; and the least a launch takes."""
    with Archive.open(archive) as opened:
        (entry,) = [e for e in Dispatch.from_json(opened.table("gemm")).entries if e.signature.key() == key]
    operands = Weights(entry.signature, m, environment["l2_bytes"], seed=0).operands(m)
    floor_us = measure.expected_us(entry.signature, m)

    def launch_of(name: str) -> measure.Launch:
        function = library.functions[name]

        def launch(o: OperandSet) -> None:
            function(*o.tensors(), stream=torch.cuda.current_stream())

        return launch

    launches = {name: launch_of(name) for name in candidates_at(entry.candidates, m)}
    times = measure.time_interleaved(launches, operands, floor_us, _LEAST_REPEATS, _GRAPH_US)
    chosen = {name: launches[name] for name in sorted(times, key=lambda n: times[n].us)[:count]}
    chosen["torch"] = baseline(entry.signature, operands[0])[1]
    stream, graphs = torch.cuda.Stream(), max(2, math.ceil(_GRAPH_US / floor_us))
    return {name: measure.Contender(launch, operands, graphs, stream) for name, launch in chosen.items()}, floor_us


def in_turns(graphs: dict[str, measure.Contender], floor_us: float, turn_ms: float) -> dict[str, measure.Timing]:
    """Time each over the last quarter of turns that last about `turn_ms`."""
    for _ in range(_LEAST_REPEATS if turn_ms > _LONG_TURN_MS else _MOST_REPEATS):
        for graph in graphs.values():
            replays = max(1, round(turn_ms * 1e3 / (graph.count * floor_us)))
            timed = max(1, replays // 4)
            if replays > timed:
                graph.replay(replays - timed, timed=False)
            graph.replay(timed)
        torch.cuda.synchronize()
    found = {name: graph.timing() for name, graph in graphs.items()}
    for graph in graphs.values():
        graph.events.clear()
    return found


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path, help="with all candidates, tuned or not")
    parser.add_argument("case", nargs="+", help="KEY:M of a signature in the archive")
    parser.add_argument("--contenders", type=int, default=5)
    parser.add_argument(
        "--turns", type=lambda t: [float(x) for x in t.split(",")], default=[0.5, 2.0, 10.0, 40.0, 150.0]
    )
    out_argument(parser)
    options = parser.parse_args()
    environment = measure.environment()
    library = runtime.load(options.archive)
    environment["archive_sha256"] = library.digest
    results: list[dict[str, Any]] = []
    for case in options.case:
        key, _, m = case.rpartition(":")
        graphs, floor_us = contenders(options.archive, library, key, int(m), options.contenders, environment)
        for turn_ms in options.turns:
            found = in_turns(graphs, floor_us, turn_ms)
            for name, timing in found.items():
                row = {"signature": key, "m": int(m), "turn_ms": turn_ms, "who": name, "us": round(timing.us, 2)}
                row |= {"spread": round(timing.spread, 4), "speedup": round(found["torch"].us / timing.us, 4)}
                results.append(row)
                print(" ".join(f"{k}={v}" for k, v in row.items()), flush=True)
        del graphs
        library.forget_captures()
    write(options.out, environment, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
