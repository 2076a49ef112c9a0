"""Prepared weights as the kernel sees them: codes and scales as tensors for TMA, their stages, and the tiled MMA.

A is the few-token GEMM's (`small_m.operands`). Knows nothing of who loads or multiplies.
"""

import math
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from runtime.numbers.weights import LANES, WORDS

from ...w4.form import BLOCK_K, BLOCK_WORDS, SCALE_WORDS, SLAB_ROWS
from ...w4.words import in_words
from ..sizes import WGMMA_ROWS
from .plan import Plan

_WGMMA_K = 16  # columns of an instruction
_MATRIX = 2  # modes of B, where it has no groups


def codes_view(plan: Plan, b: cute.Tensor) -> cute.Tensor:
    """The memory of B (N, K[, groups]) as words: (words of a block, N / 16, K / 64[, groups]); where gates are in the
    first half of all rows (`Plan.halves`), (words, N / 32, 2, K / 64[, groups])."""
    slabs, blocks = cute.size(b, mode=[0]) // SLAB_ROWS, cute.size(b, mode=[1]) // BLOCK_K
    shape: tuple[Any, ...] = (BLOCK_WORDS, slabs)
    stride: tuple[Any, ...] = (1, BLOCK_WORDS)
    if plan.halves:
        shape, stride = (BLOCK_WORDS, slabs // 2, 2), (1, BLOCK_WORDS, slabs // 2 * BLOCK_WORDS)
    shape, stride = (*shape, blocks), (*stride, slabs * BLOCK_WORDS)
    if cute.rank(b) > _MATRIX:
        shape, stride = (*shape, cute.size(b, mode=[2])), (*stride, in_words(b, b.stride[2]))
    return cute.make_tensor(cute.recast_ptr(b.iterator, dtype=cutlass.Int32), cute.make_layout(shape, stride=stride))


def codes_tiler(plan: Plan) -> tuple[int, ...]:
    """The shape of a stage of `codes_view`."""
    slabs = (plan.slabs // 2, 2) if plan.halves else (plan.slabs,)
    return BLOCK_WORDS, *slabs, plan.blocks_k


def scales_view(plan: Plan, b: cute.Tensor, scale_b: cute.Tensor) -> cute.Tensor:
    """The memory of scales as words: (words for all rows, blocks of columns[, groups]), words for half of the rows, and
    2, where gates are in the first half."""
    words, blocks = cute.size(b, mode=[0]) // SLAB_ROWS * SCALE_WORDS, cute.size(b, mode=[1]) // plan.weights.columns
    shape: tuple[Any, ...] = (words,)
    stride: tuple[Any, ...] = (1,)
    if plan.halves:
        half = cute.size(b, mode=[0]) // (2 * SLAB_ROWS) * SCALE_WORDS
        shape, stride = (half, 2), (1, half)
    shape, stride = (*shape, blocks), (*stride, words)
    if cute.rank(b) > _MATRIX:
        shape, stride = (*shape, cute.size(b, mode=[2])), (*stride, in_words(scale_b, scale_b.stride[0]))
    pointer = cute.recast_ptr(scale_b.iterator, dtype=cutlass.Int32)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))


def scales_tiler(plan: Plan) -> tuple[int, ...]:
    """The shape of a stage of `scales_view`."""
    words = plan.slabs * SCALE_WORDS
    return (words // 2, 2, plan.scale_blocks) if plan.halves else (words, plan.scale_blocks)


def tma_of_weights(plan: Plan, b: cute.Tensor, scale_b: cute.Tensor) -> tuple[Any, Any]:
    """TMA atoms and tensors of codes and of scales."""
    load = cpasync.CopyBulkTensorTileG2SOp()
    of_codes, of_scales = (
        cpasync.make_tiled_tma_atom(load, view, cute.make_layout(tiler), tiler)
        for view, tiler in (
            (codes_view(plan, b), codes_tiler(plan)),
            (scales_view(plan, b, scale_b), scales_tiler(plan)),
        )
    )
    return of_codes, of_scales


def codes_stages(plan: Plan, pointer: cute.Pointer) -> cute.Tensor:
    """Codes in shared memory as TMA writes them: (*`codes_tiler`, stages)."""
    return cute.make_tensor(pointer, cute.make_layout((*codes_tiler(plan), plan.stages)))


def codes_of_lanes(plan: Plan, pointer: cute.Pointer) -> cute.Tensor:
    """The same as threads read it: (words, lanes, slabs, blocks of K, stages)."""
    return cute.make_tensor(pointer, cute.make_layout((WORDS, LANES, plan.slabs, plan.blocks_k, plan.stages)))


def scales_stages(plan: Plan, pointer: cute.Pointer) -> cute.Tensor:
    """Scales in shared memory as TMA writes them: (*`scales_tiler`, stages)."""
    tiler = scales_tiler(plan)
    steps = (1, *(math.prod(tiler[: i + 1]) for i in range(len(tiler) - 1)), plan.scales_pitch_bytes // 4)
    return cute.make_tensor(pointer, cute.make_layout((*tiler, plan.stages), stride=steps))


def scales_of_rows(plan: Plan, pointer: cute.Pointer) -> cute.Tensor:
    """The same as threads read it: (words of all rows, blocks of columns, stages)."""
    words, blocks = plan.slabs * SCALE_WORDS, plan.scale_blocks
    layout = cute.make_layout((words, blocks, plan.stages), stride=(1, words, plan.scales_pitch_bytes // 4))
    return cute.make_tensor(pointer, layout)


def tiled_mma(plan: Plan, element: Any) -> cute.TiledMma:
    """WGMMA of rows of B from registers, over the warp groups that multiply a stage, and tokens from shared memory."""
    shape = (WGMMA_ROWS, plan.tile_m, _WGMMA_K)
    source = warpgroup.OperandSource.RMEM
    op = warpgroup.MmaF16BF16Op(element, cutlass.Float32, shape, source, OperandMajorMode.K, OperandMajorMode.K)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (plan.row_groups, 1, 1))
