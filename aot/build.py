"""Manifests to an archive: problems, variants, a shortlist, kernels, and the tables that say what they are for.

`plan` decides what to compile and is pure; `build` compiles and writes. The archive of a build is *ranked*: which
function serves which M is an estimate, until `aot.tune` has measured its candidates. Needs no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib import metadata
from typing import Any

from runtime.dispatch import serves
from runtime.driver import Driver
from runtime.errors import AotError, DeviceError
from runtime.signature import Signature

from . import manifest, pack, rank, tables
from .cache import Cache
from .compiler import BuildReport, Event, compile_variants
from .manifest import Manifest
from .providers import PROVIDERS, provider
from .select import points, ranges, waves
from .targets import target as target_named
from .variants import Variant

CANDIDATES = 8


class BuildError(AotError):
    """There is nothing to build, or nothing came of it."""


@dataclass(frozen=True)
class GemmCandidates:
    """What to compile for one signature on one target: variants, best first, for each M, ascending."""

    signature: Signature
    target: str
    by_tokens: tuple[tuple[int, tuple[Variant, ...]], ...]


@dataclass(frozen=True)
class Plan:
    """What a build compiles, and why: `ranking` says for each target what ordered the candidates."""

    manifests: tuple[Manifest, ...]
    targets: tuple[str, ...]
    gemms: tuple[GemmCandidates, ...]
    functions: tuple[Variant, ...]
    ranking: Mapping[str, str]
    limit: int

    def variants(self) -> list[Variant]:
        """Each variant once, in a fixed order."""
        found = {v for gemm in self.gemms for _, candidates in gemm.by_tokens for v in candidates}
        return sorted(found | set(self.functions), key=lambda v: (v.target, v.name()))


@dataclass(frozen=True)
class Built:
    """What a build did. `unserved` has (signature, target, reason) for what the archive cannot serve, `targets` those
    for which it serves something."""

    report: BuildReport
    targets: tuple[str, ...]
    unserved: tuple[tuple[Signature, str, str], ...]
    archive_bytes: int


def plan(
    manifests: Sequence[Manifest],
    targets: Sequence[str] = (),
    limit: int = CANDIDATES,
    functions: Sequence[str] = (),
) -> Plan:
    """Choose what to compile: for each signature, target and M the `limit` variants that rank best.

    At the M values between the manifest's where a choice may change (`select.points`), a quarter as many; where waves
    of tiles end (`select.waves`), the best.

    `targets` replaces those of the manifests. `functions` names further operations, such as "rmsnorm", of which every
    variant is compiled.

    Raises:
        AotError: an unknown target or function, or no manifest.
    """
    if not manifests:
        raise BuildError("there is nothing to build; name a manifest")
    manifests = tuple(dict.fromkeys(manifests))
    for name in targets:
        target_named(name)
    wanted: dict[tuple[str, Signature], set[int]] = {}
    for m in manifests:
        for name in targets or m.targets:
            for problem in m.problems():
                wanted.setdefault((name, problem.signature), set()).update(problem.tokens)
    gemms: list[GemmCandidates] = []
    ranking: dict[str, str] = {}
    for name in dict.fromkeys(t for t, _ in wanted):
        tokens = {signature: sorted(ms) for (t, signature), ms in wanted.items() if t == name}
        variants = dict.fromkeys(v for p in PROVIDERS for s in tokens for v in provider(p).variants(name, s))
        limits = {s: _limits(s, ms, target_named(name).multiprocessors, limit) for s, ms in tokens.items()}
        problems = [(s, m) for s, by_tokens in limits.items() for m in by_tokens]
        found = rank.shortlist(variants, problems, name, limit)
        for s, by_tokens in limits.items():
            ranked = ((m, tuple(found.candidates[s, m][:most])) for m, most in sorted(by_tokens.items()))
            gemms.append(GemmCandidates(s, name, tuple(ranked)))
        ranking[name] = found.source
    chosen = tuple(ranking)
    return Plan(manifests, chosen, tuple(gemms), _functions(functions, chosen), ranking, limit)


def _limits(signature: Signature, tokens: Sequence[int], multiprocessors: int, limit: int) -> dict[int, int]:
    """How many candidates a signature has at each M that it is ranked for."""
    found = dict.fromkeys(waves(signature.n, multiprocessors, tokens), 1)
    found |= dict.fromkeys(points(tokens), max(1, limit // 4))
    return found | dict.fromkeys(tokens, limit)


def _functions(names: Iterable[str], targets: Sequence[str]) -> tuple[Variant, ...]:
    known = [v for t in targets for p in PROVIDERS for v in provider(p).functions(t)]
    for name in names:
        if not any(v.operation == name for v in known):
            hint = manifest.did_you_mean(name, sorted({v.operation for v in known}))
            raise BuildError(f"unknown function {name!r} on {', '.join(targets)}; {hint}")
    return tuple(v for v in known if v.operation in names)


def build(
    work: Plan,
    destination: str | os.PathLike[str],
    cache: Cache,
    jobs: int | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
    on_start: Callable[[int, int], None] = lambda kernels, processes: None,
) -> Built:
    """Compile what `work` says and write the archive. What fails is left out, and reported.

    `on_event` and `on_start` are those of `aot.compiler.compile_variants`.

    Raises:
        AotError: nothing could be compiled, the archive cannot be written, or others may write to the cache.
    """
    pack.destination(destination)  # before the work, not after it
    report = compile_variants(work.variants(), cache, jobs, on_event, on_start=on_start)
    if not report.kernels:
        if reasons := sorted(set(report.failures.values())):
            raise BuildError(f"none of {len(report.failures)} kernels compiled; the first reason: {reasons[0]}")
        first, *more = (f"{g.signature.key()} on {g.target}" for g in work.gemms)
        others = f", nor for the other {len(more)}" if more else ""
        raise BuildError(f"no kernel family computes {first}{others}; choose another target, or a plainer problem")
    package = pack.Package()
    for kernel in report.kernels.values():
        package.add_function(kernel.record, kernel.cubin)
    entries, unserved = _gemm_entries(work, report)
    package.set_table("gemm", tables.gemm_table(entries, {v.name(): v.target for v in report.kernels}))
    package.set_table("build", _build_table(work, report, unserved))
    package.write(destination, cache=cache)
    targets = tuple(dict.fromkeys(row.target for row in entries))
    return Built(report, targets, tuple(unserved), os.stat(destination).st_size)


def _gemm_entries(work: Plan, report: BuildReport) -> tuple[list[tables.GemmRow], list[tuple[Signature, str, str]]]:
    """The rows of the gemm table (`runtime.dispatch` reads them), and what no kernel is there for."""
    entries, unserved = [], []
    for gemm in work.gemms:
        compiled = [(m, [v.name() for v in variants if v in report.kernels]) for m, variants in gemm.by_tokens]
        ranked = [(m, names) for m, names in compiled if names]
        if not ranked:
            failed = any(variants for _, variants in gemm.by_tokens)
            reason = "every candidate failed to compile" if failed else "no kernel family computes it"
            unserved.append((gemm.signature, gemm.target, reason))
            continue
        entries.append(
            tables.GemmRow(
                gemm.signature,
                gemm.target,
                None,
                "ranked",
                ranges([(m, names[0]) for m, names in ranked]),
                candidates=ranked,
            )
        )
    return entries, unserved


def _build_table(work: Plan, report: BuildReport, unserved: list[tuple[Signature, str, str]]) -> dict[str, Any]:
    """Where the archive comes from; nothing in it depends on when, where or by whom it was built."""
    providers = {v.provider for v in work.variants()}
    return {
        "models": [
            {
                "model": m.model,
                "source": m.source,
                "manifest": sha256(manifest.dump(m).encode()).hexdigest(),
                "gemms": [{"name": g.name, "signature": g.signature.key(), "calls": m.calls(g)} for g in m.gemms],
            }
            for m in work.manifests
        ],
        "targets": list(work.targets),
        "ranking": dict(work.ranking),
        "candidates": work.limit,
        "tools": report.tools | {"cute-aot": version()},
        "providers": {name: provider(name).source_digest() for name in sorted(providers)},
        "failures": [[v.name(), reason] for v, reason in report.failures.items()],
        "unserved": [[s.key(), t, reason] for s, t, reason in unserved],
    }


def version() -> str:
    """The version of this distribution, or "unknown" where it runs from its source tree."""
    try:
        return metadata.version("cute-aot")
    except metadata.PackageNotFoundError:
        return "unknown"


def tunable(targets: Iterable[str]) -> bool:
    """Whether this machine has a GPU that runs one of `targets`; without a driver it has none."""
    try:
        capability = Driver().compute_capability
    except (DeviceError, ImportError):
        return False
    return any(serves(name, capability) for name in targets)
