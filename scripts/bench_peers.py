"""Check and time an archive's GEMMs against other libraries', interleaved in one process on one GPU, with cold L2.

Every peer is optional: one that is not installed is reported as absent, with the reason. A peer's candidates are timed
briefly, its fastest three are checked against float32 and timed again, and its best that is right is timed in turn with
all others. What the archive has with overlap "weights" is a contender of its own. A contender that is wrong, or that
cannot compute a case, is reported so and not timed. The result file is written after every case; cases that the time
budget leaves out are listed in it.

`--compile-only` needs no GPU: it compiles what the peers will need into `--cache`, for a run with the same packages.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bench_gemm
import torch
from peers import CACHE, PEERS, Peer, PeerMissing, Settings, guarded, load, written
from report import ends, geomean, out_argument, patch_argument, write

import runtime
from aot.tune import measure
from aot.tune.elements import poisoned
from aot.tune.gemm.baseline import baseline
from aot.tune.gemm.operands import MAX_ERROR_FP8, OperandSet, Weights, reference
from aot.tune.measure import Launch
from aot.tune.timing import whole_turns
from runtime.errors import AotError, KernelMiss
from runtime.gemm.signature import Signature

# N x K of one GPU's layers: Llama-3.1-8B, and Llama-3.1-70B over eight GPUs.
LAYERS = {
    "8B qkv": (6144, 4096),
    "8B o": (4096, 4096),
    "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336),
    "70B/8 gate_up": (7168, 8192),
    "70B/8 down": (8192, 3584),
    "70B/8 qkv": (1280, 8192),
    "70B/8 o": (8192, 1024),
}
TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
KINDS = ("bf16", "fp8", "swiglu")
NAMES = tuple(name for name in PEERS if name not in ("deep_gemm", "marlin"))  # whose scalings no kind here has
REGIMES = (("M = 1..64", 1, 64), ("M = 65..511", 65, 511), ("M >= 512", 512, 1 << 30), ("all M", 1, 1 << 30))

OURS, OVERLAPPING, CUBLAS, FAST, _AGAIN = "ours", "ours overlapping", "cublas", "cublas fast", "cublas again"
_FINALISTS = 3
_SCREEN_REPEATS, _SCREEN_GRAPH_US = 1, 100.0
_SECOND_REPEATS, _SECOND_GRAPH_US = 3, 300.0
_FINAL_GRAPH_US = 1000.0
# Root mean squares of D that one element of an imprecise result may be off by; in a wrong tile some are off by 3.
_IMPRECISE_ELEMENT = 0.5
_GUARD_ROWS = 8


@dataclass(frozen=True)
class Case:
    """A layer's GEMM at one M; `kind` is one of `KINDS`."""

    kind: str
    layer: str
    signature: Signature
    m: int


def cases(kinds: Sequence[str], layers: Sequence[str], tokens: Sequence[int]) -> list[Case]:
    """Every case asked for, all layers at one M before the next M; SwiGLU has the gate_up layers only."""
    found = []
    for kind in kinds:
        for m in tokens:
            for layer in layers:
                if kind != "swiglu" or layer.endswith("gate_up"):
                    found.append(Case(kind, layer, _signature(kind, *LAYERS[layer]), m))
    return found


def _signature(kind: str, n: int, k: int) -> Signature:
    if kind == "fp8":
        return Signature("e4m3", "e4m3", "bf16", "f32", "none", n, k, scaling="row_column")
    return Signature("bf16", "bf16", "bf16", "f32", "swiglu" if kind == "swiglu" else "none", n, k)


def of_manifests(paths: Sequence[Path], kinds: Sequence[str], tokens: Sequence[int]) -> list[Case]:
    """The same of the manifests' layers, each N x K once, up to the largest M that any of them asks for."""
    found = bench_gemm.problems(list(paths))
    return [
        Case(kind, name, signature, m)
        for kind in kinds
        for m in tokens
        for signature, (name, most) in found.items()
        if m <= most and signature == _signature(kind, signature.n, signature.k)
    ]


def load_peers(names: Sequence[str], settings: Settings) -> tuple[dict[str, Peer], dict[str, dict[str, Any]]]:
    """The peers that are installed, and what the result file says of each that was asked for."""
    found: dict[str, Peer] = {}
    said: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            peer = found[name] = load(name, settings)
            said[name] = {"versions": peer.versions(), "search": peer.search}
        except PeerMissing as missing:
            said[name] = {"absent": str(missing)}
    return found, said


