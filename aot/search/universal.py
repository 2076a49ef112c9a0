"""Which functions of a form serve any N, K and M, and the table by which a reader chooses among them.

A form is a signature without N and K. Functions are chosen on problems drawn over the whole range, by the times that
their families estimate, and by measured ones where there are any. Pure; knows nothing of compilers or files.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.gemm.signature import Signature
from runtime.gemm.universal import WORDS, FormSource, Function, write
from runtime.limits import MAX_COST_RESULTS, MAX_EXTENT
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.scaling import SCALINGS
from runtime.program.operation import OVERLAPS

from .costs import Machine
from .estimates import CORRECTED_M, Correction, Estimates, program, shares
from .h200 import H200
from .legal import summation, unsuited
from .provider import family_of, provider, provider_names
from .variants import Variant

FUNCTIONS = 40  # of a form, unless told otherwise
# Of a form that differs from another in its overlap alone, what it has besides the other's: a share of that.
_OVERLAPPING_SHARE = 0.25
_DRAWN = 100  # problems for each regime of M
_REGIMES = (1, 64), (65, 511), (512, 8192)  # of M, both ends included
_N, _K = (256, 131_072), (512, 32_768)
_MEASURED_SHARE = 3.0  # what the problems of a regime that were measured count for together, against those drawn
_UNTIMED = 1.05  # of its estimate, what a function is taken for at a problem where others were timed and it was not
# As how many measurements of none a correction begins, of a function and of it at one M; and by what logarithm a time
# is behind the best of its problem that counts 1/e. Of what two GPUs were tuned with, one N x K in five left out
# (`tests/test_packaged.py`), choices differ by less than 0.2% for 2 to 5 and 0.15 to 0.3.
_LIKELY_0, _COUNTS_TO = 3.0, 0.2
_WORST = math.log(4)  # what a problem costs that no function computes
_ENOUGH = 5e-5  # mean gain of a function below which no more are taken
_MULTIPLES = (1, 8, 16, 32, 64, 128, 256)
_ODD = (3, 5, 7, 11)


@dataclass(frozen=True)
class Chosen:
    """The functions of a form on a target, most useful first, and what was measured of their estimates.

    `form` is a signature whose N and K say nothing.
    """

    form: Signature
    target: str
    variants: tuple[Variant, ...]
    corrections: Mapping[Variant, Correction]


@dataclass(frozen=True)
class Measured:
    """Microseconds by a variant's choices, which are the same for variants of forms that are alike, at one problem on
    one machine."""

    n: int
    k: int
    m: int
    us: Mapping[Any, float]
    machine: Machine = H200


def forms(signatures: Iterable[Signature]) -> list[Signature]:
    """The distinct forms of signatures, those that overlap less first among those that are otherwise the same."""
    return sorted(dict.fromkeys(map(form_of, signatures)), key=lambda s: OVERLAPS.index(s.overlap))


def form_of(signature: Signature) -> Signature:
    """The form of a signature, as a signature whose N and K say nothing."""
    return dataclasses.replace(signature, n=_N[0], k=_K[0], batch=min(signature.batch, 2))


def form_word(signature: Signature) -> str:
    """The key of a form's signatures with stars for what they differ in, such as "bf16_bf16_bf16_f32_bias_n*_k*"."""
    key = dataclasses.replace(signature, n=2, k=1, batch=min(signature.batch, 2)).key()
    return key.replace("_n2_k1", "_n*_k*").replace("_k*_b2", "_k*_b*")


def choose(
    form: Signature, target: str, count: int, kept: Sequence[Variant] = (), measured: Sequence[Measured] = ()
) -> Chosen:
    """At most `count` functions for a form besides `kept`, which the archive has anyway; of these the first, where all
    are too many.

    Greedy, as facility location is approximated (Nemhauser, Wolsey and Fisher, 1978): the next is the one by which the
    mean logarithm of the best time at all problems falls most.
    """
    kept = [v for v in kept if unsuited(v, form) is None][: MAX_COST_RESULTS - count]
    candidates = list(dict.fromkeys([*kept, *_estimated(form, target)]))
    rows, weight = _losses(candidates, form, measured)
    taken = _cover(rows, len(candidates), len(kept), count + len(kept), _ENOUGH * weight)
    variants, lines = tuple(candidates[i] for i in taken), corrections(candidates, form, measured)
    return Chosen(form, target, variants, {v: lines[v] for v in variants if v in lines})


