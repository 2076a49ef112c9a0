"""Compile legal variants drawn at random over all families and targets: each compiles, or is refused by name.

What is legal has a rule (`aot.search.legal`), and what a compiler makes of it shows here: choices that nobody would
build are drawn as often as others. Families take turns, so that small ones are among the first. A variant that a
compiler crashes on, or refuses in words of its own, is a failure; one that spills registers is refused by name. Nothing
is kept, and no GPU is needed.

    python scripts/compile_sample.py --count 2000 --seed 0 --jobs 2
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from report import ends, out_argument, write

from aot.compile.cache import Cache
from aot.compile.compiler import Event, compile_variants
from aot.compile.toolchain import ToolchainError, require_compiler, toolchain
from aot.search.legal import illegal
from aot.search.provider import families, provider_names
from aot.search.targets import TARGETS
from aot.search.variants import Family, Option, Variant, choices

_TRIES = 20_000  # for one more of a family; some rules leave one combination of choices in thousands
# How the compiler words what it did not expect: an exception's type, or the end of a worker.
_UNEXPECTED = re.compile(r"[A-Z]\w+: |its worker |no result after ")


class Stratum(NamedTuple):
    """Where a variant may come from."""

    provider: str
    family: str
    target: str


def strata(targets: Sequence[str]) -> list[Stratum]:
    """Every family with each of these targets that it compiles for."""
    return [
        Stratum(provider, name, target)
        for provider in provider_names()
        for name, family in families(provider).items()
        for target in targets
        if target in family.targets
    ]


def draw(count: int, seed: int, targets: Sequence[str]) -> list[Variant]:
    """So many different legal variants, or all where there are fewer; the same for the same arguments."""
    rng, left, found = random.Random(seed), strata(targets), dict[Variant, None]()
    while left and len(found) < count:
        for stratum in list(left):
            variant = _one(stratum, rng, found)
            if variant is None:
                left.remove(stratum)
            elif len(found) < count:
                found[variant] = None
    return list(found)


def _one(stratum: Stratum, rng: random.Random, known: dict[Variant, None]) -> Variant | None:
    """A legal variant that is not known yet; None where none is found."""
    family = families(stratum.provider)[stratum.family]
    for _ in range(_TRIES):
        config = _config(family, rng)
        if config is None:
            continue
        variant = Variant(
            *stratum,
            choices(**config),
            rng.choice(family.elements),
            family.accumulator,
            rng.choice(sorted(family.epilogues)),
            rng.choice(family.batched),
            operation=family.operation,
            scaling=rng.choice(family.scalings),
            b_major=rng.choice(family.b_majors),
        )
        if variant not in known and illegal(variant) is None:
            return variant
    return None


def _config(family: Family, rng: random.Random) -> dict[str, Option] | None:
    """Choices drawn one by one, none that is hopeless after those before it; None where that leaves nothing."""
    found: dict[str, Option] = {}
    for option, values in family.options.items():
        hopes = [v for v in values if family.hopeless is None or not family.hopeless(found | {option: v})]
        if not hopes:
            return None
        found[option] = rng.choice(hopes)
    return found


def expected(reason: str) -> bool:
    """Whether a variant was refused by name: in this project's words, by what was asked of its kernel."""
    return _UNEXPECTED.match(reason) is None


def compilable(targets: Sequence[str]) -> Iterator[str]:
    """Those of the targets that the installed DSL has a compiler for."""
    tools = toolchain(Cache(None))
    for target in targets:
        try:
            require_compiler(tools, [target])
        except ToolchainError as error:
            print(f"left out: {error}", file=sys.stderr)
        else:
            yield target


def _cpu_s() -> float:
    """Seconds of CPU that workers took."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Draw, compile and report; exit status 1 if anything failed that was not refused by name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="may be repeated; default: all")
    out_argument(parser)
    options = parser.parse_args()
    begun = time.monotonic()
    variants = draw(options.count, options.seed, list(compilable(options.target or list(TARGETS))))
    print(f"{len(variants)} variants drawn in {time.monotonic() - begun:.0f} s", file=sys.stderr)

    def said(event: Event) -> None:
        if event.outcome == "failed":
            word = "refused" if expected(event.detail) else "FAILED"
            print(f"{word}  {event.variant.name()}  {event.detail}", flush=True)

    built = compile_variants(variants, Cache(None), options.jobs, said)
    refused = sum(map(expected, built.failures.values()))
    result = {
        "seed": options.seed,
        "jobs": options.jobs,
        "drawn": len(variants),
        "families": dict(sorted(Counter(f"{v.provider}.{v.family}.{v.target}" for v in variants).items())),
        "compiled": len(built.kernels),
        "refused": refused,
        "failed": len(built.failures) - refused,
        "variants_per_s_per_job": round(len(variants) / built.seconds / options.jobs, 3),
        # Which tells a slow build from one that shared its cores.
        "variants_per_s_of_cpu": round(len(variants) / _cpu_s(), 3),
    }
    environment = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0))}
    write(options.out, environment | built.tools, results=result)
    print(
        f"{result['compiled']} compiled, {result['refused']} refused by name, {result['failed']} failed; "
        f"{result['variants_per_s_per_job']} variants a second and job, {result['variants_per_s_of_cpu']} of CPU"
    )
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(ends(main))
