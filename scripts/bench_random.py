"""Check and time an archive at cases that nobody tuned for: layers of many models, each at an M drawn at random.

The draw follows from the current commit's hash (or --seed), so that nobody chooses it: `random_cases.py` says how. For
each case results are first checked against float32, in outputs full of NaN, then timed in turn with torch (cuBLAS) as
CUDA-graph replays on cold L2. A case that the archive cannot serve is counted, with the reason. Needs a GPU. The result
file is written in the end, on Ctrl-C and once a minute; `summarise_random.py` makes one table of the files of several
occasions. Exit status 1 if any result is wrong.

`--best-of` looks closely at a few layers instead: it times every function of an archive of candidates that computes the
problem, to say how far what was chosen is behind the best of them, which is never slower than what was chosen.

A GPU at the limit of its power changes its clock within milliseconds. It is put under load first; what was so for all
contenders of a turn is taken out of its times; and turns go on until what each took over torch is known to half a
percent, or there have been many.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import random_cases
import report
import summarise_random
import sweep_variants
import torch
from peers import CACHE, Peer, PeerMissing, Settings, guarded, load
from random_cases import Case
from summarise_random import AGAINST, BEST_OF, DEEP_GEMM, ON_SLOWER, OURS, TORCH

import runtime
from aot.tune import measure
from aot.tune.gemm.baseline import baseline
from aot.tune.gemm.operands import OperandSet, Weights, gemm_options
from aot.tune.measure import Launch
from aot.tune.timing import Timing, deviation, in_turns, whole_turns
from runtime.errors import AotError, ArgumentError, KernelMiss, WorkspaceError
from runtime.gemm.signature import Signature

_AGAIN = "torch again"
_FINALISTS = 4
_SEEN_AGAIN = 12  # of the candidates, after a first look that is so short that the best may come out ninth
_CANDIDATE = "candidate: "
_AT_ONCE = 40  # graphs are captured before they are replayed, and each takes memory
_SCREEN_GRAPH_US, _AGAIN_GRAPH_US, _FINAL_GRAPH_US = 120.0, 400.0, 1000.0
_AGAIN_REPEATS = 3
_SETTLE_US = 50e3
_KNOWN, _MOST_TURNS = 0.005, 60  # a ratio to torch, as a standard deviation of its share; and where that is given up
_WRITE_EVERY_S = 60.0


class Bench:
    """Measures cases on this machine's GPU.

    `libraries` are open archives by the name that results give them, `OURS` among them; `peers` other libraries;
    `candidates` an archive of which every function is timed. With `samples` results keep every sample, in microseconds.
    """

    def __init__(
        self,
        libraries: Mapping[str, Any],
        peers: Mapping[str, Peer],
        candidates: Any,
        l2_bytes: int,
        repeats: int,
        samples: bool = False,
    ) -> None:
        self._libraries, self._peers, self._candidates = libraries, peers, candidates
        self._l2_bytes, self._repeats, self._samples = l2_bytes, repeats, samples
        self._baselines: dict[Signature, tuple[str, Launch]] = {}  # the last: to compile one takes seconds
        self._names: dict[Signature, list[str]] = {}  # the last: to list variants takes a moment

    def run(self, case: Case) -> dict[str, Any]:
        """One case: for each contender what it took, or why it was not timed."""
        signature, m = case.layer.signature, case.m
        said: dict[str, dict[str, Any]] = {}
        result: dict[str, Any] = {"layers": case.layer.label, "signature": signature.key(), "m": m}
        result |= {"group": random_cases.group(signature), "contenders": said}
        weights = Weights(signature, m, 0, seed=m)
        launches = self._served(signature, weights.operands(m)[0], said)
        if OURS not in launches:
            return result
        said[OURS]["variant"] = _function(self._libraries[OURS], signature, m)
        operands = Weights(signature, m, self._l2_bytes, seed=m).operands(m)
        launches |= self._of_peers(signature, m, operands, said)
        launches |= self._of_candidates(signature, m, operands, said, said[OURS]["variant"])
        right = self._right(signature, m, weights, launches, said)
        if signature not in self._baselines:
            self._baselines = {signature: baseline(signature, operands[0])}
        name, torch_launch = self._baselines[signature]
        said[TORCH] = {"variant": name}
        everyone = {**right, TORCH: torch_launch, _AGAIN: torch_launch}
        repeats = whole_turns(len(everyone), self._repeats)
        floor = measure.expected_us(signature, m)
        settle_us = _SETTLE_US if measure.power_bound(signature, m) else 0.0
        taken = measure.time_interleaved(
            everyone, operands, floor, repeats, _FINAL_GRAPH_US, lambda: None, settle_us, are_known
        )
        if self._samples:
            result["samples"] = {name: [float(f"{us:.4g}") for us in t.samples] for name, t in taken.items()}
        times = in_turns(taken)
        for contender, timing in times.items():
            if contender != _AGAIN and not contender.startswith(_CANDIDATE):
                said[contender] |= {"us": round(timing.us, 3), "spread": round(timing.spread, 4)}
        for contender in said.keys() & right.keys() - times.keys():
            said[contender]["failed"] = "it launches but cannot be captured into a CUDA graph"
        result["noise"] = round(times[_AGAIN].us / times[TORCH].us, 4)
        self._best(times, said)
        return result

    def forget(self) -> None:
        """Free what captured graphs had, and torch's cache, which the next case's shapes would only fragment."""
        for library in (*self._libraries.values(), *([self._candidates] if self._candidates else [])):
            library.forget_captures()
        torch.cuda.empty_cache()

    def _served(self, signature: Signature, operands: OperandSet, said: dict[str, dict[str, Any]]) -> dict[str, Launch]:
        """A launch of each archive that serves the case."""
        found = {}
        for name, library in self._libraries.items():
            said[name] = {}
            launch = _gemm(library, signature)
            try:
                launch(operands)
            except KernelMiss as miss:
                said[name]["unserved"] = str(miss).splitlines()[0]
                continue
            except WorkspaceError:
                raise  # there is no memory left, which is not the archive's fault
            except AotError:
                pass  # the check says what is wrong
            found[name] = launch
        return found

    def _of_peers(
        self, signature: Signature, m: int, operands: Sequence[OperandSet], said: dict[str, dict[str, Any]]
    ) -> dict[str, Launch]:
        found = {}
        for name, peer in self._peers.items():
            reason = peer.refuse(signature)
            if reason is not None:
                said[name] = {"unsupported": reason}
                continue
            ((variant, launch),) = peer.launches(signature, m).items()
            said[name] = {"variant": variant}
            try:
                for o in operands:  # before any is captured: a peer may prepare something for each
                    guarded(launch)(o)
            except AotError as error:
                said[name]["failed"] = str(error)
                continue
            found[name] = guarded(launch)
        return found

    def _of_candidates(
        self,
        signature: Signature,
        m: int,
        operands: Sequence[OperandSet],
        said: dict[str, dict[str, Any]],
        served: str,
    ) -> dict[str, Launch]:
        """The fastest few functions of the archive of candidates, by a short look at all of them and a longer one at
        the best of these; and `served`, what the archive serves, where it is one of them."""
        if self._candidates is None:
            return {}
        if signature not in self._names:
            self._names = {signature: list(sweep_variants.variants(signature, self._candidates.functions))}
        names = self._names[signature]
        floor = measure.expected_us(signature, m)

        def look(names: Sequence[str], repeats: int, graph_us: float) -> dict[str, float]:
            part = {name: sweep_variants.launcher(self._candidates, name) for name in names}
            times = measure.time_interleaved(part, operands, floor, repeats, graph_us)
            return {name: timing.us for name, timing in times.items()}

        us: dict[str, float] = {}
        for start in range(0, len(names), _AT_ONCE):
            us |= look(names[start : start + _AT_ONCE], 1, _SCREEN_GRAPH_US)
        said[BEST_OF] = {"candidates": len(us)}
        if not us:
            said[BEST_OF]["unserved"] = f"none of {len(self._candidates.functions)} functions computes it"
        fastest = sorted(us, key=us.__getitem__)
        if len(fastest) > _FINALISTS:
            again = look(fastest[:_SEEN_AGAIN], _AGAIN_REPEATS, _AGAIN_GRAPH_US)
            fastest = sorted(again, key=again.__getitem__)[:_FINALISTS]
        finalists = dict.fromkeys([*fastest, served] if served in us else fastest)
        return {_CANDIDATE + name: sweep_variants.launcher(self._candidates, name) for name in finalists}

    def _right(
        self,
        signature: Signature,
        m: int,
        weights: Weights,
        launches: Mapping[str, Launch],
        said: dict[str, dict[str, Any]],
    ) -> dict[str, Launch]:
        """Those of `launches` whose result is right; `said` gets every error, and what is wrong."""
        right = {}
        for name, found in measure.check(signature, m, weights, launches).items():
            candidate = name.startswith(_CANDIDATE)
            about = said[BEST_OF if candidate else name]
            if isinstance(found, str):
                about["wrong"] = f"{name.removeprefix(_CANDIDATE)}: {found}" if candidate else found
                continue
            right[name] = launches[name]
            if not candidate:
                about["error"] = found
        return right

    def _best(self, times: Mapping[str, measure.Timing], said: dict[str, dict[str, Any]]) -> None:
        """Say which finalist was fastest, or what the archive serves where that is none of them and faster."""
        finalists = {n.removeprefix(_CANDIDATE): timing for n, timing in times.items() if n.startswith(_CANDIDATE)}
        if not finalists:
            return
        if OURS in times:  # which is one of them, timed once more
            served = said[OURS]["variant"]
            finalists[served] = min(finalists.get(served, times[OURS]), times[OURS], key=lambda timing: timing.us)
        name = min(finalists, key=lambda n: finalists[n].us)
        found = {"us": round(finalists[name].us, 3), "spread": round(finalists[name].spread, 4)}
        said[BEST_OF] |= {"variant": name, **found}


def _gemm(library: Any, signature: Signature) -> Launch:
    def launch(o: OperandSet) -> None:
        library.gemm(o.a, o.b, out=o.d, **gemm_options(signature, o))

    return launch


def _function(library: Any, signature: Signature, m: int) -> str:
    """What the archive's table names for the case; nothing where it serves the case without an entry."""
    try:
        return str(library.entry(signature).best(m))
    except KernelMiss:
        return ""


