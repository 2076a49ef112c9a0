"""What happens to the partial accumulators of 8-bit products: f32 registers take them over, times scales of blocks.

Hopper's tensor core keeps about 14 bits of a sum of 8-bit products, so it accumulates a few stages only. Knows nothing
of stages and of who multiplies when.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from .plan import Plan


def scales_of_stage(plan: Plan) -> cute.Tensor:
    """Room in registers for what scales a thread's sums of one block of K: (`ScaleBlocks.scales`, halves, WGMMA atoms
    of 64 rows)."""
    return cute.make_rmem_tensor((plan.scale_blocks.scales, 2, plan.m_atoms), cutlass.Float32)


def choose(plan: Plan, scales: cute.Tensor, start: Any) -> list[list[list[Any]]]:
    """What scales a thread's sums in a part of a tile that begins `start` columns into a block of B, of the products
    in `scales` (`scales_of_stage`): by WGMMA atoms of 64 rows, halves, and then sub-blocks of each lane."""
    blocks = plan.scale_blocks

    def chosen(lane: int, sub_block: int, half: int, atom: int) -> Any:
        of_blocks = [scales[lane * blocks.blocks + block, half, atom] for block in range(blocks.blocks)]
        block = blocks.block_of(sub_block, start)
        if isinstance(block, int):
            return of_blocks[block]
        first, second = of_blocks
        return cutlass.select_(block > 0, second, first)

    each = [(lane, sub_block) for lane in range(blocks.lanes) for sub_block in range(blocks.sub_blocks)]
    return [[[chosen(*at, half, atom) for at in each] for half in range(2)] for atom in range(plan.m_atoms)]


def promote(
    plan: Plan, accumulators: cute.Tensor, partial: cute.Tensor, scales: Any, atoms: range, first: bool
) -> None:
    """Add the partial accumulators of `atoms` of 64 rows, each times its scale of `choose` if there are any, or begin
    with them if `first`."""
    each = cute.size(accumulators) // plan.m_atoms
    for atom in atoms:
        for i in range(each):
            at, x = atom * each + i, partial[(atom - atoms.start) * each + i]
            old = 0.0 if first else accumulators[at]
            if scales is None:
                accumulators[at] = _here("add.f32 $0, $1, $2;", old, x)
            else:
                lane, sub_block = plan.scale_blocks.of_sum(i // 4)
                scale = scales[atom][i // 2 % 2][lane * plan.scale_blocks.sub_blocks + sub_block]
                accumulators[at] = _here("fma.rn.f32 $0, $2, $3, $1;", old, x, scale)


def _here(code: str, *operands: Any) -> Any:
    """An instruction on f32 numbers that stays before any WGMMA that follows: else the compiler moves it behind those
    that reuse the registers of partial accumulators, copies these for it, and ptxas lets no products overlap."""
    values = [cutlass.Float32(x).ir_value() for x in operands]
    constraints = ",".join(["=f"] + ["f"] * len(values))
    return cutlass.Float32(llvm.inline_asm(T.f32(), values, code, constraints, has_side_effects=True))