def choose_all(
    signatures: Iterable[Signature], target: str, count: int = FUNCTIONS, measured: Sequence[tuple[Signature, Any]] = ()
) -> list[Chosen]:
    """`choose` for each form of `signatures`; one that differs from another in its overlap shares the other's."""
    found: list[Chosen] = []
    for form in forms(signatures):
        serial = dataclasses.replace(form, overlap=OVERLAPS[0])
        kept = next((c.variants for c in found if c.form == serial), ())
        times = [m for s, m in measured if alike(s, form)]
        found.append(choose(form, target, math.ceil(count * _OVERLAPPING_SHARE) if kept else count, kept, times))
    return [c for c in found if c.variants]


def can_choose(signatures: Iterable[Signature], target: str) -> bool:
    """Whether `choose_all` finds functions for one of the signatures at least."""
    return any(_estimated(form, target) for form in forms(signatures))


def likeness(signature: Signature) -> tuple[Any, ...]:
    """What forms have in common of which times tell the same: bits of elements, gates, scales along K, order of B."""
    s = signature
    bits = [DTYPES[t].bits for t in (s.a, s.b, s.d)]
    return (*bits, s.parts.gated, SCALINGS[s.scaling].k, s.b_major, s.batch > 1)


def alike(measured: Signature, form: Signature) -> bool:
    """Whether times of one form, which overlaps nothing, tell which tiles suit the other."""
    return measured.overlap == OVERLAPS[0] and likeness(measured) == likeness(form)


def choices_of(variant: Variant) -> tuple[str, str, Any]:
    """What variants of forms that are alike have in common."""
    return variant.provider, variant.family, variant.config


def twin_choices(variant: Variant) -> tuple[str, str, Any]:
    """What twins have in common: all choices but those that its family calls minor."""
    family = family_of(variant)
    minor = family.minor if family else frozenset()
    return variant.provider, variant.family, tuple(of for of in variant.config if of[0] not in minor)


def table(chosen: Sequence[Chosen]) -> dict[str, Any]:
    """The table "universal", as `runtime.gemm.universal` reads it, of functions that were never run."""
    return write([source(c) for c in chosen])


def source(chosen: Chosen) -> FormSource:
    """What the table is to have of a form."""
    form, equal_bits = chosen.form, _numbered([summation(v) for v in chosen.variants])
    functions = [
        Function(v.name(), _multiple(v, form, "n"), _multiple(v, form, "k"), _most_rows(v, form), number)
        for v, number in zip(chosen.variants, equal_bits, strict=True)
    ]
    words = [getattr(form, word) for word in WORDS]
    return FormSource(words, form.batch > 1, chosen.target, functions, program(chosen.variants, chosen.corrections))


def without(of: FormSource, names: Collection[str]) -> FormSource | None:
    """A form without some functions; None if that leaves none."""
    left = [place for place, f in enumerate(of.functions) if f.name not in names]
    if not left:
        return None
    functions, results = [of.functions[place] for place in left], [of.costs.results[place] for place in left]
    numbers = _numbered([f.equal_bits or None for f in functions])
    functions = [f._replace(equal_bits=number) for f, number in zip(functions, numbers, strict=True)]
    return of._replace(functions=functions, costs=of.costs._replace(results=results))


def _numbered(words: Iterable[Hashable | None]) -> list[int]:
    """A number for each word, from 1 up in order of appearance; 0 for None."""
    numbers: dict[Hashable | None, int] = {None: 0}
    return [numbers.setdefault(word, len(numbers)) for word in words]