def are_known(times: Mapping[str, Timing]) -> bool:
    """Whether what each took over what torch took is known well enough, turn by turn, or there were many turns."""
    torch_us = times[TORCH].samples
    ratios = ([us / of for us, of in zip(t.samples, torch_us, strict=True)] for t in times.values())
    return len(torch_us) >= _MOST_TURNS or all(deviation(of) <= _KNOWN for of in ratios)


# --- the run ---


def measure_all(
    asked: Sequence[Case],
    results: list[dict[str, Any]],
    run: Callable[[Case], dict[str, Any]],
    expired: Callable[[], bool],
    flush: Callable[[], None],
) -> list[Case]:
    """Measure each of `asked` that `results` has not, until `expired()`, and append it; returns what is left out."""
    done = {(r["signature"], r["m"]) for r in results}
    waiting = [case for case in asked if case.key not in done]
    written = time.monotonic()
    for place, case in enumerate(waiting):
        if expired():
            return waiting[place:]
        results.append(run(case))
        print(line(results[-1]), flush=True)
        if time.monotonic() - written > _WRITE_EVERY_S:
            flush()
            written = time.monotonic()
    return []


def header(names: Sequence[str]) -> str:
    """The first line over those of `line`."""
    others = " ".join(f"{'x ' + name:>11s}" for name in names)
    columns = " ".join(f"{c:>9s}" for c in ("us", "torch us", "x torch", "error"))
    return f"{'layer':44s} {'M':>5s} {columns} {others}".rstrip()