class Bench:
    """Measures cases on this machine's GPU."""

    def __init__(self, library: Any, peers: Mapping[str, Peer], l2_bytes: int, repeats: int) -> None:
        self._library, self._peers = library, peers
        self._l2_bytes, self._repeats = l2_bytes, repeats

    def run(self, case: Case) -> dict[str, Any]:
        """One case: for each contender what it took, or why it was not timed."""
        signature, m = case.signature, case.m
        self._operands = Weights(signature, m, self._l2_bytes, seed=m).operands(m)
        self._floor_us = measure.expected_us(signature, m)
        said: dict[str, dict[str, Any]] = {}
        entrants = self._entrants(signature, m, said)
        finalists = self._finalists(self._right(case, entrants, said))
        contenders = _with_noise(finalists)
        repeats = whole_turns(len(contenders), self._repeats)
        times = self._time(contenders, repeats, _FINAL_GRAPH_US)
        for name, (variant, launch) in finalists.items():
            if name in times:
                said[name] |= {"us": round(times[name].us, 3), "spread": round(times[name].spread, 4)}
                said[name] |= {"variant": variant, "error": said[name]["error"][variant]}
            else:
                said[name]["failed"] = self._reason(launch)
        result = {"kind": case.kind, "layer": case.layer, "signature": signature.key(), "m": m, "contenders": said}
        if CUBLAS in times and _AGAIN in times:
            result["noise"] = round(times[_AGAIN].us / times[CUBLAS].us, 4)
        return result

    def _entrants(self, signature: Signature, m: int, said: dict[str, dict[str, Any]]) -> dict[str, dict[str, Launch]]:
        """The launches of each contender that are worth checking, the fastest first."""
        name, launch = baseline(signature, self._operands[0])
        entrants = {OURS: {"": self._ours(signature)}, CUBLAS: {name: launch}}
        early = replace(signature, overlap="weights")
        with contextlib.suppress(KernelMiss):
            self._library.entry(early)
            entrants[OVERLAPPING] = {"": self._ours(early)}
        if signature.scaling == "row_column":
            entrants[FAST] = {"torch._scaled_mm row-wise, fast accumulation": _fast_accumulation}
        said |= {name: {} for name in entrants}
        for name, peer in self._peers.items():
            reason = peer.refuse(signature)
            if reason is not None:
                said[name] = {"unsupported": reason}
                continue
            launches = dict(peer.launches(signature, m))
            said[name] = {"candidates": len(launches)}
            try:
                times = self._time(launches, _SCREEN_REPEATS, _SCREEN_GRAPH_US)
            except RuntimeError as error:  # in a capture
                torch.cuda.synchronize()  # a device that is lost ends the run here
                said[name]["failed"] = str(error)
                continue
            if times:
                entrants[name] = {v: launches[v] for v in sorted(times, key=lambda v: times[v].us)[:_FINALISTS]}
            else:
                said[name]["failed"] = self._reason(next(iter(launches.values())))
        return entrants

    def _ours(self, signature: Signature) -> Launch:
        words = {} if signature.epilogue == "none" else {"epilogue": signature.epilogue}
        words |= {} if signature.overlap == "serial" else {"overlap": signature.overlap}

        def launch(o: OperandSet) -> None:
            self._library.gemm(o.a, o.b, out=o.d, **o.extras, **words)

        return launch

    def _right(
        self, case: Case, entrants: Mapping[str, Mapping[str, Launch]], said: dict[str, dict[str, Any]]
    ) -> dict[str, dict[str, Launch]]:
        """Those of `entrants` whose result is right, on other random inputs than those timed."""
        labels = {f"{name}: {variant}": (name, variant) for name, launches in entrants.items() for variant in launches}
        failures: dict[str, str] = {}

        def checked(label: str) -> Launch:
            name, variant = labels[label]
            launch = guarded(written(entrants[name][variant]))

            def run(o: OperandSet) -> None:
                try:
                    launch(o)
                except AotError as error:
                    failures[label] = str(error)
                    raise

            return run

        weights = Weights(case.signature, case.m, 0, seed=case.m + 1)
        imprecise = _Imprecise(case.signature, weights.operands(case.m)[0])
        right: dict[str, dict[str, Launch]] = {}
        found = measure.check(case.signature, case.m, weights, {label: checked(label) for label in labels})
        for label, result in found.items():
            name, variant = labels[label]
            if label in failures:
                said[name]["failed"] = failures[label]
                continue
            if isinstance(result, str) and name not in (OURS, OVERLAPPING):
                error = imprecise.error(entrants[name][variant])
                if error is not None:
                    said[name].setdefault("imprecise", {})[variant] = result
                    result = error
            if isinstance(result, str):
                said[name].setdefault("wrong", {})[variant] = result
            else:
                said[name].setdefault("error", {})[variant] = result
                right.setdefault(name, {})[variant] = entrants[name][variant]
        return right

    def _finalists(self, right: Mapping[str, Mapping[str, Launch]]) -> dict[str, tuple[str, Launch]]:
        """The fastest right candidate of each contender, by a second, longer look."""
        found = {}
        for name, launches in right.items():
            best = next(iter(launches))
            if len(launches) > 1:
                times = self._time(launches, _SECOND_REPEATS, _SECOND_GRAPH_US)
                best = min(times, key=lambda v: times[v].us, default=best)
            found[name] = best, launches[best]
        return found

    def _time(self, launches: Mapping[str, Launch], repeats: int, graph_us: float) -> dict[str, measure.Timing]:
        contenders = {name: guarded(launch) for name, launch in launches.items()}
        return measure.time_interleaved(contenders, self._operands, self._floor_us, repeats, graph_us)

    def _reason(self, launch: Launch) -> str:
        """What a launch raises."""
        try:
            guarded(launch)(self._operands[0])
        except AotError as error:
            return str(error)
        return "it launches but cannot be captured into a CUDA graph"


