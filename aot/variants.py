"""One way to compute something on a target, as data, and which such ways exist.

`FAMILIES` and `illegal` are the only source of that truth for enumerators, tuners and tests. Knows nothing of
compilers, devices or the packages that kernels come from, and imports none of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, TypeAlias

from runtime import canonical
from runtime.dtypes import DTYPES
from runtime.errors import RecordError
from runtime.signature import EPILOGUES, Signature

from .kernels.sm90 import small_m_choices
from .targets import TARGETS

Option: TypeAlias = int | str | bool

OPERATIONS = ("gemm", "rmsnorm")


@dataclass(frozen=True)
class Variant:
    """A kernel that could be compiled: where it comes from, for which target, with which choices.

    `config` holds the family's choices as sorted pairs; `options` is the same as a dictionary. `a`, `b`, `d` are the
    element types of the two inputs and the output: for "gemm" A, B and D, for "rmsnorm" x, weight and y. Kernels are
    dynamic in their extents, so a variant holds none: one serves every signature of its types.
    """

    provider: str
    family: str
    target: str
    config: tuple[tuple[str, Option], ...]
    a: str
    b: str
    d: str
    accumulator: str = "f32"
    epilogue: str = "none"
    batched: bool = False
    operation: str = "gemm"

    def __post_init__(self) -> None:
        names = [name for name, _ in self.config]
        if names != sorted(set(names)):
            raise ValueError(f"a variant's config must be sorted by name, each name once; found {names}")

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
        parts = [self.provider, self.family, f"{self.a}_{self.b}_{self.d}_{self.accumulator}"]
        if self.epilogue != "none":
            parts.append(self.epilogue)
        if self.batched:
            parts.append("batched")
        options = dict(self.config)
        for prefix in ("tile", "cluster", "fallback"):
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
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"config": dict(self.config)}

    @classmethod
    def from_json(cls, obj: Any) -> Variant:
        """Read what `to_json` wrote. A variant that reads well may still be illegal here: ask `illegal`.

        Raises:
            RecordError: a field is missing, unknown, or not of its type.
        """
        names = {f.name for f in fields(cls)}
        if not isinstance(obj, dict) or set(obj) != names:
            raise RecordError(f"a variant needs exactly the fields {sorted(names)}, found {obj!r}")
        for name in names - {"config", "batched"}:
            if not isinstance(obj[name], str):
                raise RecordError(f"variant field {name!r} must be a string, found {obj[name]!r}")
        if type(obj["batched"]) is not bool:
            raise RecordError(f"variant field 'batched' must be true or false, found {obj['batched']!r}")
        config = obj["config"]
        if not isinstance(config, dict) or not all(
            isinstance(k, str) and type(v) in (int, str, bool) for k, v in config.items()
        ):
            raise RecordError(
                f"variant field 'config' must map names to integers, strings or booleans, found {config!r}"
            )
        return cls(**(obj | {"config": choices(**config)}))


def choices(**options: Option) -> tuple[tuple[str, Option], ...]:
    """The given choices as a variant's `config`."""
    return tuple(sorted(options.items()))


@dataclass(frozen=True)
class Family:
    """Variants that differ in their choices only: what each may be, and what combinations `rule` forbids."""

    provider: str
    operation: str
    targets: tuple[str, ...]
    elements: tuple[tuple[str, str, str], ...]  # (a, b, d)
    options: Mapping[str, tuple[Option, ...]]
    rule: Callable[[Variant], str | None]
    batched: tuple[bool, ...] = (False, True)


def _sm80_rule(v: Variant) -> str | None:
    """All stages of A and B share the block's memory with the output tile, which takes their place at the end."""
    tile_m, tile_n, tile_k = (v.integer(f"tile_{mode}") for mode in "mnk")
    stages_bytes = v.integer("stages") * (tile_m + tile_n) * tile_k * DTYPES[v.a].bytes
    used, most = max(stages_bytes, tile_m * tile_n * DTYPES[v.d].bytes), TARGETS[v.target].shared_bytes_per_block
    return f"needs {used} bytes of shared memory, {v.target} has {most}" if used > most else None


def _tile_k_rule(v: Variant) -> str | None:
    """A stage is four MMA instructions deep along K, which is 128 bytes for every element type."""
    depth = 128 // DTYPES[v.a].bytes
    return None if v.integer("tile_k") == depth else f"tile_k must be {depth} for {v.a}"


