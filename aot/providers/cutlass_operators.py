"""GEMMs of NVIDIA's CUTLASS Operator API (nvidia-cutlass-operators): plain, with epilogues, block-scaled and grouped.

Which there are; `operator_api` finds the operator that a variant describes, and wraps it in a host function of our own:
B as (N, K) rows as `torch.nn.Linear` stores it, every extent and leading stride free, and the number of clusters the
device can hold as an argument. Enumerating imports nothing; only `build` imports the package, the DSL and torch.
Nothing here asks for a GPU or touches the driver.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from types import ModuleType

from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.epilogue import EPILOGUES
from runtime.numbers.products import unsupported_scaling
from runtime.numbers.scaling import SCALINGS

from ..search.legal import illegal, legal_variants
from ..search.provider import Buildable, ProviderError
from ..search.targets import TARGETS
from ..search.variants import Family, Likely, Option, Variant
from . import estimate_grouped, estimate_persistent, summation
from .arguments import digest
from .operator_api import block_scaled, dense, fused, grouped, mixed_input
from .operator_api.operator import DISTRIBUTION
from .sources import built_by

_PROVIDERS = Path(__file__).parent
# The module that finds and wraps the operator of each family.
_BUILT_BY: dict[str, ModuleType] = {
    family: module for module in (dense, fused, mixed_input, block_scaled, grouped) for family in module.OPERATORS
}


def _sm80_rule(v: Variant) -> str | None:
    """All stages of A and B share the block's memory with the output tile, which takes their place at the end."""
    tile_m, tile_n, tile_k = (v.integer(f"tile_{mode}") for mode in "mnk")
    stages_bytes = v.integer("stages") * (tile_m + tile_n) * tile_k * DTYPES[v.a].bytes
    used, most = max(stages_bytes, tile_m * tile_n * DTYPES[v.d].bytes), TARGETS[v.target].shared_bytes_per_block
    return f"needs {used} bytes of shared memory, {v.target} has {most}" if used > most else None


def _tile_k_rule(v: Variant) -> str | None:
    """A stage is four MMA instructions deep along K, which is 128 bytes for every element type."""
    depth = DTYPES[v.a].filling(128)
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


def _sm100_preferred_cluster_limit(v: Variant, signature: Signature) -> str | None:
    """With a static scheduler."""
    return _too_few_ctas(v, signature) if v.options["scheduler"] == "static" else None


