"""Orders GEMM variants for one problem, with no GPU.

The order is that of families' own estimates of each variant's time, where they have any; else nvidia-matmul-heuristics'
where that library can be loaded and knows the target and the element types, and a model of tiles and waves where not.
All are guesses that decide what gets compiled and measured, and what is served until `aot tune` has measured it. Knows
nothing of compilers.

How good a guess, for sm_90a from M = 128 up, where hundreds of variants were timed on H200s at up to seven M
(`scripts/sweep_variants.py --times benchmarks/variants_h200.json.xz` says it): of 600 in bf16 the best of the first 12
takes 0.6 % longer than the best of all (262 problems of 22 to 27 layers of models), the first alone 4 %; of 351 with
SwiGLU 0.1 % and 3 % (32 problems of 4); of 409 in row-scaled e4m3 0.2 % and 3 % (122 of 22). The estimates are fitted
to these times, to others at M, N and K drawn at random, and up to M = 64 to others still; of stream_k they hold what
was measured on average, and of orders of tiles they know but one.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import metadata
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES
from runtime.program.operation import OVERLAPS

from . import targets
from .estimates import Estimates
from .h200 import H200
from .legal import overlaps_less, unsuited
from .provider import families, family_of, provider_names
from .targets import Target
from .variants import Variant

# From so many problems on a cost program pays: to make one takes about 20 times as long as each estimate once.
_MANY_PROBLEMS = 20


@dataclass(frozen=True)
class Ranking:
    """Variants, best first, and what ordered them."""

    variants: list[Variant]
    source: str


@dataclass(frozen=True)
class Shortlist:
    """The variants worth compiling for each (signature, m), best first, and what ordered them."""

    candidates: dict[tuple[Signature, int], list[Variant]]
    source: str


def rank(variants: Iterable[Variant], signature: Signature, m: int, target: str) -> Ranking:
    """Order `variants` for `m` rows of `signature` on `target`. The same set always gives the same order."""
    model, shapes = _model(targets.target(target), signature), _shapes(variants)
    suited = _Suited(shapes, _Times(shapes))
    runs = _order(suited, signature, m, model)
    return Ranking([variant for run in runs for variant in run.variants()], suited.source(model))


def shortlist(
    variants: Iterable[Variant],
    problems: Iterable[tuple[Signature, int]],
    target: str,
    limit: int,
    most: Mapping[tuple[Signature, int], int] = MappingProxyType({}),
    suits: Mapping[Signature, frozenset[Variant]] = MappingProxyType({}),
) -> Shortlist:
    """The best `limit` of `variants` for each problem, of those for `target` that suit it.

    The best of each family comes along first, since estimates compare tiles well and families badly. Of a problem in
    `most` only so many are listed, the best of these; to find those takes less. `suits` has those of `variants` that
    suit a signature, where somebody has asked that already; signatures with the same ones may share a set.
    """
    by_form: dict[tuple[Any, ...], _Shapes] = {}  # what signatures differ in most, so that few are asked one by one
    for v, shape in _shapes(v for v in variants if v.target == target):
        by_form.setdefault((*v.elements, v.epilogue, v.scaling, v.b_major, v.batched), []).append((v, shape))
    times: dict[tuple[Any, ...], _Times] = {}
    models: dict[tuple[str, ...], _Model] = {}
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
        candidates[s, m] = _best(order, limit, suited[s].families, most.get((s, m), limit))
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


def _best(order: Iterator[_Run], limit: int, families: int, most: int) -> list[Variant]:
    """The first of each of so many families, then the first of the rest, `limit` in all; of these the first `most`, in
    the order given.

    Variants that cannot be among these are not looked at: of hundreds, all but a few.
    """
    leaders: dict[_Family, tuple[int, Variant]] = {}
    rest: list[tuple[int, Variant]] = []
    place, full = 0, False
    for run in order:
        if full and run.families <= leaders.keys():
            continue
        for variant in run.variants():
            family = variant.provider, variant.family
            if family in leaders:
                rest.append((place, variant))
            else:
                leaders[family] = place, variant
            place += 1
            if place == most and families + len(rest) <= limit:
                break  # all so far are among them, and whatever follows comes after them
        else:
            full = families + len(rest) >= limit
            if not full or len(leaders) < families:
                continue
        break
    found = sorted([*leaders.values(), *rest][:limit], key=itemgetter(0))
    return [variant for _, variant in found[:most]]


class _Shape(NamedTuple):
    """All that models look at, so variants of a shape cost the same. The tile is that of one CTA, in rows of D by
    columns of D by K, and each of `split_k` parts of K has its own; `instruction_m` is the rows of an MMA instruction.

    What neither a variant's choices nor its family's traits say is taken to be common, so that any family has a place.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    cluster_m: int
    cluster_n: int
    stages: int
    split_k: int
    instruction_m: int

    @classmethod
    def of(cls, variant: Variant) -> _Shape:
        family = family_of(variant)
        said = {**(family.traits if family else {}), **variant.options}

        def extent(name: str, common: int) -> int:
            value = said.get(name)
            return value if type(value) is int and value > 0 else common

        return cls(
            tile_m=-(-extent("tile_m", 128) // (2 if said.get("two_cta") else 1)),
            tile_n=extent("tile_n", 128),
            tile_k=extent("tile_k", DTYPES[variant.a].filling(128)),
            cluster_m=extent("cluster_m", 1),
            cluster_n=extent("cluster_n", 1),
            stages=extent("stages", 4),
            split_k=extent("split_k", 1),
            instruction_m=extent("instruction_m", 64),
        )


_Shapes: TypeAlias = list[tuple[Variant, _Shape]]
_Family: TypeAlias = tuple[str, str]  # of a provider


class _Run:
    """Variants that follow each other in an order, and the families they are of; `places` are those before ordering."""

    __slots__ = ("_variants", "families", "places")

    def __init__(self, places: list[int], variants: list[Variant]) -> None:
        self._variants, self.places = variants, places
        self.families = frozenset((v.provider, v.family) for v in variants)

    def variants(self) -> list[Variant]:
        """In their order."""
        return self._variants


class _Equals(_Run):
    """Variants of several shapes, `runs`, that cost the same: one of each shape before a second of any, in the order
    that `settle` gives shapes. That is found out when it is asked for."""

    __slots__ = ("_runs", "_settle")

    def __init__(self, runs: list[_Run], settle: Callable[[], list[tuple[float, ...]]]) -> None:
        self.families = frozenset[_Family]().union(*(run.families for run in runs))
        self._runs, self._settle = runs, settle

    def variants(self) -> list[Variant]:
        """In their order."""
        keyed = [
            ((copies, *key, place), variant)
            for run, key in zip(self._runs, self._settle(), strict=True)
            for copies, (place, variant) in enumerate(zip(run.places, run.variants(), strict=True))
        ]
        return [variant for _, variant in sorted(keyed, key=itemgetter(0))]


class _Model(Protocol):
    source: str

    def costs(self, shapes: Sequence[_Shape], signature: Signature, m: int) -> list[float]:
        """Of each shape, in any unit that they share."""

    def settle(self, shapes: Sequence[_Shape], signature: Signature, m: int) -> list[tuple[float, ...]]:
        """What puts shapes of one cost in order."""


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
    return [(v, _Shape.of(v)) for v in order]


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
        others: dict[_Shape, list[tuple[int, Variant]]] = {}
        for place, (variant, shape) in enumerate(shapes):
            if (known := times.places.get(variant)) is not None:
                self.places.append(known)
                self.estimated.append(_Run([place], [variant]))
            else:
                others.setdefault(shape, []).append((place, variant))
        self.families = len({(v.provider, v.family) for v, _ in shapes})
        self.shapes = list(others)
        self.by_shape = [_Run([p for p, _ in alike], [v for _, v in alike]) for alike in others.values()]

    def source(self, model: _Model) -> str:
        """What puts these variants in order."""
        words = ["the families' own estimates"] if self.estimated else []
        return ", then ".join([*words, model.source] if self.shapes or not words else words)


def _order(suited: _Suited, signature: Signature, m: int, model: _Model) -> Iterator[_Run]:
    """Cheapest first: by their families' own estimates of the time, then those without by `model`."""
    if suited.estimated:
        estimated = zip(suited.times.us(signature, m, suited.places), suited.estimated, strict=True)
        for _, run in sorted(estimated, key=itemgetter(0)):
            yield run
    if suited.shapes:
        yield from _by_model(suited, signature, m, model)


@lru_cache(16)  # rankings one by one mostly have the same variants
def _estimates(variants: tuple[Variant, ...]) -> Estimates:
    return Estimates(variants)


def _by_model(suited: _Suited, signature: Signature, m: int, model: _Model) -> Iterator[_Run]:
    """Cheapest first by `model`."""
    costs = model.costs(suited.shapes, signature, m)
    for _, equals in groupby(sorted(range(len(costs)), key=costs.__getitem__), key=costs.__getitem__):
        places = list(equals)
        if len(places) == 1:
            yield suited.by_shape[places[0]]
        else:
            shapes = [suited.shapes[place] for place in places]
            yield _Equals([suited.by_shape[p] for p in places], partial(model.settle, shapes, signature, m))


def _model(target: Target, signature: Signature) -> _Model:
    """The best model there is, with the reason in its `source` where that is not the library."""
    try:
        return _MatmulHeuristics(target, signature)
    except _Unknown as e:
        return _TileWaves(target, f"tile-wave model ({e})")


class _TileWaves:
    """Waves of CTAs, times what one CTA does for a slice of K: multiply its tile, and load its share of A and B.

    Counts what is wasted: rows and columns of tiles past the edge of D, CTAs that only fill a cluster, and the part of
    the last wave that stays empty. Loads weigh 64 multiply columns each, about the ratio of tensor-core to L2
    throughput in elements, and multicast within a cluster divides them. To add up the parts of a split K costs nothing.
    """

    _LOAD_WEIGHT = 64

    def __init__(self, target: Target, source: str = "tile-wave model") -> None:
        self._multiprocessors = target.multiprocessors
        self.source = source

    def costs(self, shapes: Sequence[_Shape], signature: Signature, m: int) -> list[float]:
        return [self.cost(shape, signature, m) for shape in shapes]

    def settle(self, shapes: Sequence[_Shape], signature: Signature, m: int) -> list[tuple[float, ...]]:
        return [()] * len(shapes)

    def cost(self, s: _Shape, signature: Signature, m: int) -> float:
        clusters = -(-m // (s.tile_m * s.cluster_m)) * -(-signature.n // (s.tile_n * s.cluster_n))
        in_flight = max(1, self._multiprocessors // (s.cluster_m * s.cluster_n))
        waves = -(-clusters * s.split_k * signature.batch // in_flight)
        loads = s.tile_m / s.cluster_n + s.tile_n / s.cluster_m
        slices = -(-signature.k // (s.tile_k * s.split_k)) * DTYPES[signature.a].bytes_of(s.tile_k)
        return waves * slices * (s.tile_m * s.tile_n + self._LOAD_WEIGHT * loads)


class _Unknown(Exception):
    """The library is absent, or does not know what is asked."""


_DISTRIBUTION = "nvidia-matmul-heuristics"
# The library's device and code generator for a target: "CUTLASS" is the one without TMA and clusters.
_DEVICES = {
    "sm_80": ("A100_SXM_80GB", "CUTLASS"),
    "sm_90a": ("H200_SXM", "CUTLASS3"),
    "sm_100a": ("B200", "CUTLASS3"),
    "sm_103a": ("GB300_NVL", "CUTLASS3"),
    "sm_120a": ("RTX_5090", "CUTLASS"),
}
_SUGGESTIONS = 64  # more than it ever gives


class _MatmulHeuristics:
    """Estimated seconds of each shape, then its place among the library's suggestions, then the tile-wave model."""

    def __init__(self, target: Target, signature: Signature) -> None:
        if target.name not in _DEVICES:
            raise _Unknown(f"{_DISTRIBUTION} does not know {target.name}")
        self._precision = _precision(signature)
        try:
            import nvMatmulHeuristics as library

            version = metadata.version(_DISTRIBUTION)
            device, backend = _DEVICES[target.name]
            self._interface = library.NvMatmulHeuristicsInterfaceEx(
                backend=library.NvMatmulHeuristicsTarget[backend],
                flags=library.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
                gpu=library.NvMatmulHeuristicsNvidiaGpu[device],
            )
            self._layouts = library.NvMatmulHeuristicsMatmulLayout
            # What the library knows of measured times; it would do so itself when first asked for suggestions.
            self._interface.loadInternalDiscoverySet(self._layouts.TN_ROW_MAJOR, self._precision)
        except (ImportError, OSError, AssertionError, KeyError, AttributeError, RuntimeError) as e:
            raise _Unknown(f"{_DISTRIBUTION} cannot be loaded: {e}") from e
        self._configured: tuple[Sequence[_Shape], list[tuple[bool, Any]]] = [], []  # the shapes last asked for
        self._suggested: tuple[tuple[Any, ...], dict[tuple[int, ...], int]] = (), {}  # for the problem last asked for
        self._encoded = self._precision.encode()
        self._waves = _TileWaves(target)
        self._instruction_k = DTYPES[signature.a].filling(32)
        self.source = f"{_DISTRIBUTION} {version}"

    def costs(self, shapes: Sequence[_Shape], signature: Signature, m: int) -> list[float]:
        """Seconds, or infinity where the library has no estimate (it says 0).

        The library's own wrapper of this function calls one that does not exist.
        """
        if self._configured[0] is not shapes:
            self._configured = shapes, [self._configuration(s) for s in shapes]
        made, layouts = self._interface.makeNvMatmulHeuristicsProblem, self._layouts
        straight = made(m, signature.n, signature.k, layouts.TN_ROW_MAJOR, signature.batch)
        swapped = made(signature.n, m, signature.k, layouts.TN_COL_MAJOR, signature.batch)
        problems = ctypes.byref(straight), ctypes.byref(swapped)
        ask, target = self._interface.nvMatmulHeuristicsEstimateRuntime, ctypes.c_int(self._interface.target)
        handle, encoded, hardware = self._interface.handle, self._encoded, self._interface.hardware_descriptor
        found = [
            0.0 if config is None else ask(handle, encoded, target, problems[is_swapped], config, hardware)
            for is_swapped, config in self._configured[1]
        ]
        return [seconds if seconds > 0 else math.inf for seconds in found]

    def settle(self, shapes: Sequence[_Shape], signature: Signature, m: int) -> list[tuple[float, ...]]:
        """The place among the library's suggestions, then what the tile-wave model says."""
        problem = m, signature.n, signature.k, self._layouts.TN_ROW_MAJOR, signature.batch
        if self._suggested[0] != problem:
            self._suggested = problem, self._suggestions(problem)
        places, waves = self._suggested[1], self._waves.costs(shapes, signature, m)
        tiles = ((s.tile_m, s.tile_n, s.cluster_m, s.cluster_n) for s in shapes)
        return [(places.get(tile, _SUGGESTIONS), cost) for tile, cost in zip(tiles, waves, strict=True)]

    def _suggestions(self, problem: tuple[Any, ...]) -> dict[tuple[int, ...], int]:
        """The place of each tile and cluster among the library's suggestions.

        The library's own wrapper of this function also estimates the time of each.
        """
        known = self._interface
        made = known.makeNvMatmulHeuristicsProblem(*problem)
        found = (known.nvmmhKernelConfiguration * _SUGGESTIONS)()
        flags, target = ctypes.c_int(known.flags), ctypes.c_int(known.target)
        where = ctypes.byref(made), found, _SUGGESTIONS, known.hardware_descriptor
        count = known.nvMatmulHeuristicsGetGemmConfig(known.handle, self._encoded, flags, target, *where)
        places: dict[tuple[int, ...], int] = {}
        for place, kernel in enumerate(found[:count]):
            places.setdefault((*kernel.cta[:2], *kernel.cluster), place)
        return places

    def _configuration(self, s: _Shape) -> tuple[bool, Any]:
        """Whether the library has to swap A and B for a shape, and its form of it; None where a field is too narrow for
        its value: the library would divide by what is left of that.

        The extents below a CTA's tile have no effect, but must divide it, or there is no estimate; nor is there one for
        a tile narrower than 32.
        """
        swapped = s.tile_m < 64  # the MMA's M side holds the weights
        tile, cluster = (s.tile_m, s.tile_n), (s.cluster_m, s.cluster_n)
        if swapped:
            tile, cluster = tile[::-1], cluster[::-1]
        tile_m, tile_n = tile[0], max(tile[1], 32)
        config = self._interface.nvmmhKernelConfiguration()
        config.cta[:] = tile_m, tile_n, s.tile_k
        config.warp[:] = min(64, tile_m), min(64, tile_n), s.tile_k
        config.instr[:] = s.instruction_m, 8, self._instruction_k
        config.cluster[:] = cluster
        config.loadStages = s.stages
        config.splitK = s.split_k
        config.gridSwizzle = 1
        fits = (*config.cta, *config.cluster, config.splitK) == (tile_m, tile_n, s.tile_k, *cluster, s.split_k)
        return swapped, ctypes.byref(config) if fits else None


def _precision(signature: Signature) -> str:
    """The library's word for a signature's types: A, accumulator, D; for 8-bit floats A, B, C, accumulator, D."""
    types = signature.a, signature.b, signature.d, signature.accumulator
    for t in types:
        if not DTYPES[t].heuristics:
            raise _Unknown(f"{_DISTRIBUTION} does not know the element type {t!r}")
    a, b, d, accumulator = (DTYPES[t].heuristics for t in types)
    return f"{a}{b}{d}{accumulator}{d}" if DTYPES[signature.a].bits == 8 else f"{a}{accumulator}{d}"
