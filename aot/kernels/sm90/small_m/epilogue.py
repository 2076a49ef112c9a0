"""The epilogue: from accumulators to D, by way of shared memory, a row a token.

There they reach the CTA of the cluster that reduces them (`split_k`), and the thread that makes eight columns of D of
them: scales, bias, activation or gate, residual, output scale. Knows nothing of the mainloop.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from ...finish import COLUMNS, finish
from ..sizes import WARP_GROUP, WGMMA_ROWS
from .pipeline import STAGED, Work
from .plan import row_of_b
from .split_k import reduce


class EpilogueOperands(NamedTuple):
    """What the epilogue reads and writes: D and the residual of the CTA's batch, the rest None where the form has none,
    and room in shared memory for terms that it keeps: scales of tokens, of rows of B, and bias."""

    d: Any
    residual: Any
    scale_a: Any
    scale_b: Any
    bias: Any
    scale_d: Any
    terms: Any


@cute.jit
def fetch_terms(
    plan: cutlass.Constexpr, operands: EpilogueOperands, b: cute.Tensor, work: Work, thread: cutlass.Int32
) -> None:
    """Bring scales and bias of the tile to shared memory while the first loads are under way."""
    extent_n = cute.size(b, mode=[0])
    terms = cute.make_tensor(operands.terms, cute.make_layout(max(plan.epilogue_terms, 1)))
    if cutlass.const_expr(plan.form.scaling == "row_column"):
        for step in cutlass.range_constexpr(-(-plan.tile_m // plan.consumer_threads)):
            slot = thread + step * plan.consumer_threads
            token = work.tile_row * plan.tile_m + slot
            if slot < plan.tile_m and token < cute.size(operands.d, mode=[0]):
                terms[slot] = operands.scale_a[token]
    if cutlass.const_expr(plan.epilogue_terms > 0):
        for step in cutlass.range_constexpr(-(-plan.tile_n // plan.consumer_threads)):
            slot = thread + step * plan.consumer_threads
            row = row_of_b(plan.tile_n, plan.form, work.tile_column, slot, extent_n)
            if slot < plan.tile_n and row < extent_n:
                if cutlass.const_expr(plan.form.scales_of_rows):
                    terms[plan.rows_offset + slot] = operands.scale_b[row]
                if cutlass.const_expr(plan.form.parts.bias):
                    terms[plan.bias_offset + slot] = operands.bias[row].to(cutlass.Float32)


@cute.jit
def stage_accumulators(
    plan: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    accumulators: cute.Tensor,
    staging: cute.Pointer,
    tokens: cutlass.Int32,
    thread: cutlass.Int32,
) -> None:
    """Write the accumulators to shared memory, a row a token, and wait until all have."""
    rows = cute.make_layout((2, plan.tile_n // 2, plan.tile_m), stride=(1, 2, plan.staging_pitch))
    staged = cute.make_tensor(staging, rows)
    mma_rows = WGMMA_ROWS * cute.size(accumulators, mode=[1]) * plan.consumer_threads // WARP_GROUP
    tokens = cutlass.min(tokens, plan.tile_m)
    if cutlass.const_expr(plan.swapped):
        coords = _coords(tiled_mma, (mma_rows, plan.tile_m), thread)
        for i in cutlass.range_constexpr(cute.size(accumulators)):
            row, token = coords[i]
            if token < tokens and row < plan.tile_n:
                place = plan.staged_row(row)
                staged[place % 2, place // 2, token] = accumulators[i]
    else:
        coords = _coords(tiled_mma, (mma_rows, plan.tile_n), thread)
        store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=64)
        pair = cute.make_rmem_tensor((2,), cutlass.Float32)
        for i in cutlass.range_constexpr(0, cute.size(accumulators), 2):
            token, column = coords[i]
            if token < tokens:
                pair[0], pair[1] = accumulators[i], accumulators[i + 1]
                cute.copy(store, pair, staged[None, column // 2, token])
    cute.arch.barrier(barrier_id=STAGED, number_of_threads=plan.consumer_threads)


def _coords(tiled_mma: cute.TiledMma, shape: tuple[int, int], thread: cutlass.Int32) -> cute.Tensor:
    """(row, column) of each of a thread's accumulators."""
    return tiled_mma.get_slice(thread).partition_C(cute.make_identity_tensor(shape))


@cute.jit
def store(
    plan: cutlass.Constexpr, operands: EpilogueOperands, staging: cute.Pointer, work: Work, thread: cutlass.Int32
) -> None:
    """Reduce this CTA's share of the tokens over the slices of K, in order, and write it."""
    d, residual, scale_d = operands.d, operands.residual, operands.scale_d
    width = COLUMNS * 2 if plan.form.gated else COLUMNS  # sums that make eight columns
    vectors = plan.tile_n // width
    first_token = work.tile_row * plan.tile_m + work.slice_k * plan.token_share
    extent_m, extent_n = cute.size(d, mode=[0]), cute.size(d, mode=[1])
    factor = cutlass.Float32(1.0)
    if cutlass.const_expr(plan.form.scaling == "tensor"):
        factor = operands.scale_a[0] * operands.scale_b[0]
    total = cute.make_rmem_tensor((width,), cutlass.Float32)
    out = cute.make_rmem_tensor((COLUMNS,), d.element_type)
    copy = cute.make_copy_atom(
        cute.nvgpu.CopyUniversalOp(), d.element_type, num_bits_per_copy=COLUMNS * d.element_type.width
    )
    items = vectors * plan.token_share
    for step in cutlass.range_constexpr(-(-items // plan.consumer_threads)):
        item = thread + step * plan.consumer_threads
        vector, token = item % vectors, item // vectors
        column = (work.tile_column * vectors + vector) * COLUMNS
        if item < items and first_token + token < extent_m and column < extent_n:
            reduce(plan, total, staging, work.slice_k, token, vector)
            _scale(plan, total, operands.terms, factor, vector, work.slice_k * plan.token_share + token)
            finish(plan.form.parts, total, out, residual, scale_d, first_token + token, column)
            row = cute.zipped_divide(d[first_token + token, None], (COLUMNS,))
            cute.copy(copy, out, row[None, column // COLUMNS])


@cute.jit
def _scale(
    plan: cutlass.Constexpr,
    total: cute.Tensor,
    kept: cute.Pointer,
    factor: cutlass.Float32,
    vector: cutlass.Int32,
    token: cutlass.Int32,
) -> None:
    """Times the scales, plus bias."""
    width = cute.size(total)
    terms = cute.make_tensor(kept, cute.make_layout(max(plan.epilogue_terms, 1)))
    if cutlass.const_expr(plan.form.scaling == "tensor"):
        total.store(total.load() * factor)
    if cutlass.const_expr(plan.form.scaling == "row_column"):
        of_token = terms[token]
        for i in cutlass.range_constexpr(width):
            total[i] = total[i] * (of_token * terms[plan.rows_offset + vector * width + i])
    elif cutlass.const_expr(plan.form.scales_of_rows):
        for i in cutlass.range_constexpr(width):
            total[i] = total[i] * terms[plan.rows_offset + vector * width + i]
    if cutlass.const_expr(plan.form.parts.bias):
        for i in cutlass.range_constexpr(width):
            total[i] = total[i] + terms[plan.bias_offset + vector * width + i]
