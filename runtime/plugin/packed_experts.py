"""Experts whose weights a server holds as a checkpoint has them in 4 bits, until they are prepared where they are.

Knows no server's modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..grouped_gemm import Signature as GroupedGemm
from ..numbers.weights import BLOCK_ROWS, FORMATS, WeightFormat
from ..program.tensor import dtype_name
from ..serve.library import Library
from ..torch.weights import PreparedWeight, check_scales, prepare_in_place
from .experts import NAMES, OVERLAP, ExpertWeights, stack_problem


@dataclass(frozen=True)
class PackedExperts(ExpertWeights):
    """Experts whose w13 and w2 are as a `layout` of `runtime.torch.prepare_weight` has them, with their `scales`, and
    their `zeros` or none."""

    layout: str = "mxfp4"
    zeros: tuple[torch.Tensor, ...] = ()

    @property
    def form(self) -> WeightFormat:
        """What kernels call such weights."""
        return FORMATS[
            "mxfp4_weight" if self.layout == "mxfp4" else "int4_zero_weight" if self.zeros else "int4_weight"
        ]

    def extents_problem(self) -> str:
        """Why kernels have no w13 and w2 of these extents; empty if they may."""
        (experts, wide, k), down = self.extents()
        if wide % 2 or down != (experts, k, wide // 2):
            return f"packed weights of extents {(experts, wide, k)} and {down} are no gate, up and down"
        for name, (_, n, columns) in zip(NAMES, self.extents(), strict=True):
            if n % BLOCK_ROWS or columns % self.form.multiple:
                return f"N {n} and K {columns} of {name} are no multiples of {BLOCK_ROWS} and {self.form.multiple}"
        return ""

    def tokens_problem(self) -> str:
        """Why no kernel takes these tokens; empty if some do."""
        if self.tokens == torch.bfloat16:
            return ""
        return f"tokens are {self.tokens}, and kernels for weights in 4 bits take bf16; serve with --dtype bfloat16"

    def signatures(self, top_k: int, activation: str, global_experts: int) -> tuple[list[Any], list[Any], list[Any]]:
        """As those of other experts."""
        ((experts, wide, k), _), d = self.extents(), dtype_name(self.tokens)
        (gate, down), codes, of = self.epilogues(activation), self.form.codes, (OVERLAP, self.form.word)
        of_rows = [
            GroupedGemm(d, codes, d, experts, wide, k, gate, *of),
            GroupedGemm(d, codes, d, experts, k, wide // 2, down, *of),
        ]
        return self.of_tokens(top_k, k, global_experts), of_rows, []

    def check(self) -> None:
        """Read all scales.

        Raises:
            ArgumentError: a kernel would overflow.
        """
        for scale in self.scales:
            check_scales(scale, self.layout)

    def prepare(self) -> tuple[PreparedWeight, ...]:
        """Both as kernels read them, in the memory that they have, but for scales with zero points; nothing else can
        read that from then on."""
        of = zip((self.w13, self.w2), self.scales, self.zeros or (None, None), strict=True)
        return tuple(
            prepare_in_place(weight.data, scale.data, self.layout, None if zeros is None else zeros.data)
            for weight, scale, zeros in of
        )


@dataclass(frozen=True)
class Mxfp4Experts(PackedExperts):
    """In MXFP4: w13 (experts, 2N, K / 2) and w2 (experts, K, N / 2), two elements in each uint8, the first in the low
    bits, and scales (experts, 2N, K / 32) and (experts, K, N / 32), ue8m0 in uint8."""

    def extents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """By the weights."""
        found = [(*weight.shape[:2], 2 * weight.shape[2]) for weight in (self.w13, self.w2)]
        return found[0], found[1]

    def problem(self, lib: Library) -> str:
        """Why these are none of experts that kernels of `lib` compute; empty if they may be."""
        if problem := self.tokens_problem() or self.extents_problem():
            return problem
        for name, weight, scale in zip(NAMES, (self.w13, self.w2), self.scales, strict=True):
            of = (*weight.shape[:2], 2 * weight.shape[2] // self.form.group)
            if {weight.dtype, scale.dtype} != {torch.uint8} or tuple(scale.shape) != of or not scale.is_contiguous():
                return f"weights and scales of {name} are {weight.dtype}, {scale.dtype} {tuple(scale.shape)}, not uint8"
            if problem := stack_problem(lib, weight):
                return f"of {name}, {problem}"
        return self.bias_problem()


@dataclass(frozen=True)
class Int4Experts(PackedExperts):
    """In int4: w13 and w2 of int32, in a layout whose rows are of K: "awq", (experts, K, 2N / 8), or "gptq" and
    "gptq_v2", (experts, K / 8, 2N), and w2 alike; scales (experts, K / 128, 2N) and (experts, N / 128, K) in bf16; and
    zeros (experts, K / 128, 2N / 8) and alike, or none."""

    def extents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """By the scales."""
        found = [(len(scale), scale.shape[2], scale.shape[1] * self.form.group) for scale in self.scales]
        return found[0], found[1]

    def problem(self, lib: Library) -> str:
        """As `Mxfp4Experts.problem`."""
        if any(scale.dim() != 3 for scale in self.scales):
            return "scales are not of experts, groups along K and rows"
        if problem := self.tokens_problem() or self.extents_problem():
            return problem
        of_zeros = self.zeros or (None, None)
        for name, weight, scale, zeros, (experts, n, k) in zip(
            NAMES, (self.w13, self.w2), self.scales, of_zeros, self.extents(), strict=True
        ):
            packed = (experts, k, n // 8) if self.layout == "awq" else (experts, k // 8, n)
            wanted = [(weight, torch.int32, packed), (scale, torch.bfloat16, tuple(scale.shape))]
            if zeros is not None:
                wanted.append((zeros, torch.int32, (experts, k // self.form.group, n // 8)))
            for tensor, dtype, shape in wanted:
                if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape) or not tensor.is_contiguous():
                    return f"of {name}, a tensor is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}"
            if problem := stack_problem(lib, weight):
                return f"of {name}, {problem}"
        return self.bias_problem()
