"""Warps that quantise A: they load it in 16 bits, and fill every stage with it in e4m3 and with a scale for each token.

Each takes every `QUANTISERS`th stage, and runs ahead as far as stages are free, so loads of A hide behind those of B.
Scales are of 1 x 128, as `aot.kernels.quantise` makes them. Knows nothing of what consumers do with a stage but that
they release it.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute

from runtime.numbers.scaling import SCALE_BLOCK

from ...amax import over_threads, scale_of
from ...quantise import THREADS_OF_BLOCK, WIDTH, load, magnitude, narrow
from ..sizes import SWIZZLE_ATOM_ROWS, WARP
from .pipeline import EMPTY_READY, FULL_READY, Pipeline, Work
from .plan import QUANTISERS

_TOKENS = WARP // THREADS_OF_BLOCK  # that a warp quantises at a time
_PASSES = 4  # whose loads are under way together
_LANE_BYTES = 16  # of e4m3 that a lane makes


class QuantisedStages(NamedTuple):
    """Where A in e4m3 begins in shared memory, and room for (tokens, stages) of scales."""

    tokens: Any
    scales: Any


@cute.jit
def quantise(
    plan: cutlass.Constexpr,
    a: cute.Tensor,
    to: QuantisedStages,
    pipeline: Pipeline,
    work: Work,
    warp: cutlass.Int32,
) -> None:
    """Fill the stages of a CTA's slice of K that are warp `warp`'s with `a` (M, K)."""
    full, empty = pipeline
    first_k, count_k = work.k_tiles
    if cutlass.const_expr(plan.cluster > 1):
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
    else:
        cute.arch.barrier(barrier_id=FULL_READY, number_of_threads=plan.threads)
        cute.arch.barrier(barrier_id=EMPTY_READY, number_of_threads=plan.threads)
    if cutlass.const_expr(plan.overlap != "serial"):
        cute.arch.griddepcontrol_wait()
    for i in cutlass.range(warp, count_k, QUANTISERS, unroll=1):
        stage, turn = i % plan.stages, i // plan.stages
        if turn > 0:
            cute.arch.mbarrier_wait(empty + stage, (turn - 1) % 2)
        _fill(plan, a, to, work, first_k + i, stage)
        cute.arch.fence_proxy("async.shared", space="cta")  # WGMMA reads what each lane wrote
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(full + stage)


@cute.jit
def _fill(
    plan: cutlass.Constexpr, a: cute.Tensor, to: QuantisedStages, work: Work, k: cutlass.Int32, stage: cutlass.Int32
) -> None:
    """Quantise K tile `k` of this CTA's tokens into a stage; the places of tokens past the last stay as they are."""
    lane = cute.arch.lane_idx()
    piece, of_pass = lane % THREADS_OF_BLOCK, lane // THREADS_OF_BLOCK
    scales = cute.make_tensor(to.scales, cute.make_layout((plan.tile_m, plan.stages)))
    made = cute.make_rmem_tensor((WIDTH,), cutlass.Float8E4M3FN)
    passes = plan.tile_m // _TOKENS
    values = cute.make_rmem_tensor((WIDTH, min(passes, _PASSES)), cutlass.Float32)
    for done in cutlass.range_constexpr(0, passes, _PASSES):
        first, at_once = done * _TOKENS, min(_PASSES, passes - done)
        for number in cutlass.range_constexpr(at_once):  # all loads, then all else
            token = cutlass.min(first + number * _TOKENS + of_pass, work.tokens - 1)
            row = a[work.tile_row * plan.tile_m + token, None]
            load(row, k * THREADS_OF_BLOCK + piece, values[None, number])
        for number in cutlass.range_constexpr(at_once):
            token = first + number * _TOKENS + of_pass
            amax = over_threads(magnitude(values[None, number]), THREADS_OF_BLOCK)
            narrow(values[None, number], amax, made)
            if token < work.tokens:
                _store(plan, made, to.tokens, stage, token, piece)
                if piece == 0:
                    scales[token, stage] = scale_of(amax)


@cute.jit
def _store(
    plan: cutlass.Constexpr, made: cute.Tensor, tokens: cute.Pointer, stage: Any, token: Any, piece: Any
) -> None:
    """Write 16 bytes number `piece` of a token's 128 in a stage. Rows lie behind each other; 16 bytes of them are
    swizzled as TMA and WGMMA do."""
    copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), made.element_type, num_bits_per_copy=_LANE_BYTES * 8)
    place = (stage * plan.tile_m + token) * SCALE_BLOCK + (piece ^ (token % SWIZZLE_ATOM_ROWS)) * _LANE_BYTES
    pointer = cute.make_ptr(
        made.element_type, tokens.toint() + place, cute.AddressSpace.smem, assumed_align=_LANE_BYTES
    )
    cute.copy(copy, made, cute.make_tensor(pointer, cute.make_layout(WIDTH)))
