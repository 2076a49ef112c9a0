"""Lists the GEMM variants worth compiling for each problem, best first, with no GPU.

The order is that of families' own estimates of each variant's time, where they have any, corrected by trees (`boosted`)
where these know such variants; else nvidia-matmul-heuristics' where that library can be loaded and knows the target and
the element types, and a model of `tile_waves` where not. All are guesses that decide what gets compiled and measured,
and what is served until `aot tune` has measured it. Knows nothing of compilers.

How good a guess, for sm_90a from M = 128 up, where hundreds of variants were timed on H200s at up to seven M
(`scripts/sweep_variants.py --times benchmarks/variants_h200.json.xz` says it): of 600 in bf16 the best of the first 8
takes 0.5 % longer than the best of all (262 problems of 22 to 27 layers of models), the first alone 2 %; of 351 with
SwiGLU 0.1 % and 2 % (32 problems of 4); of 409 in row-scaled e4m3 0.0 % and 1 % (122 of 22). Estimates and trees are
fitted to these times, to others at M, N and K drawn at random, and up to M = 64 to others still; of stream_k estimates
hold what was measured on average, and of orders of tiles they know but one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Any, TypeAlias

from runtime.gemm.signature import Signature
from runtime.program.operation import OVERLAPS

from . import boosted, targets
from .estimates import OWN_ESTIMATES, Estimates
from .h200 import H200
from .legal import overlaps_less, unsuited
from .matmul_heuristics import MatmulHeuristics, Unknown
from .provider import families, family_of, provider_names
from .shape import Shape
from .targets import Target
from .tile_waves import Model, model_of
from .variants import Variant

# From so many rows on, a family's best tile that two CTAs share is a candidate beside its best one of a CTA; of fewer
# rows, the best of all families is. On Blackwell a CTA then reads half as much of B, and estimates that were fitted to
# nothing compare the two badly.
_TWO_CTA_FROM_M = 256
# From so many problems on a cost program pays: to make one takes about 20 times as long as each estimate once.
_MANY_PROBLEMS = 20
# Of the least estimates so many are corrected by trees: with all of them the first 8 are no better.
_CORRECTED = 64


@dataclass(frozen=True)
class Shortlist:
    """The variants worth compiling for each (signature, m), best first, and what ordered them."""

    candidates: dict[tuple[Signature, int], list[Variant]]
    source: str


def shortlist(
    variants: Iterable[Variant],
    problems: Iterable[tuple[Signature, int]],
    target: str,
    limit: int,
    most: Mapping[tuple[Signature, int], int] = MappingProxyType({}),
    suits: Mapping[Signature, frozenset[Variant]] = MappingProxyType({}),
) -> Shortlist:
    """The best `limit` of `variants` for each problem, of those for `target` that suit it.

    The best of each family comes along first, since estimates compare tiles well and families badly; of many rows, its
    best tile of one CTA and its best of two; of few, the best of two CTAs of all families. Of a problem in `most` only
    so many are listed, the best of these; to find those takes less. `suits` has those of `variants` that suit a
    signature, where somebody has asked that already; signatures with the same ones may share a set.
    """
    by_form: dict[tuple[Any, ...], _Shapes] = {}  # what signatures differ in most, so that few are asked one by one
    for v, shape in _shapes(v for v in variants if v.target == target):
        by_form.setdefault((*v.elements, v.epilogue, v.scaling, v.b_major, v.batched), []).append((v, shape))
    times: dict[tuple[Any, ...], _Times] = {}
    models: dict[tuple[str, ...], Model] = {}
    suited: dict[Signature, _Suited] = {}
    shared: dict[tuple[Any, ...], _Suited] = {}
    candidates: dict[tuple[Signature, int], list[Variant]] = {}
    sources = set()
    problems = list(problems)
    asked = Counter(_form(s) for s, _ in problems)
    for s, m in problems:
        elements = s.a, s.b, s.d, s.accumulator
        if elements not in models:
            models[elements] = _model(targets.target(target), s)
        if s not in suited:
            form = _form(s)
            alike, known = by_form.get(form, []), suits.get(s)
            if form not in times:
                times[form] = _Times(alike, few=asked[form] < _MANY_PROBLEMS)
            same = form, s.overlap, s if known is None else id(known)
            if same not in shared:
                fit = [x for x in alike if (unsuited(x[0], s) is None if known is None else x[0] in known)]
                shared[same] = _Suited(_with_most_overlap(fit, s), times[form])
            suited[s] = shared[same]
            sources.add(suited[s].source(models[elements]))
        order = _order(suited[s], s, m, models[elements])
        candidates[s, m] = _best(order, limit, suited[s].kinds, m >= _TWO_CTA_FROM_M, most.get((s, m), limit))
    return Shortlist(candidates, "; ".join(sorted(sources)))


def _form(s: Signature) -> tuple[Any, ...]:
    """What signatures have alike that one variant, or none, computes."""
    return s.a, s.b, s.d, s.epilogue, s.scaling, s.b_major, s.batch > 1


def _with_most_overlap(shapes: _Shapes, signature: Signature) -> _Shapes:
    """Those of `shapes` that `overlaps_less` leaves; `shapes` suit the signature."""
    if signature.overlap == OVERLAPS[0]:
        return shapes
    less = overlaps_less([v for v, _ in shapes])
    return [shape for shape, left_out in zip(shapes, less, strict=True) if not left_out]


def _best(order: Iterator[_Run], limit: int, kinds: frozenset[_Kind], many: bool, most: int) -> list[Variant]:
    """The first that stand for each of these kinds, of `many` rows or few, then the first of the rest, `limit` in all;
    of these the first `most`, in the order given.

    Variants that cannot be among these are not looked at: of hundreds, all but a few.
    """
    stands_for = {kind: _of_many_rows(kind) if many else _of_few_rows(kind) for kind in kinds}
    wanted = frozenset[_Kind]().union(*stands_for.values())
    leaders: dict[_Kind, tuple[int, Variant]] = {}
    rest: list[tuple[int, Variant]] = []
    place, full = 0, False
    for run in order:
        if full and all(stands_for[kind] <= leaders.keys() for kind in run.kinds):
            continue
        for variant in run.variants():
            new = stands_for[_kind(variant)] - leaders.keys()
            if not new:
                rest.append((place, variant))
            leaders.update(dict.fromkeys(new, (place, variant)))
            place += 1
            if place == most and len(wanted) + len(rest) <= limit:
                break  # all so far are among them, and whatever follows comes after them
        else:
            full = len(set(leaders.values())) + len(rest) >= limit
            if not full or len(leaders) < len(wanted):
                continue
        break
    found = sorted([*dict.fromkeys(leaders.values()), *rest][:limit], key=itemgetter(0))
    return [variant for _, variant in found[:most]]


_Shapes: TypeAlias = list[tuple[Variant, Shape]]
_Family: TypeAlias = tuple[str, str]  # of a provider
_Kind: TypeAlias = tuple[str | bool, ...]  # provider and family, and whether two CTAs share a tile


def _of_many_rows(kind: _Kind) -> frozenset[_Kind]:
    """What a variant of a kind is the best of, where it is the first: of its family's with as many CTAs to a tile."""
    return frozenset((kind,))


