"""The persistent GEMM itself: its host function, and who does what in a CTA.

The package says how it works. Knows the parts' order and what they share, not how any of them works.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from ..sizes import WARP, WARP_GROUP
from .consumer import ConsumerStorage, consume
from .epilogue_operands import EpilogueOperands
from .gather import GatheredOperand, gather
from .operands import batch_last, column_operand, gate_beside_up, output, row_operand
from .output import Output
from .pipeline import CONSUMER_THREADS, ClusterCta, Pipeline
from .plan import OUTPUT_ALIGNMENT, STAGE_BYTES_OF_K, Plan
from .producer import TmaOperand, produce
from .scales import allocate
from .scheduler import Grid, StreamK, TileScheduler, share_last_wave, this_cluster
from .split_k import SplitK
from .staged_scales import allocate_stages, first_thread_of_quad, produce_scales
from .stream_k import Workspace

_PRODUCER_WARP = CONSUMER_THREADS // WARP
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 40, 232


class _Storage(NamedTuple):
    """A CTA's shared memory."""

    stages: Any  # bytes: rows' stages, then columns'
    rows: Any  # (rows, K, stages)
    columns: Any  # (columns, K, stages)
    out: Any  # (rows, columns, buffers) of epilogue tiles
    pipeline: Pipeline
    arrived: Any  # the mbarrier of partial sums that others push, or None
    scales: Any
    staged_scales: Any
    groups: Any  # of a grouped GEMM, or None


