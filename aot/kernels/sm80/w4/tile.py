"""One tile of D, from the operands in memory to the epilogue. Knows nothing of who makes which tile."""

from typing import Any

import cutlass
from cutlass import cute

from .epilogue import EpilogueOperands, stage_accumulators, store
from .loads import Operands, Work, stages_in
from .mainloop import multiply


@cute.jit
def make_tile(
    plan: cutlass.Constexpr,
    operands: Operands,
    into: EpilogueOperands,
    block: cute.Pointer,
    work: Work,
    thread: cutlass.Int32,
) -> None:
    """All threads of a CTA: multiply and store a tile, by way of `Plan.tile_bytes` of shared memory that nobody uses
    from `block` on."""
    accumulators: Any = multiply(plan, operands, stages_in(plan, block), work, thread)
    cute.arch.sync_threads()  # all have done with the stages, so sums can take their place
    staging = cute.recast_ptr(block, dtype=cutlass.Float32)
    stage_accumulators(plan, accumulators, staging, thread)
    store(plan, into, staging, work, thread)
