"""The mainloop of 8-bit types: the tensor core accumulates two stages, and f32 registers take its sums over.

There is one set of partial accumulators, of 64 rows. The consumer warp groups take turns by an ordered barrier: one
promotes while the other multiplies. `staged_mainloop` is that of scales of blocks. Knows nothing of the epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

from ..sizes import WGMMA_ROWS
from .mainloop import Mainloop, accumulators_of
from .pipeline import OrderedBarrier, PipelineState, advance, release
from .plan import Plan
from .promotion import promote
from .scheduler import KTiles


def partial_accumulators(plan: Plan, element: Any) -> cute.Tensor:
    """A thread's partial accumulators, in registers."""
    return accumulators_of(plan, element, WGMMA_ROWS * plan.atom_layout.rows)


@dataclass(frozen=True)
class OrderedMainloop:
    """A tile's first products are begun before the tile before is stored."""

    mainloop: Mainloop
    order: OrderedBarrier
    partial: cute.Tensor

    @cute.jit
    def begin_tile(self, state: PipelineState) -> PipelineState:
        """Begin a tile's first products; the state stays, as their stages are released later."""
        self._begin(state, 0)
        return state

    @cute.jit
    def multiply(self, accumulators: cute.Tensor, state: PipelineState, k_tiles: KTiles) -> PipelineState:
        """Accumulate all products of a tile, the first of which are under way; return the state behind them."""
        plan = self.mainloop.plan
        for atom in cutlass.range_constexpr(plan.m_atoms):
            if cutlass.const_expr(atom > 0):
                self._begin(state, atom)
            self._finish(state.stage, atom)
            promote(plan, accumulators, self.partial, None, range(atom, atom + 1), True)
        state = advance(plan, state, plan.promotion_interval)
        first, count = k_tiles
        for _ in cutlass.range(first + plan.promotion_interval, first + count, plan.promotion_interval, unroll=1):
            for atom in cutlass.range_constexpr(plan.m_atoms):
                self._begin(state, atom)
                self._finish(state.stage, atom)
                promote(plan, accumulators, self.partial, None, range(atom, atom + 1), False)
            state = advance(plan, state, plan.promotion_interval)
        return state

    @cute.jit
    def _begin(self, state: PipelineState, atom: cutlass.Constexpr) -> None:
        """Begin the products of an interval for one WGMMA atom of 64 rows, when the ordered barrier lets it."""
        mainloop = self.mainloop
        plan = mainloop.plan
        for k in cutlass.range_constexpr(plan.promotion_interval):
            stage, phase = state
            mma = mainloop.tiled_mma()
            cute.arch.mbarrier_wait(mainloop.pipeline.full + stage, phase)
            if cutlass.const_expr(k == 0):
                self.order.wait()
            warpgroup.fence()
            for k_atom in cutlass.range_constexpr(cute.size(mainloop.a, mode=[2])):
                mma.set(warpgroup.Field.ACCUMULATE, k > 0 or k_atom > 0)
                a = cute.append_ones(mainloop.a[(None, atom, k_atom, stage)], up_to_rank=2)
                cute.gemm(mma, self.partial, a, mainloop.b[(None, None, k_atom, stage)], self.partial)
            warpgroup.commit_group()
            state = advance(plan, state)
        self.order.arrive()

    @cute.jit
    def _finish(self, stage: cutlass.Int32, atom: cutlass.Constexpr) -> None:
        """Wait for the products of an interval for one atom, and release its stages after the last atom's."""
        mainloop = self.mainloop
        plan = mainloop.plan
        if cutlass.const_expr(atom < plan.m_atoms - 1):
            warpgroup.wait_group(0)
        else:
            for k in cutlass.range_constexpr(plan.promotion_interval):
                warpgroup.wait_group(plan.promotion_interval - 1 - k)
                release(plan, mainloop.pipeline.empty + stage, mainloop.cta)
                stage, _ = advance(plan, PipelineState(stage, cutlass.Int32(0)))
