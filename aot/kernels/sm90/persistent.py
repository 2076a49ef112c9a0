"""GEMM for many tokens on Hopper: D = epilogue(scale(A (M, K) @ B (N, K)^T)), sums in f32.

A persistent grid: each cluster takes tile after tile of D, in an order that keeps neighbours' rows and columns in L2.
One warp feeds TMA, two warpgroups multiply with WGMMA and store with TMA. "cooperative": both share each tile.
"pingpong": each takes every other tile, so that one's epilogue runs under the other's products. The CTAs of a cluster
that read the same rows of A or B load a share each and multicast it. Ragged M, N and K are TMA's: zeros past the
edge, no stores there. With `split_k` a cluster's CTAs multiply slices of K of one tile and add up pieces of D; with
`stream_k` any clusters do, and with the tiles of the last wave only. With `overlap` the next launch begins as SMs come
free, and waits for the end of this one before it reads or writes (programmatic dependent launch).

Rows and columns in this file are those of WGMMA's two sides: A's and B's rows, or with `swap` B's and A's, where D is
stored transposed. 8-bit products are summed by the tensor core for a stage or two only, and then in f32 registers.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from .persistent_choices import STAGE_BYTES_OF_K, STORE_BUFFERS, WARPGROUPS, WGMMA_ROWS, Plan
from .persistent_epilogue import Fused, store_tile
from .persistent_feed import boxes_at, feed, next_stage, operand
from .persistent_gpc import shift
from .persistent_places import Places, place_of
from .persistent_promotion import fetch, promote, scales_of_blocks, take_over
from .persistent_scales import Scales, allocate
from .persistent_split import end_gathering, push
from .persistent_stream import finish, item, shares

_WARP = 32
_WARPGROUP = 128
_CONSUMERS = WARPGROUPS * _WARPGROUP
_THREADS = _CONSUMERS + _WARPGROUP
_LOADING_WARP = _CONSUMERS // _WARP
_LOAD_REGISTERS, _MULTIPLY_REGISTERS = 40, 232
_TURN = 2  # a named barrier for each warpgroup, and the epilogue's follow


class Persistent:
    """The kernel for one plan."""

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
        self.element, self.element_d = element, element_d = a.element_type, d.element_type
        self.batched = cute.rank(d) == 3
        a, b, d, residual = _batch_last(a), _batch_last(b), _batch_last(d), _batch_last(residual)
        extents = (cute.size(d, mode=[0]), cute.size(b, mode=[0]))
        if cutlass.const_expr(plan.form.gated):
            b = _gate_beside_up(b, "_interleaved" in plan.form.epilogue)
        rows, columns, out = a, b, d
        if cutlass.const_expr(plan.swap):
            rows, columns, out = b, a, cute.make_tensor(d.iterator, cute.select(d.layout, [1, 0, 2][: cute.rank(d)]))

        boxed = (plan.skip_oob and not plan.swap, plan.skip_oob and plan.swap)
        of_rows = operand(plan, rows, plan.rows, plan.cluster_columns, OperandMajorMode.K, boxed[0])
        of_columns = operand(plan, columns, plan.columns, plan.cluster_rows, _major(plan), boxed[1])
        piece = (WGMMA_ROWS, plan.piece_columns)
        out_layout = _piece_layout(piece, element_d, plan.swap)
        store = cpasync.CopyBulkTensorTileS2GOp()
        out_atom, out_tma = cpasync.make_tiled_tma_atom(store, out, cute.select(out_layout, [0, 1]), piece)

        tiles_rows = cute.ceil_div(cute.size(out, mode=[0]), plan.rows * plan.cluster_rows)
        tiles_columns = cute.ceil_div(cute.size(out, mode=[1]), plan.out_columns * plan.cluster_columns)
        batches = cute.size(d, mode=[2]) if cutlass.const_expr(cute.rank(d) == 3) else 1
        tiles = tiles_rows * tiles_columns * batches
        count_k = cute.ceil_div(cute.size(a, mode=[1]), STAGE_BYTES_OF_K * 8 // element.width)
        # What is not there is zeros.
        if cutlass.const_expr(plan.unit_k > 1):
            count_k = cute.ceil_div(count_k, plan.unit_k)
        if cutlass.const_expr(plan.split_k > 1):
            count_k = cutlass.max(count_k, plan.split_k)
        streamed: tuple[Any, ...] = ()
        if cutlass.const_expr(plan.stream_k):
            tiles, whole, slices = shares(plan, tiles, max_active_clusters, count_k)
            streamed = (whole, slices, partials, counters)
        clusters = cutlass.min(tiles, max_active_clusters)
        self.kernel(
            of_rows,
            of_columns,
            (out_atom, out_tma, out_layout),
            (tiles_rows, tiles_columns, tiles, count_k, *streamed),
            extents,
            (scale_a, scale_b, bias, residual, scale_d),
        ).launch(
            grid=[clusters * plan.cluster, 1, 1],
            block=[_THREADS, 1, 1],
            cluster=[plan.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            cooperative=plan.stream_k,  # CTAs that wait for each other must all get an SM, whatever else runs
            use_pdl=plan.overlap,
        )

    @cute.kernel
    def kernel(self, of_rows: Any, of_columns: Any, of_out: Any, tiles: Any, extents: Any, extras: Any) -> None:
        """Every tile of D that falls to this cluster. `extents` is M and N.

        `tiles` counts clusters' tiles along rows and columns, in all, and units of stages along K.
        """
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rows_atom, rows, rows_layout, *boxes_of_rows = of_rows
        columns_atom, columns, columns_layout, *boxes_of_columns = of_columns
        out_atom, out, out_layout = of_out

        smem = cutlass.memory.SmemAllocator()
        of_rows_bytes, of_columns_bytes = (plan.stages * e * STAGE_BYTES_OF_K for e in (plan.rows, plan.columns))
        stages = smem.allocate_array(cutlass.Uint8, of_rows_bytes + of_columns_bytes, byte_alignment=1024)
        shared_rows = cute.make_tensor(cute.recast_ptr(stages, rows_layout.inner, self.element), rows_layout.outer)
        columns_at = cute.recast_ptr(stages + of_rows_bytes, columns_layout.inner, self.element)
        shared_columns = cute.make_tensor(columns_at, columns_layout.outer)
        shared_out = smem.allocate_tensor(self.element_d, out_layout.outer, 1024, out_layout.inner)
        full = smem.allocate_array(cutlass.Int64, plan.stages, byte_alignment=8)
        empty = smem.allocate_array(cutlass.Int64, plan.stages, byte_alignment=8)
        arrived = smem.allocate_array(cutlass.Int64, 1, byte_alignment=8) if plan.split_k > 1 else None
        scales = allocate(plan, smem)

        if warp_index == _LOADING_WARP:
            for descriptor in (rows_atom, columns_atom, out_atom, *boxes_of_rows[:1], *boxes_of_columns[:1]):
                cpasync.prefetch_descriptor(descriptor)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(plan.stages):
                    cute.arch.mbarrier_init(full + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, plan.releases)
                if cutlass.const_expr(plan.split_k > 1):
                    cute.arch.mbarrier_init(arrived, 1)
                cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(plan.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if cutlass.const_expr(plan.overlap):  # what is above touches no memory
            cute.arch.griddepcontrol_launch_dependents()

        slice_k = block % plan.split_k if cutlass.const_expr(plan.split_k > 1) else 0
        rank = block % plan.cluster // plan.split_k
        member = (rank % plan.cluster_rows, rank // plan.cluster_rows)
        spaces, tiles = tiles[6:], self._work(tiles, block, slice_k)
        places = Places(plan, tiles[:2], member, tiles[5:], self.batched)
        if warp_index >= _LOADING_WARP:
            cute.arch.setmaxregister_decrease(_LOAD_REGISTERS)
            if warp_index == _LOADING_WARP:
                # Products, and so D, come after what this warp loads. It waits even if it loads nothing: a kernel that
                # is complete then says that those before it are, which the next but one relies on.
                if cutlass.const_expr(plan.overlap):
                    cute.arch.griddepcontrol_wait()
                load_rows = (rows_atom, rows, shared_rows, boxes_at(boxes_of_rows, shared_rows))
                load_columns = (columns_atom, columns, shared_columns, boxes_at(boxes_of_columns, shared_columns))
                feed(plan, load_rows, load_columns, (full, empty), (tiles, extents[0]), member, places)
            elif cutlass.const_expr(plan.split_k > 1):
                self._attend(tiles[2])
        else:
            cute.arch.setmaxregister_increase(_MULTIPLY_REGISTERS)
            if cutlass.const_expr(plan.overlap and plan.form.reads):
                cute.arch.griddepcontrol_wait()
            fused = Fused(plan, extents, extras, thread, scales)
            self._consume(
                (shared_rows, shared_columns),
                (out_atom, out, shared_out),
                (full, empty),
                (tiles, (member, places), (stages, arrived, slice_k, *spaces)),
                fused,
                thread,
            )
        if cutlass.const_expr(plan.multicasts):  # nobody leaves while another may still write to it
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    def _work(self, tiles: Any, block: Any, slice_k: Any) -> tuple[Any, ...]:
        """The `tiles` of `kernel` for a CTA: with its slice of K, and how its cluster's tiles move if they do."""
        cluster, streamed = self.plan.cluster, tiles[4:6]
        work = (*tiles[:3], *self._slice(tiles[3], slice_k), *streamed)
        if not self.plan.quads:
            return work
        blocks, _, _ = cute.arch.grid_dim()
        return (*work, *shift(block // cluster, blocks // cluster, tiles[2]))

    def _slice(self, count_k: Any, slice_k: Any) -> tuple[Any, Any]:
        """Of `count_k` units along K, how many stages a slice has and the first of them."""
        split, unit = self.plan.split_k, self.plan.unit_k
        if split == 1:
            return count_k * unit, 0
        first = count_k * slice_k // split
        return (count_k * (slice_k + 1) // split - first) * unit, first * unit

    @cute.jit
    def _attend(self, tiles: cutlass.Int32) -> None:
        """A warp without work: a cluster's CTAs meet with all their threads."""
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        cluster = self.plan.cluster
        for _ in cutlass.range(block // cluster, tiles, blocks // cluster, unroll=1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    @cute.jit
    def _consume(
        self,
        shared: Any,
        of_out: Any,
        barriers: Any,
        work: Any,
        fused: Any,
        thread: cutlass.Int32,
    ) -> None:
        """A multiplying warpgroup: every tile that falls to it."""
        plan = self.plan
        tiled_mma = self._tiled_mma()
        tiles, (member, places), slices = work
        count_k = tiles[3]
        group = cute.arch.make_warp_uniform(thread // _WARPGROUP)
        # Descriptors are the warpgroup's, so its first thread stands for all.
        mine = tiled_mma.get_slice(0 if cutlass.const_expr(plan.pingpong) else group * _WARPGROUP)
        operands = (
            tiled_mma.make_fragment_A(mine.partition_A(shared[0])),
            tiled_mma.make_fragment_B(mine.partition_B(shared[1])),
        )
        sums = cute.make_rmem_tensor(tiled_mma.partition_shape_C((plan.rows, plan.columns)), cutlass.Float32)
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        first, step = block // plan.cluster, blocks // plan.cluster
        if cutlass.const_expr(plan.promotion > 0):
            self._consume_promoted(operands, sums, of_out, barriers, work, (first, step, group), fused)
        else:
            stage = cutlass.Int32(0)
            phase = cutlass.Int32(0)
            turn = cutlass.Int32(0)
            if cutlass.const_expr(plan.pingpong):
                if group == 1:
                    cute.arch.barrier_arrive(barrier_id=_TURN, number_of_threads=_CONSUMERS)
                    stage = count_k % plan.stages
                    phase = (count_k // plan.stages) & 1
                first += group * step
                step *= 2
            for index in cutlass.range(first, tiles[2], step, unroll=1):
                tile, _, stages_k, share = item(plan, index, tiles)
                # A stage's barrier tells two rounds apart and no more, so nobody may wait for one before its turn.
                others_turn: Any = None
                if cutlass.const_expr(plan.pingpong):
                    others_turn = (_TURN + 1 - group, index + step // 2 < tiles[2])
                    cute.arch.barrier(barrier_id=_TURN + group, number_of_threads=_CONSUMERS)
                at = (stage, phase, stages_k)
                stage, phase = self._multiply(operands, sums, barriers, at, member, others_turn)
                self._finish(barriers, stage, member)
                turn = self._exchange(sums, slices, turn, thread)
                place = place_of(places, tile)
                given = fused, Scales(plan, fused, place)
                if cutlass.const_expr(plan.stream_k):
                    spaces = (slices[0], slices[3], slices[4])
                    finish(plan, sums, of_out, place, given, share, spaces)
                else:
                    store_tile(plan, sums, of_out, place, given, slices)
                end_gathering(plan)
                if cutlass.const_expr(plan.pingpong):  # pass over the other warpgroup's tile
                    stage += count_k
                    phase ^= (stage // plan.stages) & 1
                    stage = stage % plan.stages
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _consume_promoted(
        self,
        operands: Any,
        sums: cute.Tensor,
        of_out: Any,
        barriers: Any,
        work: Any,
        share: Any,
        fused: Any,
    ) -> None:
        """The same where the tensor core sums up `promotion` stages at a time.

        A tile's first sums need no other registers, so they are under way while the tile before is stored.
        """
        plan = self.plan
        tiles, (member, places), slices = work
        first, step, group = share
        count_k = tiles[3]
        block = self._tiled_mma().partition_shape_C((WGMMA_ROWS * plan.parts[0], plan.columns))
        shape = sums.shape if plan.sets > 1 else block
        partials = [cute.make_rmem_tensor(shape, cutlass.Float32) for _ in range(plan.sets)]
        stage, phase, turn = cutlass.Int32(0), cutlass.Int32(0), cutlass.Int32(0)
        thread = group * _WARPGROUP + fused.thread
        if cutlass.const_expr(plan.sets == 1):  # noqa: SIM102  # the other is of run time
            if group == 1:
                cute.arch.barrier_arrive(barrier_id=_TURN, number_of_threads=_CONSUMERS)
        if cutlass.const_expr(plan.split_k == 1):
            stage, phase = self._begin_tile(operands, partials[0], barriers, (stage, phase), group)
        for index in cutlass.range(first, tiles[2], step, unroll=1):
            place = place_of(places, index)
            tile_scales = Scales(plan, fused, place)
            if cutlass.const_expr(plan.split_k > 1):
                partials[0].fill(0.0)
                stage, phase = self._begin_tile(operands, partials[0], barriers, (stage, phase), group)
            at = (stage, phase, count_k, tiles[4])
            if cutlass.const_expr(plan.sets > 1):
                stage, phase = self._alternate(operands, (sums, *partials), barriers, at, member, (fused, place))
            else:
                stage, phase = self._take_turns(operands, (sums, *partials), barriers, at, member, group)
            if cutlass.const_expr(plan.sets == 1 and plan.split_k == 1):  # noqa: SIM102  # the other is of run time
                if index + step < tiles[2]:
                    stage, phase = self._begin_tile(operands, partials[0], barriers, (stage, phase), group)
            turn = self._exchange(sums, slices, turn, thread)
            store_tile(plan, sums, of_out, place, (fused, tile_scales), slices)
            end_gathering(plan)
        warpgroup.wait_group(0)
        if cutlass.const_expr(plan.sets == 1):  # noqa: SIM102
            if group == 0:  # the last turn that the other passed on
                cute.arch.barrier(barrier_id=_TURN, number_of_threads=_CONSUMERS)

    @cute.jit
    def _begin_tile(self, operands: Any, partial: cute.Tensor, barriers: Any, at: Any, group: cutlass.Int32) -> Any:
        """Begin to sum up a tile's first products."""
        stage, phase = at
        if cutlass.const_expr(self.plan.sets > 1):
            self._multiply_stage(operands, partial, barriers, at, False)
            stage, phase = next_stage(self.plan, stage, phase)
        else:
            self._begin_block(operands, partial, barriers, at, (0, group))
        return stage, phase

    @cute.jit
    def _take_turns(self, operands: Any, sums: Any, barriers: Any, at: Any, member: Any, group: cutlass.Int32) -> Any:
        """All products of a tile in one set of partial sums of 64 rows, by turns with the other warpgroup: one promotes
        while the other multiplies. The first ones are under way before."""
        plan = self.plan
        total, partial = sums
        stage, phase, count_k, first_k = at
        for block in cutlass.range_constexpr(plan.blocks):
            if cutlass.const_expr(block > 0):
                self._begin_block(operands, partial, barriers, (stage, phase), (block, group))
            self._finish_block(barriers, stage, member, block)
            promote(plan, total, partial, None, range(block, block + 1), True)
        stage, phase = self._after(stage, phase)
        for _ in cutlass.range(first_k + plan.promotion, first_k + count_k, plan.promotion, unroll=1):
            for block in cutlass.range_constexpr(plan.blocks):
                self._begin_block(operands, partial, barriers, (stage, phase), (block, group))
                self._finish_block(barriers, stage, member, block)
                promote(plan, total, partial, None, range(block, block + 1), False)
            stage, phase = self._after(stage, phase)
        return stage, phase

    def _after(self, stage: cutlass.Int32, phase: cutlass.Int32) -> Any:
        """The stage after an interval."""
        for _ in range(self.plan.promotion):
            stage, phase = next_stage(self.plan, stage, phase)
        return stage, phase

    @cute.jit
    def _begin_block(self, operands: Any, partial: cute.Tensor, barriers: Any, at: Any, which: Any) -> None:
        """Begin to sum up an interval's products for a block of 64 rows, when it is this warpgroup's turn."""
        stage, phase = at
        block, group = which
        for k in cutlass.range_constexpr(self.plan.promotion):
            tiled_mma = self._tiled_mma()
            cute.arch.mbarrier_wait(barriers[0] + stage, phase)
            if cutlass.const_expr(k == 0):
                cute.arch.barrier(barrier_id=_TURN + group, number_of_threads=_CONSUMERS)
            warpgroup.fence()
            for block_k in cutlass.range_constexpr(cute.size(operands[0], mode=[2])):
                tiled_mma.set(warpgroup.Field.ACCUMULATE, k > 0 or block_k > 0)
                a = cute.append_ones(operands[0][(None, block, block_k, stage)], up_to_rank=2)
                cute.gemm(tiled_mma, partial, a, operands[1][(None, None, block_k, stage)], partial)
            warpgroup.commit_group()
            stage, phase = next_stage(self.plan, stage, phase)
        cute.arch.barrier_arrive(barrier_id=_TURN + 1 - group, number_of_threads=_CONSUMERS)

    @cute.jit
    def _finish_block(self, barriers: Any, stage: cutlass.Int32, member: Any, block: cutlass.Constexpr) -> None:
        """Wait for an interval's products for a block of 64 rows, and release its stages after the last block's."""
        plan = self.plan
        if cutlass.const_expr(block < plan.blocks - 1):
            warpgroup.wait_group(0)
        else:
            for k in cutlass.range_constexpr(plan.promotion):
                warpgroup.wait_group(plan.promotion - 1 - k)
                self._release(barriers[1] + stage, member)
                stage = next_stage(plan, stage, cutlass.Int32(0))[0]

    @cute.jit
    def _alternate(self, operands: Any, sums: Any, barriers: Any, at: Any, member: Any, scaled: Any) -> Any:
        """All products of a tile in two sets of partial sums by turns. Its first ones are under way before, the next
        tile's after: of spare stages, if there is none, so that nothing here needs a branch."""
        plan = self.plan
        total, even, odd = sums
        stage, phase, count_k, first_k = at
        scales, later = scales_of_blocks(plan, plan.unit_k)
        fetch(plan, later, scaled, first_k)
        take_over(plan, scales, later)
        total.fill(0.0)
        odd.fill(0.0)  # WGMMA would ignore what is there, but the compiler keep it through the epilogue before
        for k in cutlass.range(first_k, first_k + count_k, plan.unit_k, unroll=1):
            fetch(plan, later, scaled, k + plan.unit_k)
            # Sums are read behind a loop's edge only where no others are under way: ptxas would let none overlap.
            self._finish(barriers, stage, member)
            for i in cutlass.range_constexpr(plan.unit_k):
                new, old = (even, odd) if cutlass.const_expr(i % 2) else (odd, even)
                self._multiply_stage(operands, new, barriers, (stage, phase), False)
                stage, phase = next_stage(plan, stage, phase)
                if cutlass.const_expr(i > 0):
                    warpgroup.wait_group(1)
                    self._release_before(barriers, stage, member, 2)
                promote(plan, total, old, scales[i], range(plan.blocks), False)
            take_over(plan, scales, later)
        if cutlass.const_expr(plan.split_k > 1):
            self._finish(barriers, stage, member)
        return stage, phase

    @cute.jit
    def _exchange(self, sums: cute.Tensor, slices: Any, turn: cutlass.Int32, thread: cutlass.Int32) -> Any:
        """Where K is split, give the other CTAs the sums of their pieces of D and wait for one's own; return the next
        turn. Stages are where they go, so no CTA of the cluster may have any left."""
        plan = self.plan
        if cutlass.const_expr(plan.split_k > 1):
            stages, arrived, slice_k = slices
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(arrived, plan.pushed_bytes)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
            push(plan, sums, stages, arrived, slice_k, thread)
            cute.arch.mbarrier_wait(arrived, turn)
        return turn ^ 1

    @cute.jit
    def _multiply(self, operands: Any, sums: cute.Tensor, barriers: Any, at: Any, member: Any, others_turn: Any) -> Any:
        """Sum up the products of some stages, from zero. The last stage is still being read on return.

        Once all are under way it is the other warpgroup's turn, `others_turn`: a barrier, and whether it has a tile.
        Behind the loop the compiler would put the barrier after all that has nothing to wait for.
        """
        plan = self.plan
        stage, phase, count = at
        previous = stage
        for k in cutlass.range(count, unroll=1):
            self._multiply_stage(operands, sums, barriers, (stage, phase), k > 0)
            if cutlass.const_expr(plan.pingpong):
                barrier, has_tile = others_turn
                if (k == count - 1) & has_tile:
                    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=_CONSUMERS)
            warpgroup.wait_group(1)
            if k > 0:
                self._release(barriers[1] + previous, member)
            previous = stage
            stage += 1
            if stage == plan.stages:
                stage = cutlass.Int32(0)
                phase ^= 1
        return stage, phase

    @cute.jit
    def _multiply_stage(self, operands: Any, sums: cute.Tensor, barriers: Any, at: Any, accumulate: Any) -> None:
        """Begin to multiply what a stage holds, when it is there."""
        stage, phase = at
        tiled_mma = self._tiled_mma()  # of its own: what is set here must not outlive a loop's or a branch's body
        cute.arch.mbarrier_wait(barriers[0] + stage, phase)
        warpgroup.fence()
        for block_k in cutlass.range_constexpr(cute.size(operands[0], mode=[2])):
            where = (None, None, block_k, stage)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, accumulate if cutlass.const_expr(block_k == 0) else True)
            cute.gemm(tiled_mma, sums, operands[0][where], operands[1][where], sums)
        warpgroup.commit_group()

    @cute.jit
    def _finish(self, barriers: Any, stage: cutlass.Int32, member: Any) -> None:
        """Wait for all products, and release the last stage before `stage`."""
        warpgroup.wait_group(0)
        self._release_before(barriers, stage, member, 1)

    @cute.jit
    def _release_before(self, barriers: Any, stage: cutlass.Int32, member: Any, back: cutlass.Constexpr) -> None:
        """Release the stage `back` stages before `stage`."""
        at = stage - back
        at = at + self.plan.stages if at < 0 else at
        self._release(barriers[1] + at, member)

    def _tiled_mma(self) -> cute.TiledMma:
        """WGMMA by the warpgroups that share a tile, for this form's types."""
        plan, element = self.plan, self.element
        k, smem = OperandMajorMode.K, warpgroup.OperandSource.SMEM
        columns = plan.columns // plan.parts[1]
        if element.width == 8:
            op = warpgroup.MmaF8Op(element, element, cutlass.Float32, (WGMMA_ROWS, columns, 32), smem, k, k)
        else:
            major = _major(plan)
            op = warpgroup.MmaF16BF16Op(element, cutlass.Float32, (WGMMA_ROWS, columns, 16), smem, k, major)
        return cute.make_tiled_mma(cute.make_mma_atom(op), (*plan.parts, 1))

    @cute.jit
    def _release(self, empty: cute.Pointer, member: Any) -> None:
        """Say, to all CTAs that write this stage here, that this warp has read it."""
        plan = self.plan
        with cute.arch.elect_one():
            if cutlass.const_expr(not plan.multicasts):
                cute.arch.mbarrier_arrive(empty)
            for row in cutlass.range_constexpr(plan.cluster_rows if plan.cluster_rows > 1 else 0):
                cute.arch.mbarrier_arrive(empty, member[1] * plan.cluster_rows + row)
            for column in cutlass.range_constexpr(plan.cluster_columns if plan.cluster_columns > 1 else 0):
                cute.arch.mbarrier_arrive(empty, column * plan.cluster_rows + member[0])


def _major(plan: Plan) -> OperandMajorMode:
    """How the operand on WGMMA's N side lies in memory."""
    return OperandMajorMode.MN if plan.form.b_major == "n" else OperandMajorMode.K


def _batch_last(x: Any) -> Any:
    """A tensor, if there is one, with its batch, if it has one, as the last mode."""
    if x is None or cute.rank(x) == 2:
        return x
    return cute.make_tensor(x.iterator, cute.select(x.layout, [1, 2, 0]))


def _gate_beside_up(b: cute.Tensor, interleaved: bool) -> cute.Tensor:
    """B with its rows in another order: by turns 8 that make gates and the 8 that make what they gate.

    WGMMA then leaves a gate and its partner to the same thread.
    """
    row = b.stride[0]
    extent = cute.size(b, mode=[0])
    strides = (2 * row, row, 16 * row) if interleaved else (row, extent // 2 * row, 8 * row)
    shape = ((8, 2, extent // 16), *b.shape[1:])
    return cute.make_tensor(b.iterator, cute.make_layout(shape, stride=(strides, *b.stride[1:])))


def _piece_layout(piece: tuple[int, int], element: Any, transposed: bool) -> cute.ComposedLayout:
    """Pieces of D in shared memory: (rows, columns, buffers of all warpgroups)."""
    kinds = warpgroup.SmemLayoutAtomKind
    contiguous_bytes = piece[0 if transposed else 1] * element.width // 8
    if contiguous_bytes // 16 % 2:
        shape = (*piece, WARPGROUPS * STORE_BUFFERS)
        plain = cute.make_layout(shape, stride=(piece[1], 1, piece[0] * piece[1]))
        return cute.make_composed_layout(cute.make_swizzle(0, 4, 3), 0, plain)
    swizzles = {128: (kinds.K_SW128, kinds.MN_SW128), 64: (kinds.K_SW64, kinds.MN_SW64), 32: (kinds.K_SW32, None)}
    atom = warpgroup.make_smem_layout_atom(swizzles[contiguous_bytes][transposed], element)
    return cute.tile_to_shape(atom, (*piece, WARPGROUPS * STORE_BUFFERS), (0, 1, 2))
