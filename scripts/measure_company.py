"""What a GEMM takes in a CUDA graph by what comes before it: itself, a pause, a memset, torch's for the same.

A kernel alone has caches and a clock that a chain of launches does not leave it. Each graph has launches of the GEMM,
and something else before each; the time of a graph of that alone is taken off. For our kernels and torch's, twice
over. Needs a GPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from measure_bounds import signatures
from report import out_argument, patch_argument, write

import runtime
from aot import measure
from aot.baseline import baseline
from aot.operands import Weights, gemm_options
from runtime.signature import Signature

_LAUNCHES, _REPLAYS, _ROUNDS = 60, 15, 2
_PAUSE_CYCLES = 20_000
_MEMSET_BYTES = 256 << 20

Step = Callable[[], Any]


def graph_us(steps: Sequence[Step]) -> float:
    """Microseconds that a graph of `steps` takes: the median of its replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    samples = []
    with torch.cuda.stream(stream):
        for step in steps[:2]:
            step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for step in steps:
            step()
        graph.capture_end()
        for replay in range(_REPLAYS + 2):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            stream.synchronize()
            if replay > 1:
                samples.append(start.elapsed_time(end) * 1e3)
    return statistics.median(samples)


def companies(launch: Callable[[Any], Any], theirs: Callable[[Any], Any], operands: Sequence[Any]) -> Iterator[Any]:
    """What comes before each launch, and microseconds of a launch then."""
    small, large = torch.zeros(32, device="cuda"), torch.empty(_MEMSET_BYTES, dtype=torch.uint8, device="cuda")

    def chain(of: Callable[[Any], Any], sets: int) -> list[Step]:
        return [functools.partial(of, operands[i % sets]) for i in range(_LAUNCHES)]

    every = chain(launch, len(operands))
    yield "itself", graph_us(every) / _LAUNCHES
    yield "itself, one set of operands", graph_us(chain(launch, 1)) / _LAUNCHES
    others: dict[str, list[Step]] = {
        "a kernel of 32 elements": [lambda: small.add_(1)] * _LAUNCHES,
        "a pause": [lambda: torch.cuda._sleep(_PAUSE_CYCLES)] * _LAUNCHES,
        "a memset of 256 MiB": [lambda: large.zero_()] * (_LAUNCHES // 6),
        "torch's GEMM": chain(theirs, len(operands)),
    }
    for name, before in others.items():
        both = list(itertools.chain.from_iterable(zip(before, every, strict=False)))
        yield name, (graph_us(both) - graph_us(before)) / len(before)


def _call(function: Any, o: Any) -> None:
    function(*o.tensors(), stream=torch.cuda.current_stream())


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("case", nargs="+", help="KEY:M of a signature in the archive")
    parser.add_argument("--function", action="append", default=[], help="a function of the archive to time beside it")
    patch_argument(parser)
    out_argument(parser)
    options = parser.parse_args()
    environment = measure.environment()
    library = runtime.load([options.archive, *options.patch])
    environment["archive_sha256"] = library.digest
    known = signatures([options.archive, *options.patch])
    results: list[dict[str, Any]] = []
    for case in options.case:
        key, _, m = case.rpartition(":")
        signature = known[key]
        operands = Weights(signature, int(m), 2 * environment["l2_bytes"], seed=0).operands(int(m))
        theirs = baseline(signature, operands[0])[1]

        def ours(o: Any, signature: Signature = signature) -> None:
            library.gemm(o.a, o.b, out=o.d, **gemm_options(signature, o))

        contenders: dict[str, Callable[[Any], Any]] = {library.entry(signature).functions(int(m))[0]: ours}
        for name in options.function:
            contenders[name] = functools.partial(_call, library.functions[name])
        contenders["torch"] = theirs
        for _, (who, launch) in itertools.product(range(_ROUNDS), contenders.items()):
            for before, us in companies(launch, theirs, operands):
                results.append({"signature": key, "m": int(m), "who": who, "before": before, "us": round(us, 2)})
                print(" ".join(f"{k}={v}" for k, v in results[-1].items()), flush=True)
        library.forget_captures()
    write(options.out, environment, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
