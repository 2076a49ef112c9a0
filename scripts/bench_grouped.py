"""Time an archive's grouped GEMMs against torch and other libraries, interleaved in one process, with cold L2.

An archive of benchmarks/grouped.yaml has the experts of four mixtures, with no activation, so that others compute the
same; one of benchmarks/grouped_w4.yaml those of GPT-OSS with weights of 4 bits and of 16, which the summary compares
where both were timed at one M; of 4 bits torch multiplies what these are in 16. Cases are its signatures, at the M of
its manifest and at `--drawn` more, at random. Rows fall to groups with log-normal chances. An entry that was tuned is
timed as it serves; of one that was not all functions are timed briefly, and the fastest at that M is kept, as `aot
tune` would there. Against it, in turns, run torch where it has one call for it, and of `--peers` those that can be
imported: DeepGEMM for scales of blocks, vLLM's Marlin for weights of 4 bits, quack for 16 bits. Of a peer with many
candidates the fastest are found by a brief look. Ours may start while the kernel before ends. What is wrong is not
timed.

`--warm` launches the peers at each case once and measures nothing: DeepGEMM compiles for minutes, which processes with
`--only` may share, and quack in `--workers` of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peers import CACHE, PeerError, PeerMissing, Settings, guarded, written
from peers.base import Allocating
from peers.deep_gemm_grouped import GroupedDeepGemm
from peers.marlin_grouped import GroupedMarlin
from peers.quack_grouped import GroupedQuack
from report import ends, geomean, out_argument, patch_argument, write

import runtime
from aot.pack.tables import operation_entries
from aot.tune import measure
from aot.tune.grouped_gemm.measures import GroupedMeasures, OperandSet, Weights
from aot.tune.measure import Launch
from aot.tune.roofline import expected_us
from runtime.container.archive import Archive
from runtime.grouped_gemm import GROUPED_GEMM, Signature
from runtime.numbers.weights import FORMATS
from runtime.tables.table import Entry

OURS, TORCH, DEEP_GEMM, MARLIN, QUACK = "ours", "torch", "deep_gemm", "marlin", "quack"
PEERS: dict[str, Any] = {DEEP_GEMM: GroupedDeepGemm, MARLIN: GroupedMarlin, QUACK: GroupedQuack}
_OF_TORCH = {  # rows that it has one call for
    "none": ("contiguous", "masked"),
    "row_column": ("contiguous",),
    **dict.fromkeys(FORMATS, ("contiguous",)),
}
OURS_IN_16_BITS = "ours in 16 bits"
_SCREEN_REPEATS, _SCREEN_GRAPH_US, _GRAPH_US = 2, 300.0, 1000.0
_FINALISTS = 5  # of a peer, whose other candidates are timed briefly only
_REGIMES = (("M = 1..64", 1, 64), ("M = 65..511", 65, 511), ("M >= 512", 512, 1 << 30), ("all M", 1, 1 << 30))
_MEASURES = GroupedMeasures()


def kind(s: Signature) -> str:
    """What is summarised together."""
    return " ".join([s.a, *([s.scaling] if s.scaling != "none" else []), *([s.rows] if s.rows != "contiguous" else [])])


def cases(entries: Sequence[Entry], kinds: Sequence[str], only: str, drawn: int, seed: int) -> list[tuple[Entry, int]]:
    """Each entry of these kinds, or of all, at the M that its manifest looked at, and at so many more, log-uniform
    between; all entries of a kind follow each other. The M of one entry do not depend on which others there are."""
    found = []
    for e in sorted(entries, key=lambda e: (kind(e.signature), e.signature.key())):
        if only not in e.signature.key() or (kinds and kind(e.signature) not in kinds):
            continue
        looked_at = [m for m, _ in e.candidates] or [
            t["m"] for t in e.timings
        ]  # a tuned archive may keep no candidates
        given = [m for m in looked_at if m & (m - 1) == 0 or e.state != "tuned"]
        draw = random.Random(f"{seed} {e.signature.key()}")
        low, high = math.log(min(given)), math.log(max(given))
        more = {round(math.exp(draw.uniform(low, high))) for _ in range(drawn)}
        found += [(e, m) for m in sorted({*given, *more})]
    return found


class Bench:
    """Measures cases of `library` on this machine's GPU; `peers` are of `PEERS`."""

    def __init__(self, library: Any, peers: Mapping[str, Any], l2_bytes: int, repeats: int) -> None:
        self._library, self._peers, self._l2_bytes, self._repeats = library, peers, l2_bytes, repeats

    def run(self, entry: Entry, m: int) -> dict[str, Any]:
        """Check and time one signature at one M."""
        s = entry.signature
        operands: Any = Weights(s, m, self._l2_bytes, seed=m).operands(m)
        others, found = self._others(s, m, operands)
        name, ours = self._ours(entry, m, operands)
        launches = {OURS: ours, **others}
        asked = {n: guarded(written(launch)) for n, launch in launches.items() if n != TORCH}
        checked = measure.check(s, m, Weights(s, m, 0, seed=m + 1), asked)
        wrong = {n for n, error in checked.items() if isinstance(error, str)}
        right = {n: guarded(launch) for n, launch in launches.items() if n not in wrong}
        for launch in (right[n] for n in right if n.startswith(tuple(PEERS))):
            _lay_out(launch, operands)
        times = measure.time_interleaved(right, operands, expected_us(s, m), self._repeats, _GRAPH_US)
        found["errors"] = {n: e if isinstance(e, str) else round(e, 6) for n, e in checked.items()}
        fastest = {
            who: min((n for n in times if n.startswith(who)), key=lambda n: times[n].us, default="")
            for who in (OURS, TORCH, *PEERS)
        }
        return {
            "kind": kind(s),
            "signature": s.key(),
            "m": m,
            "function": name,
            "us": {who: round(times[n].us, 3) for who, n in fastest.items() if n},
            "spread": {who: round(times[n].spread, 4) for who, n in fastest.items() if n},
            "floor_us": round(expected_us(s, m), 2),
            **found,
        }

    def warm(self, entry: Entry, m: int) -> None:
        """Launch the peers once; what one cannot do it says again when it is to be timed."""
        operands = Weights(entry.signature, m, 0, seed=m).operands(m)
        for launch in self._of_peers(entry.signature, m)[0].values():
            with contextlib.suppress(PeerError):
                guarded(launch)(operands[0])
        torch.cuda.synchronize()

    def _ours(self, entry: Entry, m: int, operands: Any) -> tuple[str, Launch]:
        """The function that serves, or of an entry that was not tuned the one that is fastest here, and its launch."""
        names = [entry.best(m)] if entry.state == "tuned" else list(entry.functions(m))
        launches = {name: self._launch(name) for name in names}
        if len(names) > 1:
            times = measure.time_interleaved(
                launches, operands, expected_us(entry.signature, m), _SCREEN_REPEATS, _SCREEN_GRAPH_US
            )
            names = sorted(times, key=lambda name: times[name].us) or names
        return names[0], launches[names[0]]

    def _launch(self, name: str) -> Launch:
        function = self._library.functions[name]
        return lambda o: function(*o.arguments(), stream=torch.cuda.current_stream())

    def _others(self, s: Signature, m: int, operands: Sequence[OperandSet]) -> tuple[dict[str, Launch], dict[str, Any]]:
        """What others launch, by name, and what is said of those that launch nothing."""
        launches: dict[str, Launch] = {}
        said: dict[str, Any] = {}
        if s.epilogue == "none" and s.rows in _OF_TORCH.get(s.scaling, ()):
            name, of_torch = _MEASURES.baseline(s, operands[0])
            launches[TORCH], said["torch_is"] = Allocating(of_torch, {}), name
        of_peers, unable = self._of_peers(s, m)
        for name in self._peers:
            candidates = {n: launch for n, launch in of_peers.items() if n.startswith(f"{name} ")}
            launches |= self._fastest(candidates, operands, expected_us(s, m))
        return launches, said | unable

    def _fastest(
        self, launches: Mapping[str, Launch], operands: Sequence[OperandSet], floor_us: float
    ) -> dict[str, Launch]:
        """Of one peer's candidates the finalists; of those that all fail one, which then says why."""
        if len(launches) <= _FINALISTS:
            return dict(launches)
        able = {}
        for name, launch in launches.items():
            with contextlib.suppress(PeerError):
                _lay_out(guarded(launch), operands)
                able[name] = guarded(launch)
        times = measure.time_interleaved(able, operands, floor_us, _SCREEN_REPEATS, _SCREEN_GRAPH_US)
        names = sorted(times, key=lambda name: times[name].us)[:_FINALISTS] or list(launches)[:1]
        return {name: launches[name] for name in names}

    def _of_peers(self, s: Signature, m: int) -> tuple[dict[str, Launch], dict[str, Any]]:
        """What peers launch, by their names and their candidates', and why others launch nothing."""
        launches: dict[str, Launch] = {}
        said: dict[str, Any] = {}
        for name, peer in self._peers.items():
            if reason := peer.refuse(s):
                said[f"{name}_is"] = reason
            else:
                launches |= {f"{name} {candidate}": launch for candidate, launch in peer.launches(s, m).items()}
        return launches, said


