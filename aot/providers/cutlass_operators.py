"""GEMMs of NVIDIA's CUTLASS Operator API (nvidia-cutlass-operators), plain, block-scaled and grouped.

Finds the operator that a variant describes, and wraps it in a host function of our own: B as (N, K) rows as
`torch.nn.Linear` stores it, every extent and leading stride free, and the number of clusters the device can hold as an
argument. Enumerating imports nothing; only `build` imports the package, the DSL and torch. Nothing here asks for a GPU
or touches the driver.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import DTYPES, TORCH_NAMES
from runtime.numbers.scaling import SCALINGS
from runtime.program.arguments import Argument, DeviceArgument, StreamArgument, TensorArgument

from ..search.legal import illegal, legal_variants
from ..search.provider import Buildable, ProviderError
from ..search.targets import TARGETS
from ..search.variants import Family, Likely, Option, Variant
from . import estimate_grouped, estimate_persistent, summation
from .arguments import digest, gemm_tensors, grouped_tensors, stand_ins

DISTRIBUTION = "nvidia-cutlass-operators"
VERSION = "0.3.0"  # the version whose operators, arguments and limits were read

# The operator class behind each family, and whether its kernel stores D with TMA.
_OPERATORS = {
    "sm80_tensorop": ("Sm80TensorOpGemmOperator", None),
    "sm90_static_persistent": ("Sm90StaticPersistentGemmOperator", None),
    "sm100_persistent": ("PersistentDenseGemmOperator", True),
    "sm100_preferred_cluster": ("PersistentDenseGemmPreferredClusterOperator", True),
    "sm100_tgv": ("TgvGemmOperator", False),
    "sm100_block_scaled": ("PersistentDenseBlockScaledGemmOperator", True),
    "sm100_grouped": ("ContiguousOffset2D3DGemmDenseOperator", True),
}
_DESIGN = (
    "tile_shape",
    "cluster_shape",
    "fallback_cluster_shape",
    "num_smem_stages",
    "use_2cta_mma",
    "use_tma_store",
    "tile_scheduler",
)
_SCHEDULERS: dict[Any, str] = {
    None: "NoneType",
    "clc": "CLCDynamicPersistentTileSchedulerMetadata",
    "static": "StaticPersistentTileSchedulerMetadata",
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
    """The static grid is the CTAs that fallback clusters would take, in whole preferred clusters: none, if those are
    fewer.
    """
    if v.options["scheduler"] != "static":
        return None
    tiles_n = -(-signature.n // v.integer("tile_n"))
    ctas = v.integer("fallback_m") * tiles_n * signature.batch
    cluster = v.integer("cluster_m") * v.integer("cluster_n")
    if ctas < cluster:
        return f"at m = 1 its {ctas} CTAs do not fill one cluster of {cluster}, and nothing would be launched"
    return None


def _block_scaled_limit(v: Variant, signature: Signature) -> str | None:
    """The kernel is compiled for N that is a multiple of 32, and whole blocks of K share a scale."""
    for extent, value in (("N", signature.n), ("K", signature.k)):
        if value % _BLOCK_SCALED_MULTIPLE:
            return f"{v.family}: {extent} must be a multiple of {_BLOCK_SCALED_MULTIPLE}, found {value}"
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


_SAME_16_BIT = (("bf16", "bf16", "bf16"), ("f16", "f16", "f16"))
_BLOCK_SCALED_MULTIPLE = 32
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
    "sm100_persistent": Family(
        "gemm", ("sm_100a", "sm_103a"), _DENSE, _SM100_OPTIONS, _sm100_rule, summation=summation.by_itself
    ),
    # The same with two cluster shapes in one launch: the smaller fills what the larger leaves.
    "sm100_preferred_cluster": Family(
        "gemm",
        ("sm_100a", "sm_103a"),
        _DENSE,
        _SM100_OPTIONS | {"fallback_m": (2,), "fallback_n": (1,)},
        _sm100_preferred_cluster_rule,
        limit=_sm100_preferred_cluster_limit,
        summation=summation.by_itself,
    ),
    # Low latency for few tokens: swap-AB (weights on the MMA's M side, so tile_n is 64), one CTA a tile, direct stores.
    # Right at any M up to 65535 tiles, which the grid holds; meant for M <= 64.
    "sm100_tgv": Family(
        "gemm",
        ("sm_100a", "sm_103a"),
        _SAME_16_BIT,
        {"tile_m": (8, 16, 32), "tile_n": (64,), "tile_k": (128,), "stages": (8,)},
        summation=summation.by_itself,
    ),
    # Warp-specialised and persistent: TMA and tcgen05.mma with scales of blocks, which the tensor core applies. Takes
    # addresses and extents, so A, B and D must have no gaps between rows.
    "sm100_block_scaled": Family(
        "gemm",
        ("sm_100a", "sm_103a"),
        (("e4m3", "e4m3", "bf16"), ("e4m3", "e4m3", "f16")),
        {
            "tile_m": (128, 256),
            "tile_n": (64, 128, 192),
            "tile_k": (128,),
            "cluster_m": (2, 4),
            "cluster_n": (1, 2, 4),
        },
        batched=(False,),
        scalings=("mxfp8",),
        limit=_block_scaled_limit,
        summation=summation.by_itself,
    ),
    # Rows by groups that follow each other, where each ends on the device: the same pipeline; tiles that a group does
    # not fill are stored thread by thread.
    "sm100_grouped": Family(
        "grouped_gemm",
        ("sm_100a", "sm_103a"),
        _SAME_16_BIT,
        {
            "tile_m": (64, 128, 256),
            "tile_n": (128, 256),
            "tile_k": (64,),
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
    """GEMMs of the Operator API that need no metadata or fused epilogue."""

    name = "cutlass_operators"
    families = FAMILIES

    def variants(self, target: str, signature: Signature) -> list[Variant]:
        """The variants that compute `signature` on `target` and are worth compiling."""
        return legal_variants(self.name, target, signature)

    def functions(self, target: str) -> list[Variant]:
        """None: the operators used here are GEMMs."""
        return []

    def source_digest(self, family: str) -> str:
        """SHA-256 over this provider and the installed package's Python sources and version: the same for each family,
        since the package's operators find each other's modules at run time."""
        if family not in _OPERATORS:
            raise ProviderError(f"{self.name} has no family {family!r}; its families are {', '.join(_OPERATORS)}")
        found = metadata.distribution(DISTRIBUTION)
        sources = [f for f in found.files or () if f.suffix == ".py"]
        if not sources:
            raise ProviderError(f"{DISTRIBUTION} {found.version} lists no sources; install it from its wheel")
        items = [(f"installed/{f.as_posix()}", Path(str(f.locate())).read_bytes()) for f in sources]
        items += [(f"provider/{p.name}", p.read_bytes()) for p in (Path(__file__), Path(inspect.getfile(digest)))]
        return digest([*items, ("version", found.version.encode())])

    def build(self, variant: Variant) -> Buildable:
        """Prepare `variant` for `cute.compile`.

        Raises:
            ProviderError: the variant is illegal, or the installed package has no such operator.
        """
        if reason := illegal(variant):
            raise ProviderError(f"cannot build {variant.name()}: {reason}")
        import torch

        # Small tensors on the CPU: torch's fake ones would do, but importing them takes most of a second.
        grouped = variant.operation == "grouped_gemm"
        args = (_grouped_arguments if grouped else _gemm_arguments)(torch, variant)
        operator = _find(variant, args)
        if variant.family == "sm80_tensorop":
            _set_tile(operator.impl, variant)
        entry, values = _capture(operator, args, variant)
        return (_wrap if variant.scaling == "none" else _wrap_block_scaled)(variant, entry, values, args)


def _gemm_arguments(torch: Any, variant: Variant) -> Any:
    """Operator API arguments of some extents that every variant accepts; the compiled kernel keeps none of them."""
    import cutlass.operators as ops

    a, b, d = (getattr(torch, TORCH_NAMES[t]) for t in (variant.a, variant.b, variant.d))
    batch = (2,) if variant.batched else ()
    m, n, k = 256, 512, 1024
    of_a: Any = torch.empty((*batch, m, k), dtype=a)
    of_b: Any = torch.empty((*batch, n, k), dtype=b).transpose(-1, -2)
    if variant.scaling != "none":
        of_a, of_b = (_scaled(torch, variant, x, rows, k) for x, rows in ((of_a, m), (of_b, n)))
    return ops.GemmArguments(
        A=of_a,
        B=of_b,
        out=torch.empty((*batch, m, n), dtype=d),
        accumulator_type=getattr(torch, TORCH_NAMES[variant.accumulator]),
    )


def _grouped_arguments(torch: Any, variant: Variant) -> Any:
    """The same of a grouped GEMM, with groups of no matter what rows."""
    import cutlass.operators as ops

    a, b, d = (getattr(torch, TORCH_NAMES[t]) for t in variant.elements)
    groups, m, n, k = 3, 256, 512, 1024
    return ops.IndexPtrGroupedGemmArguments(
        A=torch.empty((m, k), dtype=a),
        B=torch.empty((groups, n, k), dtype=b).transpose(-1, -2),
        out=torch.empty((m, n), dtype=d),
        accumulator_type=getattr(torch, TORCH_NAMES[variant.accumulator]),
        offsets=torch.zeros(groups, dtype=torch.int32),
        offsets_along="m",
    )


def _scaled(torch: Any, variant: Variant, x: Any, rows: int, k: int) -> Any:
    """An operand of the Operator API with scales of blocks along K."""
    from cutlass.operators.arguments import ScaledOperand, ScaleMode, ScaleSwizzleMode

    scaling = SCALINGS[variant.scaling]
    mode, swizzle = ScaleMode((1, 1, scaling.k)), ScaleSwizzleMode.Swizzle32x4x4
    count = ScaledOperand.numel_scale((1, rows, k), mode, swizzle)
    return ScaledOperand(x, torch.empty(count, dtype=getattr(torch, TORCH_NAMES[scaling.dtype])), mode, swizzle)


def _find(variant: Variant, args: Any) -> Any:
    """The one operator whose metadata says what `variant` says."""
    import cutlass.operators as ops

    installed = metadata.version(DISTRIBUTION)
    if installed != VERSION:
        raise ProviderError(f"{DISTRIBUTION} {installed} is installed, this provider was made for {VERSION}")
    wanted = _wanted(variant)
    found = ops.get_operators(
        args, metadata_filter=lambda m: _found(m) == wanted, target_sm=variant.target.removeprefix("sm_")
    )
    if len(found) != 1:
        names = [o.metadata.operator_name for o in found]
        raise ProviderError(f"{DISTRIBUTION} {installed} has {len(found)} operators for {variant.name()}: {names}")
    return found[0]


def _wanted(variant: Variant) -> tuple[Any, ...]:
    """The operator that `variant` describes: its class, and its design in the order of `_DESIGN`."""
    class_name, tma_store = _OPERATORS[variant.family]
    options = variant.options
    m, n, k = (options[f"tile_{mode}"] for mode in "mnk")
    tile = (m, n, k)
    if variant.family == "sm100_tgv":
        tile = (n, m, k)  # swap-AB: its first extent tiles the weights
    if variant.family == "sm90_static_persistent":
        tile = (m, n, 64)  # it says 64 for every element type; the kernel derives the real depth
    cluster = (options.get("cluster_m", 1), options.get("cluster_n", 1), 1)
    fallback = (options["fallback_m"], options["fallback_n"], 1) if "fallback_m" in options else None
    two_cta = options.get("two_cta", None if tma_store is None else variant.family == "sm100_block_scaled")
    scheduler = _SCHEDULERS[options.get("scheduler")]
    return class_name, tile, cluster, fallback, options.get("stages"), two_cta, tma_store, scheduler


def _found(operator: Any) -> tuple[Any, ...]:
    """The same of an operator's metadata."""
    design = [getattr(operator.design, name, None) for name in _DESIGN]
    return operator.operator_class.__name__, *design[:-1], type(design[-1]).__name__