def _of_few_rows(kind: _Kind) -> frozenset[_Kind]:
    """The same of few rows: of its family's, and of all where two CTAs share a tile."""
    return frozenset((kind[:2], kind[2:]) if kind[2] else (kind[:2],))


def _kind(variant: Variant) -> _Kind:
    return variant.provider, variant.family, bool(variant.options.get("two_cta"))


class _Run:
    """Variants that follow each other in an order, and the kinds that they are of; `places` are those before
    ordering."""

    __slots__ = ("_variants", "kinds", "places")

    def __init__(self, places: list[int], variants: list[Variant]) -> None:
        self._variants, self.places = variants, places
        self.kinds = frozenset(map(_kind, variants))

    def variants(self) -> list[Variant]:
        """In their order."""
        return self._variants


class _Equals(_Run):
    """Variants of several shapes, `runs`, that cost the same: one of each shape before a second of any, in the order
    that `settle` gives shapes. That is found out when it is asked for."""

    __slots__ = ("_runs", "_settle")

    def __init__(self, runs: list[_Run], settle: Callable[[], list[tuple[float, ...]]]) -> None:
        self.kinds = frozenset[_Kind]().union(*(run.kinds for run in runs))
        self._runs, self._settle = runs, settle

    def variants(self) -> list[Variant]:
        """In their order."""
        keyed = [
            ((copies, *key, place), variant)
            for run, key in zip(self._runs, self._settle(), strict=True)
            for copies, (place, variant) in enumerate(zip(run.places, run.variants(), strict=True))
        ]
        return [variant for _, variant in sorted(keyed, key=itemgetter(0))]


