"""Block-scaled GEMMs of the Operator API, over A, B and D without gaps and tiles of scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.numbers.dtypes import TORCH_NAMES
from runtime.numbers.scaling import SCALINGS
from runtime.program.arguments import Argument, DeviceArgument, StreamArgument, TensorArgument

from ...search.provider import Buildable, ProviderError
from ...search.variants import Variant
from ..arguments import stand_ins
from ..gemm_arguments import gemm_tensors
from .operator import Design, MaxActiveClusters, capture, design_of, find

# The operator class, and whether its kernel stores D with TMA.
OPERATORS = {"sm100_block_scaled": ("PersistentDenseBlockScaledGemmOperator", True)}


def build(variant: Variant) -> Buildable:
    """Prepare `variant`; see `CutlassOperators.build`."""
    import torch

    args = arguments(torch, variant)
    entry, values = capture(find(variant, args, design(variant)), args, variant)
    return _wrap(variant, entry, values)


def design(variant: Variant) -> Design:
    """The operator that `variant` describes, whose tiles pairs of CTAs share."""
    return design_of(variant, *OPERATORS[variant.family])._replace(use_2cta_mma=True)


def arguments(torch: Any, variant: Variant) -> Any:
    """Operator API arguments of some extents that every variant accepts; the compiled kernel keeps none of them."""
    import cutlass.operators as ops

    a, b, d = (getattr(torch, TORCH_NAMES[t]) for t in (variant.a, variant.b, variant.d))
    m, n, k = 256, 512, 1024
    return ops.GemmArguments(
        A=_scaled(torch, variant, torch.empty((m, k), dtype=a), m, k),
        B=_scaled(torch, variant, torch.empty((n, k), dtype=b).transpose(-1, -2), n, k),
        out=torch.empty((m, n), dtype=d),
        accumulator_type=getattr(torch, TORCH_NAMES[variant.accumulator]),
    )


def _scaled(torch: Any, variant: Variant, x: Any, rows: int, k: int) -> Any:
    """An operand of the Operator API with scales of blocks along K."""
    from cutlass.operators.arguments import ScaledOperand, ScaleMode, ScaleSwizzleMode

    scaling = SCALINGS[variant.scaling]
    mode, swizzle = ScaleMode((1, 1, scaling.k)), ScaleSwizzleMode.Swizzle32x4x4
    count = ScaledOperand.numel_scale((1, rows, k), mode, swizzle)
    return ScaledOperand(x, torch.empty(count, dtype=getattr(torch, TORCH_NAMES[scaling.dtype])), mode, swizzle)


def _wrap(variant: Variant, entry: Callable[..., None], values: tuple[Any, ...]) -> Buildable:
    """A host function over A (M, K), B (N, K), D (M, N), all without gaps, tiles of scales, the device's cluster count
    and a stream, calling `entry`, which takes addresses and extents."""
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream

    places = [i for i, value in enumerate(values) if isinstance(value, MaxActiveClusters)]
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