def line(result: Mapping[str, Any]) -> str:
    """A case as one aligned line; of each other contender how many times as long as ours it took."""
    said = result["contenders"]
    ours = said[OURS]
    start = f"{result['layers'][:44]:44s} {result['m']:5d}"
    if "us" not in ours:
        kind = next(k for k in ("unserved", "wrong", "failed") if k in ours)
        return f"{start} {kind}: {ours[kind]}"
    cells = [f"{ours['us']:9.2f} {said[TORCH]['us']:9.2f} {said[TORCH]['us'] / ours['us']:9.3f} {ours['error']:9.2e}"]
    for name, found in said.items():
        if name not in (OURS, TORCH):
            why = next((k for k in ("wrong", "failed", "unserved", "unsupported") if k in found), "-")
            cells.append(f"{found['us'] / ours['us']:11.3f}" if "us" in found else f"{why:>11s}")
    return f"{start} {' '.join(cells)}"


def earlier(path: Path | None, content: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The results of the file that a run goes on with, and the environments they were measured in, by GPU.

    Ends the process where the file is of another seed, archive or draw: their cases would not be those of one run.
    """
    if path is None:
        return [], {}
    try:
        found = json.loads(path.read_text())
        results, environments = found["results"], found["environments"]
        differing = [k for k, value in content.items() if found[k] != value]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{path}: {type(error).__name__}: {error}; name a result file of this script") from None
    if differing:
        what = ", ".join(f"{k} {found[k]!r}, now {content[k]!r}" for k in differing)
        raise ArgumentError(f"{path}: its {what}; go on with a file of the same run, or leave --resume out")
    return results, environments


def run_all(
    asked: Sequence[Case],
    results: list[dict[str, Any]],
    run: Callable[[Case], dict[str, Any]],
    end: float,
    flush: Callable[[], None],
) -> tuple[int, bool]:
    """`measure_all` until `end` on the monotonic clock, then `flush`, whatever ended it.

    Returns the number of cases left out, and whether Ctrl-C or a SIGTERM came first.
    """
    interrupted = False
    left_out: Sequence[Case] = ()
    try:
        with stopped_by_a_signal():
            left_out = measure_all(asked, results, run, lambda: time.monotonic() > end, flush)
    except KeyboardInterrupt:
        interrupted = True
    finally:  # undisturbed by a second Ctrl-C
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        flush()
        signal.signal(signal.SIGINT, before)
    return len(left_out), interrupted


@contextlib.contextmanager
def stopped_by_a_signal() -> Iterator[None]:
    """A SIGTERM, which a time limit sends, ends what is inside as Ctrl-C does."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    report.patch_argument(parser)
    files = "take layers from these manifests or files such as benchmarks/models.yaml; all of this checkout"
    parser.add_argument("--layers", type=Path, nargs="+", default=random_cases.default_paths(), help=files)
    parser.add_argument("--seed", help="any text; the current commit's hash")
    parser.add_argument("--count", type=int, default=1000, help="cases of the seed, at most (1000)")
    parser.add_argument("--least-m", type=int, default=1, metavar="M", help="leave out cases of fewer rows (1)")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no case after this time (8)")
    parser.add_argument("--repeats", type=int, default=7, help="at least; until each has had each place as often")
    parser.add_argument("--samples", action="store_true", help="keep every sample, turn by turn, as taken")
    parser.add_argument("--resume", type=Path, help="keep the results of this file and measure what it lacks")
    parser.add_argument(
        "--against", type=Path, help="another archive to time beside, such as one that nothing was tuned in"
    )
    parser.add_argument(
        "--on-slower", action="store_true", help='the archive as runtime.load(on_slower="torch") serves it, too'
    )
    parser.add_argument(
        "--deep-gemm", action="store_true", help="DeepGEMM for block-scaled e4m3, where it is installed"
    )
    parser.add_argument("--best-of", type=Path, metavar="CANDIDATES", help="an archive whose every function is timed")
    few = "with --best-of: layers to draw, and values of M for each (3x20)"
    parser.add_argument("--few", type=few_argument, default=(3, 20), metavar="LAYERSxTOKENS", help=few)
    report.out_argument(parser)
    return parser.parse_args()


def few_argument(text: str) -> tuple[int, int]:
    """Two positive numbers such as 3x20."""
    layers, _, tokens = text.partition("x")
    if not (layers.isdigit() and tokens.isdigit() and int(layers) and int(tokens)):
        raise argparse.ArgumentTypeError(f"{text!r} is not LAYERSxTOKENS, such as 3x20")
    return int(layers), int(tokens)


def open_libraries(options: argparse.Namespace) -> dict[str, Any]:
    """The archives that are asked for, by the name that results give them."""
    paths = [options.archive, *options.patch]
    found = {OURS: runtime.load(paths)}
    if options.on_slower:
        words: dict[str, Any] = {"on_slower": "torch"}
        found[ON_SLOWER] = runtime.load(paths, **words)
    if options.against:
        found[AGAINST] = runtime.load(options.against)
    return found


def open_peers(options: argparse.Namespace) -> tuple[dict[str, Peer], dict[str, str]]:
    """The other libraries that are asked for and installed, and what the result file says of them."""
    if not options.deep_gemm:
        return {}, {}
    try:
        peer = load(DEEP_GEMM, Settings(CACHE, 1))
    except PeerMissing as missing:
        return {}, {DEEP_GEMM: f"absent ({missing})"}
    return {DEEP_GEMM: peer}, peer.versions()


def main() -> int:
    """Run and report."""
    options = _options()
    return report.ends(lambda: bench(options))


def bench(options: argparse.Namespace) -> int:
    """What the options ask for."""
    end = time.monotonic() + 60 * options.minutes
    seed = options.seed or random_cases.seed_of_commit()
    layers = random_cases.load_layers(options.layers)
    if options.best_of:
        asked = random_cases.few_layers(seed, options.few[0], options.few[1], layers)
    else:
        asked = random_cases.cases(seed, options.count, layers, options.least_m)
    environment = measure.environment()
    libraries = open_libraries(options)
    candidates = runtime.load(options.best_of) if options.best_of else None
    peers, versions = open_peers(options)
    for name, path in ((OURS, options.archive), (AGAINST, options.against)):
        if name in libraries:
            environment |= {name: path.name, f"{name}_sha256": libraries[name].digest}
    environment |= versions
    drawn = (
        "few layers" if candidates else "all layers" + (f" from M = {options.least_m}" if options.least_m > 1 else "")
    )
    run_of = {"seed": seed, "drawn": drawn, "archive": libraries[OURS].digest}
    results, environments = earlier(options.resume, run_of)
    gpu_id = environment["gpu_id"]
    environments[gpu_id] = environment | {"commit": report.commit()}
    print(" ".join(f"{k}={v}" for k, v in {"seed": seed, **environment}.items()))
    print(header([*(n for n in libraries if n != OURS), *peers, *([BEST_OF] if candidates else [])]))
    measured = Bench(libraries, peers, candidates, environment["l2_bytes"], options.repeats, options.samples)

    def run(case: Case) -> dict[str, Any]:
        found = measured.run(case) | {"gpu_id": gpu_id}
        measured.forget()
        return found

    def flush() -> None:
        done = {(r["signature"], r["m"]) for r in results}
        content = run_of | {"environments": environments, "left_out": sum(c.key not in done for c in asked)}
        report.write(options.out, environment, **content, results=results)

    left_out, interrupted = run_all(asked, results, run, end, flush)
    if interrupted:
        print(f"interrupted: {len(results)} cases are kept")
    elif left_out:
        print(f"{left_out} cases left out: the {options.minutes} minutes are over")
    document = run_of | {"results": results}
    print("\n".join(summarise_random.table([document])))
    return 1 if summarise_random.wrong([document]) else 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(report.ends(main))
