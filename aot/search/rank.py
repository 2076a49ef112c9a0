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
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeAlias

from runtime.gemm.signature import OVERLAPS, Signature
from runtime.numbers.dtypes import DTYPES

from . import targets
from .estimates import Estimates
from .legal import family_of, overlaps_less, unsuited
from .provider import families, provider_names
from .targets import Target
from .variants import Variant


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
    model, suited = _model(targets.target(target), signature), _Suited(_shapes(variants))
    return Ranking(_order(suited, signature, m, model), suited.source(model))


def shortlist(
    variants: Iterable[Variant], problems: Iterable[tuple[Signature, int]], target: str, limit: int
) -> Shortlist:
    """The best `limit` of `variants` for each problem, of those for `target` that suit it.

    The best of each family comes along first, since estimates compare tiles well and families badly.
    """
    by_form: dict[tuple[Any, ...], _Shapes] = {}  # what signatures differ in most, so that few are asked one by one
    for v, shape in _shapes(v for v in variants if v.target == target):
        by_form.setdefault((*v.elements, v.epilogue, v.scaling, v.b_major, v.batched), []).append((v, shape))
    models: dict[tuple[str, ...], _Model] = {}
    suited: dict[Signature, _Suited] = {}
    candidates: dict[tuple[Signature, int], list[Variant]] = {}
    sources = set()
    for s, m in problems:
        elements = s.a, s.b, s.d, s.accumulator
        if elements not in models:
            models[elements] = _model(targets.target(target), s)
        if s not in suited:
            alike = by_form.get((s.a, s.b, s.d, s.epilogue, s.scaling, s.b_major, s.batch > 1), [])
            suited[s] = _Suited(_with_most_overlap([(v, shape) for v, shape in alike if unsuited(v, s) is None], s))
            sources.add(suited[s].source(models[elements]))
        candidates[s, m] = _best(_order(suited[s], s, m, models[elements]), limit)
    return Shortlist(candidates, "; ".join(sorted(sources)))


def _with_most_overlap(shapes: _Shapes, signature: Signature) -> _Shapes:
    """Those of `shapes` that `overlaps_less` leaves; `shapes` suit the signature."""
    if signature.overlap == OVERLAPS[0]:
        return shapes
    less = overlaps_less([v for v, _ in shapes])
    return [shape for shape, left_out in zip(shapes, less, strict=True) if not left_out]


def _best(order: list[Variant], limit: int) -> list[Variant]:
    """The first of each family, then the first of the rest: `limit` in all, in the order given."""
    leaders: dict[tuple[str, str], int] = {}
    for place, variant in enumerate(order):
        leaders.setdefault((variant.provider, variant.family), place)
    first = list(leaders.values())
    among_first = set(first)
    rest = islice((place for place in range(len(order)) if place not in among_first), limit)
    return [order[place] for place in sorted([*first, *rest][:limit])]


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
_Costs: TypeAlias = list[tuple[float, ...]]  # of shapes in their order


class _Model(Protocol):
    source: str

    def costs(self, shapes: Sequence[_Shape], signature: Signature, m: int) -> _Costs: ...


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


class _Suited:
    """The variants that suit a signature: those with an estimate of their family's, and others.

    `shapes` are those of the others, each once. Of each of the others `places` has its shape's place among them, and
    `copies` how many of the same shape are before it.
    """

    def __init__(self, shapes: _Shapes) -> None:
        self.estimated: list[Variant] = []
        self.others: list[Variant] = []
        shapes_of_others: list[_Shape] = []
        known: dict[tuple[str, str], bool] = {}  # there are many variants, and few families
        for variant, shape in shapes:
            key = variant.provider, variant.family
            if key not in known:
                family = family_of(variant)
                known[key] = family is not None and family.estimate_us is not None
            if known[key]:
                self.estimated.append(variant)
            else:
                self.others.append(variant)
                shapes_of_others.append(shape)
        self.shapes = list(dict.fromkeys(shapes_of_others))
        place_of = {shape: place for place, shape in enumerate(self.shapes)}
        self.places = [place_of[shape] for shape in shapes_of_others]
        seen: Counter[int] = Counter()
        self.copies = []
        for place in self.places:
            self.copies.append(seen[place])
            seen[place] += 1

    def source(self, model: _Model) -> str:
        """What puts these variants in order."""
        words = ["the families' own estimates"] if self.estimated else []
        return ", then ".join([*words, model.source] if self.others or not words else words)


def _order(suited: _Suited, signature: Signature, m: int, model: _Model) -> list[Variant]:
    """Cheapest first: by their families' own estimates of the time, then those without by `model`."""
    estimated = zip(_estimates(tuple(suited.estimated)).us(signature, m), suited.estimated, strict=True)
    first = [variant for _, variant in sorted(estimated, key=itemgetter(0))]
    return [*first, *_by_model(suited, signature, m, model)] if suited.others else first


