"""The mainloop of a warp: codes to bf16 in registers, tokens by ldmatrix, and mma.sync of both, over K.

Stages are loaded while others are multiplied. Knows nothing of the epilogue.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warp as warp_operations

from runtime.numbers.weights import WORDS

from ...w4.dequantise import Factors, factors_of_words, weights_of_word, words_of_column
from ...w4.form import BLOCK_K, SCALE_WORDS
from ..sizes import MMA_COLUMNS, MMA_K, MMA_ROWS, WARP
from .loads import Operands, Stages, Work, load_stage, tokens_at
from .plan import Plan

_REGISTERS = 4  # of a thread for operand A of mma.sync, 16 x 16
_LANES_OF_ROW = 4  # lanes that have the same rows
_STEPS_AT_ONCE = 2  # of MMA_K columns whose tokens one ldmatrix brings: four matrices of 8 x 8
_B_VALUES, _SUMS = 4, 4  # of a thread for operand B, 16 x 8, and for the sums, 16 x 8


@cute.jit
def multiply(
    plan: cutlass.Constexpr, operands: Operands, stages: Stages, work: Work, thread: cutlass.Int32
) -> cute.Tensor:
    """The sums of this thread, over the columns of its warp: (of an instruction, groups of tokens, slabs)."""
    blocks = cute.size(operands.codes, mode=[2])  # of all K
    tiles = cute.ceil_div(blocks, plan.blocks_k)
    accumulators = cute.make_rmem_tensor((_SUMS, plan.token_tiles, plan.warp_slabs), cutlass.Float32)
    accumulators.fill(0.0)
    for stage in cutlass.range_constexpr(plan.stages - 1):
        if stage < tiles:
            load_stage(plan, operands, stages, work, cutlass.Int32(stage), cutlass.Int32(stage), thread)
        cute.arch.cp_async_commit_group()
    for tile in cutlass.range(tiles, unroll=1):
        # What this thread loaded of the tile is there, then what others did; and all have done with the tile before,
        # whose stage is filled again.
        cute.arch.cp_async_wait_group(plan.stages - 2)
        cute.arch.sync_threads()
        ahead = tile + plan.stages - 1
        if ahead < tiles:
            load_stage(plan, operands, stages, work, ahead, ahead % plan.stages, thread)
        cute.arch.cp_async_commit_group()
        _multiply_stage(plan, accumulators, stages, tile % plan.stages, blocks - tile * plan.blocks_k, thread)
    return accumulators


@cute.jit
def _multiply_stage(
    plan: cutlass.Constexpr,
    accumulators: cute.Tensor,
    stages: Stages,
    stage: cutlass.Int32,
    blocks: cutlass.Int32,
    thread: cutlass.Int32,
) -> None:
    """Add the products of this warp's columns of a stage, which has so many blocks of K."""
    warp, lane = cute.arch.make_warp_uniform(thread // WARP), thread % WARP
    first_slab = warp % plan.row_warps * plan.warp_slabs
    first_block = warp // plan.row_warps * plan.warp_blocks
    mma = cute.make_mma_atom(
        warp_operations.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (MMA_ROWS, MMA_COLUMNS, MMA_K))
    )
    for i in cutlass.range_constexpr(plan.warp_blocks):
        block = first_block + i
        if block < blocks:
            codes, factors = _load_weights(plan, stages, stage, first_slab, block, lane)
            for half in cutlass.range_constexpr(WORDS // _STEPS_AT_ONCE):
                tokens = _load_tokens(plan, stages, stage, block, half, lane)
                for step in cutlass.range_constexpr(_STEPS_AT_ONCE):
                    word = half * _STEPS_AT_ONCE + step
                    for slab in cutlass.range_constexpr(plan.warp_slabs):
                        sums = _of_slab(plan, accumulators, slab)
                        rows = _dequantise(plan, codes[word, slab], factors[slab], word)
                        cute.gemm(mma, sums, rows, tokens[None, step, None], sums)


def _load_weights(
    plan: Plan, stages: Stages, stage: Any, first_slab: Any, block: Any, lane: Any
) -> tuple[cute.Tensor, list[list[list[Factors]]]]:
    """A thread's codes (words, slabs) of a block of K, and what multiplies them: of each slab, for each group of
    columns that the block has a part of."""
    form = plan.weights
    codes = cute.make_rmem_tensor((WORDS, plan.warp_slabs), cutlass.Int32)
    load = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Int32, num_bits_per_copy=128)
    factors = []
    for slab in range(plan.warp_slabs):
        cute.copy(load, stages.codes[None, lane, first_slab + slab, block, stage], codes[None, slab])
        row = (first_slab + slab) * SCALE_WORDS + lane // _LANES_OF_ROW
        columns = range(0, BLOCK_K, min(form.group, BLOCK_K))  # of a block, where groups begin
        first = block // (form.multiple // BLOCK_K) * (form.multiple // form.columns)
        words = [cutlass.Uint32(stages.scales[row, first + at, stage]) for at in words_of_column(form, 0)]
        factors.append([factors_of_words(form, words, column) for column in columns])
    return codes, factors


def _load_tokens(plan: Plan, stages: Stages, stage: Any, block: Any, half: int, lane: Any) -> cute.Tensor:
    """Operand B of half a block of K: (of a thread, steps of K, groups of tokens)."""
    each = _B_VALUES * _STEPS_AT_ONCE
    found = cute.make_rmem_tensor((each, plan.token_tiles), cutlass.BFloat16)
    load = cute.make_copy_atom(warp_operations.LdMatrix8x8x16bOp(False, each // 2), cutlass.BFloat16)
    accesses = BLOCK_K // MMA_COLUMNS  # of a block
    access = block * accesses + half * (accesses // 2) + lane // MMA_COLUMNS
    for i in range(plan.token_tiles):
        token = i * MMA_COLUMNS + lane % MMA_COLUMNS
        cute.copy(load, tokens_at(plan, stages, stage, token, access), found[None, i])
    return cute.make_tensor(found.iterator, cute.make_layout((_B_VALUES, _STEPS_AT_ONCE, plan.token_tiles)))


def _of_slab(plan: Plan, accumulators: cute.Tensor, slab: int) -> cute.Tensor:
    """A thread's sums of a slab: (of an instruction, 1, groups of tokens)."""
    first = slab * _SUMS * plan.token_tiles
    return cute.make_tensor(accumulators.iterator + first, cute.make_layout((_SUMS, 1, plan.token_tiles)))


def _dequantise(plan: Plan, codes: Any, factors: list[list[Factors]], word: int) -> cute.Tensor:
    """Operand A of a slab's word of codes, number `word` of a block, which is 16 columns: (of a thread, 1)."""
    found = cute.make_rmem_tensor((_REGISTERS,), cutlass.Uint32)
    values = weights_of_word(plan.weights, cutlass.Uint32(codes), factors[word * MMA_K // plan.weights.group])
    for j, value in enumerate(values):
        found[j] = value
    pointer = cute.recast_ptr(found.iterator, dtype=cutlass.BFloat16)
    return cute.make_tensor(pointer, cute.make_layout((_REGISTERS * 2, 1)))
