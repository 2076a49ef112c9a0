"""GEMM for few tokens on Hopper: D (M, N) = A (M, K) @ B (N, K)^T, sums in f32. Its time is that of reading B once.

The operands are swapped: rows of B (weights) take WGMMA's M side and tokens its N side, so a tile of 8 tokens wastes
nothing. A CTA owns `tile_n` rows of B, `tile_m` tokens and one of `split_k` slices of K. The CTAs of a cluster that
differ in the slice only add up a share of the tokens each, in the order of the slices, from sums that all of them push
into its shared memory: the result is always the same, and there is no workspace. `cluster_n` neighbours along N load a
share of A each and multicast it.

One warp feeds TMA, `ceil(tile_n / 64)` warpgroups multiply. `tile_n` may be any multiple of 8, so that bytes can be
spread evenly over the SMs: WGMMA then reads rows past the tile, whose products nobody looks at. K tails and rows past M
and N are zeros from TMA; stores are predicated. Any M up to 65535 tiles is right, one row of the grid a tile.

`overlap` says what may happen before the kernel before this one on the stream has ended, where both were compiled for
it: "serial" nothing, "launch" everything but reads and writes of tensors, "weights" also reading B. Every kernel but a
"serial" one lets the next begin as soon as it has begun itself.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from .small_m_choices import sums_pitch

_WARP = 32
_WARPGROUP = 128
_ATOM_ROWS = 8  # rows of a 128-byte swizzle atom
_ATOM_BYTES = 128
_WGMMA_ROWS = 64
_VECTOR = 8  # 16-bit elements in 16 bytes
_EARLY_STAGES = 2  # loads of B that go ahead of those of A, while the cluster meets
_FULL_READY, _EMPTY_READY, _STAGED = 1, 2, 3  # named barriers
_EVICT_FIRST = 0x12F0000000000000  # what createpolicy makes of L2::evict_first for everything


class SmallM:
    """The kernel for one choice of tile, split, depth and overlap."""

    def __init__(
        self, tile: tuple[int, int, int], split_k: int, cluster_n: int, stages: int, overlap: str = "serial"
    ) -> None:
        self.tile_m, self.tile_n, self.tile_k = tile
        self.split_k, self.cluster_n, self.stages, self.overlap = split_k, cluster_n, stages, overlap
        self.cluster = split_k * cluster_n
        self.warpgroups = -(-self.tile_n // _WGMMA_ROWS)
        self.consumers = self.warpgroups * _WARPGROUP
        self.threads = self.consumers + _WARP
        self.mma_rows = self.warpgroups * _WGMMA_ROWS
        self.tokens_per_cta = self.tile_m // split_k
        self.pitch = sums_pitch(self.tile_n)

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, d: cute.Tensor, stream: Any) -> None:
        """Launch over A (M, K), B (N, K), D (M, N), all row-major."""
        element = a.element_type
        op = warpgroup.MmaF16BF16Op(
            element,
            cutlass.Float32,
            (_WGMMA_ROWS, self.tile_m, 16),
            warpgroup.OperandSource.SMEM,
            OperandMajorMode.K,
            OperandMajorMode.K,
        )
        tiled_mma = cute.make_tiled_mma(cute.make_mma_atom(op), (self.warpgroups, 1, 1))

        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, element)
        atom_k = _ATOM_BYTES * 8 // element.width
        a_layout = cute.tile_to_shape(atom, (self.tile_m, self.tile_k, self.stages), (0, 1, 2))
        b_layout = cute.tile_to_shape(atom, (self.tile_n, self.tile_k, self.stages), (0, 1, 2))
        # The same memory as WGMMA reads it: whole 64-row blocks, which reach into what follows.
        rows = cute.make_layout((_ATOM_ROWS, self.mma_rows // _ATOM_ROWS), stride=(atom_k, _ATOM_ROWS * atom_k))
        columns = cute.make_layout((atom_k, self.tile_k // atom_k), stride=(1, self.tile_n * atom_k))
        outer = cute.make_layout(
            (rows.shape, columns.shape, self.stages),
            stride=(rows.stride, columns.stride, self.tile_n * self.tile_k),
        )
        b_mma_layout = cute.make_composed_layout(b_layout.inner, 0, outer)

        load = cpasync.CopyBulkTensorTileG2SOp()
        load_a = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster_n > 1 else load
        a_atom, a_tma = cpasync.make_tiled_tma_atom(
            load_a, a, cute.select(a_layout, [0, 1]), (self.tile_m, self.tile_k), self.cluster_n
        )
        b_atom, b_tma = cpasync.make_tiled_tma_atom(load, b, cute.select(b_layout, [0, 1]), (self.tile_n, self.tile_k))
        tiles_m = cute.ceil_div(cute.size(d, mode=[0]), self.tile_m)
        tiles_n = cute.round_up(cute.ceil_div(cute.size(d, mode=[1]), self.tile_n), self.cluster_n)
        self.kernel(a_atom, a_tma, b_atom, b_tma, d, tiled_mma, a_layout, b_layout, b_mma_layout).launch(
            grid=[tiles_n * self.split_k, tiles_m, 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            use_pdl=self.overlap != "serial",
        )

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        a: cute.Tensor,
        b_atom: cute.CopyAtom,
        b: cute.Tensor,
        d: cute.Tensor,
        tiled_mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        b_mma_layout: cute.ComposedLayout,
    ) -> None:
        """One tile of D, or one slice of its sums."""
        thread, _, _ = cute.arch.thread_idx()
        block_n, block_m, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # Neighbours along K, then those that share rows of A.
        rank, tile = block_n % self.split_k, block_n // self.split_k
        member = tile % self.cluster_n
        element = d.element_type

        smem = cutlass.memory.SmemAllocator()
        shared_b = smem.allocate_tensor(element, b_layout.outer, 1024, b_layout.inner)
        shared_a = smem.allocate_tensor(element, a_layout.outer, 1024, a_layout.inner)
        staging = smem.allocate_array(cutlass.Float32, self.tile_m * self.pitch, byte_alignment=16)
        partial = staging
        if cutlass.const_expr(self.split_k > 1):
            partial = smem.allocate_array(cutlass.Float32, self.tile_m * self.pitch, byte_alignment=16)
        full = smem.allocate_array(cutlass.Int64, self.stages, byte_alignment=8)
        empty = smem.allocate_array(cutlass.Int64, self.stages, byte_alignment=8)
        arrived = smem.allocate_array(cutlass.Int64, 1, byte_alignment=8)
        shared_b_mma = cute.make_tensor(shared_b.iterator, b_mma_layout.outer)

        tokens = cute.size(d, mode=[0]) - block_m * self.tile_m
        # This CTA's slice of K, in tiles: slices differ by one tile at most.
        tiles_k = cute.ceil_div(cute.size(b, mode=[1]), self.tile_k)
        first_k = tiles_k * rank // self.split_k
        count_k = tiles_k * (rank + 1) // self.split_k - first_k

        if warp == self.consumers // _WARP:
            cpasync.prefetch_descriptor(b_atom)
            cpasync.prefetch_descriptor(a_atom)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init_fence()
            if cutlass.const_expr(self.cluster > 1):
                cute.arch.cluster_arrive_relaxed()
            else:
                cute.arch.barrier_arrive(barrier_id=_FULL_READY, number_of_threads=self.threads)
            if cutlass.const_expr(self.overlap != "serial"):
                cute.arch.griddepcontrol_launch_dependents()
            place = (tile, block_m, member, rank, first_k, count_k)
            self._feed((a_atom, a, shared_a), (b_atom, b, shared_b), full, empty, place)
        else:
            if warp == 0:
                with cute.arch.elect_one():
                    for stage in cutlass.range_constexpr(self.stages):
                        cute.arch.mbarrier_init(empty + stage, self.cluster_n * (self.consumers // _WARP))
                    if cutlass.const_expr(self.split_k > 1):
                        cute.arch.mbarrier_init(arrived, 1)
                    cute.arch.mbarrier_init_fence()
                    if cutlass.const_expr(self.split_k > 1):
                        mine = cutlass.min(cutlass.max(tokens - rank * self.tokens_per_cta, 0), self.tokens_per_cta)
                        cute.arch.mbarrier_arrive_and_expect_tx(arrived, mine * (self.split_k * self.tile_n * 4))
            if cutlass.const_expr(self.cluster > 1):
                cute.arch.cluster_arrive_relaxed()
                cute.arch.cluster_wait()
            else:
                cute.arch.barrier_arrive(barrier_id=_EMPTY_READY, number_of_threads=self.threads)
                cute.arch.barrier(barrier_id=_FULL_READY, number_of_threads=self.threads)
            accumulator = self._multiply(tiled_mma, (shared_a, shared_b_mma), full, empty, (rank, count_k), warp)
            self._stage(tiled_mma, accumulator, staging, tokens, thread)
            if cutlass.const_expr(self.split_k > 1):
                self._push(staging, partial, arrived, (member, rank), tokens, thread)
            if cutlass.const_expr(self.overlap != "serial"):
                cute.arch.griddepcontrol_wait()
            self._store(d, partial, tile, block_m, rank, thread)

    @cute.jit
    def _feed(
        self,
        load_a: Any,
        load_b: Any,
        full: cute.Pointer,
        empty: cute.Pointer,
        place: Any,
    ) -> None:
        """The loading warp: keep every stage full. An operand is its TMA atom, its tensor and its shared memory."""
        a_atom, a, shared_a = load_a
        b_atom, b, shared_b = load_b
        tile, block_m, member, rank, first_k, count_k = place
        # (rows, K, tiles of K)
        tiled_a = cute.local_tile(a, (self.tile_m, self.tile_k), (block_m, None))
        tiled_b = cute.local_tile(b, (self.tile_n, self.tile_k), (tile, None))
        to_a, from_a = cpasync.tma_partition(
            a_atom,
            member,
            cute.make_layout(self.cluster_n),
            cute.group_modes(shared_a, 0, 2),
            cute.group_modes(tiled_a, 0, 2),
        )
        to_b, from_b = cpasync.tma_partition(
            b_atom, 0, cute.make_layout(1), cute.group_modes(shared_b, 0, 2), cute.group_modes(tiled_b, 0, 2)
        )
        stage_bytes = (self.tile_m + self.tile_n) * self.tile_k * shared_a.element_type.width // 8
        policy = cutlass.Int64(_EVICT_FIRST)
        mask = None
        if cutlass.const_expr(self.cluster_n > 1):
            every_member = sum(1 << (other * self.split_k) for other in range(self.cluster_n))
            mask = cutlass.Int16(every_member) << cutlass.Int16(rank)

        # The first stages need no barrier but `full`. Their weights wait for nobody: neither for the kernel before
        # this one, which may still be writing A, nor for the other CTAs of the cluster, whose barriers A arrives at.
        if cutlass.const_expr(self.overlap == "launch"):
            cute.arch.griddepcontrol_wait()
        apart = self.overlap == "weights" or self.cluster_n > 1
        depth = self.stages if self.cluster_n == 1 or self.overlap == "weights" else _EARLY_STAGES
        early = cutlass.min(count_k, depth)
        for i in cutlass.range(early, unroll=1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + i, stage_bytes)
            cute.copy(b_atom, from_b[None, first_k + i], to_b[None, i], tma_bar_ptr=full + i, cache_policy=policy)
            if cutlass.const_expr(not apart):
                cute.copy(a_atom, from_a[None, first_k + i], to_a[None, i], tma_bar_ptr=full + i)
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier(barrier_id=_EMPTY_READY, number_of_threads=self.threads)
        if cutlass.const_expr(self.overlap == "weights"):
            cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(apart):
            for i in cutlass.range(early, unroll=1):
                cute.copy(a_atom, from_a[None, first_k + i], to_a[None, i], tma_bar_ptr=full + i, mcast_mask=mask)

        stage, phase = early, cutlass.Int32(1)
        if stage == self.stages:
            stage, phase = cutlass.Int32(0), cutlass.Int32(0)
        for i in cutlass.range(early, count_k, unroll=1):
            cute.arch.mbarrier_wait(empty + stage, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, stage_bytes)
            bar = full + stage
            k = first_k + i
            cute.copy(b_atom, from_b[None, k], to_b[None, stage], tma_bar_ptr=bar, cache_policy=policy)
            cute.copy(a_atom, from_a[None, k], to_a[None, stage], tma_bar_ptr=bar, mcast_mask=mask)
            stage += 1
            if stage == self.stages:
                stage = cutlass.Int32(0)
                phase ^= 1

    @cute.jit
    def _multiply(
        self,
        tiled_mma: cute.TiledMma,
        shared: Any,
        full: cute.Pointer,
        empty: cute.Pointer,
        place: Any,
        warp: cutlass.Int32,
    ) -> cute.Tensor:
        """The multiplying warpgroups: this slice's sums of D^T in registers, in WGMMA's layout."""
        shared_a, shared_b = shared
        rank, count_k = place
        # Descriptors are the warpgroup's, so its first thread stands for all.
        mine = tiled_mma.get_slice(cute.arch.make_warp_uniform(warp // 4) * _WARPGROUP)
        weights = tiled_mma.make_fragment_A(mine.partition_A(shared_b))
        tokens = tiled_mma.make_fragment_B(mine.partition_B(shared_a))
        accumulator = cute.make_rmem_tensor(tiled_mma.partition_shape_C((self.mma_rows, self.tile_m)), cutlass.Float32)
        accumulator.fill(0.0)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        stage = cutlass.Int32(0)
        phase = cutlass.Int32(0)
        previous = cutlass.Int32(0)
        for i in cutlass.range(count_k, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            warpgroup.fence()
            for block in cutlass.range_constexpr(cute.size(weights, mode=[2])):
                at = (None, None, block, stage)
                cute.gemm(tiled_mma, accumulator, weights[at], tokens[at], accumulator)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            # The stage before this one is free. Say so only where it is filled again: who no longer waits may be gone.
            if i > 0 and i - 1 + self.stages < count_k:
                with cute.arch.elect_one():
                    if cutlass.const_expr(self.cluster_n > 1):
                        for member in cutlass.range_constexpr(self.cluster_n):
                            cute.arch.mbarrier_arrive(empty + previous, rank + member * self.split_k)
                    else:
                        cute.arch.mbarrier_arrive(empty + previous)
            previous = stage
            stage += 1
            if stage == self.stages:
                stage = cutlass.Int32(0)
                phase ^= 1
        warpgroup.wait_group(0)
        return accumulator

    @cute.jit
    def _stage(
        self,
        tiled_mma: cute.TiledMma,
        accumulator: cute.Tensor,
        staging: cute.Pointer,
        tokens: cutlass.Int32,
        thread: cutlass.Int32,
    ) -> None:
        """Write the sums to shared memory, a row a token."""
        places = tiled_mma.get_slice(thread).partition_C(cute.make_identity_tensor((self.mma_rows, self.tile_m)))
        sums = cute.make_tensor(staging, cute.make_layout((self.tile_n, self.tile_m), stride=(1, self.pitch)))
        for i in cutlass.range_constexpr(cute.size(accumulator)):
            row, token = places[i]
            if token < tokens and (cutlass.const_expr(self.mma_rows == self.tile_n) or row < self.tile_n):
                sums[row, token] = accumulator[i]
        cute.arch.barrier(barrier_id=_STAGED, number_of_threads=self.consumers)

    @cute.jit
    def _push(
        self,
        staging: cute.Pointer,
        partial: cute.Pointer,
        arrived: cute.Pointer,
        place: Any,
        tokens: cutlass.Int32,
        thread: cutlass.Int32,
    ) -> None:
        """Give each CTA of the cluster the sums of its share of the tokens; return when its own are here."""
        member, rank = place
        vectors = self.tile_n // 4
        layout = cute.make_layout((4, vectors, self.tile_m), stride=(1, 4, self.pitch))
        mine, theirs = cute.make_tensor(staging, layout), cute.make_tensor(partial, layout)
        load = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=128)
        values = cute.make_rmem_tensor((4,), cutlass.Float32)
        words = cute.recast_tensor(values, cutlass.Int32)
        items = vectors * self.tile_m
        for step in cutlass.range_constexpr(-(-items // self.consumers)):
            item = thread + step * self.consumers
            vector, token = item % vectors, item // vectors
            if item < items and token < tokens:
                cute.copy(load, mine[None, vector, token], values)
                slot = rank * self.tokens_per_cta + token % self.tokens_per_cta
                cute.arch.store_async_dsmem(
                    theirs[None, vector, slot].iterator,
                    (words[0], words[1], words[2], words[3]),
                    arrived,
                    member * self.split_k + token // self.tokens_per_cta,
                )
        cute.arch.mbarrier_wait(arrived, 0)

    @cute.jit
    def _store(
        self,
        d: cute.Tensor,
        partial: cute.Pointer,
        tile: cutlass.Int32,
        block_m: cutlass.Int32,
        rank: cutlass.Int32,
        thread: cutlass.Int32,
    ) -> None:
        """Add up this CTA's share of the tokens over the slices of K, in order, and write it."""
        vectors = self.tile_n // _VECTOR
        first_token = block_m * self.tile_m + rank * self.tokens_per_cta
        extent_m, extent_n = cute.size(d, mode=[0]), cute.size(d, mode=[1])
        sums = cute.make_tensor(
            partial,
            cute.make_layout(
                (_VECTOR, vectors, self.tokens_per_cta, self.split_k),
                stride=(1, _VECTOR, self.pitch, self.pitch * self.tokens_per_cta),
            ),
        )
        part = cute.make_rmem_tensor((_VECTOR,), cutlass.Float32)
        out = cute.make_rmem_tensor((_VECTOR,), d.element_type)
        load = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=128)
        store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), d.element_type, num_bits_per_copy=128)
        items = vectors * self.tokens_per_cta
        for step in cutlass.range_constexpr(-(-items // self.consumers)):
            item = thread + step * self.consumers
            vector, token = item % vectors, item // vectors
            column = tile * self.tile_n + vector * _VECTOR
            if item < items and first_token + token < extent_m and column < extent_n:
                cute.copy(load, sums[None, vector, token, 0], part)
                total = part.load()
                for other in cutlass.range_constexpr(1, self.split_k):
                    cute.copy(load, sums[None, vector, token, other], part)
                    total += part.load()
                out.store(total.to(d.element_type))
                row = cute.zipped_divide(d[first_token + token, None], (_VECTOR,))
                cute.copy(store, out, row[None, column // _VECTOR])
