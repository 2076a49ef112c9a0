"""GEMMs of the Operator API whose B, the weights, are integers that become the type of A on their way to the MMA.

The package has the integers on the MMA's M side, so A and B change places and D is stored transposed: a tile's rows of
D lie along the MMA's N. Weights of 8 bits have no scales. Those of 4 bits have one for each group along K, N of a group
side by side; torch tensors of theirs say nothing to the package, so their kernel is made like the one it offers for 8.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runtime.numbers.dtypes import DTYPES, TORCH_NAMES
from runtime.numbers.scaling import SCALINGS
from runtime.program.arguments import Argument, DeviceArgument, StreamArgument

from ...search.provider import Buildable
from ...search.variants import Variant
from ..arguments import stand_ins
from ..gemm_arguments import gemm_tensors
from .operator import Design, design_of, find

# The operator class, and whether its kernel stores D with TMA.
OPERATORS = {"sm100_mixed_input": ("MixedInputGemmOperator", True)}


def build(variant: Variant) -> Buildable:
    """Prepare `variant`; see `CutlassOperators.build`."""
    import torch

    # The package says where it has weights of 8 bits, which is not everywhere; those of 4 bits it has wherever it can.
    listed = replace(variant, target="sm_100a") if SCALINGS[variant.scaling].dtype else variant
    operator = find(listed, arguments(torch, variant), design(variant))
    return _wrap(variant, type(operator.impl), operator.metadata.design)


def design(variant: Variant) -> Design:
    """The operator that `variant` describes, whose first extent is along N."""
    found = design_of(variant, *OPERATORS[variant.family])
    (m, n, k), (cluster_m, cluster_n, _) = found.tile_shape, found.cluster_shape
    return found._replace(tile_shape=(n, m, k), cluster_shape=(cluster_n, cluster_m, 1))


def arguments(torch: Any, variant: Variant) -> Any:
    """Operator API arguments of some extents that every variant accepts, with weights of 8 bits."""
    import cutlass.operators as ops

    wide = getattr(torch, TORCH_NAMES[variant.a])
    m, n, k = 256, 512, 1024
    return ops.GemmArguments(
        A=torch.empty((n, k), dtype=torch.int8),
        B=torch.empty((m, k), dtype=wide).t(),
        out=torch.empty((m, n), dtype=wide).t(),
        accumulator_type=getattr(torch, TORCH_NAMES[variant.accumulator]),
    )


def _wrap(variant: Variant, kernel_class: Any, offered: Any) -> Buildable:
    """A host function over A (M, K), B (N, K), D (M, N), scales if there are any, the device's cluster count and a
    stream, calling a kernel of this class with the choices that are `offered`."""
    import cutlass
    from cutlass import cute

    group = SCALINGS[variant.scaling].k or 0
    kernel = kernel_class(
        scale_granularity_m=1 if group else 0,
        scale_granularity_k=group,
        acc_dtype=getattr(cutlass, DTYPES[variant.accumulator].dsl),
        use_2cta_instrs=offered.use_2cta_mma,
        mma_tiler_mnk=offered.tile_shape,
        cluster_shape_mn=offered.cluster_shape[:2],
        use_tma_store=offered.use_tma_store,
        shuffle_a=False,
        a_dtype=getattr(cutlass, DTYPES[variant.b].dsl),
    )
    symbols, tensors = gemm_tensors(variant)
    size = offered.cluster_shape[0] * offered.cluster_shape[1]
    clusters = DeviceArgument("max_active_clusters", "max_active_clusters", size)
    tree: list[Argument] = [*tensors, clusters, StreamArgument("stream")]

    def transposed(x: Any) -> Any:
        return cute.make_tensor(x.iterator, cute.select(x.layout, [1, 0]))

    @cute.jit
    def gemm(a: Any, b: Any, d: Any, count: Any, stream: Any) -> None:
        kernel(b, None, transposed(a), transposed(d), count, stream)

    @cute.jit
    def gemm_scaled(a: Any, b: Any, d: Any, scale_b: Any, count: Any, stream: Any) -> None:
        kernel(b, transposed(scale_b), transposed(a), transposed(d), count, stream)

    return Buildable(gemm_scaled if group else gemm, stand_ins(tree, symbols), tree, symbols)