def _lay_out(launch: Launch, operands: Sequence[OperandSet]) -> None:
    """Launch on each: a peer lays out what it takes at the first launch, which no capture may hold."""
    for o in operands:
        launch(o)


def _in_16_bits(results: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], float]:
    """Our times with weights of 16 bits, by the signature of 4 bits and M of those that have them."""
    times = {(r["signature"], r["m"]): r["us"][OURS] for r in results if OURS in r["us"]}
    found: dict[tuple[str, int], float] = {}
    for key, m in times:
        s = GROUPED_GEMM.of_key(key)
        if s is not None and s.scaling in FORMATS:
            plain = replace(s, b=s.a, scaling="none").key(), m
            found |= {(key, m): times[plain]} if plain in times else {}
    return found


def summarise(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each kind, other and range of M: how many times as long as ours it takes (above 1, ours is faster)."""
    lines, wide = [], _in_16_bits(results)
    of_all = [
        {**r, "us": {**r["us"], **({OURS_IN_16_BITS: wide[at]} if (at := (r["signature"], r["m"])) in wide else {})}}
        for r in results
    ]
    for what in dict.fromkeys(r["kind"] for r in results):
        for other in (TORCH, *PEERS, OURS_IN_16_BITS):
            for regime, low, high in _REGIMES:
                timed = [r["us"] for r in of_all if r["kind"] == what and low <= r["m"] <= high]
                ratios = [us[other] / us[OURS] for us in timed if other in us and OURS in us]
                if ratios:
                    figures = {"geomean": round(geomean(ratios), 3), "worst": round(min(ratios), 3)}
                    lines.append({"kind": what, "over": other, "regime": regime, "cases": len(ratios), **figures})
    return lines


def line(found: Mapping[str, Any]) -> str:
    """A case, aligned: microseconds, and how many times as long as ours others take."""
    us = found["us"]
    ours = us.get(OURS, math.nan)
    others = " ".join(f"{us.get(n, math.nan):9.2f} {us.get(n, math.nan) / ours:6.3f}" for n in (TORCH, *PEERS))
    wrong = " ".join(f"{n}: {e}" for n, e in found["errors"].items() if isinstance(e, str))
    return f"{found['signature']:58s} {found['m']:6d} {ours:9.2f} {ours / found['floor_us']:6.2f} {others} {wrong}"


def open_peers(asked: Sequence[str] | None, settings: Settings) -> tuple[dict[str, Any], dict[str, str]]:
    """The peers that are asked for, or if None all that can be imported; and of each its versions or why it is absent.

    Raises:
        PeerMissing: one that is asked for is not there, or does not run on this GPU.
    """
    found: dict[str, Any] = {}
    said: dict[str, str] = {}
    for name in PEERS if asked is None else asked:
        try:
            found[name] = PEERS[name](settings)
            said[name] = " ".join(f"{package} {version}" for package, version in found[name].versions().items())
        except (ImportError, PeerMissing) as missing:
            if asked is not None:
                raise PeerMissing(f"{name}: {missing}") from missing
            said[name] = f"absent ({missing})"
    return found, said


def _peers(asked: str) -> list[str]:
    names = [name for name in asked.split(",") if name]
    if unknown := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; known are {', '.join(PEERS)}")
    return names


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    patch_argument(parser)
    known = "bf16, bf16 mxfp4_weight, e4m3 row_column, e4m3 block, e4m3 block masked"
    parser.add_argument("--kinds", type=lambda t: t.split(","), default=[], help=f"of {known}; all unless said")
    parser.add_argument("--only", default="", help="signatures whose keys have this in them")
    parser.add_argument("--drawn", type=int, default=2, help="M to draw for each signature")
    parser.add_argument("--seed", type=int, default=0, help="of these")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case after this time")
    required = f"of {','.join(PEERS)}, which then must be there; those that are, unless said"
    parser.add_argument("--peers", type=_peers, help=required)
    parser.add_argument("--cache", type=Path, default=CACHE, help="what DeepGEMM and quack compiled")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes in which quack compiles")
    parser.add_argument("--warm", action="store_true", help="launch peers at each case once, and measure nothing")
    out_argument(parser)
    return parser.parse_args()


def main() -> int:
    """Run and report."""
    options = _options()
    end = time.monotonic() + 60 * options.minutes
    environment = measure.environment()
    peers, said = open_peers(options.peers, Settings(options.cache, options.workers))
    library = runtime.load([options.archive, *options.patch])
    with Archive.open(options.archive) as archive:
        entries = [e for e in operation_entries(archive) if isinstance(e.signature, Signature)]
    environment["archive_sha256"] = library.digest
    print(" ".join(f"{k}={v}" for k, v in environment.items()))
    for name, state in said.items():
        print(f"{name}: {state}")
    bench, results, left_out = Bench(library, peers, environment["l2_bytes"], options.repeats), [], []
    asked = cases(entries, options.kinds, options.only, options.drawn, options.seed)
    for place, (entry, m) in enumerate(asked):
        if time.monotonic() > end:
            left_out = [{"signature": e.signature.key(), "m": m} for e, m in asked[place:]]
            print(f"{len(left_out)} cases left out: the {options.minutes} minutes are over")
            break
        if options.warm:
            bench.warm(entry, m)
            continue
        results.append(bench.run(entry, m))
        print(line(results[-1]), flush=True)
        library.forget_captures()
        summary = summarise(results)
        write(options.out, environment, peers=said, summary=summary, left_out=left_out, results=results)
    for found in summarise(results):
        print(" ".join(f"{k}={v}" for k, v in found.items()))
    write(options.out, environment, peers=said, summary=summarise(results), left_out=left_out, results=results)
    return 1 if any(isinstance(r["errors"].get(OURS), str) for r in results) else 0


if __name__ == "__main__":
    sys.exit(ends(main))
