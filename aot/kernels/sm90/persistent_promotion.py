"""What `persistent.Persistent` does with the partial sums of 8-bit products: f32 registers take them over.

Hopper's tensor core keeps about 14 bits of a sum of 8-bit products, so it sums up a few stages only.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from .persistent_choices import Plan


def scales_of_blocks(plan: Plan, count: int) -> tuple[list[Any], list[Any]]:
    """Registers for what scales the products of `count` blocks of K: products of scales, for each block of 64 rows and
    each half of it, of each of `_first_columns`; and the scales themselves, rows' and then columns'."""
    columns = 2 if _by_gate(plan) else 1
    products = [cute.make_rmem_tensor((columns, 2, plan.blocks), cutlass.Float32) for _ in range(count)]
    return products, [cute.make_rmem_tensor((2 * plan.blocks + columns,), cutlass.Float32) for _ in range(count)]


def fetch(plan: Plan, later: list[Any], scaled: Any, first_k: Any) -> None:
    """Begin to load the scales of blocks of K, from `first_k` on. `scaled` is what is read from memory, and the tile's
    place."""
    fused, place = scaled
    for k, held in enumerate(later):
        for block in range(plan.blocks):
            for half in range(2):
                row = fused.first_row(place, block) + 8 * half
                held[2 * block + half] = fused.scale_a_of_block(row, first_k + k)
        for i, column in enumerate(_first_columns(plan, fused, place)):
            held[2 * plan.blocks + i] = fused.scale_b_of_block(column, first_k + k)


def take_over(plan: Plan, products: list[Any], later: list[Any]) -> None:
    """Multiply what was loaded, here and not before."""
    for product, held in zip(products, later, strict=True):
        for block in range(plan.blocks):
            for half in range(2):
                for i in range(cute.size(product, mode=[0])):
                    factors = held[2 * block + half], held[2 * plan.blocks + i]
                    product[i, half, block] = _here("mul.f32 $0, $1, $2;", *factors)


def _by_gate(plan: Plan) -> bool:
    """Whether gates are of another block of B than what they gate."""
    return plan.form.gated and "_interleaved" not in plan.form.epilogue


def _first_columns(plan: Plan, fused: Any, place: Any) -> list[Any]:
    """A column of each block of B that the tile has: one, or the gates' and the other one."""
    if _by_gate(plan):
        first = place[1] * plan.out_columns
        return [first, fused.extents[1] // 2 + first]
    return [place[1] * plan.columns]


def promote(plan: Plan, total: cute.Tensor, partial: cute.Tensor, scales: Any, blocks: range, first: bool) -> None:
    """Add partial sums of `blocks` of 64 rows to the total, each times its scales if there are any, or begin it."""
    each = cute.size(total) // plan.blocks
    for block in blocks:
        for i in range(each):
            at, x = block * each + i, partial[(block - blocks.start) * each + i]
            old = 0.0 if first else total[at]
            if scales is None:
                total[at] = _here("add.f32 $0, $1, $2;", old, x)
            else:  # gates come by turns with what they gate
                scale = scales[i // 4 % cute.size(scales, mode=[0]), i // 2 % 2, block]
                total[at] = _here("fma.rn.f32 $0, $2, $3, $1;", old, x, scale)


def _here(code: str, *operands: Any) -> Any:
    """An instruction on f32 numbers that stays before any WGMMA that follows: else the compiler moves it behind those
    that reuse the registers of partial sums, copies these for it, and ptxas lets no products overlap."""
    values = [cutlass.Float32(x).ir_value() for x in operands]
    constraints = ",".join(["=f"] + ["f"] * len(values))
    return cutlass.Float32(llvm.inline_asm(T.f32(), values, code, constraints, has_side_effects=True))
