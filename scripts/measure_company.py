"""What a GEMM takes in a CUDA graph by what comes before it: itself, a pause, a memset, torch's for the same.

A kernel alone has caches and a clock that a chain of launches does not leave it. Each graph has launches of the GEMM,
and something else before each; the time of a graph of that alone is taken off. For our kernels and torch's, twice
over. Needs a GPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from measure_bounds import case_arguments, given_cases
from report import out_argument, write

import runtime
from aot import measure
from aot.baseline import baseline
from aot.operands import Weights, gemm_options
from runtime.signature import Signature

_LAUNCHES, _WARMUP, _REPLAYS, _ROUNDS = 60, 2, 15, 2
_PAUSE_CYCLES = 20_000
_MEMSET_BYTES = 256 << 20

Step = Callable[[], Any]


def graph_us(steps: Sequence[Step]) -> measure.Timing:
    """Microseconds that a graph of `steps` takes, all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    in_turn: Any = steps  # what a contender calls operands, one for each launch
    graph = measure.Contender(_step, in_turn, len(steps), stream)
    for replay in range(_WARMUP + _REPLAYS):
        graph.replay(timed=replay >= _WARMUP)
        stream.synchronize()
    timing = graph.timing()
    return measure.Timing(timing.us * len(steps), timing.spread)


def companies(launch: Callable[[Any], Any], theirs: Callable[[Any], Any], operands: Sequence[Any]) -> Iterator[Any]:
    """What comes before each launch, microseconds of a launch then, and the spread of the graphs it was found with."""
    small, large = torch.zeros(32, device="cuda"), torch.empty(_MEMSET_BYTES, dtype=torch.uint8, device="cuda")

    def chain(of: Callable[[Any], Any], sets: int) -> list[Step]:
        return [functools.partial(of, operands[i % sets]) for i in range(_LAUNCHES)]

    every = chain(launch, len(operands))
    for name, steps in (("itself", every), ("itself, one set of operands", chain(launch, 1))):
        alone = graph_us(steps)
        yield name, alone.us / _LAUNCHES, alone.spread
    others: dict[str, list[Step]] = {
        "a kernel of 32 elements": [lambda: small.add_(1)] * _LAUNCHES,
        "a pause": [lambda: torch.cuda._sleep(_PAUSE_CYCLES)] * _LAUNCHES,
        "a memset of 256 MiB": [lambda: large.zero_()] * (_LAUNCHES // 6),
        "torch's GEMM": chain(theirs, len(operands)),
    }
    for name, before in others.items():
        alone = graph_us(before)
        both = graph_us(list(itertools.chain.from_iterable(zip(before, every, strict=False))))
        yield name, (both.us - alone.us) / len(before), max(both.spread, alone.spread)


def _step(step: Any) -> None:
    step()


def _call(function: Any, o: Any) -> None:
    function(*o.tensors(), stream=torch.cuda.current_stream())


def main() -> int:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    case_arguments(parser)
    parser.add_argument("--function", action="append", default=[], help="a function of the archive to time beside it")
    out_argument(parser)
    options = parser.parse_args()
    archives, known, cases = given_cases(parser, options)
    library = runtime.load(archives)
    if unknown := set(options.function) - set(library.functions):
        parser.error(f"{options.archive} has no function {', '.join(sorted(unknown))}; aot ls lists what it has")
    environment = measure.environment() | {"archive_sha256": library.digest}
    results: list[dict[str, Any]] = []
    for key, m in cases:
        signature = known[key]
        operands = Weights(signature, m, 2 * environment["l2_bytes"], seed=0).operands(m)
        theirs = baseline(signature, operands[0])[1]

        def ours(o: Any, signature: Signature = signature) -> None:
            library.gemm(o.a, o.b, out=o.d, **gemm_options(signature, o))

        contenders: dict[str, Callable[[Any], Any]] = {library.entry(signature).best(m): ours}
        for name in options.function:
            contenders[name] = functools.partial(_call, library.functions[name])
        contenders["torch"] = theirs
        for _, (who, launch) in itertools.product(range(_ROUNDS), contenders.items()):
            for before, us, spread in companies(launch, theirs, operands):
                row = {"signature": key, "m": m, "who": who, "before": before}
                results.append(row | {"us": round(us, 2), "spread": round(spread, 4)})
                print(" ".join(f"{k}={v}" for k, v in results[-1].items()), flush=True)
        library.forget_captures()
    write(options.out, environment, results=results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
