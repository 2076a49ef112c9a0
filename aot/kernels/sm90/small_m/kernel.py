"""The GEMM for few tokens itself: its host function, and who does what in a CTA.

The package says how it works. Knows the parts' order and what they share, not how any of them works.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from ..sizes import WARP
from . import weight_tiles
from .epilogue import EpilogueOperands, fetch_terms, stage_accumulators, store
from .form import Form
from .mainloop import BlockScales, multiply
from .operands import batch_last, box_layout, m_side_layouts, n_side_layout, tiled_mma
from .pipeline import DRAINED, EMPTY_READY, FULL_READY, KTiles, Pipeline, Work
from .plan import Plan
from .producer import TmaOperand, TokenScales, produce
from .quantiser import QuantisedStages, quantise
from .split_k import exchange, pushed_bytes


class _Storage(NamedTuple):
    """A CTA's shared memory."""

    m_side: Any  # (rows, tile_k, stages) as TMA writes them
    n_side: Any
    multiplied: Any  # the M side as WGMMA reads it
    staging: Any  # over the stages
    pipeline: Pipeline
    arrived: Any  # the mbarrier of partial sums that others push
    terms: Any  # what the epilogue keeps
    scales: Any  # of A's blocks, (tokens, stages)


class SmallM:
    """The kernel for one set of choices (`choices.OPTIONS`) and one form."""

    __module__ = __package__  # part of the kernel's symbol, which tools find it by: the package, not this file

    def __init__(self, options: Mapping[str, Any], form: Form) -> None:
        self.plan = Plan.of(options, form)

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        d: cute.Tensor,
        scale_a: cute.Tensor | None,
        scale_b: cute.Tensor | None,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        scale_d: cute.Tensor | None,
        stream: Any,
    ) -> None:
        """Launch over A (M, K), B (N, K), D (M, columns) and what the form has besides, each perhaps behind a batch;
        `runtime.gemm.signature` has the shapes."""
        plan = self.plan
        a, b, d, residual = (batch_last(plan, t) for t in (a, b, d, residual))
        element = b.element_type
        m_side_layout, mma_layout = m_side_layouts(plan, element)
        other_layout = n_side_layout(plan, element)
        b_layout = m_side_layout if plan.swapped else other_layout
        load = cpasync.CopyBulkTensorTileG2SOp()
        load_a = cpasync.CopyBulkTensorTileG2SMulticastOp() if plan.cluster_n > 1 else load
        boxes = box_layout(plan, element)
        box = (plan.box_tokens, plan.tile_k)
        a_atom, a_tma = None, a
        if cutlass.const_expr(not plan.form.quantises):
            a_atom, a_tma = cpasync.make_tiled_tma_atom(load_a, a, cute.select(boxes, [0, 1]), box)
        b_atom, b_tma = cpasync.make_tiled_tma_atom(
            load, weight_tiles.view(plan, b), weight_tiles.shared(plan, b_layout), weight_tiles.tiler(plan)
        )
        tiles_m = cute.ceil_div(cute.size(a, mode=[0]), plan.tile_m)
        tiles_n = cute.round_up(cute.ceil_div(cute.size(b, mode=[0]), plan.tile_n), plan.cluster_n)
        extras = (scale_a, scale_b, bias, residual, scale_d)
        layouts = (m_side_layout, mma_layout, other_layout, boxes)
        self.kernel((a_atom, a_tma), (b_atom, b_tma), b, d, extras, tiled_mma(plan, element), layouts).launch(
            grid=[tiles_n * plan.split_k, tiles_m, cute.size(a, mode=[2]) if plan.form.batched else 1],
            block=[plan.threads, 1, 1],
            cluster=[plan.cluster, 1, 1],
            stream=stream,
            use_pdl=plan.overlap != "serial",
        )

    @cute.kernel
    def kernel(
        self, load_a: Any, load_b: Any, b: cute.Tensor, d: cute.Tensor, extras: Any, mma: Any, layouts: Any
    ) -> None:
        """One tile of D, or one slice of K of it. Loads are a TMA atom, None where A is quantised, and a tensor;
        `layouts` are those of stages."""
        plan = self.plan
        block_n, block_m, item = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # Neighbours along K, then those that share rows of A.
        slice_k, tile_column = block_n % plan.split_k, block_n // plan.split_k
        cta_n = tile_column % plan.cluster_n
        a_atom, a = load_a
        b_atom, b_tma = load_b
        scale_a, scale_b, bias, residual, scale_d = extras
        batch = (item,) if plan.form.batched else ()
        if cutlass.const_expr(plan.form.batched):
            d = d[None, None, item]
            residual = residual[None, None, item] if residual is not None else None
        m_side_layout, mma_layout, other_layout, boxes = layouts
        storage = self._allocate(b.element_type, m_side_layout, mma_layout, other_layout)

        tokens = cute.size(d, mode=[0]) - block_m * plan.tile_m
        # This CTA's slice of K, in K tiles: slices differ by one K tile at most.
        tiles_k = cute.ceil_div(cute.size(b, mode=[1]), plan.tile_k)
        first_k = tiles_k * slice_k // plan.split_k
        k_tiles = KTiles(first_k, tiles_k * (slice_k + 1) // plan.split_k - first_k)
        work = Work(block_m, tile_column, batch, cta_n, slice_k, k_tiles, tokens)
        if warp == plan.consumer_threads // WARP:
            cpasync.prefetch_descriptor(b_atom)
            of_a = None
            shared_a, shared_b = storage.m_side, storage.n_side
            if cutlass.const_expr(plan.swapped):
                shared_a, shared_b = shared_b, shared_a
            if cutlass.const_expr(a_atom is not None):
                cpasync.prefetch_descriptor(a_atom)
                of_a = TmaOperand(a_atom, a, cute.make_tensor(shared_a.iterator, boxes.outer))
            self._set_up_full(storage.pipeline.full)
            of_b = TmaOperand(b_atom, b_tma, shared_b)
            produce(plan, of_a, of_b, TokenScales(scale_a, storage.scales), storage.pipeline, work)
        else:
            scales = BlockScales(storage.scales, scale_b, cute.size(b, mode=[0]))
            operands = EpilogueOperands(d, residual, scale_a, scale_b, bias, scale_d, storage.terms)
            if cutlass.const_expr(plan.form.quantises):
                stages = QuantisedStages(storage.n_side.iterator, storage.scales)
                quantiser = warp - (plan.consumer_threads // WARP + 1)
                if quantiser >= 0:
                    quantise(plan, a, stages, storage.pipeline, work, quantiser)
                else:
                    self._consume(mma, b, storage, operands, scales, work)
            else:
                self._consume(mma, b, storage, operands, scales, work)

    def _allocate(self, element: Any, m_side_layout: Any, mma_layout: Any, other_layout: Any) -> _Storage:
        """Lay out shared memory."""
        plan, memory = self.plan, self.plan.memory
        smem = cutlass.memory.SmemAllocator()
        block = smem.allocate_array(cutlass.Uint8, memory.block, byte_alignment=1024)
        m_side_pointer = cute.recast_ptr(block, m_side_layout.inner, element)
        n_side_pointer = cute.recast_ptr(block + plan.stages * memory.m_side, other_layout.inner, element)
        m_side = cute.make_tensor(m_side_pointer, m_side_layout.outer)
        n_side = cute.make_tensor(n_side_pointer, other_layout.outer)
        multiplied = cute.make_tensor(m_side_pointer, mma_layout.outer)
        staging = cute.recast_ptr(block, dtype=cutlass.Float32)
        full = smem.allocate_array(cutlass.Int64, plan.stages, byte_alignment=8)
        empty = smem.allocate_array(cutlass.Int64, plan.stages, byte_alignment=8)
        arrived = smem.allocate_array(cutlass.Int64, 1, byte_alignment=8)
        terms = smem.allocate_array(cutlass.Float32, max(plan.epilogue_terms, 1), byte_alignment=16)
        scales = terms
        if plan.form.scaled_by_stage:
            scales = smem.allocate_array(cutlass.Float32, plan.stages * plan.tile_m, byte_alignment=16)
        return _Storage(m_side, n_side, multiplied, staging, Pipeline(full, empty), arrived, terms, scales)

    @cute.jit
    def _set_up_full(self, full: cute.Pointer) -> None:
        """The producer warp: initialise the full barriers, and say so to the consumers."""
        plan = self.plan
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(plan.stages):
                cute.arch.mbarrier_init(full + stage, plan.full_arrivals)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()  # the lane that arrives at them may be another
        if cutlass.const_expr(plan.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
        else:
            cute.arch.barrier_arrive(barrier_id=FULL_READY, number_of_threads=plan.threads)
        if cutlass.const_expr(plan.overlap != "serial"):
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _set_up_empty(self, storage: _Storage, work: Work) -> None:
        """The consumers: initialise the empty barriers, and that of partial sums, and say so to the producer."""
        plan = self.plan
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(plan.stages):
                    cute.arch.mbarrier_init(storage.pipeline.empty + stage, plan.cluster_n * plan.empty_arrivals)
                if cutlass.const_expr(plan.split_k > 1):
                    cute.arch.mbarrier_init(storage.arrived, 1)
                cute.arch.mbarrier_init_fence()
            if cutlass.const_expr(plan.split_k > 1):
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(storage.arrived, pushed_bytes(plan, work))
        if cutlass.const_expr(plan.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
        else:
            cute.arch.barrier_arrive(barrier_id=EMPTY_READY, number_of_threads=plan.threads)

    @cute.jit
    def _consume(
        self,
        mma: cute.TiledMma,
        b: cute.Tensor,
        storage: _Storage,
        operands: EpilogueOperands,
        scales: BlockScales,
        work: Work,
    ) -> None:
        """The consumer warp groups: accumulators, what others have of them, and D."""
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        self._set_up_empty(storage, work)
        if cutlass.const_expr(plan.overlap != "serial"):
            cute.arch.griddepcontrol_wait()
        fetch_terms(plan, operands, b, work, thread)
        if cutlass.const_expr(plan.cluster > 1):
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier(barrier_id=FULL_READY, number_of_threads=plan.threads)
        multiplied = storage.multiplied, storage.n_side
        accumulators = multiply(plan, mma, *multiplied, storage.pipeline, work, scales, thread)

        # The stages of this CTA are done with, so sums can take their place.
        cute.arch.barrier(barrier_id=DRAINED, number_of_threads=plan.consumer_threads)
        if cutlass.const_expr(plan.split_k > 1 and plan.memory.apart == 0):
            cute.arch.cluster_arrive()
        stage_accumulators(plan, mma, accumulators, storage.staging, work.tokens, thread)
        if cutlass.const_expr(plan.split_k > 1):
            if cutlass.const_expr(plan.memory.apart == 0):
                cute.arch.cluster_wait()
            exchange(plan, storage.staging, storage.arrived, work, thread)
        store(plan, operands, storage.staging, work, thread)
