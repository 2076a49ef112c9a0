"""The grouped GEMM of 4-bit weights by mma.sync itself: its host function, and what a CTA does.

The package says how it works. Knows the parts' order and what they share, not how any of them works.
"""

from collections.abc import Mapping
from typing import Any

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from ...groups import add_up, allocate, tile_at
from ...w4.form import Form
from ..sizes import WARP
from ..w4 import views
from ..w4.epilogue import EpilogueOperands
from ..w4.loads import Operands, Work
from ..w4.tile import make_tile
from .plan import Plan


class GroupedW4:
    """The kernel for one set of choices (`choices.OPTIONS`) and one form."""

    __module__ = __package__  # part of the kernel's symbol, which tools find it by: the package, not this file

    def __init__(self, options: Mapping[str, Any], form: Form) -> None:
        self.plan = Plan.of(options, form)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        ends: cute.Tensor,
        d: cute.Tensor,
        scale_b: cute.Tensor,
        bias: cute.Tensor | None,
        max_active_clusters: cutlass.Int32,
        stream: Any,
    ) -> None:
        """Launch over A (M, K), B (groups, N, K) and scale_b as `runtime.numbers.weights` has them, group by group, the
        row of A that each group ends before, i32 (groups), D (M, columns), and bias (groups, N) if the form has it."""
        plan = self.plan
        b = cute.make_tensor(b.iterator, cute.select(b.layout, [1, 2, 0]))
        weights = views.codes_of(b), views.scales_of(plan.weights, b, scale_b)
        m, groups = cute.size(d, mode=[0]), cute.size(ends)
        tiles_along_n = cute.ceil_div(cute.size(b, mode=[0]), plan.tile_n)
        # Each group has a tile at most that is not full.
        most = (cute.ceil_div(m, plan.tile_m) + cutlass.min(groups, m)) * tiles_along_n
        self.kernel(a, *weights, ends, d, bias, tiles_along_n).launch(
            grid=[cutlass.min(most, max_active_clusters), 1, 1], block=[plan.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        a: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        ends: cute.Tensor,
        d: cute.Tensor,
        bias: cute.Tensor | None,
        tiles_along_n: cutlass.Int32,
    ) -> None:
        """Every tile of D that falls to this CTA."""
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        smem = cutlass.memory.SmemAllocator()
        block = smem.allocate_array(cutlass.Uint8, plan.tile_bytes, byte_alignment=128)
        groups, count = allocate(smem), cute.size(ends)
        if thread < WARP:
            add_up(plan.tile_m, False, groups, ends, cute.size(d, mode=[0]), tiles_along_n)
        cute.arch.sync_threads()
        for index in cutlass.range(first, groups.tiles[count], step, unroll=1):
            tile = tile_at(plan.tile_m, False, groups, count, index)
            row = tile.begin + tile.along_m * plan.tile_m
            work = Work(row, tile.end - row, tile.along_n * plan.slabs)
            of_group = Operands(a, codes[None, None, None, tile.group], scales[None, None, tile.group])
            into = EpilogueOperands(d, _of_group(bias, tile.group), None, None)
            make_tile(plan, of_group, into, block, work, _anew(thread))
            cute.arch.sync_threads()  # all have stored, so the next tile's stages can take the sums' place


def _anew(thread: Any) -> Any:
    """The same number, of which the compiler does not know that it is: else it works out before the first tile where a
    thread's accesses are in any, and keeps that in twice as many registers as a tile takes."""
    return cutlass.Int32(
        llvm.inline_asm(T.i32(), [cutlass.Int32(thread).ir_value()], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
    )


def _of_group(bias: cute.Tensor | None, group: Any) -> Any:
    """A group's bias, if the form has any."""
    return None if bias is None else bias[group, None]
