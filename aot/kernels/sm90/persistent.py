"""GEMM for many tokens on Hopper: D = epilogue(scale(A (M, K) @ B (N, K)^T)), sums in f32.

A persistent grid: each cluster takes tile after tile of D, in an order that keeps neighbours' rows and columns in L2.
One warp feeds TMA, two warpgroups multiply with WGMMA and store with TMA. "cooperative": both share each tile.
"pingpong": each takes every other tile, so that one's epilogue runs under the other's products. The CTAs of a cluster
that read the same rows of A or B load a share each and multicast it. Ragged M, N and K are TMA's: zeros past the
edge, no stores there.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from .persistent_choices import STORE_BUFFERS, WARPGROUPS, WGMMA_ROWS, Plan

_WARP = 32
_WARPGROUP = 128
_CONSUMERS = WARPGROUPS * _WARPGROUP
_THREADS = _CONSUMERS + _WARPGROUP
_LOADING_WARP = _CONSUMERS // _WARP
_LOAD_REGISTERS, _MULTIPLY_REGISTERS = 40, 232
_TURN, _STORE = 1, 3  # named barriers, one for each warpgroup


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
        max_active_clusters: cutlass.Int32,
        stream: Any,
    ) -> None:
        """Launch over A ([L,] M, K), B ([L,] N, K), D ([L,] M, columns) and what else `runtime.signature` says."""
        plan = self.plan
        self.element, self.element_d = element, element_d = a.element_type, d.element_type
        tile_k = 1024 // element.width
        a, b, d = _batch_last(a), _batch_last(b), _batch_last(d)
        tiled_mma = _tiled_mma(element, (plan.parts_m, plan.parts_n), plan.tile_n // plan.parts_n)
        store_mma = _tiled_mma(element, (1, 1), plan.store_columns)

        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, element)
        a_layout = cute.tile_to_shape(atom, (plan.tile_m, tile_k, plan.stages), (0, 1, 2))
        b_layout = cute.tile_to_shape(atom, (plan.tile_n, tile_k, plan.stages), (0, 1, 2))
        d_layout = _store_layout(plan.store_columns, element_d)

        load = cpasync.CopyBulkTensorTileG2SOp()
        multicast = cpasync.CopyBulkTensorTileG2SMulticastOp()
        a_atom, a_tma = cpasync.make_tiled_tma_atom(
            multicast if plan.cluster_n > 1 else load,
            a,
            cute.select(a_layout, [0, 1]),
            (plan.tile_m, tile_k),
            plan.cluster_n,
        )
        b_atom, b_tma = cpasync.make_tiled_tma_atom(
            multicast if plan.cluster_m > 1 else load,
            b,
            cute.select(b_layout, [0, 1]),
            (plan.tile_n, tile_k),
            plan.cluster_m,
        )
        d_atom, d_tma = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), d, cute.select(d_layout, [0, 1]), (WGMMA_ROWS, plan.store_columns)
        )
        tiles_m = cute.ceil_div(cute.size(d, mode=[0]), plan.tile_m * plan.cluster_m)
        tiles_n = cute.ceil_div(cute.size(d, mode=[1]), plan.tile_columns * plan.cluster_n)
        batches = cute.size(d, mode=[2]) if cutlass.const_expr(cute.rank(d) == 3) else 1
        clusters = cutlass.min(tiles_m * tiles_n * batches, max_active_clusters)
        self.kernel(
            (a_atom, a_tma, a_layout),
            (b_atom, b_tma, b_layout),
            (d_atom, d_tma, d_layout),
            (tiles_m, tiles_n, tiles_m * tiles_n * batches, cute.ceil_div(cute.size(a, mode=[1]), tile_k)),
            tiled_mma,
            store_mma,
        ).launch(
            grid=[clusters * plan.cluster, 1, 1],
            block=[_THREADS, 1, 1],
            cluster=[plan.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(self, of_a: Any, of_b: Any, of_d: Any, tiles: Any, tiled_mma: Any, store_mma: Any) -> None:
        """Every tile of D that falls to this cluster. An operand is its TMA atom, its tensor and its layout."""
        plan = self.plan
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        a_atom, a, a_layout = of_a
        b_atom, b, b_layout = of_b
        d_atom, d, d_layout = of_d

        smem = cutlass.memory.SmemAllocator()
        shared_a = smem.allocate_tensor(self.element, a_layout.outer, 1024, a_layout.inner)
        shared_b = smem.allocate_tensor(self.element, b_layout.outer, 1024, b_layout.inner)
        shared_d = smem.allocate_tensor(self.element_d, d_layout.outer, 1024, d_layout.inner)
        full = smem.allocate_array(cutlass.Int64, plan.stages, byte_alignment=8)
        empty = smem.allocate_array(cutlass.Int64, plan.stages, byte_alignment=8)

        if warp_index == _LOADING_WARP:
            for descriptor in (a_atom, b_atom, d_atom):
                cpasync.prefetch_descriptor(descriptor)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(plan.stages):
                    cute.arch.mbarrier_init(full + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, plan.releases)
                cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(plan.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        rank = block % plan.cluster
        member = (rank % plan.cluster_m, rank // plan.cluster_m)
        if warp_index >= _LOADING_WARP:
            cute.arch.setmaxregister_decrease(_LOAD_REGISTERS)
            if warp_index == _LOADING_WARP:
                self._feed((a_atom, a, shared_a), (b_atom, b, shared_b), (full, empty), tiles, member)
        else:
            cute.arch.setmaxregister_increase(_MULTIPLY_REGISTERS)
            self._consume(
                (tiled_mma, store_mma), (shared_a, shared_b), (d_atom, d, shared_d), (full, empty), tiles, member, thread
            )
        if cutlass.const_expr(plan.cluster > 1):  # nobody leaves while another may still write to it
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()

    @cute.jit
    def _place(self, index: cutlass.Int32, tiles: Any, member: Any) -> Any:
        """This CTA's tile of D as (m, n, batch), in the cluster's tile number `index`."""
        plan = self.plan
        tiles_m, tiles_n, _, _ = tiles
        per_batch = tiles_m * tiles_n
        batch = index // per_batch
        rest = index - batch * per_batch
        along, across = (tiles_m, tiles_n) if cutlass.const_expr(plan.raster == "m") else (tiles_n, tiles_m)
        band = rest // (plan.group * across)
        rest -= band * (plan.group * across)
        width = cutlass.min(along - band * plan.group, plan.group)
        second = rest // width
        first = band * plan.group + rest - second * width
        m, n = (first, second) if cutlass.const_expr(plan.raster == "m") else (second, first)
        return m * plan.cluster_m + member[0], n * plan.cluster_n + member[1], batch

    @cute.jit
    def _feed(self, load_a: Any, load_b: Any, barriers: Any, tiles: Any, member: Any) -> None:
        """The loading warp: keep every stage full."""
        plan = self.plan
        a_atom, a, shared_a = load_a
        b_atom, b, shared_b = load_b
        full, empty = barriers
        cta_m, cta_n = member
        tile_k = cute.size(shared_a, mode=[1])
        tiled_a = cute.local_tile(a, (plan.tile_m, tile_k), (None,) * cute.rank(a))
        tiled_b = cute.local_tile(b, (plan.tile_n, tile_k), (None,) * cute.rank(b))
        to_a, from_a = cpasync.tma_partition(
            a_atom,
            cta_n,
            cute.make_layout(plan.cluster_n),
            cute.group_modes(shared_a, 0, 2),
            cute.group_modes(tiled_a, 0, 2),
        )
        to_b, from_b = cpasync.tma_partition(
            b_atom,
            cta_m,
            cute.make_layout(plan.cluster_m),
            cute.group_modes(shared_b, 0, 2),
            cute.group_modes(tiled_b, 0, 2),
        )
        mask_a, mask_b = None, None
        if cutlass.const_expr(plan.cluster_n > 1):
            mask_a = cutlass.Int16(sum(1 << (n * plan.cluster_m) for n in range(plan.cluster_n))) << cutlass.Int16(cta_m)
        if cutlass.const_expr(plan.cluster_m > 1):
            mask_b = cutlass.Int16((1 << plan.cluster_m) - 1) << cutlass.Int16(cta_n * plan.cluster_m)

        stage_bytes = (plan.tile_m + plan.tile_n) * tile_k * self.element.width // 8
        count_k = tiles[3]
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        stage = cutlass.Int32(0)
        phase = cutlass.Int32(1)  # the first round finds every stage empty
        for index in cutlass.range(block // plan.cluster, tiles[2], blocks // plan.cluster, unroll=1):
            m, n, batch = self._place(index, tiles, member)
            tail = (batch,) if cutlass.const_expr(cute.rank(a) == 3) else ()
            for k in cutlass.range(count_k, unroll=1):
                cute.arch.mbarrier_wait(empty + stage, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, stage_bytes)
                bar = full + stage
                cute.copy(a_atom, from_a[(None, m, k, *tail)], to_a[None, stage], tma_bar_ptr=bar, mcast_mask=mask_a)
                cute.copy(b_atom, from_b[(None, n, k, *tail)], to_b[None, stage], tma_bar_ptr=bar, mcast_mask=mask_b)
                stage += 1
                if stage == plan.stages:
                    stage = cutlass.Int32(0)
                    phase ^= 1

    @cute.jit
    def _consume(
        self, mmas: Any, shared: Any, of_d: Any, barriers: Any, tiles: Any, member: Any, thread: cutlass.Int32
    ) -> None:
        """A multiplying warpgroup: every tile that falls to it."""
        plan = self.plan
        tiled_mma, store_mma = mmas
        shared_a, shared_b = shared
        group = cute.arch.make_warp_uniform(thread // _WARPGROUP)
        # Descriptors are the warpgroup's, so its first thread stands for all.
        mine = tiled_mma.get_slice(group * _WARPGROUP if cutlass.const_expr(not plan.pingpong) else 0)
        rows = tiled_mma.make_fragment_A(mine.partition_A(shared_a))
        columns = tiled_mma.make_fragment_B(mine.partition_B(shared_b))
        shape = tiled_mma.partition_shape_C((plan.tile_m, plan.tile_n))
        sums = cute.make_rmem_tensor(shape, cutlass.Float32)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)

        count_k = tiles[3]
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        first, step = block // plan.cluster, blocks // plan.cluster
        stage = cutlass.Int32(0)
        phase = cutlass.Int32(0)
        if cutlass.const_expr(plan.pingpong):
            if group == 1:
                cute.arch.barrier_arrive(barrier_id=_TURN, number_of_threads=_CONSUMERS)
                stage = count_k % plan.stages
                phase = (count_k // plan.stages) & 1
            first += group * step
            step *= 2
        for index in cutlass.range(first, tiles[2], step, unroll=1):
            place = self._place(index, tiles, member)
            sums.fill(0.0)
            if cutlass.const_expr(plan.pingpong):
                cute.arch.barrier(barrier_id=_TURN + group, number_of_threads=_CONSUMERS)
            previous = stage
            for k in cutlass.range(count_k, unroll=1):
                cute.arch.mbarrier_wait(barriers[0] + stage, phase)
                warpgroup.fence()
                for block_k in cutlass.range_constexpr(cute.size(rows, mode=[2])):
                    at = (None, None, block_k, stage)
                    cute.gemm(tiled_mma, sums, rows[at], columns[at], sums)
                warpgroup.commit_group()
                warpgroup.wait_group(1)
                if k > 0:
                    self._release(barriers[1] + previous, member)
                previous = stage
                stage += 1
                if stage == plan.stages:
                    stage = cutlass.Int32(0)
                    phase ^= 1
            if cutlass.const_expr(plan.pingpong):
                if index + step // 2 < tiles[2]:
                    cute.arch.barrier_arrive(barrier_id=_TURN + 1 - group, number_of_threads=_CONSUMERS)
                stage += count_k
                phase ^= (stage // plan.stages) & 1
                stage = stage % plan.stages
            warpgroup.wait_group(0)
            self._release(barriers[1] + previous, member)
            self._store(store_mma, sums, of_d, place, group, thread % _WARPGROUP)
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _release(self, empty: cute.Pointer, member: Any) -> None:
        """Say, to all CTAs that write this stage here, that this warp has read it."""
        plan = self.plan
        cta_m, cta_n = member
        with cute.arch.elect_one():
            if cutlass.const_expr(plan.cluster == 1):
                cute.arch.mbarrier_arrive(empty)
            for m in cutlass.range_constexpr(plan.cluster_m if plan.cluster_m > 1 else 0):
                cute.arch.mbarrier_arrive(empty, cta_n * plan.cluster_m + m)
            for n in cutlass.range_constexpr(plan.cluster_n if plan.cluster_n > 1 else 0):
                cute.arch.mbarrier_arrive(empty, n * plan.cluster_m + cta_m)

    @cute.jit
    def _store(
        self, store_mma: Any, sums: cute.Tensor, of_d: Any, place: Any, group: cutlass.Int32, thread: cutlass.Int32
    ) -> None:
        """Write a warpgroup's sums to D, a piece at a time: registers, shared memory, TMA."""
        plan = self.plan
        d_atom, d, shared_d = of_d
        m, n, batch = place
        element = self.element_d
        tail = (batch,) if cutlass.const_expr(cute.rank(d) == 3) else ()
        tiled_d = cute.local_tile(d, (WGMMA_ROWS, plan.store_columns), (None,) * cute.rank(d))
        from_d, to_d = cpasync.tma_partition(
            d_atom, 0, cute.make_layout(1), cute.group_modes(shared_d, 0, 2), cute.group_modes(tiled_d, 0, 2)
        )
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), element), store_mma)
        mine = copy.get_slice(thread)
        staged = mine.partition_D(shared_d)
        shape = store_mma.partition_shape_C((WGMMA_ROWS, plan.store_columns))
        values = cute.make_rmem_tensor(shape, cutlass.Float32)
        piece = cute.make_rmem_tensor(shape, element)
        each = cute.size(piece)
        blocks_m = plan.tile_m // WGMMA_ROWS // plan.parts_m
        pieces = plan.tile_columns // plan.parts_n // plan.store_columns
        group_m = group if cutlass.const_expr(plan.parts_m > 1) else 0
        group_n = group if cutlass.const_expr(plan.parts_n > 1) else 0
        for block in cutlass.range_constexpr(blocks_m):
            row = (m * blocks_m + block) * plan.parts_m + group_m
            for column in cutlass.range_constexpr(pieces):
                number = block * pieces + column
                for i in cutlass.range_constexpr(each):
                    values[i] = sums[number * each + i]
                piece.store(values.load().to(element))
                buffer = group * STORE_BUFFERS + number % STORE_BUFFERS
                cute.arch.cp_async_bulk_wait_group(STORE_BUFFERS - 1, read=True)
                cute.arch.barrier(barrier_id=_STORE + group, number_of_threads=_WARPGROUP)
                cute.copy(copy, mine.retile(piece), staged[None, None, None, buffer])
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=_STORE + group, number_of_threads=_WARPGROUP)
                if thread < _WARP:
                    at = (None, row, (n * plan.parts_n + group_n) * pieces + column, *tail)
                    cute.copy(d_atom, from_d[None, buffer], to_d[at])
                    cute.arch.cp_async_bulk_commit_group()