class _Imprecise:
    """Judges peers that let the tensor core sum e4m3 products over all of K, or round between product and epilogue.

    They are not wrong, but less precise than the limit for what one kernel does; the result file says so.
    """

    def __init__(self, signature: Signature, operands: OperandSet) -> None:
        self._signature, self._operands = signature, operands
        self._reference: torch.Tensor | None = None

    def error(self, launch: Launch) -> float | None:
        """The relative error, if it is what such sums may have; else None."""
        if self._signature.a != "e4m3" and self._signature.epilogue == "none":
            return None
        if self._reference is None:
            self._reference = reference(self._signature, self._operands)
        expected, rows = self._reference, self._operands.d.shape[0]
        d = poisoned((rows + _GUARD_ROWS, self._signature.columns), self._signature.d, "cuda")
        guarded(written(launch))(replace(self._operands, d=d[:rows]))
        difference = d[:rows].to(expected.dtype) - expected
        error = difference.norm().item() / expected.norm().item()
        worst = difference.abs().max().item() / expected.square().mean().sqrt().item()
        right = error <= MAX_ERROR_FP8 and worst <= _IMPRECISE_ELEMENT and bool(d[rows:].isnan().all())
        return error if right else None


def _with_noise(finalists: Mapping[str, tuple[str, Launch]]) -> dict[str, Launch]:
    """What is timed in turn: all finalists, and cuBLAS a second time, for the noise."""
    launches = {name: launch for name, (_, launch) in finalists.items()}
    return launches | ({_AGAIN: launches[CUBLAS]} if CUBLAS in launches else {})


def _fast_accumulation(o: OperandSet) -> None:
    scale_a, scale_b = o.extras["scale_a"].view(-1, 1), o.extras["scale_b"].view(1, -1)
    torch._scaled_mm(o.a, o.b.t(), scale_a, scale_b, out_dtype=o.d.dtype, use_fast_accum=True, out=o.d)


