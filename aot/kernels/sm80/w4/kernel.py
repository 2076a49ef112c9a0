"""The GEMM of 4-bit weights by mma.sync itself: its host function, and what a CTA does.

Knows the parts' order and what they share, not how any of them works.
"""

from collections.abc import Mapping
from typing import Any

import cutlass
from cutlass import cute

from ...w4.form import Form
from . import views
from .epilogue import EpilogueOperands
from .loads import Operands, Work
from .plan import Plan
from .tile import make_tile


class W4:
    """The kernel for one set of choices (`choices.OPTIONS`) and one form."""

    __module__ = __package__  # part of the kernel's symbol, which tools find it by: the package, not this file

    def __init__(self, options: Mapping[str, Any], form: Form) -> None:
        self.plan = Plan.of(options, form)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        d: cute.Tensor,
        scale_b: cute.Tensor,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        scale_d: cute.Tensor | None,
        stream: Any,
    ) -> None:
        """Launch over A (M, K), D (M, N), B (N, K) and scale_b as `runtime.numbers.weights` has them, and what the
        form has besides."""
        plan = self.plan
        weights = views.codes_of(b), views.scales_of(plan.weights, b, scale_b)
        tiles_m = cute.ceil_div(cute.size(a, mode=[0]), plan.tile_m)
        tiles_n = cute.ceil_div(cute.size(b, mode=[0]), plan.tile_n)
        self.kernel(a, *weights, d, bias, residual, scale_d).launch(
            grid=[tiles_n, tiles_m, 1], block=[plan.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        a: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        d: cute.Tensor,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        scale_d: cute.Tensor | None,
    ) -> None:
        """One tile of D."""
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        tile_n, tile_m, _ = cute.arch.block_idx()
        first_token = tile_m * plan.tile_m
        work = Work(first_token, cute.size(d, mode=[0]) - first_token, tile_n * plan.slabs)
        block = cutlass.memory.SmemAllocator().allocate_array(cutlass.Uint8, plan.tile_bytes, byte_alignment=128)
        into = EpilogueOperands(d, bias, residual, scale_d)
        make_tile(plan, Operands(a, codes, scales), into, block, work, thread)