def _sm100_rule(v: Variant) -> str | None:
    """`tile_m` is the MMA's: where `two_cta` holds, two CTAs share it, side by side along a cluster's M."""
    two_cta, tile_m = v.options["two_cta"], v.integer("tile_m")
    cluster_m, cluster_n = v.integer("cluster_m"), v.integer("cluster_n")
    if tile_m not in ((128, 256) if two_cta else (64, 128)):
        return f"tile_m must be {'128 or 256 with' if two_cta else '64 or 128 without'} two_cta"
    if two_cta and cluster_m % 2:
        return "cluster_m must be even with two_cta"
    if cluster_m * cluster_n > 16:
        return f"a cluster of {cluster_m * cluster_n} CTAs exceeds 16"
    return _tile_k_rule(v)


def _sm100_preferred_cluster_rule(v: Variant) -> str | None:
    """The preferred cluster is made of whole fallback clusters."""
    preferred = v.integer("cluster_m"), v.integer("cluster_n")
    fallback = v.integer("fallback_m"), v.integer("fallback_n")
    if preferred == fallback or preferred[0] % fallback[0] or preferred[1] % fallback[1]:
        return "cluster must be a larger multiple of fallback"
    return _sm100_rule(v)


def _small_m_rule(v: Variant) -> str | None:
    return small_m_choices.rule(v.options)


def _no_rule(v: Variant) -> str | None:
    return None


_SAME_16_BIT = (("bf16", "bf16", "bf16"), ("f16", "f16", "f16"))
_DENSE = (*_SAME_16_BIT, ("e4m3", "e4m3", "bf16"))
_POWERS = (1, 2, 4, 8, 16)
_SM100_OPTIONS: dict[str, tuple[Option, ...]] = {
    "tile_m": (64, 128, 256),
    "tile_n": (32, 64, 128, 256),
    "tile_k": (64, 128),
    "cluster_m": _POWERS,
    "cluster_n": _POWERS,
    "scheduler": ("clc", "static"),
    "two_cta": (False, True),
}

FAMILIES: dict[str, Family] = {
    # Four warps with mma.sync, cp.async and one CTA a tile; any GPU since Ampere. The operator also states tile_n 64,
    # which its kernel cannot compile for row-major D.
    "sm80_tensorop": Family(
        "cutlass_operators",
        "gemm",
        ("sm_80", "sm_120a"),
        _SAME_16_BIT,
        {"tile_m": (64, 128), "tile_n": (128,), "tile_k": (32,), "stages": (4,)},
        _sm80_rule,
    ),
    # Warp-specialised and persistent: TMA, WGMMA, multicast within clusters. In e4m3 the sums stay in the tensor core
    # over all of K, with its reduced precision, as cuBLAS's fast accumulation does.
    "sm90_static_persistent": Family(
        "cutlass_operators",
        "gemm",
        ("sm_90a",),
        _DENSE,
        {"tile_m": (64, 128), "tile_n": (64, 128, 256), "tile_k": (64, 128), "cluster_m": (1, 2), "cluster_n": (1, 2)},
        _tile_k_rule,
    ),
    # Warp-specialised and persistent: TMA, tcgen05.mma of one or two CTAs, static or cluster-launch-control scheduling.
    "sm100_persistent": Family(
        "cutlass_operators", "gemm", ("sm_100a", "sm_103a"), _DENSE, _SM100_OPTIONS, _sm100_rule
    ),
    # The same with two cluster shapes in one launch: the smaller fills what the larger leaves.
    "sm100_preferred_cluster": Family(
        "cutlass_operators",
        "gemm",
        ("sm_100a", "sm_103a"),
        _DENSE,
        _SM100_OPTIONS | {"fallback_m": (2,), "fallback_n": (1,)},
        _sm100_preferred_cluster_rule,
    ),
    # Low latency for few tokens: swap-AB (weights on the MMA's M side, so tile_n is 64), one CTA a tile, direct stores.
    # Right at any M up to 65535 tiles, which the grid holds; meant for M <= 64.
    "sm100_tgv": Family(
        "cutlass_operators",
        "gemm",
        ("sm_100a", "sm_103a"),
        _SAME_16_BIT,
        {"tile_m": (8, 16, 32), "tile_n": (64,), "tile_k": (128,), "stages": (8,)},
        _no_rule,
    ),
    # Few tokens on Hopper: weights on WGMMA's M side, K split over a cluster. Right at any M up to 65535 tiles, which
    # the grid holds; meant for M <= 64.
    "sm90_small_m": Family("own", "gemm", ("sm_90a",), _SAME_16_BIT, small_m_choices.OPTIONS, _small_m_rule, (False,)),
    # One block a row, `threads` threads a block.
    "rmsnorm_row": Family(
        "own", "rmsnorm", tuple(TARGETS), _SAME_16_BIT, {"threads": (128, 256, 512)}, _no_rule, (False,)
    ),
}


