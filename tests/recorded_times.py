"""Times of every function that was timed on an H200, for tests of what predicts them: the file says how."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

from aot.search.provider import PROVIDERS, family_of, provider
from aot.search.variants import Variant
from runtime.gemm.signature import Signature

TIMES = Path(__file__).resolve().parent.parent / "benchmarks/variants_h200.json.xz"
AT_RANDOM_M = TIMES.with_name("ragged_h200.json.xz")


class Fastest(NamedTuple):
    """The fastest of all functions at a problem, among those that were timed with more care."""

    signature: Signature
    m: int
    function: str


@cache
def fastest() -> tuple[Fastest, ...]:
    """The problems of which every function was timed, each with the fastest."""
    content = json.loads(lzma.decompress(TIMES.read_bytes()))
    found = []
    for case in content["results"]:
        if case["whole"]:
            timed = {n: t for n, t in case["best"].items() if n in content["names"][case["names"]]}
            best = min(timed, key=timed.__getitem__)
            found.append(Fastest(Signature.from_json(case["signature"]), case["m"], best))
    return tuple(found)


class Recorded(NamedTuple):
    """Microseconds of functions by M and name for one signature, and what the functions were compiled from."""

    signature: Signature
    us: dict[int, dict[str, float]]
    variants: dict[str, Variant]


@cache
def recorded() -> tuple[Recorded, ...]:
    """The signatures of which every function was timed at some M, with those M."""
    content = json.loads(lzma.decompress(TIMES.read_bytes()))
    found: dict[Signature, Recorded] = {}
    variants: dict[int, dict[str, Variant]] = {}
    for case in content["results"]:
        if not case["whole"]:
            continue
        signature, names = Signature.from_json(case["signature"]), content["names"][case["names"]]
        if case["names"] not in variants:
            legal = (v for p in PROVIDERS for v in provider(p).variants("sm_90a", signature))
            variants[case["names"]] = {name: v for v in legal if (name := v.name()) in set(names)}
        known = variants[case["names"]]
        one = found.setdefault(signature, Recorded(signature, {}, {}))
        us = {n: t for n, t in zip(names, case["us"], strict=True) if t is not None and n in known}
        one.us[case["m"]] = us
        one.variants.update((n, known[n]) for n in us)
    return tuple(found.values())


@cache
def at_random_m() -> tuple[Recorded, ...]:
    """Signatures in bf16 of which some 210 functions were timed at 26 random M."""
    content = json.loads(lzma.decompress(AT_RANDOM_M.read_bytes()))
    found: dict[Signature, Recorded] = {}
    for case in content["results"]:
        signature = Signature.from_json(case["signature"])
        if signature not in found:
            legal = (v for p in PROVIDERS for v in provider(p).variants("sm_90a", signature))
            found[signature] = Recorded(signature, {}, {v.name(): v for v in legal})
        known, names = found[signature].variants, content["names"][case["names"]]
        us = {n: t for n, t in zip(names, case["us"], strict=True) if t is not None and n in known}
        found[signature].us[case["m"]] = us
    return tuple(of for of in found.values() if len(of.us) == 26)


@cache
def _variant(name: str) -> Variant:
    return next(r.variants[name] for r in (*recorded(), *at_random_m()) if name in r.variants)


def family(name: str) -> list[tuple[str, str]]:
    """The groups that a function is of, as `aot.tune.pool` has them."""
    return [(_variant(name).provider, _variant(name).family)]


@cache
def estimates(signature: Signature) -> Callable[[str, int], float]:
    """The families' estimates for one signature."""

    @cache
    def estimate_us(name: str, m: int) -> float:
        variant = _variant(name)
        of = family_of(variant)
        assert of is not None
        assert of.estimate_us is not None
        return of.estimate_us(variant, signature, m)

    return estimate_us