def _too_few_ctas(v: Variant, signature: Signature) -> str | None:
    """The grid is the CTAs that fallback clusters would take, in whole preferred clusters: none, if those are fewer."""
    fallback_n = v.integer("fallback_n")
    tiles_n = -(-signature.n // (v.integer("tile_n") * fallback_n)) * fallback_n
    ctas = v.integer("fallback_m") * tiles_n * signature.batch
    cluster = v.integer("cluster_m") * v.integer("cluster_n")
    if ctas < cluster:
        return f"at m = 1 its {ctas} CTAs do not fill one cluster of {cluster}, and nothing would be launched"
    return None


def _sm107_rule(v: Variant) -> str | None:
    """`tile_m` is that of all CTAs that multiply together. Two tiles of A in an MMA have sums in tensor memory of their
    own, which has no room for those of more than 128 columns twice, or for 256 once."""
    two_cta, b_reuse, tile_n = v.options["two_cta"], v.options["b_reuse"], v.integer("tile_n")
    rows = 128 * (2 if two_cta else 1) * (2 if b_reuse else 1)
    if v.integer("tile_m") != rows:
        return f"tile_m must be {rows} with these MMAs"
    if b_reuse and 128 < tile_n < 256:
        return "with b_reuse tile_n must be up to 128, or 256"
    cluster = v.integer("cluster_m"), v.integer("cluster_n")
    fallback = v.integer("fallback_m"), v.integer("fallback_n")
    if cluster[0] * cluster[1] > 16:
        return f"a cluster of {cluster[0] * cluster[1]} CTAs exceeds 16"
    if fallback == (2, 2) or cluster == fallback or cluster[0] % fallback[0] or cluster[1] % fallback[1]:
        return "cluster must be a larger multiple of fallback, which has at most two CTAs"
    if two_cta and fallback[0] != 2:
        return "fallback_m must be 2 with two_cta"
    return None


def _mixed_input_rule(v: Variant) -> str | None:
    """`tile_n`, weights, is the MMA's M side. Stages of both operands, and of weights as the MMA takes them, share an
    SM's memory; groups are whole tiles along K, and a CTA's scales at least 128 bytes."""
    if v.b == "i8" and v.target not in _INT8_TARGETS:
        return f"the package has weights of 8 bits for {' and '.join(_INT8_TARGETS)} alone"
    two_cta, tile_m, tile_k = v.options["two_cta"], v.integer("tile_m"), v.integer("tile_k")
    rows = v.integer("tile_n") // (2 if two_cta else 1)
    if rows not in (64, 128):
        return f"tile_n must be {'128 or 256 with' if two_cta else '64 or 128 without'} two_cta"
    if two_cta and v.integer("cluster_n") != 2:
        return "cluster_n must be 2 with two_cta"
    if tile_m == tile_k == 256 and not two_cta:
        return "tiles of 256 by 256 of A take two CTAs"
    if problem := unsupported_scaling(v.a, v.scaling, v.b):
        return problem
    if group := SCALINGS[v.scaling].k:
        if group % tile_k:
            return f"tile_k must divide groups of {group}"
        if rows // v.integer("cluster_m") < 64:
            return "cluster_m must be 1 with 64 weights a CTA, whose scales are too few to share"
    return None


def _mixed_input_limit(v: Variant, signature: Signature) -> str | None:
    """Groups along K are whole."""
    group = SCALINGS[v.scaling].k
    if group and signature.k % group:
        return f"{v.family}: K must be a multiple of {group}, found {signature.k}"
    return None


def _block_scaled_rule(v: Variant) -> str | None:
    """Each element type has scalings of its own. `tile_m` is the MMA's, and one of 256 rows is of two CTAs."""
    if v.options["two_cta"] != (v.integer("tile_m") == 256):
        return "tile_m must be 256 with two_cta, and 128 without"
    return unsupported_scaling(v.a, v.scaling) or _tile_k_rule(v)


def _sm107_block_scaled_rule(v: Variant) -> str | None:
    """Each element type has scalings of its own; tiles and clusters are those of `sm107_dense`, of which there are
    fewer."""
    return unsupported_scaling(v.a, v.scaling) or _tile_k_rule(v) or _sm107_rule(v)


def _sm107_block_scaled_limit(v: Variant, signature: Signature) -> str | None:
    return _block_scaled_limit(v, signature) or _too_few_ctas(v, signature)


def _block_scaled_limit(v: Variant, signature: Signature) -> str | None:
    """The kernel is compiled for N that is a multiple of 32, and whole blocks of K share a scale."""
    for extent, value in (("N", signature.n), ("K", signature.k)):
        if value % block_scaled.MULTIPLE:
            return f"{v.family}: {extent} must be a multiple of {block_scaled.MULTIPLE}, found {value}"
    return None


def _sm100_grouped_rule(v: Variant) -> str | None:
    """The operator has tiles of 256 columns with 256 rows alone."""
    if v.integer("tile_n") == 256 and v.integer("tile_m") != 256:
        return "tiles of 256 columns have 256 rows"
    return _sm100_rule(v)


def _sm100_grouped_unlikely(v: Variant) -> str | None:
    """Groups have few tiles along M, and one CTA alone reads few bytes at a time."""
    cluster_m, cluster_n, two_cta = v.integer("cluster_m"), v.integer("cluster_n"), v.options["two_cta"]
    if cluster_m != (2 if two_cta else 1) or cluster_n > 2:
        return "a cluster's tiles along M would mostly be of other groups"
    return None


def _efc_rule(v: Variant) -> str | None:
    """Scales are of e4m3."""
    return unsupported_scaling(v.a, v.scaling) or _sm100_rule(v)


def _efc_unlikely(v: Variant) -> str | None:
    """It is the pipeline of sm100_persistent, which has more ways to schedule tiles."""
    if (v.epilogue, v.scaling) == ("none", "none") and v.elements in _DENSE:
        return "sm100_persistent computes it"
    return None


_SAME_16_BIT = (("bf16", "bf16", "bf16"), ("f16", "f16", "f16"))
_DENSE = (*_SAME_16_BIT, ("e4m3", "e4m3", "bf16"))
_FUSED = (
    *_SAME_16_BIT,
    *(("e4m3", "e4m3", d) for d in ("bf16", "f16", "e4m3")),
    *((ab, ab, "e4m3") for ab in ("bf16", "f16")),
)
_BLOCK_SCALED = tuple((a, a, d) for a in ("e4m3", "e2m1") for d in ("bf16", "f16"))
_TILE_SCALINGS = "mxfp8", "mxfp4", "nvfp4"
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

_INT8_TARGETS = ("sm_100a", "sm_110a")
_TCGEN05 = ("sm_100a", "sm_103a", "sm_107a", "sm_110a")

FAMILIES: dict[str, Family] = {
    # Four warps with mma.sync, cp.async and one CTA a tile; any GPU since Ampere. The operator also states tile_n 64,
    # which its kernel cannot compile for row-major D.
    "sm80_tensorop": Family(
        "gemm",
        ("sm_80", "sm_120a"),
        _SAME_16_BIT,
        {"tile_m": (64, 128), "tile_n": (128,), "tile_k": (32,), "stages": (4,)},
        _sm80_rule,
        traits={"instruction_m": 16},
        summation=summation.by_itself,
    ),
    # Warp-specialised and persistent: TMA, WGMMA, multicast within clusters. In e4m3 the sums stay in the tensor core
    # over all of K, with its reduced precision, as cuBLAS's fast accumulation does.
    "sm90_static_persistent": Family(
        "gemm",
        ("sm_90a",),
        _DENSE,
        {"tile_m": (64, 128), "tile_n": (64, 128, 256), "tile_k": (64, 128), "cluster_m": (1, 2), "cluster_n": (1, 2)},
        _tile_k_rule,
        summation=summation.of_operator,
        estimate_us=estimate_persistent.of_operator,
    ),
    # Warp-specialised and persistent: TMA, tcgen05.mma of one or two CTAs, static or cluster-launch-control scheduling.
    "sm100_persistent": Family("gemm", _TCGEN05, _DENSE, _SM100_OPTIONS, _sm100_rule, summation=summation.by_itself),
    # The same with two cluster shapes in one launch: the smaller fills what the larger leaves.
    "sm100_preferred_cluster": Family(
        "gemm",
        _TCGEN05,
        _DENSE,
        _SM100_OPTIONS | {"fallback_m": (2,), "fallback_n": (1,)},
        _sm100_preferred_cluster_rule,
        limit=_sm100_preferred_cluster_limit,
        summation=summation.by_itself,
    ),
    # The pipeline of sm100_persistent with static scheduling, and a warp that loads what the epilogue needs by TMA. It
    # has no gates: tiles of D are those of the sums.
    "sm100_static_persistent_efc": Family(
        "gemm",
        _TCGEN05,
        _FUSED,
        {name: values for name, values in _SM100_OPTIONS.items() if name != "scheduler"},
        _efc_rule,
        likely=Likely(_efc_unlikely),
        batched=(False,),
        scalings=("none", "tensor", "row_column"),
        epilogues=frozenset(word for word, epilogue in EPILOGUES.items() if not epilogue.gated),
        summation=summation.by_itself,
    ),
    # Low latency for few tokens: swap-AB (weights on the MMA's M side, so tile_n is 64), one CTA a tile, direct stores.
    # Right at any M up to 65535 tiles, which the grid holds; meant for M <= 64.
    "sm100_tgv": Family(
        "gemm",
        _TCGEN05,
        _SAME_16_BIT,
        {"tile_m": (8, 16, 32), "tile_n": (64,), "tile_k": (128,), "stages": (8,)},
        summation=summation.by_itself,
    ),
    # Weights of integers, which warps of their own make what A is.
    "sm100_mixed_input": Family(
        "gemm",
        _TCGEN05,
        (("bf16", "i8", "bf16"), ("f16", "i8", "f16"), ("bf16", "i4", "bf16")),
        {
            "tile_m": (32, 64, 128, 256),
            "tile_n": (64, 128, 256),
            "tile_k": (64, 128, 256),
            "cluster_m": (1, 2),
            "cluster_n": (1, 2),
            "two_cta": (False, True),
        },
        _mixed_input_rule,
        batched=(False,),
        scalings=("none", "int4_group128"),
        limit=_mixed_input_limit,
        traits={"swap_ab": 1},
        summation=summation.by_itself,
    ),
    # Rubin's, in 8 bits: two cluster shapes in one launch, and with `b_reuse` each MMA takes two tiles of A.
    "sm107_dense": Family(
        "gemm",
        ("sm_107a",),
        tuple(("e4m3", "e4m3", d) for d in ("bf16", "f16", "e4m3")),
        {
            "tile_m": (128, 256, 512),
            "tile_n": tuple(range(32, 257, 32)),
            "tile_k": (128,),
            "cluster_m": _POWERS,
            "cluster_n": _POWERS,
            "fallback_m": (1, 2),
            "fallback_n": (1, 2),
            "two_cta": (False, True),
            "b_reuse": (False, True),
        },
        _sm107_rule,
        limit=_too_few_ctas,
        summation=summation.by_itself,
    ),
    # Warp-specialised and persistent: TMA and tcgen05.mma with scales of blocks, which the tensor core applies. Takes
    # addresses and extents, so A, B and D must have no gaps between rows.
    "sm100_block_scaled": Family(
        "gemm",
        ("sm_100a", "sm_103a"),
        _BLOCK_SCALED,
        {
            "tile_m": (128, 256),
            "tile_n": (64, 128, 192),
            "tile_k": (128, 256),
            "cluster_m": (2, 4),
            "cluster_n": (1, 2, 4),
            "two_cta": (False, True),
        },
        _block_scaled_rule,
        batched=(False,),
        scalings=_TILE_SCALINGS,
        limit=_block_scaled_limit,
        summation=summation.by_itself,
    ),
    # Rubin's: the same of two cluster shapes in one launch, and with `b_reuse` each MMA takes two tiles of A.
    "sm107_block_scaled": Family(
        "gemm",
        ("sm_107a",),
        _BLOCK_SCALED,
        {
            "tile_m": (128, 256, 512),
            "tile_n": (64, 128, 256),
            "tile_k": (128, 256),
            "cluster_m": (1, 2, 4),
            "cluster_n": (1, 2, 4),
            "fallback_m": (1, 2),
            "fallback_n": (1, 2),
            "two_cta": (False, True),
            "b_reuse": (False, True),
        },
        _sm107_block_scaled_rule,
        batched=(False,),
        scalings=_TILE_SCALINGS,
        limit=_sm107_block_scaled_limit,
        summation=summation.by_itself,
    ),
    # Rows by groups that follow each other, where each ends on the device: the same pipeline; tiles that a group does
    # not fill are stored thread by thread.
    "sm100_grouped": Family(
        "grouped_gemm",
        _TCGEN05,
        (*_SAME_16_BIT, ("e4m3", "e4m3", "bf16"), ("e4m3", "e4m3", "f16")),
        {
            "tile_m": (64, 128, 256),
            "tile_n": (128, 256),
            "tile_k": (64, 128),
            "cluster_m": (1, 2, 4),
            "cluster_n": (1, 2, 4),
            "two_cta": (False, True),
        },
        _sm100_grouped_rule,
        likely=Likely(_sm100_grouped_unlikely),
        batched=(False,),
        estimate_us=estimate_grouped.of_operator,
    ),
}


class CutlassOperators:
    """GEMMs of the Operator API, with epilogues of this project's words."""

    name = "cutlass_operators"
    families = FAMILIES

    def variants(self, target: str, signature: Signature) -> list[Variant]:
        """The variants that compute `signature` on `target` and are worth compiling."""
        return legal_variants(self.name, target, signature)

    def functions(self, target: str) -> list[Variant]:
        """None: the operators used here are GEMMs."""
        return []

    def source_digest(self, family: str) -> str:
        """SHA-256 over what builds a family's variants: the module of its kind of operands with what that imports,
        and the installed package's Python sources and version, since its operators find each other's modules at run
        time."""
        if family not in _BUILT_BY:
            raise ProviderError(f"{self.name} has no family {family!r}; its families are {', '.join(_BUILT_BY)}")
        found = metadata.distribution(DISTRIBUTION)
        sources = [f for f in found.files or () if f.suffix == ".py"]
        if not sources:
            raise ProviderError(f"{DISTRIBUTION} {found.version} lists no sources; install it from its wheel")
        items = [(f"installed/{f.as_posix()}", Path(str(f.locate())).read_bytes()) for f in sources]
        module = _BUILT_BY[family].__name__.rpartition(".")[2]
        files = built_by(_PROVIDERS / "operator_api" / f"{module}.py", _PROVIDERS)
        items += [(path.relative_to(_PROVIDERS.parents[1]).as_posix(), path.read_bytes()) for path in files]
        return digest([*items, ("version", found.version.encode())])

    def build(self, variant: Variant) -> Buildable:
        """Prepare `variant` for `cute.compile`.

        Raises:
            ProviderError: the variant is illegal, or the installed package has no such operator.
        """
        if reason := illegal(variant):
            raise ProviderError(f"cannot build {variant.name()}: {reason}")
        found: Buildable = _BUILT_BY[variant.family].build(variant)
        return found