def illegal(variant: Variant) -> str | None:
    """Why `variant` cannot be compiled, or None if it can. Pure: asks no device and imports no compiler."""
    family = FAMILIES.get(variant.family)
    if family is None or family.provider != variant.provider or family.operation != variant.operation:
        return f"no family {variant.family!r} of {variant.operation!r} in provider {variant.provider!r}"
    if variant.target not in family.targets:
        return f"{variant.family} is not made for {variant.target}, only for {', '.join(family.targets)}"
    if (variant.a, variant.b, variant.d) not in family.elements or variant.accumulator != "f32":
        return f"{variant.family} does not compute {variant.a} x {variant.b} -> {variant.d} in {variant.accumulator}"
    if variant.epilogue not in EPILOGUES:
        return f"{variant.family} has no epilogue {variant.epilogue!r}"
    if variant.batched not in family.batched:
        return f"{variant.family} has no {'batched' if variant.batched else 'unbatched'} form"
    options = variant.options
    if set(options) != set(family.options):
        return f"{variant.family} needs exactly the choices {sorted(family.options)}, found {sorted(options)}"
    for name, value in options.items():
        if not any(type(value) is type(allowed) and value == allowed for allowed in family.options[name]):
            return f"{variant.family}: {name} must be one of {family.options[name]}, found {value!r}"
    return family.rule(variant)


def unsuited(variant: Variant, signature: Signature) -> str | None:
    """Why `variant` cannot compute `signature`, or None if it can, at every M from 1 up.

    Every family loads and stores rows of A, B and D in 16-byte pieces, so K and N must fill whole pieces. Tiles and
    clusters that hang over the edge of D are no limit: loads past it give zeros and stores past it are dropped, in
    every family.
    """
    if variant.operation != "gemm":
        return f"{variant.family} is not a GEMM"
    wanted = (signature.a, signature.b, signature.d, signature.accumulator, signature.epilogue)
    if (variant.a, variant.b, variant.d, variant.accumulator, variant.epilogue) != wanted:
        return f"{variant.family} computes {variant.a} x {variant.b} -> {variant.d}, not {signature.key()}"
    if variant.batched != (signature.batch > 1):
        return "a batched signature needs a batched kernel, and no other does"
    for extent, value, element in (("n", signature.n, signature.d), ("k", signature.k, signature.a)):
        divisibility = 16 // DTYPES[element].bytes
        if value % divisibility:
            return f"{extent} = {value} is not a multiple of {divisibility}, which 16-byte access to {element} needs"
    if variant.family == "sm90_small_m" and (reason := small_m_choices.limit(variant.options)):
        return reason
    if variant.family == "sm100_preferred_cluster" and variant.options["scheduler"] == "static":
        # The grid is the CTAs that fallback clusters would take, in whole preferred clusters: none, if those are fewer.
        tiles_n = -(-signature.n // variant.integer("tile_n"))
        ctas = variant.integer("fallback_m") * tiles_n * signature.batch
        cluster = variant.integer("cluster_m") * variant.integer("cluster_n")
        if ctas < cluster:
            return f"at m = 1 its {ctas} CTAs do not fill one cluster of {cluster}, and nothing would be launched"
    return None


def legal_variants(provider: str, target: str, signature: Signature) -> list[Variant]:
    """Every legal GEMM variant of `provider` that computes `signature` on `target`, in a fixed order."""
    elements = (signature.a, signature.b, signature.d)
    return [
        v for v in _legal(provider, "gemm", target, elements, signature.batch > 1) if unsuited(v, signature) is None
    ]


def legal_functions(provider: str, target: str) -> list[Variant]:
    """Every legal variant of `provider` for `target` that is not a GEMM, in a fixed order."""
    return [
        v
        for operation in OPERATIONS
        if operation != "gemm"
        for elements in _SAME_16_BIT
        for v in _legal(provider, operation, target, elements, False)
    ]


@cache
def _legal(
    provider: str, operation: str, target: str, elements: tuple[str, str, str], batched: bool
) -> tuple[Variant, ...]:
    """Every legal variant with the given types, family by family."""
    variants = []
    for name, family in FAMILIES.items():
        if (family.provider, family.operation) != (provider, operation) or target not in family.targets:
            continue
        for values in itertools.product(*family.options.values()):
            config = choices(**dict(zip(family.options, values, strict=True)))
            variant = Variant(provider, name, target, config, *elements, batched=batched, operation=operation)
            if illegal(variant) is None:
                variants.append(variant)
    return tuple(variants)