def _batch_last(x: cute.Tensor) -> cute.Tensor:
    """A tensor with its batch, if it has one, as the last mode."""
    if cute.rank(x) == 2:
        return x
    return cute.make_tensor(x.iterator, cute.select(x.layout, [1, 2, 0]))


def _tiled_mma(element: Any, parts: tuple[int, int], columns: int) -> cute.TiledMma:
    """WGMMA by `parts` warpgroups along M and N, `columns` wide each."""
    k = OperandMajorMode.K
    if element.width == 8:
        shape = (WGMMA_ROWS, columns, 32)
        op = warpgroup.MmaF8Op(element, element, cutlass.Float32, shape, warpgroup.OperandSource.SMEM, k, k)
    else:
        shape = (WGMMA_ROWS, columns, 16)
        op = warpgroup.MmaF16BF16Op(element, cutlass.Float32, shape, warpgroup.OperandSource.SMEM, k, k)
    return cute.make_tiled_mma(cute.make_mma_atom(op), (*parts, 1))


def _store_layout(columns: int, element: Any) -> cute.ComposedLayout:
    """The pieces of D in shared memory: (rows, columns, buffers of all warpgroups)."""
    kinds = warpgroup.SmemLayoutAtomKind
    kind = {128: kinds.K_SW128, 64: kinds.K_SW64, 32: kinds.K_SW32}[columns * element.width // 8]
    atom = warpgroup.make_smem_layout_atom(kind, element)
    return cute.tile_to_shape(atom, (WGMMA_ROWS, columns, WARPGROUPS * STORE_BUFFERS), (0, 1, 2))
