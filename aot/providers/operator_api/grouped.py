"""Grouped GEMMs of the Operator API, over A (M, K), B (groups, N, K), where groups end, and D (M, N)."""

from __future__ import annotations

from typing import Any

from runtime.numbers.dtypes import TORCH_NAMES
from runtime.program.arguments import StreamArgument

from ...search.provider import Buildable
from ...search.variants import Variant
from ..arguments import stand_ins
from ..grouped_arguments import grouped_tensors
from .operator import Design, Wrapped, capture, design_of, find

OPERATORS = {"sm100_grouped": ("ContiguousOffset2D3DGemmDenseOperator", True)}  # and whether it stores D with TMA


def build(variant: Variant) -> Buildable:
    """Prepare `variant`; see `CutlassOperators.build`."""
    import torch

    args = arguments(torch, variant)
    entry, values = capture(find(variant, args, design(variant)), args, variant)
    tensors = {
        id(args.A.tensor): "a",
        id(args.B.tensor): "b",
        id(args.out.tensor): "d",
        id(args.offsets.tensor): "ends",
    }
    return _wrap(variant, Wrapped(variant, entry, values, tensors))


def design(variant: Variant) -> Design:
    """The operator that `variant` describes."""
    return design_of(variant, *OPERATORS[variant.family])


def arguments(torch: Any, variant: Variant) -> Any:
    """Operator API arguments of some extents that every variant accepts, with groups of no matter what rows."""
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


def _wrap(variant: Variant, entry: Wrapped) -> Buildable:
    """A host function over the tensors of a grouped GEMM, the device's cluster count and a stream, calling `entry`."""
    from cutlass import cute

    symbols, tree = grouped_tensors(variant)
    tree += [*entry.clusters, StreamArgument("stream")]

    @cute.jit
    def grouped_gemm(a: Any, b: Any, ends: Any, d: Any, count: Any, stream: Any) -> None:
        b_as_k_by_n = cute.make_tensor(b.iterator, cute.select(b.layout, [0, 2, 1]))
        entry((count,), a=a, b=b_as_k_by_n, ends=ends, d=d, stream=stream)

    return Buildable(grouped_gemm, stand_ins(tree, symbols), tree, symbols)