def summarise(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each kind, range of M and contender: how many times as long as ours it takes (above 1, ours is faster)."""
    lines = []
    for kind, ours in itertools.product(dict.fromkeys(r["kind"] for r in results), (OURS, OVERLAPPING)):
        for regime, low, high in REGIMES:
            picked = [r for r in results if r["kind"] == kind and low <= r["m"] <= high]
            timed = [r for r in picked if "us" in r["contenders"].get(ours, {})]
            for name in dict.fromkeys(
                name for r in timed for name in r["contenders"] if name not in (OURS, OVERLAPPING)
            ):
                ratios = [
                    r["contenders"][name]["us"] / r["contenders"][ours]["us"]
                    for r in timed
                    if "us" in r["contenders"].get(name, {})
                ]
                if ratios:
                    lines.append(
                        {
                            "kind": kind,
                            "ours": ours,
                            "regime": regime,
                            "against": name,
                            "cases": len(ratios),
                            "geomean": round(geomean(ratios), 3),
                            "worst": round(min(ratios), 3),
                            "best": round(max(ratios), 3),
                            "noise_geomean": round(geomean(r.get("noise", 1.0) for r in timed), 3),
                            "largest_spread": max(r["contenders"][ours]["spread"] for r in timed),
                        }
                    )
    return lines


def is_wrong(results: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any result of ours is."""
    return any("wrong" in r["contenders"].get(ours, {}) for r in results for ours in (OURS, OVERLAPPING))


def line(result: Mapping[str, Any], names: Sequence[str]) -> str:
    """A case as one aligned line: microseconds of each contender, and how many times as long as ours it took."""
    ours = result["contenders"][OURS].get("us")
    cells = []
    for name in names:
        found = result["contenders"].get(name, {})
        if "us" in found:
            ratio = f"({found['us'] / ours:5.3f}x)" if ours else ""
            cells.append(f"{found['us']:9.2f} {'' if name == OURS else ratio:8s}")
        else:
            why = next((k for k in ("unsupported", "failed", "wrong") if k in found), "-")
            cells.append(f"{why:>18s}")
    return f"{result['kind']:7s} {result['layer']:14s} {result['m']:5d} " + " ".join(cells)


def _options() -> argparse.Namespace:
    def words(known: Sequence[str]) -> Callable[[str], list[str]]:
        def parse(text: str) -> list[str]:
            asked = [w for w in text.split(",") if w]
            if unknown := [w for w in asked if w not in known]:
                raise argparse.ArgumentTypeError(f"unknown {unknown}; known are {', '.join(known)}")
            return asked

        return parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, nargs="?", help="the tuned archive; not needed with --compile-only")
    patch_argument(parser)
    parser.add_argument("--kinds", type=words(KINDS), default=list(KINDS), help=f"of {','.join(KINDS)}")
    parser.add_argument("--peers", type=words(NAMES), default=list(NAMES), help=f"of {','.join(NAMES)}")
    parser.add_argument("--layers", type=words(tuple(LAYERS)), default=list(LAYERS), help="comma-separated names")
    everything = "compare the layers of this manifest instead; may be repeated"
    parser.add_argument("--manifest", type=Path, action="append", default=[], help=everything)
    parser.add_argument("--tokens", type=lambda t: [int(x) for x in t.split(",")], default=list(TOKENS))
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no case after this time")
    parser.add_argument("--repeats", type=int, default=7, help="at least; until each has had each place as often")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--compile-only", action="store_true", help="fill --cache, measure nothing; needs no GPU")
    out_argument(parser)
    options = parser.parse_args()
    if options.archive is None and not options.compile_only:
        parser.error("an archive is needed; make one with aot build and aot tune")
    return options


def main() -> int:
    """Run and report."""
    options = _options()
    end = time.monotonic() + 60 * options.minutes
    asked = cases(options.kinds, options.layers, options.tokens)
    if options.manifest:
        asked = of_manifests(options.manifest, options.kinds, options.tokens)
    settings = Settings(options.cache, options.workers, "cpu" if options.compile_only else "cuda")
    environment = {} if options.compile_only else measure.environment()
    peers, said = load_peers(options.peers, settings)
    for name, state in said.items():
        print(name, *(f"{k}={v}" for k, v in state.get("versions", state).items()))
    for name, peer in peers.items():
        start = time.monotonic()
        problems = [(c.signature, c.m) for c in asked if peer.refuse(c.signature) is None]
        peer.prepare(problems, lambda: time.monotonic() > end)
        print(f"{name}: compiled in {time.monotonic() - start:.1f} s", flush=True)
    if options.compile_only:
        return 0
    library = runtime.load([options.archive, *options.patch])
    environment["archive_sha256"] = library.digest
    print(" ".join(f"{k}={v}" for k, v in environment.items()))
    names = [OURS, OVERLAPPING, CUBLAS, FAST, *peers]
    print(f"{'kind':7s} {'layer':14s} {'M':>5s} " + " ".join(f"{name + ' us':>18s}" for name in names))
    bench = Bench(library, peers, environment["l2_bytes"], options.repeats)
    results: list[dict[str, Any]] = []

    def flush(left_out: Sequence[Case]) -> None:
        listed = [{"kind": c.kind, "layer": c.layer, "m": c.m} for c in left_out]
        content = {"peers": said, "summary": summarise(results), "left_out": listed, "results": results}
        write(options.out, environment, **content)

    for place, case in enumerate(asked):
        if time.monotonic() > end:
            print(f"{len(asked) - place} cases left out: the {options.minutes} minutes are over")
            break
        results.append(bench.run(case))
        print(line(results[-1], names), flush=True)
        flush(asked[place + 1 :])
    for summary in summarise(results):
        print(" ".join(f"{k}={v}" for k, v in summary.items()))
    return 1 if is_wrong(results) else 0


if __name__ == "__main__":
    sys.exit(ends(main))
