"""The end of an epilogue: from a token's sums in registers to eight columns of D there.

Scales of operands and bias are in the sums already. Knows nothing of where sums come from, or of tiles.
"""

from typing import Any

import cutlass
from cutlass import cute

from .activations import activate, gate

COLUMNS = 8  # of D that a thread makes at a time


@cute.jit
def finish(
    parts: cutlass.Constexpr,
    total: cute.Tensor,
    out: cute.Tensor,
    residual: Any,
    scale_d: Any,
    token: cutlass.Int32,
    column: cutlass.Int32,
) -> None:
    """Activation or gate, residual, scale_d, conversion; `parts` is a `runtime.numbers.epilogue.Epilogue`. Where it is
    gated, `total` has as many gates, and then their partners."""
    name = parts.activation
    made = cute.make_rmem_tensor((COLUMNS,), cutlass.Float32)
    for i in cutlass.range_constexpr(COLUMNS):
        if cutlass.const_expr(parts.gated):
            made[i] = gate(name, total[i], total[COLUMNS + i])
        else:
            made[i] = activate(name, total[i])
    if cutlass.const_expr(residual is not None):
        load = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), residual.element_type, num_bits_per_copy=128)
        more = cute.make_rmem_tensor((COLUMNS,), residual.element_type)
        row = cute.zipped_divide(residual[token, None], (COLUMNS,))
        cute.copy(load, row[None, column // COLUMNS], more)
        made.store(made.load() + more.load().to(cutlass.Float32))
    if cutlass.const_expr(scale_d is not None):
        made.store(made.load() * scale_d[0])
    out.store(made.load().to(out.element_type))
