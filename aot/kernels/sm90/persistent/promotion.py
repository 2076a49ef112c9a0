"""What happens to the partial accumulators of 8-bit products: f32 registers take them over, times scales of blocks.

Hopper's tensor core keeps about 14 bits of a sum of 8-bit products, so it accumulates a few stages only. Knows nothing
of stages and of who multiplies when.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from runtime.numbers.scaling import SCALE_BLOCK

from .epilogue_operands import EpilogueOperands
from .plan import Plan
from .scheduler import TileCoord


@dataclass(frozen=True)
class BlockScales:
    """What scales the products of `Plan.k_tile_multiple` blocks of K of one tile, in registers."""

    plan: Plan
    operands: EpilogueOperands
    coord: TileCoord
    products: list[Any]  # of scales: as `scales_of_stage` has them, for each block of K
    factors: list[Any]  # the scales themselves, of the next blocks: rows' and then columns'

    @classmethod
    def of(cls, plan: Plan, operands: EpilogueOperands, coord: TileCoord) -> BlockScales:
        """Those of the tile `coord`, not yet loaded."""
        columns = plan.scale_blocks.scales
        blocks = range(plan.k_tile_multiple)
        products = [scales_of_stage(plan) for _ in blocks]
        factors = [cute.make_rmem_tensor((2 * plan.m_atoms + columns,), cutlass.Float32) for _ in blocks]
        return cls(plan, operands, coord, products, factors)

    def fetch(self, first_k: Any) -> None:
        """Begin to load the scales of blocks of K, from `first_k` on."""
        plan, operands = self.plan, self.operands
        for k, factors in enumerate(self.factors):
            for atom in range(plan.m_atoms):
                for half in range(2):
                    row = operands.first_row(self.coord, atom) + operands.row + 8 * half
                    factors[2 * atom + half] = operands.scale_a_of_block(row, first_k + k)
            for i, column in enumerate(scaled_columns(plan, operands, self.coord)):
                factors[2 * plan.m_atoms + i] = operands.scale_b_of_block(column, first_k + k)

    def take_over(self) -> None:
        """Multiply what was loaded, here and not before."""
        for product, factors in zip(self.products, self.factors, strict=True):
            for atom in range(self.plan.m_atoms):
                for half in range(2):
                    for i in range(cute.size(product, mode=[0])):
                        pair = factors[2 * atom + half], factors[2 * self.plan.m_atoms + i]
                        product[i, half, atom] = _here("mul.f32 $0, $1, $2;", *pair)


def first_column(plan: Plan, operands: EpilogueOperands, coord: TileCoord) -> Any:
    """The first row of B that a warp group's part of a tile has, in the first lane of `Plan.scale_blocks`."""
    return operands.first_column(coord, 0) * (2 if operands.parts.interleaved else 1)


def scaled_columns(plan: Plan, operands: EpilogueOperands, coord: TileCoord) -> list[Any]:
    """A row of B in each block of `Plan.scale_blocks`."""
    blocks, first = plan.scale_blocks, first_column(plan, operands, coord)
    firsts = [first] if blocks.lanes == 1 else [first, operands.n // 2 + first]
    return [lane + block * SCALE_BLOCK for lane in firsts for block in range(blocks.blocks)]


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
