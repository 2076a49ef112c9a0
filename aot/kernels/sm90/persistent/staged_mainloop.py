"""The mainloop of e4m3 with scales of blocks that wait in stages (`staged_scales`): one set of partial accumulators, of
64 rows, which takes the products of a stage for one atom of rows after the other.

A warp group promotes while the other one multiplies, as it comes: an ordered barrier made it slower. What is between
the last partial sum that is read and the next products is kept short: where these lie in shared memory, and whether
they have come, is found out while the products before are under way. Knows nothing of the epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.tcgen05 import int_to_smem_descriptor, smem_descriptor_to_int

from .mainloop import Mainloop
from .pipeline import PipelineState, advance
from .promotion import choose, promote, scales_of_stage
from .scheduler import KTiles


class _StageOperands(NamedTuple):
    """The low halves of the descriptors of A and B, of a stage's first products."""

    a: Any
    b: Any


@dataclass(frozen=True)
class StagedMainloop:
    """A tile's first products are begun before the tile before is stored, if there are registers for it."""

    mainloop: Mainloop
    partial: cute.Tensor
    staged: cute.Tensor  # what this thread reads of products of scales, (products, stage) in shared memory
    scales: cute.Tensor  # those of the stage that is being multiplied, in registers

    @classmethod
    def of(cls, mainloop: Mainloop, partial: cute.Tensor, staged: cute.Tensor) -> StagedMainloop:
        """The mainloop of a consumer warp group, whose thread reads `staged`."""
        return cls(mainloop, partial, staged, scales_of_stage(mainloop.plan))

    @cute.jit
    def begin_tile(self, state: PipelineState) -> PipelineState:
        """Begin a tile's first products; the state stays, as their stage is released later."""
        stage, phase = state
        cute.arch.mbarrier_wait(self.mainloop.pipeline.full + stage, phase)
        self._begin(self._operands(stage), 0)
        self._read_scales(stage)
        return state

    @cute.jit
    def multiply(self, accumulators: cute.Tensor, state: PipelineState, k_tiles: KTiles, start: Any) -> PipelineState:
        """Accumulate all products of a tile, the first of which are under way; return the state behind them. This warp
        group's part of the tile begins `start` columns into a block of B."""
        plan, full = self.mainloop.plan, self.mainloop.pipeline.full
        operands = self._operands(state.stage)
        scales = choose(plan, self.scales, start)
        for atom in cutlass.range_constexpr(plan.m_atoms):
            if cutlass.const_expr(atom > 0):
                self._begin(operands, atom)
            self._finish(state.stage, atom)
            promote(plan, accumulators, self.partial, scales, range(atom, atom + 1), True)
        stage, phase = advance(plan, state)
        a, b = self._operands(stage)
        ready = cute.arch.mbarrier_test_wait(full + stage, phase)
        first, count = k_tiles
        for _ in cutlass.range(first + 1, first + count, unroll=1):
            if not ready:
                cute.arch.mbarrier_wait(full + stage, phase)
            this = stage
            operands = _StageOperands(a, b)
            self._begin(operands, 0)
            self._read_scales(this)
            stage, phase = advance(plan, PipelineState(stage, phase))
            a, b = self._next_operands(operands, stage)
            scales = choose(plan, self.scales, start)
            for atom in cutlass.range_constexpr(plan.m_atoms):
                if cutlass.const_expr(atom > 0):
                    self._begin(operands, atom)
                self._finish(this, atom)
                if cutlass.const_expr(atom == plan.m_atoms - 1):
                    ready = cute.arch.mbarrier_test_wait(full + stage, phase)
                promote(plan, accumulators, self.partial, scales, range(atom, atom + 1), False)
        return PipelineState(stage, phase)

    @cute.jit
    def pass_over(self, state: PipelineState, k_tiles: KTiles) -> PipelineState:
        """Drop the first products of a tile, which are under way, and release all of its stages; return the state
        behind them."""
        plan = self.mainloop.plan
        self._finish(state.stage, plan.m_atoms - 1)
        stage, phase = advance(plan, state)
        first, count = k_tiles
        for _ in cutlass.range(first + 1, first + count, unroll=1):
            cute.arch.mbarrier_wait(self.mainloop.pipeline.full + stage, phase)
            self.mainloop.release_stage(stage)
            stage, phase = advance(plan, PipelineState(stage, phase))
        return PipelineState(stage, phase)

    def _read_scales(self, stage: Any) -> None:
        """Begin to read what scales the products of a stage."""
        read = cute.make_tensor(self.scales.iterator, self.mainloop.plan.staged_scales)
        cute.autovec_copy(self.staged[None, stage], read)

    def _operands(self, stage: Any) -> _StageOperands:
        """Where a stage's operands lie."""
        low = [
            cutlass.Int32(smem_descriptor_to_int(x[(None, 0, 0, stage)].iterator))
            for x in (self.mainloop.a, self.mainloop.b)
        ]
        return _StageOperands(*low)

    def _next_operands(self, operands: _StageOperands, stage: Any) -> _StageOperands:
        """Those of `stage`, which is the next one, or the first."""
        found = []
        for x, low, first in zip((self.mainloop.a, self.mainloop.b), operands, self._operands(0), strict=True):
            found.append(cutlass.select_(stage == 0, first, low + cute.crd2idx((0, 0, 0, 1), x.layout)))
        return _StageOperands(*found)

    @cute.jit
    def _begin(self, operands: _StageOperands, atom: cutlass.Constexpr) -> None:
        """Begin the products of a stage that is full for one WGMMA atom of 64 rows."""
        mainloop = self.mainloop
        mma = mainloop.tiled_mma()
        warpgroup.fence()
        for k_atom in cutlass.range_constexpr(cute.size(mainloop.a, mode=[2])):
            mma.set(warpgroup.Field.ACCUMULATE, k_atom > 0)
            a = cute.append_ones(_at(mainloop.a, operands.a, atom, k_atom), up_to_rank=2)
            cute.gemm(mma, self.partial, a, _at(mainloop.b, operands.b, None, k_atom), self.partial)
        warpgroup.commit_group()

    @cute.jit
    def _finish(self, stage: cutlass.Int32, atom: cutlass.Constexpr) -> None:
        """Wait for the products of an atom, and release the stage after the last one's."""
        warpgroup.wait_group(0)
        if cutlass.const_expr(atom == self.mainloop.plan.m_atoms - 1):
            self.mainloop.release_stage(stage)


def _at(fragment: cute.Tensor, low: Any, atom: int | None, k_atom: int) -> cute.Tensor:
    """The descriptors of an atom, or of all, in a stage whose first descriptor has the low half `low`."""
    first = smem_descriptor_to_int(fragment.iterator)
    high = first & cutlass.Int64(-1 << 32)
    offset = cute.crd2idx((0, atom or 0, k_atom, 0), fragment.layout)
    descriptor = high | (cutlass.Int64(low + offset) & cutlass.Int64((1 << 32) - 1))
    return cute.make_tensor(int_to_smem_descriptor(descriptor), fragment[(None, atom, k_atom, 0)].layout)
