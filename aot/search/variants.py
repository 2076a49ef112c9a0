"""One way to compute something on a target, as data, and what a provider says of a family of such ways.

`legal` says which of them there are. Knows no provider, and nothing of compilers, devices or the packages that kernels
come from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypeAlias

from runtime.container import canonical
from runtime.errors import RecordError
from runtime.numbers.dtypes import DTYPES

from .targets import target as target_named

Option: TypeAlias = int | str | bool
TILES = "tile", "cluster", "fallback"  # choices whose extents are one word of a name


@dataclass(frozen=True)
class Variant:
    """A kernel that could be compiled: where it comes from, for which target, with which choices.

    `config` holds the family's choices as sorted pairs; `options` is the same as a dictionary. `elements` are the
    element types of the operation's operands, in their order: of GEMMs those of A, B and D, which are `a`, `b` and `d`
    too. Kernels are dynamic in their extents, so a variant holds none: one serves every signature of its types,
    scaling, order of B and epilogue (`runtime.gemm.signature` says what these are).
    """

    provider: str
    family: str
    target: str
    config: tuple[tuple[str, Option], ...]
    elements: tuple[str, ...]
    accumulator: str = "f32"
    epilogue: str = "none"
    batched: bool = False
    operation: str = field(kw_only=True)  # whose signatures it computes
    scaling: str = "none"
    b_major: str = "k"

    def __post_init__(self) -> None:
        names = [name for name, _ in self.config]
        if names != sorted(set(names)):
            raise ValueError(f"a variant's config must be sorted by name, each name once; found {names}")

    @property
    def a(self) -> str:
        """The element type of a GEMM's A."""
        return self.elements[0]

    @property
    def b(self) -> str:
        """The element type of a GEMM's B."""
        return self.elements[1]

    @property
    def d(self) -> str:
        """The element type of a GEMM's D."""
        return self.elements[2]

    @cached_property
    def options(self) -> Mapping[str, Option]:
        """The choices by name."""
        return dict(self.config)

    def integer(self, name: str, default: int = 1) -> int:
        """The integer choice called `name`, or `default` where the family has no such choice."""
        value = self.options.get(name, default)
        if type(value) is not int:
            raise TypeError(f"{self.family}: the choice {name!r} is {value!r}, not an integer")
        return value

    def name(self) -> str:
        """One readable word, the same for equal variants and only for them; relatives share a prefix."""
        parts = [self.provider, self.family, "_".join((*self.elements, self.accumulator))]
        if self.epilogue != "none":
            parts.append(self.epilogue)
        if self.scaling != "none":
            parts.append(f"{self.scaling}_scaled")
        if self.b_major != "k":
            parts.append(f"b_{self.b_major}_major")
        if self.batched:
            parts.append("batched")
        options = dict(self.config)
        for prefix in TILES:
            if f"{prefix}_m" in options:
                extents = [options.pop(f"{prefix}_{mode}", None) for mode in "mnk"]
                parts.append(prefix + "x".join(str(e) for e in extents if e is not None))
        for option, value in options.items():
            if isinstance(value, str):
                parts.append(value)
            elif value is not False:
                parts.append(option if value is True else f"{option}{value}")
        return ".".join([*parts, self.target])

    def key(self) -> str:
        """Canonical JSON, the same for equal variants and only for them."""
        return canonical.dumps(self.to_json()).decode()

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary that `from_json` reads."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return given | {"config": dict(self.config), "elements": list(self.elements)}

    @classmethod
    def from_json(cls, obj: Any) -> Variant:
        """Read what `to_json` wrote. A variant that reads well may still be illegal here: ask `illegal`.

        Raises:
            RecordError: a field is missing, unknown, or not of its type.
        """
        names = {f.name for f in fields(cls)}
        if not isinstance(obj, dict) or set(obj) != names:
            raise RecordError(f"a variant needs exactly the fields {sorted(names)}, found {obj!r}")
        for name in names - {"config", "batched", "elements"}:
            if not isinstance(obj[name], str):
                raise RecordError(f"variant field {name!r} must be a string, found {obj[name]!r}")
        if type(obj["batched"]) is not bool:
            raise RecordError(f"variant field 'batched' must be true or false, found {obj['batched']!r}")
        elements, config = obj["elements"], obj["config"]
        if not isinstance(elements, list) or not elements or not all(isinstance(name, str) for name in elements):
            raise RecordError(f"variant field 'elements' must be a list of strings, found {elements!r}")
        if not isinstance(config, dict) or not all(
            isinstance(k, str) and type(v) in (int, str, bool) for k, v in config.items()
        ):
            raise RecordError(
                f"variant field 'config' must map names to integers, strings or booleans, found {config!r}"
            )
        return cls(**(obj | {"config": choices(**config), "elements": tuple(elements)}))