@lru_cache(16)  # signatures that differ in N and K alone mostly have the same variants
def _estimates(variants: tuple[Variant, ...]) -> Estimates:
    return Estimates(variants)


def _by_model(suited: _Suited, signature: Signature, m: int, model: _Model) -> list[Variant]:
    """Cheapest first by `model`; among equals one of each shape before a second of any."""
    costs = model.costs(suited.shapes, signature, m)
    keyed = [
        ((costs[place][0], copies, *costs[place][1:]), variant)
        for variant, place, copies in zip(suited.others, suited.places, suited.copies, strict=True)
    ]
    return [variant for _, variant in sorted(keyed, key=itemgetter(0))]


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

    def costs(self, shapes: Sequence[_Shape], signature: Signature, m: int) -> _Costs:
        return [(self.cost(shape, signature, m),) for shape in shapes]

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
        except (ImportError, OSError, AssertionError, KeyError, AttributeError, RuntimeError) as e:
            raise _Unknown(f"{_DISTRIBUTION} cannot be loaded: {e}") from e
        self._library = library
        self._configurations: dict[_Shape, Any] = {}
        self._encoded = self._precision.encode()
        self._waves = _TileWaves(target)
        self._instruction_k = DTYPES[signature.a].filling(32)
        self.source = f"{_DISTRIBUTION} {version}"

    def costs(self, shapes: Sequence[_Shape], signature: Signature, m: int) -> _Costs:
        layouts = self._library.NvMatmulHeuristicsMatmulLayout
        made = self._interface.makeNvMatmulHeuristicsProblem
        straight = made(m, signature.n, signature.k, layouts.TN_ROW_MAJOR, signature.batch)
        swapped = made(signature.n, m, signature.k, layouts.TN_COL_MAJOR, signature.batch)
        places: dict[tuple[int, ...], int] = {}
        for place, found in enumerate(self._interface.get(straight, _SUGGESTIONS, precision=self._precision)):
            kernel = found["kernel"]
            suggested = kernel.cta_tile_m, kernel.cta_tile_n, kernel.cluster_m, kernel.cluster_n
            places.setdefault(suggested, place)
        costs: _Costs = []
        for s in shapes:
            if s.tile_m < 64:  # swap-AB: the MMA's M side holds the weights
                seconds = self._estimate(swapped, s, (s.tile_n, s.tile_m), (s.cluster_n, s.cluster_m))
            else:
                seconds = self._estimate(straight, s, (s.tile_m, s.tile_n), (s.cluster_m, s.cluster_n))
            place = places.get((s.tile_m, s.tile_n, s.cluster_m, s.cluster_n), _SUGGESTIONS)
            costs.append((seconds, place, self._waves.cost(s, signature, m)))
        return costs

    def _estimate(self, problem: Any, s: _Shape, tile: tuple[int, int], cluster: tuple[int, int]) -> float:
        """Seconds, or infinity where the library has no estimate (it says 0).

        The extents below a CTA's tile have no effect, but must divide it, or there is no estimate; nor is there one for
        a tile narrower than 32. The library's own wrapper of this function calls one that does not exist.
        """
        if s not in self._configurations:  # a shape is always straight or always swapped
            self._configurations[s] = self._configuration(s, tile, cluster)
        config = self._configurations[s]
        if config is None:
            return float("inf")
        seconds: float = self._interface.nvMatmulHeuristicsEstimateRuntime(
            self._interface.handle,
            self._encoded,
            ctypes.c_int(self._interface.target),
            ctypes.byref(problem),
            ctypes.byref(config),
            self._interface.hardware_descriptor,
        )
        return seconds if seconds > 0 else float("inf")

    def _configuration(self, s: _Shape, tile: tuple[int, int], cluster: tuple[int, int]) -> Any:
        """The library's form of a shape; None where a field is too narrow for its value: the library would divide by
        what is left of that."""
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
        return config if fits else None


def _precision(signature: Signature) -> str:
    """The library's word for a signature's types: A, accumulator, D; for 8-bit floats A, B, C, accumulator, D."""
    types = signature.a, signature.b, signature.d, signature.accumulator
    for t in types:
        if not DTYPES[t].heuristics:
            raise _Unknown(f"{_DISTRIBUTION} does not know the element type {t!r}")
    a, b, d, accumulator = (DTYPES[t].heuristics for t in types)
    return f"{a}{b}{d}{accumulator}{d}" if DTYPES[signature.a].bits == 8 else f"{a}{accumulator}{d}"
