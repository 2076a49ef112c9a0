"""Prepared weights as the kernel sees them: codes and scales as tensors for TMA, their stages, and the tiled MMA.

A is the few-token GEMM's (`small_m.operands`). Knows nothing of who loads or multiplies.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from runtime.numbers.weights import LANES, WORDS

from ..sizes import WGMMA_ROWS
from .plan import BLOCK_K, BLOCK_WORDS, SCALE_WORDS, SLAB_ROWS, Plan

_WGMMA_K = 16  # columns of an instruction


def codes_view(b: cute.Tensor) -> cute.Tensor:
    """B's memory as words: (words of a block, N / 16, K / 64)."""
    slabs, blocks = cute.size(b, mode=[0]) // SLAB_ROWS, cute.size(b, mode=[1]) // BLOCK_K
    layout = cute.make_layout((BLOCK_WORDS, slabs, blocks), stride=(1, BLOCK_WORDS, slabs * BLOCK_WORDS))
    return cute.make_tensor(cute.recast_ptr(b.iterator, dtype=cutlass.Int32), layout)


def codes_tiler(plan: Plan) -> tuple[int, int, int]:
    """The shape of a stage of `codes_view`."""
    return BLOCK_WORDS, plan.slabs, plan.blocks_k


def scales_view(plan: Plan, b: cute.Tensor, scale_b: cute.Tensor) -> cute.Tensor:
    """The memory of scales as words: (words for all rows, blocks of columns)."""
    words = cute.size(b, mode=[0]) // SLAB_ROWS * SCALE_WORDS
    layout = cute.make_layout((words, cute.size(b, mode=[1]) // plan.weights.columns), stride=(1, words))
    return cute.make_tensor(cute.recast_ptr(scale_b.iterator, dtype=cutlass.Int32), layout)


def scales_tiler(plan: Plan) -> tuple[int, int]:
    """The shape of a stage of `scales_view`."""
    return plan.slabs * SCALE_WORDS, plan.scale_blocks


def codes_stages(plan: Plan, pointer: cute.Pointer) -> cute.Tensor:
    """(words of a block, slabs, blocks of K, stages) of codes in shared memory."""
    return cute.make_tensor(pointer, cute.make_layout((*codes_tiler(plan), plan.stages)))


def codes_of_lanes(plan: Plan, pointer: cute.Pointer) -> cute.Tensor:
    """The same as threads read it: (words, lanes, slabs, blocks of K, stages)."""
    return cute.make_tensor(pointer, cute.make_layout((WORDS, LANES, plan.slabs, plan.blocks_k, plan.stages)))


def scales_stages(plan: Plan, pointer: cute.Pointer) -> cute.Tensor:
    """(words of all rows, blocks of columns, stages) of scales in shared memory."""
    words, blocks = scales_tiler(plan)
    layout = cute.make_layout((words, blocks, plan.stages), stride=(1, words, plan.scales_pitch_bytes // 4))
    return cute.make_tensor(pointer, layout)


def tiled_mma(plan: Plan, element: Any) -> cute.TiledMma:
    """WGMMA of rows of B from registers, over the warp groups that multiply a stage, and tokens from shared memory."""
    shape = (WGMMA_ROWS, plan.tile_m, _WGMMA_K)
    source = warpgroup.OperandSource.RMEM
    op = warpgroup.MmaF16BF16Op(element, cutlass.Float32, shape, source, OperandMajorMode.K, OperandMajorMode.K)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (plan.row_groups, 1, 1))