def choices(**options: Option) -> tuple[tuple[str, Option], ...]:
    """The given choices as a variant's `config`."""
    return tuple(sorted(options.items()))


def _no_rule(v: Variant) -> str | None:
    return None


def _no_opinion(v: Variant) -> str | None:
    return None


def _no_limit(v: Variant, signature: Any) -> str | None:
    return None


def _promises_nothing(v: Variant, k: int | None) -> str | None:
    return None


@dataclass(frozen=True, eq=False)
class Likely:
    """Which legal variants of a family are worth compiling: an opinion, mostly from measurements.

    Enumeration for builds leaves the others out; who names one gets it. Nothing here decides the code of a variant, so
    it belongs in no digest of sources.
    """

    opinion: Callable[[Variant], str | None] = _no_opinion  # why choices that are all in `options` are not worth trying
    # Whether `opinion` refuses all that begins with these choices, the first of the family's options.
    hopeless: Callable[[Mapping[str, Option]], bool] | None = None
    # What of a choice is worth trying, in the order in which builds enumerate it; of others all that the family has.
    options: Mapping[str, tuple[Option, ...]] = field(default_factory=dict)

    def unlikely(self, variant: Variant) -> str | None:
        """Why a legal variant is not worth trying, or None."""
        for name, value in variant.config:
            if value not in self.options.get(name, (value,)):
                return f"{name} is worth trying as one of {self.options[name]}, not {value}"
        return self.opinion(variant)


@dataclass(frozen=True, eq=False)
class Family:
    """Variants of one provider that differ in their choices only: what each may be, and which combinations are illegal.

    Of a GEMM's choices, `aot.search.rank` reads those that are called tile_m, tile_n and tile_k (rows of D, columns of
    D and depth), cluster_m, cluster_n, stages, split_k and two_cta (two CTAs share the tile, side by side along M), and
    does without those that are missing. `traits` states by the same names what is no choice; instruction_m, the rows of
    an MMA instruction, and swap_ab, that these are rows of B and two CTAs share a tile along N, can only be stated
    there.
    """

    operation: str  # whose signatures its variants compute
    targets: tuple[str, ...]
    elements: tuple[tuple[str, ...], ...]  # of operands, in order: of a GEMM (a, b, d)
    options: Mapping[str, tuple[Option, ...]]  # what each choice may be
    # Why choices that are allowed one by one are illegal together: what the hardware demands, or the kernel's algebra.
    # What is legal and not worth compiling is for `likely` to say.
    rule: Callable[[Variant], str | None] = _no_rule
    # Whether `rule` refuses all that begins with these choices, the first of `options`: enumeration goes no further.
    hopeless: Callable[[Mapping[str, Option]], bool] | None = None
    likely: Likely = Likely()
    batched: tuple[bool, ...] = (False, True)
    scalings: tuple[str, ...] = ("none",)
    b_majors: tuple[str, ...] = ("k",)
    rows: str = "contiguous"  # of a grouped GEMM, a word of `runtime.grouped_gemm.ROWS`
    epilogues: frozenset[str] = frozenset(("none",))
    accumulator: str = "f32"
    access_bytes: int = 16  # rows of A, B and D are loaded and stored in whole pieces of this size
    limit: Callable[[Variant, Any], str | None] = _no_limit  # why a legal variant cannot compute a signature
    summation: Callable[[Variant, int | None], str | None] = _promises_nothing  # see `legal.summation`
    traits: Mapping[str, int] = field(default_factory=dict)
    # Choices whose effect on a time estimates know well: a time of a variant tells that of its twin, which differs in
    # these alone.
    minor: frozenset[str] = frozenset()
    # Microseconds for (variant, signature, M[, `aot.search.costs.Machine`]), by which variants of all families that
    # have it are put in order, before others. Written in the arithmetic of `aot.search.costs`, so extents may be
    # symbols.
    estimate_us: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        for name in self.targets:
            target_named(name)
        unknown = {self.accumulator, *itertools.chain(*self.elements)} - set(DTYPES)
        if unknown:
            raise ValueError(f"unknown element types {sorted(unknown)}; the element types are {', '.join(DTYPES)}")