def _multiple(variant: Variant, form: Signature, extent: str) -> int:
    """The least number of which N or K must be a multiple."""
    for step in _MULTIPLES:
        of = [Signature(**(dataclasses.asdict(form) | {extent: step * odd})) for odd in _ODD]
        if all(unsuited(variant, signature) is None for signature in of):
            return step
    raise ValueError(f"{variant.name()} takes no multiple of {_MULTIPLES[-1]} as {extent.upper()}")


def _most_rows(variant: Variant, form: Signature) -> int:
    """The most rows of B, as a power of two, or all there may be."""
    most = 1 << (MAX_EXTENT.bit_length() - 1)
    while unsuited(variant, dataclasses.replace(form, n=most)) is not None:
        most //= 2
    return MAX_EXTENT if most == 1 << (MAX_EXTENT.bit_length() - 1) else most


def _estimated(form: Signature, target: str) -> list[Variant]:
    """The variants for a form whose families estimate their times."""
    every = (v for p in provider_names() for v in provider(p).variants(target, form))
    return [v for v in every if (family := family_of(v)) is not None and family.estimate_us is not None]


def corrections(
    variants: Sequence[Variant], form: Signature, measured: Sequence[Measured]
) -> dict[Variant, Correction]:
    """What times say of each variant's estimate, beside those of others at the same problem, drawn to 0 where there is
    little to go by. A problem at which one alone was timed says nothing.

    A time counts less the further it is behind the best. A variant's mean over all its problems comes first; at each M,
    what is left is drawn to that. It is 0 where nothing was measured.
    """
    estimates, places = Estimates(variants), [choices_of(v) for v in variants]
    found: dict[int, list[tuple[list[float], float]]] = {}
    for at in measured:
        us = estimates.us(dataclasses.replace(form, n=at.n, k=at.k), at.m, at.machine)
        logs = {i: math.log(at.us[p] / us[i]) for i, p in enumerate(places) if p in at.us}
        if len(logs) < 2:
            continue
        best = min(at.us.values())
        counts = {i: (best / at.us[places[i]]) ** (1 / _COUNTS_TO) for i in logs}
        common = math.fsum(counts[i] * x for i, x in logs.items()) / (math.fsum(counts.values()) or 1.0)
        for i, x in logs.items():
            found.setdefault(i, []).append(([counts[i] * share for share in shares(at.m)], x - common))
    of_m = [any(of[i] for mine in found.values() for of, _ in mine) for i in range(len(CORRECTED_M))]
    return {variants[i]: _line(mine, of_m) for i, mine in found.items()}


def _line(mine: Sequence[tuple[Sequence[float], float]], of_m: Sequence[bool]) -> Correction:
    """A variant's corrections, at the M `of_m` where something was measured."""
    counts = [math.fsum(of) for of, _ in mine]
    mean = math.fsum(c * x for c, (_, x) in zip(counts, mine, strict=True)) / (math.fsum(counts) + _LIKELY_0)
    at_m = _means(((of, x - mean) for of, x in mine), _LIKELY_0)
    return tuple(round(mean + x, 4) if some else 0.0 for x, some in zip(at_m, of_m, strict=True))


def _means(of: Iterable[tuple[Sequence[float], float]], likely_0: float) -> list[float]:
    """At each of `CORRECTED_M` the mean of numbers that count there by shares, and of so many zeros."""
    sums, counts = [0.0] * len(CORRECTED_M), [likely_0] * len(CORRECTED_M)
    for shares_of, x in of:
        for i, share in enumerate(shares_of):
            if share:
                sums[i] += share * x
                counts[i] += share
    return [total / count if count else 0.0 for total, count in zip(sums, counts, strict=True)]


def filled(variants: Sequence[Variant], estimated: Sequence[float], us: Mapping[Any, float]) -> list[float]:
    """The time of each variant at a problem where some were timed: of others what a twin tells, or else the estimate,
    brought to the scale of the times and a little worse, so that no guess is the best of hundreds.

    All infinite where no variant was timed.
    """
    found = [us.get(choices_of(v), math.inf) for v in variants]
    timed = [i for i, x in enumerate(found) if math.isfinite(x)]
    if not timed:
        return found
    scale = _UNTIMED * math.exp(math.fsum(math.log(found[i] / estimated[i]) for i in timed) / len(timed))
    twins = {twin_choices(variants[i]): found[i] / estimated[i] for i in timed}
    return [
        x if math.isfinite(x) else guess * twins.get(twin_choices(v), scale)
        for v, x, guess in zip(variants, found, estimated, strict=True)
    ]


