"""Plain GEMMs of the Operator API, over A (M, K), B (N, K) and D (M, N), each with a free leading stride."""

from __future__ import annotations

from typing import Any

from runtime.numbers.dtypes import TORCH_NAMES
from runtime.program.arguments import StreamArgument

from ...search.provider import Buildable, ProviderError
from ...search.variants import Variant
from ..arguments import stand_ins
from ..gemm_arguments import gemm_tensors
from .operator import Design, Wrapped, capture, design_of, find

# The operator class behind each family, and whether its kernel stores D with TMA.
OPERATORS = {
    "sm80_tensorop": ("Sm80TensorOpGemmOperator", None),
    "sm90_static_persistent": ("Sm90StaticPersistentGemmOperator", None),
    "sm100_persistent": ("PersistentDenseGemmOperator", True),
    "sm100_preferred_cluster": ("PersistentDenseGemmPreferredClusterOperator", True),
    "sm100_tgv": ("TgvGemmOperator", False),
    "sm107_dense": ("Sm107DenseGemmOperator", True),
}


def build(variant: Variant) -> Buildable:
    """Prepare `variant`; see `CutlassOperators.build`."""
    import torch

    args = arguments(torch, variant)
    operator = find(variant, args, design(variant))
    if variant.family == "sm80_tensorop":
        _set_tile(operator.impl, variant)
    entry, values = capture(operator, args, variant)
    return _wrap(variant, Wrapped(variant, entry, values, tensors_of(args)))


def design(variant: Variant) -> Design:
    """The operator that `variant` describes."""
    found = design_of(variant, *OPERATORS[variant.family])
    m, n, k = found.tile_shape
    if variant.family == "sm100_tgv":
        return found._replace(tile_shape=(n, m, k))  # swap-AB: its first extent tiles the weights
    if variant.family == "sm107_dense" and found.use_2cta_mma:
        return found._replace(tile_shape=(m // 2, n, k))  # a CTA's part of the tile that two share
    if variant.family == "sm90_static_persistent":
        # It says 64 for every element type; the kernel derives the real depth.
        return found._replace(tile_shape=(m, n, 64))
    return found


def arguments(torch: Any, variant: Variant) -> Any:
    """Operator API arguments of some extents that every variant accepts; the compiled kernel keeps none of them.

    Small tensors on the CPU: torch's fake ones would do, but importing them takes most of a second.
    """
    import cutlass.operators as ops

    a, b, d = (getattr(torch, TORCH_NAMES[t]) for t in (variant.a, variant.b, variant.d))
    batch = (2,) if variant.batched else ()
    m, n, k = 4096, 4096, 256
    return ops.GemmArguments(
        A=torch.empty((*batch, m, k), dtype=a),
        B=torch.empty((*batch, n, k), dtype=b).transpose(-1, -2),
        out=torch.empty((*batch, m, n), dtype=d),
        accumulator_type=getattr(torch, TORCH_NAMES[variant.accumulator]),
    )


def tensors_of(args: Any) -> dict[int, str]:
    """What A, B and D of these arguments are called, by the identity of what an operator passes on."""
    return {id(args.A.tensor): "a", id(args.B.tensor): "b", id(args.out.tensor): "d"}


def _set_tile(kernel: Any, variant: Variant) -> None:
    """Give an sm80 kernel the tile that its operator states; the operator's constructor drops it and leaves 128x128x32.

    The kernel derives everything else from these attributes when it is traced.
    """
    tile = tuple(variant.integer(f"tile_{mode}") for mode in "mnk")
    if kernel.cta_tiler != (128, 128, 32) or kernel.num_stages != variant.integer("stages"):
        raise ProviderError(f"the sm80 kernel has an unexpected tile {kernel.cta_tiler}; expected 128x128x32")
    kernel.cta_tiler = tile
    kernel.bM, kernel.bN, kernel.bK = tile


def _wrap(variant: Variant, entry: Wrapped) -> Buildable:
    """A host function over A (M, K), B (N, K), D (M, N), the device's cluster counts and a stream, calling `entry`."""
    from cutlass import cute

    symbols, tree = gemm_tensors(variant)
    tree += [*entry.clusters, StreamArgument("stream")]

    def taken(x: Any) -> Any:
        """A matrix as `entry` takes it, which for Rubin is a batch."""
        if variant.batched or variant.family != "sm107_dense":
            return x
        return cute.make_tensor(x.iterator, cute.prepend(x.layout, cute.make_layout(1), up_to_rank=3))

    def call(a: Any, b: Any, d: Any, stream: Any, counts: tuple[Any, ...]) -> None:
        b_as_k_by_n = cute.make_tensor(b.iterator, cute.select(b.layout, [0, 2, 1] if variant.batched else [1, 0]))
        entry(counts, a=taken(a), b=taken(b_as_k_by_n), d=taken(d), stream=stream)

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

    function = (gemm, gemm_clusters, gemm_two_clusters)[len(entry.clusters)]
    return Buildable(function, stand_ins(tree, symbols), tree, symbols)
