"""The GEMM of 4-bit weights itself: its host function, and who does what in a CTA.

The package says how it works. It is the few-token GEMM (`small_m`) with another operand B. Knows the parts' order and
what they share, not how any of them works.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from ...w4.form import Form
from ..sizes import WARP
from ..small_m.epilogue import EpilogueOperands, fetch_terms, stage_accumulators, store
from ..small_m.kernel import SmallM
from ..small_m.operands import box_layout, n_side_layout
from ..small_m.pipeline import DRAINED, FULL_READY, KTiles, Pipeline, Work
from ..small_m.producer import TmaOperand
from ..small_m.split_k import exchange
from . import operands
from .mainloop import Slice, Weights, add_slices, multiply
from .plan import Plan
from .producer import Operands, produce


class _Storage(NamedTuple):
    """A CTA's shared memory."""

    tokens: Any  # A as WGMMA reads it, (rows, tile_k, stages)
    codes: Any  # the first of all stages' codes
    scales: Any
    staging: Any  # over the stages
    pipeline: Pipeline
    ready: Any  # mbarriers of stages, at which CTAs that share A say that theirs are free
    arrived: Any  # the mbarrier of partial sums that others push
    terms: Any  # what the epilogue keeps


class W4(SmallM):
    """The kernel for one set of choices (`choices.OPTIONS`) and one form."""

    __module__ = __package__  # part of the kernel's symbol, which tools find it by: the package, not this file

    plan: Plan

    def __init__(self, options: Mapping[str, Any], form: Form) -> None:
        self.plan = Plan.of(options, form)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        d: cute.Tensor,
        scale_b: cute.Tensor,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        scale_d: cute.Tensor | None,
        stream: Any,
    ) -> None:
        """Launch over A (M, K), D (M, N), B (N, K) and scale_b as `runtime.numbers.weights` has them, and what the
        form has besides."""
        plan = self.plan
        element = a.element_type
        load = cpasync.CopyBulkTensorTileG2SOp()
        load_a = cpasync.CopyBulkTensorTileG2SMulticastOp() if plan.cluster_n > 1 else load
        boxes = box_layout(plan, element)
        box = (plan.box_tokens, plan.tile_k)
        of_a = cpasync.make_tiled_tma_atom(load_a, a, cute.select(boxes, [0, 1]), box)
        of_codes, of_scales = operands.tma_of_weights(plan, b, scale_b)
        tiles_m = cute.ceil_div(cute.size(a, mode=[0]), plan.tile_m)
        tiles_n = cute.round_up(cute.ceil_div(cute.size(b, mode=[0]), plan.tile_n), plan.cluster_n)
        layouts = (n_side_layout(plan, element), boxes)
        extras = (bias, residual, scale_d)
        mma = operands.tiled_mma(plan, element)
        self.kernel(of_a, of_codes, of_scales, b, d, extras, mma, layouts).launch(
            grid=[tiles_n * plan.split_k, tiles_m, 1],
            block=[plan.threads, 1, 1],
            cluster=[plan.cluster, 1, 1],
            stream=stream,
            use_pdl=plan.overlap != "serial",
            max_number_threads=[plan.threads * plan.ctas_per_sm, 1, 1],  # so few registers that so many CTAs fit
        )

    @cute.kernel
    def kernel(
        self,
        of_a: Any,
        of_codes: Any,
        of_scales: Any,
        b: cute.Tensor,
        d: cute.Tensor,
        extras: Any,
        mma: Any,
        layouts: Any,
    ) -> None:
        """One tile of D, or one slice of K of it. Operands are a TMA atom and a tensor, `layouts` those of stages."""
        plan = self.plan
        block_n, block_m, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # Neighbours along K, then those that share rows of A.
        slice_k, tile_column = block_n % plan.split_k, block_n // plan.split_k
        cta_n = tile_column % plan.cluster_n
        bias, residual, scale_d = extras
        tokens_layout, boxes = layouts
        storage = self._allocate_w4(tokens_layout)

        tokens = cute.size(d, mode=[0]) - block_m * plan.tile_m
        # This CTA's slice of K, in K tiles: slices differ by one K tile at most.
        tiles_k = cute.ceil_div(cute.size(b, mode=[1]), plan.tile_k)
        first_k = tiles_k * slice_k // plan.split_k
        k_tiles = KTiles(first_k, tiles_k * (slice_k + 1) // plan.split_k - first_k)
        work = Work(block_m, tile_column, (), cta_n, slice_k, k_tiles, tokens)
        if warp == plan.consumer_threads // WARP:
            for atom, _ in (of_codes, of_scales, of_a):
                cpasync.prefetch_descriptor(atom)
            if cutlass.const_expr(plan.cluster_n > 1):
                with cute.arch.elect_one():
                    for stage in cutlass.range_constexpr(plan.stages):
                        cute.arch.mbarrier_init(storage.ready + stage, plan.cluster_n)
            self._set_up_full(storage.pipeline.full)
            a = TmaOperand(of_a[0], of_a[1], cute.make_tensor(storage.tokens.iterator, boxes.outer))
            codes = TmaOperand(of_codes[0], of_codes[1], operands.codes_stages(plan, storage.codes))
            scales = TmaOperand(of_scales[0], of_scales[1], operands.scales_stages(plan, storage.scales))
            produce(plan, Operands(a, codes, scales), storage.pipeline, storage.ready, work)
        else:
            self._consume_w4(
                mma, b, storage, EpilogueOperands(d, residual, None, None, bias, scale_d, storage.terms), work
            )

    def _allocate_w4(self, tokens_layout: Any) -> _Storage:
        """Lay out shared memory."""
        plan, memory = self.plan, self.plan.memory
        smem = cutlass.memory.SmemAllocator()
        block = smem.allocate_array(cutlass.Uint8, memory.block, byte_alignment=1024)
        tokens = cute.make_tensor(cute.recast_ptr(block, tokens_layout.inner, cutlass.BFloat16), tokens_layout.outer)
        codes = block + plan.stages * memory.n_side
        scales = codes + plan.stages * plan.codes_bytes
        full = smem.allocate_array(cutlass.Int64, plan.stages, byte_alignment=8)
        empty = smem.allocate_array(cutlass.Int64, plan.stages, byte_alignment=8)
        ready = full
        if plan.cluster_n > 1:
            ready = smem.allocate_array(cutlass.Int64, plan.stages, byte_alignment=8)
        arrived = smem.allocate_array(cutlass.Int64, 1, byte_alignment=8)
        terms = smem.allocate_array(cutlass.Float32, max(plan.epilogue_terms, 1), byte_alignment=16)
        codes, scales = (cute.recast_ptr(pointer, dtype=cutlass.Int32) for pointer in (codes, scales))
        staging = cute.recast_ptr(block, dtype=cutlass.Float32)
        return _Storage(tokens, codes, scales, staging, Pipeline(full, empty), ready, arrived, terms)

    @cute.jit
    def _consume_w4(
        self, mma: cute.TiledMma, b: cute.Tensor, storage: _Storage, operand: EpilogueOperands, work: Work
    ) -> None:
        """The consumer warp groups: accumulators, what others have of them, and D."""
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        self._set_up_empty(storage, work)
        if cutlass.const_expr(plan.overlap != "serial"):
            cute.arch.griddepcontrol_wait()
        fetch_terms(plan, operand, b, work, thread)
        if cutlass.const_expr(plan.cluster > 1):
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier(barrier_id=FULL_READY, number_of_threads=plan.threads)
        weights = Weights(operands.codes_of_lanes(plan, storage.codes), operands.scales_of_rows(plan, storage.scales))
        first = cute.arch.make_warp_uniform(thread // plan.slice_threads)
        thread_of_slice = thread % plan.slice_threads
        of_slice = Slice(first, first, cutlass.Int32(0))
        _, count_k = work.k_tiles
        accumulators = multiply(
            plan, mma, weights, storage.tokens, storage.pipeline, count_k, of_slice, thread_of_slice
        )

        # The stages of this CTA are done with, so sums can take their place.
        cute.arch.barrier(barrier_id=DRAINED, number_of_threads=plan.consumer_threads)
        staged_tokens = work.tokens
        if cutlass.const_expr(plan.sliced_k > 1):
            sums = storage.staging + plan.memory.staging // 4
            add_slices(plan, accumulators, sums, first, thread_of_slice)
            staged_tokens = work.tokens if first == 0 else cutlass.Int32(0)  # those of the others are in the sums
        stage_accumulators(plan, mma, accumulators, storage.staging, staged_tokens, thread_of_slice)
        if cutlass.const_expr(plan.split_k > 1):
            exchange(plan, storage.staging, storage.arrived, work, thread)
        store(plan, operand, storage.staging, work, thread)
