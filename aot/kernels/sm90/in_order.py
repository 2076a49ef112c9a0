"""Instructions that the compiler keeps in their place among WGMMA's, whose registers are written behind its back."""

from typing import Any

import cutlass
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T


def here(code: str, *operands: Any) -> Any:
    """An instruction on f32 numbers that stays before any WGMMA that follows: else the compiler moves it behind those
    that reuse the registers of partial accumulators, copies these for it, and ptxas lets no products overlap."""
    values = [cutlass.Float32(x).ir_value() for x in operands]
    constraints = ",".join(["=f"] + ["f"] * len(values))
    return cutlass.Float32(llvm.inline_asm(T.f32(), values, code, constraints, has_side_effects=True))
