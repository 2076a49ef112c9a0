"""Layers in fp8 for few tokens, whose activations kernels quantise as they load them: what a manifest asks for besides
the product of quantised activations, which serves more tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from runtime.program.operation import OVERLAPS

from ..search.unserved import variants
from .manifest import Gemm

# Up to so many tokens one kernel was faster than two on an H100: docs/kernels/sm90_small_m.md.
MOST_TOKENS = 16
_SCALINGS = {"block": "block_weight", "row_column": "column_weight"}


def with_few_tokens(gemms: Iterable[Gemm], targets: Sequence[str]) -> Iterator[Gemm]:
    """GEMMs, and behind each in fp8 with scales of blocks, or of tokens and channels, the one of few tokens, if one of
    `targets` has kernels for it: `few` is added to its name. Servers' weights are not written meanwhile, so it may
    overlap with the kernel before."""
    for gemm in gemms:
        yield gemm
        s = gemm.signature
        scaling = _SCALINGS.get(s.scaling)
        if scaling is None or s.b_major != "k" or s.batch > 1:
            continue
        way = dataclasses.replace(s, a=s.d, scaling=scaling, overlap=OVERLAPS[-1])
        few = tuple(m for m in gemm.tokens if m <= MOST_TOKENS)
        if few and any(variants(target, way) for target in targets):
            traffic = tuple((m, seen) for m, seen in gemm.traffic if m <= MOST_TOKENS)
            yield dataclasses.replace(gemm, name=f"{gemm.name}.few", signature=way, tokens=few, traffic=traffic)
