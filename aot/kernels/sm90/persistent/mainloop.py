"""The mainloop of a consumer warp group: WGMMA over the stages of a tile, each released once it has been read.

Accumulates in the tensor core all along, which is right for 16-bit types; `promoted_mainloop` has the others. Knows
nothing of tiles' coordinates, and nothing of the epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ..sizes import WARP_GROUP, WGMMA_ROWS
from .operands import major_of_b, multiplied_rows
from .pipeline import ClusterCta, Pipeline, PipelineState, release
from .plan import Plan


@dataclass(frozen=True)
class Mainloop:
    """WGMMA's operands in all stages, and how they come and go. A and B are those of WGMMA's M and N sides."""

    plan: Plan
    pipeline: Pipeline
    cta: ClusterCta
    element: Any
    a: Any  # descriptors: (instruction, atoms along M, atoms along K, stages)
    b: Any

    @classmethod
    def of(
        cls, plan: Plan, pipeline: Pipeline, cta: ClusterCta, rows: cute.Tensor, columns: cute.Tensor, group: Any
    ) -> Mainloop:
        """The mainloop of consumer warp group `group` over stages of rows and columns in shared memory."""
        mma = tiled_mma(plan, rows.element_type)
        # Descriptors are the warp group's, so its first thread stands for all.
        mine = mma.get_slice(0 if plan.pingpong else group * WARP_GROUP)
        rows = multiplied_rows(plan, rows)
        of_rows = mine.partition_A(rows)
        if plan.pairs_atoms and plan.atom_layout.rows > 1:  # the warp group's atoms follow each other
            part = cute.local_tile(rows, (plan.rows // plan.atom_layout.rows, *rows.shape[1:]), (group, 0, 0))
            of_rows = tiled_mma(plan, rows.element_type, one=True).get_slice(0).partition_A(part)
        a = mma.make_fragment_A(of_rows)
        return cls(plan, pipeline, cta, rows.element_type, a, mma.make_fragment_B(mine.partition_B(columns)))

    def tiled_mma(self) -> cute.TiledMma:
        """One of its own for each use: what is set in it must not outlive a loop's or a branch's body."""
        return tiled_mma(self.plan, self.element)

    @cute.jit
    def multiply(self, accumulators: cute.Tensor, state: PipelineState, count: Any, hand_over: Any) -> PipelineState:
        """Accumulate the products of `count` stages, from zero. The last stage is still being read on return.

        Once all are under way, `hand_over`, a `HandOver` or None, lets the other warp group through. Behind the loop
        the compiler would put that after all that has nothing to wait for.
        """
        plan = self.plan
        stage, phase = state
        previous = stage
        for k in cutlass.range(count, unroll=1):
            self.multiply_stage(accumulators, PipelineState(stage, phase), k > 0)
            if cutlass.const_expr(plan.pingpong):  # noqa: SIM102  # the other is of run time
                if (k == count - 1) & hand_over.wanted:
                    hand_over.arrive()
            warpgroup.wait_group(1)
            if k > 0:
                release(plan, self.pipeline.empty + previous, self.cta)
            previous = stage
            stage += 1
            if stage == plan.stages:
                stage = cutlass.Int32(0)
                phase ^= 1
        return PipelineState(stage, phase)

    @cute.jit
    def multiply_stage(self, accumulators: cute.Tensor, state: PipelineState, accumulate: Any) -> None:
        """Begin to multiply what a stage holds, when it is full."""
        stage, phase = state
        mma = self.tiled_mma()
        cute.arch.mbarrier_wait(self.pipeline.full + stage, phase)
        warpgroup.fence()
        for k_atom in cutlass.range_constexpr(cute.size(self.a, mode=[2])):
            where = (None, None, k_atom, stage)
            mma.set(warpgroup.Field.ACCUMULATE, accumulate if cutlass.const_expr(k_atom == 0) else True)
            cute.gemm(mma, accumulators, self.a[where], self.b[where], accumulators)
        warpgroup.commit_group()

    @cute.jit
    def finish(self, stage: cutlass.Int32) -> None:
        """Wait for all products, and release the last stage before `stage`."""
        warpgroup.wait_group(0)
        self.release_before(stage, 1)

    @cute.jit
    def release_before(self, stage: cutlass.Int32, back: cutlass.Constexpr) -> None:
        """Release the stage `back` stages before `stage`."""
        at = stage - back
        at = at + self.plan.stages if at < 0 else at
        self.release_stage(at)

    def release_stage(self, stage: Any) -> None:
        """Say that this warp has read a stage."""
        release(self.plan, self.pipeline.empty + stage, self.cta)


def tiled_mma(plan: Plan, element: Any, one: bool = False) -> cute.TiledMma:
    """WGMMA by the warp groups that share a tile, or by `one` of them, for A and B of type `element`."""
    k, smem = OperandMajorMode.K, warpgroup.OperandSource.SMEM
    columns = plan.columns // plan.atom_layout.columns
    if element.width == 8:
        op: Any = warpgroup.MmaF8Op(element, element, cutlass.Float32, (WGMMA_ROWS, columns, 32), smem, k, k)
    else:
        op = warpgroup.MmaF16BF16Op(element, cutlass.Float32, (WGMMA_ROWS, columns, 16), smem, k, major_of_b(plan))
    return cute.make_tiled_mma(cute.make_mma_atom(op), (1, 1, 1) if one else (*plan.atom_layout, 1))


def accumulators_of(plan: Plan, element: Any, rows: int) -> cute.Tensor:
    """A thread's accumulators, in registers, of `rows` rows and all columns of a tile."""
    return cute.make_rmem_tensor(tiled_mma(plan, element).partition_shape_C((rows, plan.columns)), cutlass.Float32)
