"""Prepared weights as the kernel sees them: boxes of codes and scales for TMA, their stages, and the tiled MMA.

A is the few-token GEMM's (`small_m.operands`). Knows nothing of who loads or multiplies.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from runtime.numbers.weights import LANES, WORDS

from ...w4.form import BLOCK_WORDS, SCALE_WORDS
from ..sizes import WGMMA_ROWS
from .plan import Plan

_WGMMA_K = 16  # columns of an instruction


def codes_tiler(plan: Plan) -> tuple[int, int, int]:
    """The shape of a stage of `views.codes_of`."""
    return BLOCK_WORDS, plan.slabs, plan.blocks_k


def scales_tiler(plan: Plan) -> tuple[int, int]:
    """The shape of a stage of `views.scales_of`."""
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
