"""The grouped GEMM itself: its host function, and how a CTA comes to its scheduler.

The rest of the kernel is the persistent GEMM's.
"""

from collections.abc import Mapping
from typing import Any

import cutlass
from cutlass import cute

from ...groups import add_up, allocate
from ..persistent.form import Form
from ..persistent.kernel import Persistent
from ..persistent.operands import batch_last, column_operand, gate_beside_up, gathered_operand, output, row_operand
from ..persistent.pipeline import ClusterCta
from ..persistent.plan import STAGE_BYTES_OF_K
from ..persistent.scheduler import KTiles
from .plan import plan_of
from .scheduler import GroupedGrid, GroupedScheduler


class Grouped(Persistent):
    """The kernel for one set of choices (`choices.OPTIONS`) and one form."""

    __module__ = __package__  # part of the kernel's symbol, which tools find it by: the package, not this file

    def __init__(self, options: Mapping[str, Any], form: Form) -> None:
        super().__init__(plan_of(options, form))

    @cute.jit
    def __call__(
        self,
        a: cute.Tensor,
        b: cute.Tensor,
        indices: Any,
        ends: cute.Tensor,
        d: cute.Tensor,
        scale_a: Any,
        scale_b: Any,
        bias: Any,
        scale_d: Any,
        max_active_clusters: cutlass.Int32,
        stream: Any,
    ) -> None:
        """Launch over A (M, K), B (groups, N, K), the row of A that each group ends before, i32 (groups), D (M,
        columns), and what `runtime.grouped_gemm.Signature` says of scales and bias, or None. Where rows are gathered, A
        is (T, K), and `indices`, i32 (M), says which of its rows each row of D is made of; else they are None. Where
        rows are masked, A is (groups, M, K), D (groups, M, columns), and `ends` is how many rows each group has."""
        plan = self.plan
        self.element, self.element_d, self.batched = a.element_type, d.element_type, False
        a, b, d = batch_last(a), batch_last(b), batch_last(d)
        groups, extents = cute.size(ends), (cute.size(d, mode=[0]), cute.size(b, mode=[0]))
        if cutlass.const_expr(plan.form.gated):
            b = gate_beside_up(plan, b)
        rows, columns, out = a, b, d
        if cutlass.const_expr(plan.swap):
            rows, columns, out = b, a, cute.make_tensor(d.iterator, cute.select(d.layout, [1, 0, 2][: cute.rank(d)]))
        tokens: Any = None
        if cutlass.const_expr(plan.form.gathered):
            tokens = gathered_operand(plan, a, indices)
        of_rows = tokens if cutlass.const_expr(tokens is not None and not plan.swap) else row_operand(plan, rows)
        of_columns = tokens if cutlass.const_expr(tokens is not None and plan.swap) else column_operand(plan, columns)
        of_out = output(plan, out)
        per_tile = (plan.out_rows if plan.swap else plan.out_columns) * plan.cluster_along_n
        tiles_along_n = cute.ceil_div(cute.size(d, mode=[1]), per_tile)
        # Each group has a tile at most that is not full.
        most = (cute.ceil_div(extents[0], plan.tokens) + cutlass.min(groups, extents[0])) * tiles_along_n
        if cutlass.const_expr(plan.form.masked):
            most = cute.ceil_div(extents[0], plan.tokens) * groups * tiles_along_n
        clusters = cutlass.min(most, max_active_clusters)
        k_tiles = cute.ceil_div(cute.size(a, mode=[1]), STAGE_BYTES_OF_K * 8 // a.element_type.width)
        if cutlass.const_expr(plan.k_tile_multiple > 1):  # what is not there is zeros
            k_tiles = cute.ceil_div(k_tiles, plan.k_tile_multiple) * plan.k_tile_multiple
        self.kernel(
            of_rows,
            of_columns,
            (*of_out, out),
            (ends, tiles_along_n, k_tiles),
            extents,
            (scale_a, scale_b, bias, None, scale_d),
        ).launch(
            grid=[clusters * plan.cluster, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[plan.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=plan.overlap,
        )

    @cute.jit
    def _scheduler(
        self, storage: Any, of_grid: Any, extents: Any, cta: ClusterCta, slice_k: Any, warp_index: Any
    ) -> Any:
        """Which tiles fall to this CTA, of groups that one of its warps adds up."""
        plan, groups = self.plan, storage.groups
        ends, tiles_along_n, k_tiles = of_grid
        if warp_index == 0:
            if cutlass.const_expr(plan.overlap):
                cute.arch.griddepcontrol_wait()  # the kernel before may be what says where groups end
            add_up(plan.tokens, plan.form.masked, groups, ends, extents[0], tiles_along_n, plan.pairs_tiles)
        cute.arch.sync_threads()
        count = cute.size(ends)
        grid = GroupedGrid(count, tiles_along_n, groups.tiles[count])
        return GroupedScheduler(plan, grid, cta, KTiles(0, k_tiles), groups)

    def _groups(self, smem: cutlass.memory.SmemAllocator) -> Any:
        return allocate(smem)
