"""The ring of stages: where tokens, codes and scales lie in shared memory, and how cp.async brings them there.

Every thread of a CTA loads its share of each. Knows nothing of who multiplies them.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from runtime.numbers.weights import LANES, WORDS

from ...w4.form import SCALE_WORDS
from ..sizes import SWIZZLE_ROWS
from .plan import Plan

_COLUMNS = 8  # of A in 16 bytes


class Work(NamedTuple):
    """What a CTA does: a tile of D."""

    first_token: Any
    tokens: Any  # from the first to the last of all
    first_slab: Any  # of 16 rows of B, twice the gates' where gates are in the first half of all rows


class Operands(NamedTuple):
    """What is loaded: A (M, K), and the words of codes and scales as `views` has them."""

    a: Any
    codes: Any
    scales: Any


class Stages(NamedTuple):
    """The stages in shared memory: A's first element, see `tokens_at`; codes (words, lanes, slabs, blocks of K,
    stages); scales (words of all rows, blocks of columns, stages)."""

    tokens: Any
    codes: Any
    scales: Any


def stages_in(plan: Plan, block: Any) -> Stages:
    """Lay out the stages in shared memory that begins at `block`: all of A, then all codes, then all scales."""
    codes = block + plan.stages * plan.tokens_bytes
    scales = codes + plan.stages * plan.codes_bytes
    return Stages(
        cute.recast_ptr(block, dtype=cutlass.BFloat16),
        cute.make_tensor(
            cute.recast_ptr(codes, dtype=cutlass.Int32),
            cute.make_layout((WORDS, LANES, plan.slabs, plan.blocks_k, plan.stages)),
        ),
        cute.make_tensor(
            cute.recast_ptr(scales, dtype=cutlass.Int32),
            cute.make_layout((plan.slabs * SCALE_WORDS, plan.scale_blocks, plan.stages)),
        ),
    )


def tokens_at(plan: Plan, stages: Stages, stage: Any, token: Any, access: Any) -> cute.Tensor:
    """Eight columns of a token, those of an access of 16 bytes. Accesses of a row are swapped by its number, so that
    the same ones of eight rows are in different banks."""
    place = access ^ (token % SWIZZLE_ROWS)
    offset = (stage * plan.tile_m + token) * plan.tile_k + place * _COLUMNS
    return cute.make_tensor(stages.tokens + cute.assume(offset, divby=_COLUMNS), cute.make_layout((_COLUMNS,)))


@cute.jit
def load_stage(
    plan: cutlass.Constexpr,
    operands: Operands,
    stages: Stages,
    work: Work,
    k_tile: cutlass.Int32,
    stage: cutlass.Int32,
    thread: cutlass.Int32,
) -> None:
    """Begin to load this thread's share of K tile `k_tile`. What is past M, N or K is left as it was: nobody looks at
    what comes of it."""
    global_only = cute.nvgpu.LoadCacheMode.GLOBAL
    load = cute.make_copy_atom(cpasync.CopyG2SOp(global_only), cutlass.BFloat16, num_bits_per_copy=128)
    load_words = cute.make_copy_atom(cpasync.CopyG2SOp(global_only), cutlass.Int32, num_bits_per_copy=128)
    _load_tokens(plan, load, operands.a, stages, work, k_tile, stage, thread)
    _load_codes(plan, load_words, operands.codes, stages.codes, work, k_tile, stage, thread)
    _load_scales(plan, load_words, operands.scales, stages.scales, work, k_tile, stage, thread)


def _place(plan: Plan, work: Work, each: int, step: Any, size: int, extent: Any) -> tuple[Any, Any]:
    """Which piece of all is the `step`th of a tile, and whether it is there at all: pieces have `size` elements of
    `extent`, and a slab of 16 rows of B has `each` of them. Where halves are gates and ups, a tile takes half of its
    slabs from each half of all."""
    first = work.first_slab * each
    if not plan.halves:
        place = first + step
        return place, place * size < extent
    of_half = plan.slabs // 2 * each
    half = step // of_half
    pair = first // 2 + (step - half * of_half)
    return half * (extent // (2 * size)) + pair, pair * size < extent // 2


@cute.jit
def _load_tokens(
    plan: cutlass.Constexpr,
    load: cute.CopyAtom,
    a: cute.Tensor,
    stages: Stages,
    work: Work,
    k_tile: cutlass.Int32,
    stage: cutlass.Int32,
    thread: cutlass.Int32,
) -> None:
    accesses = plan.row_accesses
    for step in cutlass.range_constexpr(-(-plan.tile_m * accesses // plan.threads)):
        item = thread + step * plan.threads
        token, access = item // accesses, item % accesses
        column = k_tile * accesses + access
        if token < cutlass.min(work.tokens, plan.tile_m) and column * _COLUMNS < cute.size(a, mode=[1]):
            row = cute.zipped_divide(a[work.first_token + token, None], (_COLUMNS,))
            cute.copy(load, row[None, column], tokens_at(plan, stages, stage, token, access))


@cute.jit
def _load_codes(
    plan: cutlass.Constexpr,
    load: cute.CopyAtom,
    codes: cute.Tensor,
    target: cute.Tensor,
    work: Work,
    k_tile: cutlass.Int32,
    stage: cutlass.Int32,
    thread: cutlass.Int32,
) -> None:
    items = LANES * plan.slabs * plan.blocks_k
    for step in cutlass.range_constexpr(-(-items // plan.threads)):
        item = thread + step * plan.threads
        lane, slab, block = item % LANES, item // LANES % plan.slabs, item // (LANES * plan.slabs)
        slab_of_all, there = _place(plan, work, 1, slab, 1, cute.size(codes, mode=[1]))
        block_of_all = k_tile * plan.blocks_k + block
        inside = there and block_of_all < cute.size(codes, mode=[2])
        if item < items and inside:
            lanes = cute.zipped_divide(codes[None, slab_of_all, block_of_all], (WORDS,))
            cute.copy(load, lanes[None, lane], target[None, lane, slab, block, stage])


@cute.jit
def _load_scales(
    plan: cutlass.Constexpr,
    load: cute.CopyAtom,
    scales: cute.Tensor,
    target: cute.Tensor,
    work: Work,
    k_tile: cutlass.Int32,
    stage: cutlass.Int32,
    thread: cutlass.Int32,
) -> None:
    of_block = plan.slabs * SCALE_WORDS // WORDS  # accesses to the scales of a block of columns
    items = of_block * plan.scale_blocks
    for step in cutlass.range_constexpr(-(-items // plan.threads)):
        item = thread + step * plan.threads
        access, block = item % of_block, item // of_block
        access_of_all, there = _place(plan, work, SCALE_WORDS // WORDS, access, WORDS, cute.size(scales, mode=[0]))
        block_of_all = k_tile * plan.scale_blocks + block
        inside = there and block_of_all < cute.size(scales, mode=[1])
        if item < items and inside:
            words = cute.zipped_divide(scales[None, block_of_all], (WORDS,))
            cute.copy(
                load, words[None, access_of_all], cute.zipped_divide(target[None, block, stage], (WORDS,))[None, access]
            )
