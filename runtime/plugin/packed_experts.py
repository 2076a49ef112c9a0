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
from .experts import OVERLAP, ExpertWeights, stack_problem

_MXFP4 = FORMATS["mxfp4_weight"]


@dataclass(frozen=True)
class Mxfp4Experts(ExpertWeights):
    """Experts in MXFP4: w13 (experts, 2N, K / 2) and w2 (experts, K, N / 2), two elements in each uint8, the first in
    the low bits, and their `scales` (experts, 2N, K / 32) and (experts, K, N / 32), ue8m0 in uint8."""

    def problem(self, lib: Library) -> str:
        """Why these are none of experts that kernels of `lib` compute; empty if they may be."""
        (experts, wide, units), down = self.w13.shape, tuple(self.w2.shape)
        if self.tokens != torch.bfloat16:
            return f"tokens are {self.tokens}, and kernels for weights in MXFP4 take bf16; serve with --dtype bfloat16"
        if wide % 4 or down != (experts, 2 * units, wide // 4):
            return f"packed weights of shapes {tuple(self.w13.shape)} and {down} are no gate, up and down"
        for name, weight, scale in zip(("gate and up", "down"), (self.w13, self.w2), self.scales, strict=True):
            (_, n, of_two), of = weight.shape, (*weight.shape[:2], 2 * weight.shape[2] // _MXFP4.group)
            if {weight.dtype, scale.dtype} != {torch.uint8} or tuple(scale.shape) != of or not scale.is_contiguous():
                return f"weights and scales of {name} are {weight.dtype}, {scale.dtype} {tuple(scale.shape)}, not uint8"
            if n % BLOCK_ROWS or 2 * of_two % _MXFP4.multiple:
                return f"N {n} and K {2 * of_two} of {name} are no multiples of {BLOCK_ROWS} and {_MXFP4.multiple}"
            if problem := stack_problem(lib, weight):
                return f"of {name}, {problem}"
        return self.bias_problem()

    def signatures(self, top_k: int, activation: str, global_experts: int) -> tuple[list[Any], list[Any], list[Any]]:
        """As those of other experts."""
        (experts, wide, units), d = self.w13.shape, dtype_name(self.tokens)
        k, (gate, down), of = 2 * units, self.epilogues(activation), (OVERLAP, _MXFP4.word)
        of_rows = [
            GroupedGemm(d, "e2m1", d, experts, wide, k, gate, *of),
            GroupedGemm(d, "e2m1", d, experts, k, wide // 2, down, *of),
        ]
        return self.of_tokens(top_k, k, global_experts), of_rows, []

    def check(self) -> None:
        """Read all scales.

        Raises:
            ArgumentError: a kernel would overflow.
        """
        for scale in self.scales:
            check_scales(scale, "mxfp4")

    def prepare(self) -> tuple[PreparedWeight, ...]:
        """Both as kernels read them, in the memory that they have; nothing else can read that from then on."""
        pairs = zip((self.w13, self.w2), self.scales, strict=True)
        return tuple(prepare_in_place(weight.data, scale.data, "mxfp4") for weight, scale in pairs)


@dataclass(frozen=True)
class Int4Experts(ExpertWeights):
    """Experts in int4: w13 and w2 of int32, as a `layout` of `runtime.torch.prepare_weight` has them, whose rows are of
    K: "awq", (experts, K, 2N / 8), or "gptq" and "gptq_v2", (experts, K / 8, 2N), and w2 alike; `scales` (experts, K /
    128, 2N) and (experts, N / 128, K) in bf16; and `zeros` (experts, K / 128, 2N / 8) and alike, or none."""

    layout: str = "gptq"
    zeros: tuple[torch.Tensor, ...] = ()

    @property
    def form(self) -> WeightFormat:
        """What kernels call such weights."""
        return FORMATS["int4_zero_weight" if self.zeros else "int4_weight"]

    def extents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """By the scales."""
        found = [(len(scale), scale.shape[2], scale.shape[1] * self.form.group) for scale in self.scales]
        return found[0], found[1]

    def problem(self, lib: Library) -> str:
        """As `Mxfp4Experts.problem`."""
        if self.tokens != torch.bfloat16:
            return f"tokens are {self.tokens}, and kernels for weights in int4 take bf16; serve with --dtype bfloat16"
        if any(scale.dim() != 3 for scale in self.scales):
            return "scales are not of experts, groups along K and rows"
        (experts, wide, k), down = self.extents()
        if wide % 2 or down != (experts, k, wide // 2):
            return (
                f"scales of shapes {tuple(self.scales[0].shape)} and {tuple(self.scales[1].shape)} fit no groups of 128"
            )
        of_zeros = self.zeros or (None, None)
        for name, weight, scale, zeros, (_, n, columns) in zip(
            ("gate and up", "down"), (self.w13, self.w2), self.scales, of_zeros, self.extents(), strict=True
        ):
            packed = (experts, columns, n // 8) if self.layout == "awq" else (experts, columns // 8, n)
            wanted = [(weight, torch.int32, packed), (scale, torch.bfloat16, tuple(scale.shape))]
            if zeros is not None:
                wanted.append((zeros, torch.int32, (experts, columns // self.form.group, n // 8)))
            for tensor, dtype, shape in wanted:
                if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape) or not tensor.is_contiguous():
                    return f"of {name}, a tensor is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}"
            if n % BLOCK_ROWS:
                return f"N {n} of {name} is no multiple of {BLOCK_ROWS}"
            if problem := stack_problem(lib, weight):
                return f"of {name}, {problem}"
        return self.bias_problem()

    def signatures(self, top_k: int, activation: str, global_experts: int) -> tuple[list[Any], list[Any], list[Any]]:
        """As those of other experts."""
        ((experts, wide, k), _), d = self.extents(), dtype_name(self.tokens)
        (gate, down), of = self.epilogues(activation), (OVERLAP, self.form.word)
        of_rows = [
            GroupedGemm(d, "u4", d, experts, wide, k, gate, *of),
            GroupedGemm(d, "u4", d, experts, k, wide // 2, down, *of),
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