def _shapes(variants: Iterable[Variant]) -> _Shapes:
    """Each variant once, with its shape, in the order that stands where models see no difference."""
    known = [(provider, family) for provider in provider_names() for family in families(provider)]
    places = {family: place for place, family in enumerate(known)}
    order = sorted(
        set(variants),
        key=lambda v: (
            not v.options.get("two_cta", False),
            places.get((v.provider, v.family), len(places)),
            v.name(),
            repr(v.config),  # a choice of False leaves no trace in the name
        ),
    )
    return [(v, Shape.of(v)) for v in order]


class _Times:
    """What their families estimate of variants of one form: by their cost program, evaluated for all at once, or of
    `few` problems, for which that is too long to make, one by one. Both give the same numbers."""

    def __init__(self, shapes: _Shapes, few: bool = False) -> None:
        estimates: dict[_Family, Any] = {}  # there are many variants, and few families
        self._found: list[tuple[Variant, Any]] = []
        for variant, _ in shapes:
            key = variant.provider, variant.family
            if key not in estimates:
                family = family_of(variant)
                estimates[key] = family and family.estimate_us
            if estimates[key]:
                self._found.append((variant, estimates[key]))
        self.places = {variant: place for place, (variant, _) in enumerate(self._found)}
        self._estimates = None if few else _estimates(tuple(self.places))

    def variant(self, place: int) -> Variant:
        """The one at a place."""
        return self._found[place][0]

    def us(self, signature: Signature, m: int, places: Sequence[int]) -> list[float]:
        """The microseconds of those at `places`."""
        if self._estimates is None:
            asked = (self._found[place] for place in places)
            return [estimate_us(variant, signature, m, H200) for variant, estimate_us in asked]
        found = self._estimates.us(signature, m)
        return [found[place] for place in places]


class _Suited:
    """The variants that suit a signature: those with an estimate of their family's, and others.

    `estimated` has a run for each of the one, at `places` of `times`, and `by_shape` for each of `shapes`, those of the
    others, each once.
    """

    def __init__(self, shapes: _Shapes, times: _Times) -> None:
        self.times = times
        self.places: list[int] = []
        self.estimated: list[_Run] = []
        others: dict[Shape, list[tuple[int, Variant]]] = {}
        for place, (variant, shape) in enumerate(shapes):
            if (known := times.places.get(variant)) is not None:
                self.places.append(known)
                self.estimated.append(_Run([place], [variant]))
            else:
                others.setdefault(shape, []).append((place, variant))
        self.kinds = frozenset(_kind(v) for v, _ in shapes)
        self.shapes = list(others)
        self.by_shape = [_Run([p for p, _ in alike], [v for _, v in alike]) for alike in others.values()]

    def source(self, model: Model) -> str:
        """What puts these variants in order."""
        words = [OWN_ESTIMATES] if self.estimated else []
        return ", then ".join([*words, model.source] if self.shapes or not words else words)


def _order(suited: _Suited, signature: Signature, m: int, model: Model) -> Iterator[_Run]:
    """Cheapest first: by their families' own estimates of the time, of which the least are corrected by trees, then
    those without by `model`."""
    if suited.estimated:
        us = suited.times.us(signature, m, suited.places)
        places = sorted(range(len(us)), key=us.__getitem__)
        first = places[:_CORRECTED]
        corrected = {i: us[i] * _correction(suited.times.variant(suited.places[i]), signature)(m) for i in first}
        for place in [*sorted(first, key=corrected.__getitem__), *places[_CORRECTED:]]:
            yield suited.estimated[place]
    if suited.shapes:
        yield from _by_model(suited, signature, m, model)


@lru_cache(4096)  # a signature's at many M
def _correction(variant: Variant, signature: Signature) -> Callable[[int], float]:
    return boosted.correction(variant, signature)


@lru_cache(16)  # lists of one form mostly have the same variants
def _estimates(variants: tuple[Variant, ...]) -> Estimates:
    return Estimates(variants)


def _by_model(suited: _Suited, signature: Signature, m: int, model: Model) -> Iterator[_Run]:
    """Cheapest first by `model`."""
    costs = model.costs(suited.shapes, signature, m)
    for _, equals in groupby(sorted(range(len(costs)), key=costs.__getitem__), key=costs.__getitem__):
        places = list(equals)
        if len(places) == 1:
            yield suited.by_shape[places[0]]
        else:
            shapes = [suited.shapes[place] for place in places]
            yield _Equals([suited.by_shape[p] for p in places], partial(model.settle, shapes, signature, m))


def _model(target: Target, signature: Signature) -> Model:
    """The best model there is, with the reason in its `source` where that is not the library."""
    try:
        return MatmulHeuristics(target, signature)
    except Unknown as e:
        return model_of(target, str(e))