def _set_tile(kernel: Any, variant: Variant) -> None:
    """Give an sm80 kernel the tile that its operator states; the operator's constructor drops it and leaves 128x128x32.

    The kernel derives everything else from these attributes when it is traced.
    """
    tile = tuple(variant.integer(f"tile_{mode}") for mode in "mnk")
    if kernel.cta_tiler != (128, 128, 32) or kernel.num_stages != variant.integer("stages"):
        raise ProviderError(f"the sm80 kernel has an unexpected tile {kernel.cta_tiler}; expected 128x128x32")
    kernel.cta_tiler = tile
    kernel.bM, kernel.bN, kernel.bK = tile


class _MaxActiveClusters(int):
    """What the stand-in for the device answered, so that it can be found among an operator's compile arguments."""

    cluster_size: int


class _HardwareInfo:
    """Stands in for `cutlass.utils.HardwareInfo`: answers for a target, with no driver."""

    def __init__(self, multiprocessors: int) -> None:
        self._multiprocessors = multiprocessors

    def get_max_active_clusters(self, cluster_size: int) -> int:
        """An estimate; compiled code takes the number as an argument and does not keep this one."""
        answer = _MaxActiveClusters(self._multiprocessors // cluster_size)
        answer.cluster_size = cluster_size
        return answer


@contextlib.contextmanager
def _device_of(target: str) -> Iterator[None]:
    """Answer questions about the device for `target`, in this process, for as long as the context lasts."""
    import cutlass.utils

    real = cutlass.utils.HardwareInfo
    cutlass.utils.HardwareInfo = lambda *_: _HardwareInfo(TARGETS[target].multiprocessors)
    try:
        yield
    finally:
        cutlass.utils.HardwareInfo = real


def _capture(operator: Any, args: Any, variant: Variant) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function and the argument values that `operator` would compile, taken just before it does."""
    captured: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def cute_compile(entry: Callable[..., None], *values: Any, target_sm: Any = None) -> None:
        captured.append((entry, values))

    operator.cute_compile = cute_compile
    with _device_of(variant.target):
        operator.compile(args, target_sm=variant.target.removeprefix("sm_"))
    if len(captured) != 1:
        raise ProviderError(f"the operator for {variant.name()} compiles {len(captured)} functions, expected one")
    return captured[0]


def _wrap(variant: Variant, entry: Callable[..., None], values: tuple[Any, ...], args: Any) -> Buildable:
    """A host function over A (M, K), B (N, K), D (M, N), or the tensors of a grouped GEMM, the device's cluster counts
    and a stream, calling `entry`."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    tensors = {id(args.A.tensor): "a", id(args.B.tensor): "b", id(args.out.tensor): "d"}
    grouped = variant.operation == "grouped_gemm"
    if grouped:
        tensors[id(args.offsets.tensor)] = "ends"
    stream_type = type(make_fake_stream())
    roles: list[str | None] = []
    clusters: list[DeviceArgument] = []
    for value in values:
        if id(value) in tensors:
            roles.append(tensors[id(value)])
        elif isinstance(value, _MaxActiveClusters):
            size = value.cluster_size
            clusters.append(DeviceArgument(f"max_active_clusters_{size}", "max_active_clusters", size))
            roles.append(clusters[-1].name)
        elif isinstance(value, stream_type):
            roles.append("stream")
        else:
            roles.append(None)
    if sorted(r for r in roles if r and not r.startswith("max")) != sorted([*tensors.values(), "stream"]):
        raise ProviderError(f"the operator for {variant.name()} takes unexpected arguments: {roles}")

    symbols, tree = (grouped_tensors if grouped else gemm_tensors)(variant)
    tree += [*clusters, StreamArgument("stream")]

    def call(a: Any, b: Any, d: Any, stream: Any, counts: tuple[Any, ...], ends: Any = None) -> None:
        modes = [0, 2, 1] if variant.batched or grouped else [1, 0]
        b_as_k_by_n = cute.make_tensor(b.iterator, cute.select(b.layout, modes))
        given = {"a": a, "b": b_as_k_by_n, "d": d, "ends": ends, "stream": stream}
        given |= {argument.name: count for argument, count in zip(clusters, counts, strict=True)}
        entry(*(given[role] if role else value for role, value in zip(roles, values, strict=True)))

    # The DSL reads a function's own parameters, so there is one function for each number of cluster counts.
    @cute.jit
    def gemm(a: Any, b: Any, d: Any, stream: Any) -> None:
        call(a, b, d, stream, ())

    @cute.jit
    def gemm_clusters(a: Any, b: Any, d: Any, count: Any, stream: Any) -> None:
        call(a, b, d, stream, (count,))

    @cute.jit
    def gemm_two_clusters(a: Any, b: Any, d: Any, count: Any, fallback_count: Any, stream: Any) -> None:
        call(a, b, d, stream, (count, fallback_count))

    @cute.jit
    def grouped_gemm(a: Any, b: Any, ends: Any, d: Any, count: Any, stream: Any) -> None:
        call(a, b, d, stream, (count,), ends)

    function = grouped_gemm if grouped else (gemm, gemm_clusters, gemm_two_clusters)[len(clusters)]
    return Buildable(function, stand_ins(tree, symbols), tree, symbols)


def _wrap_block_scaled(variant: Variant, entry: Callable[..., None], values: tuple[Any, ...], args: Any) -> Buildable:
    """A host function over A (M, K), B (N, K), D (M, N), all without gaps, tiles of scales, the device's cluster count
    and a stream, calling `entry`, which takes addresses and extents."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    places = [i for i, value in enumerate(values) if isinstance(value, _MaxActiveClusters)]
    streams = [i for i, value in enumerate(values) if isinstance(value, type(make_fake_stream()))]
    extents = [i for i, value in enumerate(values) if isinstance(value, tuple) and len(value) == 4]
    addresses = [i for i, value in enumerate(values) if hasattr(value, "memspace")]
    if [len(found) for found in (places, streams, extents, addresses)] != [1, 1, 1, 5]:
        raise ProviderError(f"the operator for {variant.name()} takes unexpected arguments: {values}")
    size = values[places[0]].cluster_size

    symbols, tensors = gemm_tensors(variant)
    packed = {"lda": "k", "ldb": "k", "ldd": "n"}
    tree: list[Argument] = [
        a._replace(strides=tuple(packed.get(str(s), s) for s in a.strides))
        for a in tensors
        if isinstance(a, TensorArgument)
    ]
    symbols = {name: symbol for name, symbol in symbols.items() if name not in packed}
    tree += [DeviceArgument("max_active_clusters", "max_active_clusters", size), StreamArgument("stream")]

    @cute.jit
    def gemm(a: Any, b: Any, d: Any, scale_a: Any, scale_b: Any, count: Any, stream: Any) -> None:
        given = list(values)
        for place, x in zip(addresses, (a, b, scale_a, scale_b, d), strict=True):
            given[place] = x.iterator
        given[extents[0]] = cute.size(a, mode=[0]), cute.size(b, mode=[0]), cute.size(a, mode=[1]), 1
        given[places[0]], given[streams[0]] = count, stream
        entry(*given)

    return Buildable(gemm, stand_ins(tree, symbols), tree, symbols)