class Persistent:
    """The kernel for one plan."""

    __module__ = __package__  # part of the kernel's symbol, which tools find it by: the package, not this file

    threads = CONSUMER_THREADS + WARP_GROUP

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        d: cute.Tensor,
        scale_a: Any,
        scale_b: Any,
        bias: Any,
        residual: Any,
        scale_d: Any,
        partials: Any,
        counters: Any,
        max_active_clusters: cutlass.Int32,
        stream: Any,
    ) -> None:
        """Launch over A ([L,] M, K), B ([L,] N, K), D ([L,] M, columns) and what else `runtime.gemm.signature` says."""
        plan = self.plan
        self.element, self.element_d = a.element_type, d.element_type
        self.batched = cute.rank(d) == 3
        a, b, d, residual = batch_last(a), batch_last(b), batch_last(d), batch_last(residual)
        extents = (cute.size(d, mode=[0]), cute.size(b, mode=[0]))
        if cutlass.const_expr(plan.form.gated):
            b = gate_beside_up(plan, b)
        rows, columns, out = a, b, d
        if cutlass.const_expr(plan.swap):
            rows, columns, out = b, a, cute.make_tensor(d.iterator, cute.select(d.layout, [1, 0, 2][: cute.rank(d)]))
        of_rows, of_columns, of_out = row_operand(plan, rows), column_operand(plan, columns), output(plan, out)

        tile_rows = cute.ceil_div(cute.size(out, mode=[0]), plan.out_rows * plan.cluster_rows)
        tile_columns = cute.ceil_div(cute.size(out, mode=[1]), plan.out_columns * plan.cluster_columns)
        batches = cute.size(d, mode=[2]) if cutlass.const_expr(cute.rank(d) == 3) else 1
        work = tile_rows * tile_columns * batches
        k_multiples = cute.ceil_div(cute.size(a, mode=[1]), STAGE_BYTES_OF_K * 8 // a.element_type.width)
        # What is not there is zeros.
        if cutlass.const_expr(plan.k_tile_multiple > 1):
            k_multiples = cute.ceil_div(k_multiples, plan.k_tile_multiple)
        if cutlass.const_expr(plan.split_k > 1):
            k_multiples = cutlass.max(k_multiples, plan.split_k)
        streamed: tuple[Any, ...] = ()
        if cutlass.const_expr(plan.stream_k):
            work, (whole, slices) = share_last_wave(plan, work, max_active_clusters, k_multiples)
            streamed = (whole, slices, partials, counters)
        clusters = work if cutlass.const_expr(plan.nonpersistent) else cutlass.min(work, max_active_clusters)
        self.kernel(
            of_rows,
            of_columns,
            of_out,
            (tile_rows, tile_columns, work, k_multiples, *streamed),
            extents,
            (scale_a, scale_b, bias, residual, scale_d),
        ).launch(
            grid=[clusters * plan.cluster, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[plan.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            cooperative=plan.stream_k,  # CTAs that wait for each other must all get an SM, whatever else runs
            use_pdl=plan.overlap,
        )

    @cute.kernel
    def kernel(self, of_rows: Any, of_columns: Any, of_out: Any, of_grid: Any, extents: Any, extras: Any) -> None:
        """Every tile of D that falls to this cluster.

        Operands are a TMA atom, a tensor and a layout in shared memory, or what `gathered_operand` says; `of_grid` is
        the fields of `Grid` but M, and of a `Workspace` if there is one; `extents` is M and N.
        """
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rows_atom, rows, rows_layout, *of_gathered_rows = of_rows
        columns_atom, columns, columns_layout, *of_gathered_columns = of_columns
        out_atom, out, out_layout, *memory = of_out
        storage = self._allocate(rows_layout, columns_layout, out_layout)
        self._set_up(storage, (rows_atom, columns_atom, out_atom), warp_index)

        rank, slice_k, first = block % plan.cluster, 0, None
        if cutlass.const_expr(plan.split_k > 1):
            slice_k, rank = rank // plan.cluster_tiles, rank % plan.cluster_tiles
            first = slice_k * plan.cluster_tiles
        cta = ClusterCta(rank % plan.cluster_rows, rank // plan.cluster_rows, first)
        workspace, split = None, None
        if cutlass.const_expr(plan.stream_k):
            workspace = Workspace(storage.stages, *of_grid[-2:])
        if cutlass.const_expr(plan.split_k > 1):
            split = SplitK(storage.stages, storage.arrived, slice_k, rank)
        scheduler = self._scheduler(storage, of_grid, extents, cta, slice_k, warp_index)
        work = scheduler.grid.work
        if warp_index >= _PRODUCER_WARP:
            cute.arch.setmaxregister_decrease(_PRODUCER_REGISTERS)
            if warp_index == _PRODUCER_WARP:
                # Products, and so D, come after what this warp loads. It waits even if it loads nothing: a kernel that
                # is complete then says that those before it are, which the next but one relies on.
                if cutlass.const_expr(plan.overlap):
                    cute.arch.griddepcontrol_wait()
                tma_rows = TmaOperand(rows_atom, rows, storage.rows)
                tma_columns = TmaOperand(columns_atom, columns, storage.columns)
                produce(plan, tma_rows, tma_columns, storage.pipeline, scheduler)
            elif cutlass.const_expr(plan.gather_warps > 0):
                if warp_index <= _PRODUCER_WARP + plan.gather_warps:
                    if cutlass.const_expr(plan.overlap):
                        cute.arch.griddepcontrol_wait()
                    (indices,) = of_gathered_columns if cutlass.const_expr(plan.swap) else of_gathered_rows
                    tokens, shared = (
                        (columns, storage.columns) if cutlass.const_expr(plan.swap) else (rows, storage.rows)
                    )
                    gathered = GatheredOperand(tokens, indices, shared)
                    gather(plan, gathered, storage.pipeline, scheduler, warp_index - _PRODUCER_WARP - 1)
            elif cutlass.const_expr(plan.scale_warps > 0):
                if warp_index <= _PRODUCER_WARP + plan.scale_warps:
                    if cutlass.const_expr(plan.overlap):
                        cute.arch.griddepcontrol_wait()
                    stands_for = first_thread_of_quad(thread, warp_index - _PRODUCER_WARP - 1)
                    operands = EpilogueOperands.of(plan, extents, extras, None, stands_for)
                    produce_scales(plan, storage.staged_scales, storage.pipeline, scheduler, operands)
                elif cutlass.const_expr(plan.split_k > 1):
                    self._attend(work)
            elif cutlass.const_expr(plan.split_k > 1):
                self._attend(work)
        else:
            cute.arch.setmaxregister_increase(_CONSUMER_REGISTERS)
            if cutlass.const_expr(plan.overlap and plan.form.reads):
                cute.arch.griddepcontrol_wait()
            operands = EpilogueOperands.of(plan, extents, extras, storage.scales, thread)
            of_d = Output(out_atom, out, storage.out, *memory)
            used = ConsumerStorage(
                storage.rows, storage.columns, of_d, storage.pipeline, storage.staged_scales, split, workspace
            )
            consume(plan, used, scheduler, operands, thread)
        if cutlass.const_expr(plan.multicasts):  # nobody leaves while another may still write to it
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    def _scheduler(
        self, storage: _Storage, of_grid: Any, extents: Any, cta: ClusterCta, slice_k: Any, warp_index: Any
    ) -> Any:
        """Which tiles fall to this CTA."""
        tile_rows, tile_columns, work, k_multiples, *streamed = of_grid
        stream_k = StreamK(*streamed[:2]) if self.plan.stream_k else None
        m, _ = extents
        grid = Grid(m, tile_rows, tile_columns, work, k_multiples, stream_k)
        block, _, _ = cute.arch.block_idx()
        return TileScheduler.of(self.plan, grid, block, cta, slice_k, self.batched)

    def _allocate(self, rows_layout: Any, columns_layout: Any, out_layout: Any) -> _Storage:
        """Lay out shared memory."""
        plan = self.plan
        smem = cutlass.memory.SmemAllocator()
        rows_bytes, columns_bytes = (plan.stages * one for one in plan.operand_bytes)
        stages = smem.allocate_array(cutlass.Uint8, rows_bytes + columns_bytes, byte_alignment=1024)
        rows = cute.make_tensor(cute.recast_ptr(stages, rows_layout.inner, self.element), rows_layout.outer)
        columns_at = cute.recast_ptr(stages + rows_bytes, columns_layout.inner, self.element)
        columns = cute.make_tensor(columns_at, columns_layout.outer)
        if cutlass.const_expr(plan.nonpersistent):
            out_at = cute.recast_ptr(stages + plan.output_offset, out_layout.inner, self.element_d)
            out = cute.make_tensor(out_at, out_layout.outer)
        else:
            out = smem.allocate_tensor(self.element_d, out_layout.outer, OUTPUT_ALIGNMENT, out_layout.inner)
        full = smem.allocate_array(cutlass.Int64, plan.stages, byte_alignment=8)
        empty = smem.allocate_array(cutlass.Int64, plan.stages, byte_alignment=8)
        arrived = smem.allocate_array(cutlass.Int64, 1, byte_alignment=8) if plan.split_k > 1 else None
        scales, staged = allocate(plan, smem), allocate_stages(plan, smem)
        return _Storage(stages, rows, columns, out, Pipeline(full, empty), arrived, scales, staged, self._groups(smem))

    def _groups(self, smem: cutlass.memory.SmemAllocator) -> Any:
        """Room for what the scheduler adds up; None where it need not."""
        return None

    @cute.jit
    def _set_up(self, storage: _Storage, descriptors: Any, warp_index: Any) -> None:
        """Prefetch TMA descriptors and initialise mbarriers, for all threads of the cluster."""
        plan = self.plan
        if warp_index == _PRODUCER_WARP:
            for descriptor in descriptors:
                if cutlass.const_expr(descriptor is not None):
                    cpasync.prefetch_descriptor(descriptor)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(plan.stages):
                    cute.arch.mbarrier_init(storage.pipeline.full + stage, plan.full_arrivals)
                    cute.arch.mbarrier_init(storage.pipeline.empty + stage, plan.empty_arrivals)
                if cutlass.const_expr(plan.split_k > 1):
                    cute.arch.mbarrier_init(storage.arrived, 1)
                cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(plan.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if cutlass.const_expr(plan.overlap):  # what is above touches no memory
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _attend(self, work: cutlass.Int32) -> None:
        """A warp without work: a cluster's CTAs meet with all their threads."""
        cluster = this_cluster(self.plan)
        for _ in cutlass.range(cluster.number, work, cluster.count, unroll=1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