def _losses(
    variants: Sequence[Variant], form: Signature, measured: Sequence[Measured]
) -> tuple[list[list[float]], float]:
    """For each problem that some variant computes the logarithm of each variant's time over the least, times the weight
    of the problem; and these weights together."""
    if not variants:
        return [], 0.0
    estimates, multiples = Estimates(variants), [(_multiple(v, form, "n"), _multiple(v, form, "k")) for v in variants]

    rows: list[list[float]] = []
    of_all = 0.0

    def add(us: Sequence[float], n: int, k: int, weight: float) -> None:
        """A variant that does not compute it costs what a problem does that no function computes."""
        nonlocal of_all
        able = [x if n % of_n == k % of_k == 0 else math.inf for x, (of_n, of_k) in zip(us, multiples, strict=True)]
        least = min(able)
        if math.isfinite(least):
            rows.append([weight * min(math.log(x / least), _WORST) for x in able])
            of_all += weight

    for m, n, k in _problems(form):
        add(estimates.us(dataclasses.replace(form, n=n, k=k), m), n, k, 1.0)
    for at, weight in zip(measured, weights([at.m for at in measured]), strict=True):
        us = filled(variants, estimates.us(dataclasses.replace(form, n=at.n, k=at.k), at.m, at.machine), at.us)
        add(us, at.n, at.k, weight)
    return rows, of_all


def weights(ms: Sequence[int]) -> list[float]:
    """What each problem that was measured counts for, by its M, where one that is drawn counts for one: all of a regime
    together as much as all of another, so that few rows are served well though more rows were measured more."""
    regimes = [sum(m > most for _, most in _REGIMES[:-1]) for m in ms]  # more rows than any are in the last
    counts = Counter(regimes)
    return [_MEASURED_SHARE * _DRAWN / counts[regime] for regime in regimes]


def _problems(form: Signature) -> list[tuple[int, int, int]]:
    """M, N and K of the problems to choose on, the same each time: log-uniform, N and K multiples of 64; of gates three
    N in four are of 128, as most layers' are."""
    drawn = random.Random(0)

    def log_uniform(low: int, high: int) -> float:
        return math.exp(drawn.uniform(math.log(low), math.log(high)))

    def of_n(number: int) -> int:
        return 128 if form.parts.gated and number % 4 else 64

    return [
        (round(log_uniform(*regime)), round(log_uniform(*_N) / of_n(i)) * of_n(i), round(log_uniform(*_K) / 64) * 64)
        for regime in _REGIMES
        for i in range(_DRAWN)
    ]


def _cover(rows: Sequence[Sequence[float]], columns: int, kept: int, count: int, enough: float) -> list[int]:
    """Columns, the first `kept` among them, whose least values have the least sum; `count` of them at most, and none
    that the sum falls by less than `enough` for."""
    now = [max(row) for row in rows]
    by_column = list(zip(*rows, strict=True))
    taken = list(range(kept))
    for column in taken:
        now = [min(pair) for pair in zip(now, by_column[column], strict=True)]

    def gain(column: int) -> float:
        return math.fsum(max(0.0, a - b) for a, b in zip(now, by_column[column], strict=True))

    # A gain only falls as others are taken, so one that is still the greatest when it is computed again is the next.
    waiting = [(-gain(column), column) for column in range(kept, columns)]
    heapq.heapify(waiting)
    while waiting and len(taken) < count:
        _, column = heapq.heappop(waiting)
        found = gain(column)
        if waiting and -found > waiting[0][0]:
            heapq.heappush(waiting, (-found, column))
            continue
        if taken and found < enough:
            break
        taken.append(column)
        now = [min(pair) for pair in zip(now, by_column[column], strict=True)]
    return taken
