"""The epilogue: the sums of all slices of K, by way of shared memory, to D.

Knows nothing of the mainloop.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from ...finish import COLUMNS, finish
from ...w4.form import SLAB_ROWS
from ..sizes import MMA_COLUMNS, WARP
from .loads import Work
from .plan import Plan

_LANES_OF_ROW = 4


class EpilogueOperands(NamedTuple):
    """What the epilogue reads and writes, None where the form has none."""

    d: Any
    bias: Any
    residual: Any
    scale_d: Any


def _staged(plan: Plan, staging: Any) -> cute.Tensor:
    """Sums in shared memory: (rows of B, tokens, slices of K)."""
    pitch = plan.staging_pitch
    layout = cute.make_layout((plan.tile_n, plan.tile_m, plan.sliced_k), stride=(1, pitch, pitch * plan.tile_m))
    return cute.make_tensor(staging, layout)


@cute.jit
def stage_accumulators(
    plan: cutlass.Constexpr, accumulators: cute.Tensor, staging: cute.Pointer, thread: cutlass.Int32
) -> None:
    """Write a thread's sums to shared memory, which is free, and wait until all have."""
    staged = _staged(plan, staging)
    warp, lane = thread // WARP, thread % WARP
    first_row = warp % plan.row_warps * plan.warp_n + lane // _LANES_OF_ROW
    first_token = lane % _LANES_OF_ROW * 2
    for slab in cutlass.range_constexpr(plan.warp_slabs):
        for i in cutlass.range_constexpr(plan.token_tiles):
            for j in cutlass.range_constexpr(4):  # two tokens of a row, then of the row 8 below
                row = first_row + slab * SLAB_ROWS + j // 2 * (SLAB_ROWS // 2)
                token = first_token + i * MMA_COLUMNS + j % 2
                staged[row, token, warp // plan.row_warps] = accumulators[j, i, slab]
    cute.arch.sync_threads()


@cute.jit
def store(
    plan: cutlass.Constexpr,
    operands: EpilogueOperands,
    staging: cute.Pointer,
    work: Work,
    thread: cutlass.Int32,
) -> None:
    """Add up the slices of K, in order, and write D."""
    d, bias, residual, scale_d = operands
    staged = _staged(plan, staging)
    width = _width(plan)
    vectors = plan.tile_n // width
    items = vectors * plan.tile_m
    load = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=128)
    copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), d.element_type, num_bits_per_copy=128)
    part = cute.make_rmem_tensor((width,), cutlass.Float32)
    total = cute.make_rmem_tensor((width,), cutlass.Float32)
    out = cute.make_rmem_tensor((COLUMNS,), d.element_type)
    for step in cutlass.range_constexpr(-(-items // plan.threads)):
        item = thread + step * plan.threads
        vector, token = item % vectors, item // vectors
        column = work.first_slab * (SLAB_ROWS * COLUMNS // width) + vector * COLUMNS
        if token < cutlass.min(work.tokens, plan.tile_m) and column < cute.size(d, mode=[1]):
            for slice_k in cutlass.range_constexpr(plan.sliced_k):
                sums = cute.zipped_divide(staged[None, token, slice_k], (4,))
                for half in cutlass.range_constexpr(width // 4):
                    place = _place(plan, vector, half, 4, plan.tile_n)
                    cute.copy(load, sums[None, place], cute.zipped_divide(part, (4,))[None, half])
                if cutlass.const_expr(slice_k == 0):
                    total.store(part.load())
                else:
                    total.store(total.load() + part.load())
            total.store(total.load() * float(2**plan.weights.exponent))
            if cutlass.const_expr(bias is not None):
                more = cute.make_rmem_tensor((width,), bias.element_type)
                of_rows = cute.zipped_divide(bias, (COLUMNS,))
                for i in cutlass.range_constexpr(width // COLUMNS):
                    place = _place(plan, column // COLUMNS, i, COLUMNS, cute.size(bias))
                    cute.copy(copy, of_rows[None, place], cute.zipped_divide(more, (COLUMNS,))[None, i])
                total.store(total.load() + more.load().to(cutlass.Float32))
            row = work.first_token + token
            finish(plan.form.parts, _gates_first(plan, total), out, residual, scale_d, row, column)
            cute.copy(copy, out, cute.zipped_divide(d[row, None], (COLUMNS,))[None, column // COLUMNS])


def _width(plan: Plan) -> int:
    """Rows of B that make eight columns of D."""
    return COLUMNS * 2 if plan.form.parts.gated else COLUMNS


def _place(plan: Plan, vector: Any, i: int, piece: int, rows: Any) -> Any:
    """Which piece of so many rows of B is the `i`th of those that make eight columns, the `vector`th eight: of a
    tile's rows, or of all. They follow each other, or half of them stand in each half."""
    pieces = _width(plan) // piece
    if not plan.halves:
        return vector * pieces + i
    of_half = pieces // 2
    return i // of_half * (rows // (2 * piece)) + vector * of_half + i % of_half


def _gates_first(plan: Plan, total: cute.Tensor) -> cute.Tensor:
    """The sums of gates, then those of ups; they took turns where they are interleaved."""
    if not plan.form.parts.interleaved:
        return total
    layout = cute.make_layout((COLUMNS, 2), stride=(2, 1))
    return cute.make_tensor(total.iterator, layout)
