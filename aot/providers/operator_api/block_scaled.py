"""Block-scaled GEMMs of the Operator API, over A, B and D without gaps and tiles of scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from runtime.numbers.dtypes import DTYPES, TORCH_NAMES
from runtime.numbers.scaling import SCALINGS
from runtime.program.arguments import Argument, DeviceArgument, StreamArgument, Symbol, TensorArgument

from ...search.provider import Buildable, ProviderError
from ...search.variants import Variant
from ..arguments import stand_ins
from ..gemm_arguments import gemm_tensors
from .operator import Design, MaxActiveClusters, capture, design_of, find
from .tensor_scale import with_tensor_scale

# The operator class, and whether its kernel stores D with TMA.
OPERATORS = {
    "sm100_block_scaled": ("PersistentDenseBlockScaledGemmOperator", True),
    "sm107_block_scaled": ("Sm107DenseBlockScaledGemmOperator", True),
}

MULTIPLE = 32  # what the kernels are compiled for N and K to be multiples of, in elements


def build(variant: Variant) -> Buildable:
    """Prepare `variant`; see `CutlassOperators.build`."""
    import torch

    args = arguments(torch, variant)
    operator = find(variant, args, design(variant))
    if SCALINGS[variant.scaling].tensor_scale:
        operator.impl = with_tensor_scale(operator.impl)
    entry, values = capture(operator, args, variant)
    return _wrap(variant, entry, values)


def design(variant: Variant) -> Design:
    """The operator that `variant` describes. All of Blackwell say that pairs of CTAs share tiles, true or not; those of
    Rubin say the tile of each CTA."""
    found = design_of(variant, *OPERATORS[variant.family])
    if variant.family == "sm100_block_scaled":
        return found._replace(use_2cta_mma=True)
    m, n, k = found.tile_shape
    return found._replace(tile_shape=(m // 2 if found.use_2cta_mma else m, n, k))


def arguments(torch: Any, variant: Variant) -> Any:
    """Operator API arguments of some extents that every variant accepts; the compiled kernel keeps none of them."""
    import cutlass.operators as ops

    def tensor(dtype: str, rows: int, columns: int) -> Any:
        return torch.empty((rows, columns // DTYPES[dtype].unit), dtype=getattr(torch, DTYPES[dtype].torch))

    m, n, k = 256, 512, 1024
    return ops.GemmArguments(
        A=_scaled(torch, variant, tensor(variant.a, m, k), m, k),
        B=_scaled(torch, variant, tensor(variant.b, n, k).transpose(-1, -2), n, k),
        out=tensor(variant.d, m, n),
        accumulator_type=getattr(torch, TORCH_NAMES[variant.accumulator]),
    )


def _scaled(torch: Any, variant: Variant, x: Any, rows: int, k: int) -> Any:
    """An operand of the Operator API with scales of blocks along K."""
    from cutlass.operators.arguments import ScaledOperand, ScaleMode, ScaleSwizzleMode

    scaling = SCALINGS[variant.scaling]
    mode, swizzle = ScaleMode((1, 1, scaling.k)), ScaleSwizzleMode.Swizzle32x4x4
    count = ScaledOperand.numel_scale((1, rows, k), mode, swizzle)
    return ScaledOperand(x, torch.empty(count, dtype=getattr(torch, DTYPES[scaling.dtype].torch)), mode, swizzle)


def _wrap(variant: Variant, entry: Callable[..., None], values: tuple[Any, ...]) -> Buildable:
    """A host function over A (M, K), B (N, K), D (M, N), all without gaps, tiles of scales, perhaps a factor of the
    whole product, the device's cluster counts and a stream, calling `entry`, which takes addresses and extents."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    places = [i for i, value in enumerate(values) if isinstance(value, MaxActiveClusters)]
    streams = [i for i, value in enumerate(values) if isinstance(value, type(make_fake_stream()))]
    extents = [i for i, value in enumerate(values) if isinstance(value, tuple) and len(value) == 4]
    addresses = [i for i, value in enumerate(values) if hasattr(value, "memspace")]
    clusters = 2 if "fallback_m" in variant.options else 1
    if [len(found) for found in (places, streams, extents, addresses)] != [clusters, 1, 1, 5]:
        raise ProviderError(f"the operator for {variant.name()} takes unexpected arguments: {values}")

    symbols, tensors = _packed(variant)
    sizes = [values[place].cluster_size for place in places]
    counts = [DeviceArgument(f"max_active_clusters_{size}", "max_active_clusters", size) for size in sizes]
    tree: list[Argument] = [*tensors, *counts, StreamArgument("stream")]
    kernel = cast(Any, entry)

    def call(given_tensors: tuple[Any, ...], given_counts: tuple[Any, ...], stream: Any) -> None:
        a, b, d, scale_a, scale_b, *factor = given_tensors
        given = list(values)
        for place, x in zip(addresses, (a, b, scale_a, scale_b, d), strict=True):
            given[place] = x.iterator
        for place, count in zip(places, given_counts, strict=True):
            given[place] = count
        given[extents[0]] = cute.size(a, mode=[0]), cute.size(b, mode=[0]), cute.size(a, mode=[1]), 1
        given[streams[0]] = stream
        if factor:
            (kernel.tensor_scale,) = factor
        entry(*given)
        if factor and not kernel.multiplies:
            raise ProviderError(
                f"the kernel of {variant.name()} does not multiply by the tensor scale that it is given"
            )

    @cute.jit
    def gemm(a: Any, b: Any, d: Any, *rest: Any) -> None:
        last = len(tensors) - 3
        call((a, b, d, *rest[:last]), rest[last:-1], rest[-1])

    return Buildable(gemm, stand_ins(tree, symbols), tree, symbols)


def _packed(variant: Variant) -> tuple[dict[str, Symbol], list[TensorArgument]]:
    """The symbols and tensors of a GEMM whose A, B and D have no gaps, and extents that kernels are compiled for."""
    symbols, tensors = gemm_tensors(variant)
    packed = {"lda": "k", "ldb": "k", "ldd": "n"}
    symbols = {name: symbol for name, symbol in symbols.items() if name not in packed}
    symbols |= {extent: Symbol(32, MULTIPLE) for extent in ("n", "k")}
    return symbols, [
        a._replace(strides=tuple(packed.get(str(s), s) for s in a.strides))
        for a in tensors
        if isinstance(a, TensorArgument)
    ]
