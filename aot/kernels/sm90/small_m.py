"""GEMM for few tokens on Hopper: D = epilogue(scale(A @ B^T)), sums in f32. Its time is that of reading B once.

A CTA owns `tile_n` rows of B (weights), `tile_m` tokens and one of `split_k` slices of K. Up to 64 tokens the operands
are swapped: weights take WGMMA's M side and tokens its N side, so a tile of 8 tokens wastes nothing. Above, tokens take
the M side, and weights need not fill 64 rows. The CTAs of a cluster that differ in the slice only add up a share of the
tokens each, in the order of the slices, from sums that the others push into its shared memory: the result is always the
same, and there is no workspace. `cluster_n` neighbours along N load a share of A each and multicast it. A is loaded in
pieces of 8 or 16 rows, and those past M are left out.

One warp feeds TMA, one or more warpgroups multiply. Either tile may be any multiple of 8, so that bytes can be spread
evenly over the SMs: WGMMA then reads rows past the tile, whose products nobody looks at. K tails and rows past M and N
are zeros from TMA; stores are predicated. Any M up to 65535 tiles is right, one row of the grid a tile.

Hopper's tensor cores add 8-bit products in about 14 bits, so every `_EXACT_K` columns the sums move to f32 registers.

`overlap` says what may happen before the kernel before this one on the stream has ended, where both were compiled for
it: "serial" nothing, "launch" everything but reads and writes of tensors, "weights" also reading B. Every kernel but a
"serial" one lets the next begin as soon as it has begun itself.
"""

from collections.abc import Mapping
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from runtime.numbers.scaling import SCALE_BLOCK

from .small_m_choices import Form, memory, piece, row_of_b, sides, swapped, tile_k, warpgroups
from .small_m_output import Output
from .small_m_rows import Rows

_WARP = 32
_WARPGROUP = 128
_ATOM_ROWS = 8  # rows of a 128-byte swizzle atom
_ATOM_BYTES = 128
_WGMMA_ROWS = 64
_WGMMA_BYTES = 32  # of K in an instruction
_EXACT_K = 256  # columns whose 8-bit products are added in the tensor cores' precision: docs/kernels/sm90_small_m.md
_EARLY_STAGES = 2  # loads of B that go ahead of those of A, while the cluster meets
_FULL_READY, _EMPTY_READY, _DRAINED = 1, 2, 3  # named barriers
_EVICT_FIRST = 0x12F0000000000000  # what createpolicy makes of L2::evict_first for everything


class SmallM:
    """The kernel for one set of choices (`small_m_choices.OPTIONS`) and one form."""

    def __init__(self, options: Mapping[str, Any], form: Form) -> None:
        self.tile_m, self.tile_n, self.tile_k = options["tile_m"], options["tile_n"], tile_k(options, form)
        self.split_k, self.cluster_n, self.overlap = (options[o] for o in ("split_k", "cluster_n", "overlap"))
        self.form, self.memory, self.swapped = form, memory(options, form), swapped(options)
        self.stages = self.memory.stages
        self.cluster = self.split_k * self.cluster_n
        self.left_rows, self.right_rows = sides(options)
        self.warpgroups = warpgroups(options)
        self.consumers = self.warpgroups * _WARPGROUP
        self.threads = self.consumers + _WARP
        self.mma_rows = -(-self.left_rows // _WGMMA_ROWS) * _WGMMA_ROWS
        # A stage is full once TMA has all its bytes and, where scales come along, each lane its own of those.
        self.full_arrivals = 1 + _WARP * (form.scaling == "block")
        # A warp frees one that WGMMA has read, and each thread one of which it has read scales.
        self.empty_arrivals = self.consumers // (1 if form.scaling == "block" else _WARP)
        exact_k = SCALE_BLOCK if form.scaling == "block" else _EXACT_K
        self.exact_stages = exact_k // self.tile_k if form.element_bytes == 1 else 0
        self.piece = piece(options)
        self.rows = Rows(self.tile_n, form)
        self.output = Output(options, form, self.memory, self.consumers)

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
        a, b, d, residual = (self._batch_last(t) for t in (a, b, d, residual))
        element = a.element_type
        left_layout, left_mma = self._layouts(element, self.left_rows, self.mma_rows, self.swapped)
        right_layout, _ = self._layouts(element, self.right_rows, self.right_rows, not self.swapped)
        b_layout = left_layout if self.swapped else right_layout
        load = cpasync.CopyBulkTensorTileG2SOp()
        load_a = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster_n > 1 else load
        pieces = self._pieces(element)
        a_atom, a_tma = cpasync.make_tiled_tma_atom(load_a, a, cute.select(pieces, [0, 1]), (self.piece, self.tile_k))
        b_atom, b_tma = cpasync.make_tiled_tma_atom(
            load, self.rows.view(b), self.rows.shared(b_layout, self.tile_k), self.rows.tiler(self.tile_k)
        )
        tiles_m = cute.ceil_div(cute.size(a, mode=[0]), self.tile_m)
        tiles_n = cute.round_up(cute.ceil_div(cute.size(b, mode=[0]), self.tile_n), self.cluster_n)
        extras = (scale_a, scale_b, bias, residual, scale_d)
        layouts = (left_layout, left_mma, right_layout, pieces)
        self.kernel((a_atom, a_tma), (b_atom, b_tma), b, d, extras, self._tiled_mma(element), layouts).launch(
            grid=[tiles_n * self.split_k, tiles_m, cute.size(a, mode=[2]) if self.form.batched else 1],
            block=[self.threads, 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            use_pdl=self.overlap != "serial",
        )

    def _batch_last(self, tensor: cute.Tensor | None) -> cute.Tensor | None:
        """(rows, columns, batch) for (batch, rows, columns)."""
        if tensor is None or not self.form.batched:
            return tensor
        return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, [1, 2, 0]))

    def _tiled_mma(self, element: Any) -> cute.TiledMma:
        """The left operand's rows on the M side, spread over the warpgroups."""
        majors = [OperandMajorMode.K, OperandMajorMode.K]
        if self.form.b_major == "n":
            majors[0 if self.swapped else 1] = OperandMajorMode.MN
        shape = (_WGMMA_ROWS, self.right_rows, _WGMMA_BYTES * 8 // element.width)
        source = warpgroup.OperandSource.SMEM
        if element.width == 8:
            op: Any = warpgroup.MmaF8Op(element, element, cutlass.Float32, shape, source, *majors)
        else:
            op = warpgroup.MmaF16BF16Op(element, cutlass.Float32, shape, source, *majors)
        return cute.make_tiled_mma(cute.make_mma_atom(op), (self.warpgroups, 1, 1))

    def _layouts(self, element: Any, rows: int, mma_rows: int, of_weights: bool) -> tuple[Any, Any]:
        """(rows, tile_k, stages) of an operand in shared memory: as TMA writes it, and as WGMMA reads `mma_rows` of it.

        WGMMA wants whole blocks of 64 rows on its M side, which reach into what follows.
        """
        kinds = warpgroup.SmemLayoutAtomKind
        if of_weights and self.form.b_major == "n":
            atom = warpgroup.make_smem_layout_atom(kinds.MN_SW128, element)
            layout = cute.tile_to_shape(atom, (rows, self.tile_k, self.stages), (1, 0, 2))
            return layout, layout
        atom = warpgroup.make_smem_layout_atom(kinds.K_SW128, element)
        layout = cute.tile_to_shape(atom, (rows, self.tile_k, self.stages), (0, 1, 2))
        atom_k = _ATOM_BYTES * 8 // element.width
        by_row = cute.make_layout((_ATOM_ROWS, mma_rows // _ATOM_ROWS), stride=(atom_k, _ATOM_ROWS * atom_k))
        by_k = cute.make_layout((atom_k, self.tile_k // atom_k), stride=(1, rows * atom_k))
        outer = cute.make_layout(
            (by_row.shape, by_k.shape, self.stages), stride=(by_row.stride, by_k.stride, rows * self.tile_k)
        )
        return layout, cute.make_composed_layout(layout.inner, 0, outer)

    def _pieces(self, element: Any) -> Any:
        """(rows, tile_k, pieces, stages) of A in shared memory, in the pieces that are loaded at a time."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, element)
        atom_k = _ATOM_BYTES * 8 // element.width
        by_row = cute.make_layout((_ATOM_ROWS, self.piece // _ATOM_ROWS), stride=(atom_k, _ATOM_ROWS * atom_k))
        by_k = cute.make_layout((atom_k, self.tile_k // atom_k), stride=(1, self.tile_m * atom_k))
        outer = cute.make_layout(
            (by_row.shape, by_k.shape, self.tile_m // self.piece, self.stages),
            stride=(by_row.stride, by_k.stride, self.piece * atom_k, self.tile_m * self.tile_k),
        )
        return cute.make_composed_layout(atom.inner, 0, outer)

    @cute.kernel
    def kernel(
        self, load_a: Any, load_b: Any, b: cute.Tensor, d: cute.Tensor, extras: Any, tiled_mma: Any, layouts: Any
    ) -> None:
        """One tile of D, or one slice of its sums."""
        block_n, block_m, item = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # Neighbours along K, then those that share rows of A.
        rank, tile = block_n % self.split_k, block_n // self.split_k
        member = tile % self.cluster_n
        a_atom, a = load_a
        b_atom, b_tma = load_b
        element = b.element_type
        scale_a, scale_b, bias, residual, scale_d = extras
        batch = (item,) if self.form.batched else ()
        if cutlass.const_expr(self.form.batched):
            d = d[None, None, item]
            residual = residual[None, None, item] if residual is not None else None

        smem = cutlass.memory.SmemAllocator()
        block = smem.allocate_array(cutlass.Uint8, self.memory.block, byte_alignment=1024)
        left_layout, left_mma, right_layout, pieces = layouts
        left_pointer = cute.recast_ptr(block, left_layout.inner, element)
        right_pointer = cute.recast_ptr(block + self.stages * self.memory.left, right_layout.inner, element)
        left = cute.make_tensor(left_pointer, left_layout.outer)
        right = cute.make_tensor(right_pointer, right_layout.outer)
        multiplied = cute.make_tensor(left_pointer, left_mma.outer), right
        sums = cute.recast_ptr(block, dtype=cutlass.Float32)
        full = smem.allocate_array(cutlass.Int64, self.stages, byte_alignment=8)
        empty = smem.allocate_array(cutlass.Int64, self.stages, byte_alignment=8)
        arrived = smem.allocate_array(cutlass.Int64, 1, byte_alignment=8)
        terms = smem.allocate_array(cutlass.Float32, max(self.output.terms, 1), byte_alignment=16)
        scales = terms
        if cutlass.const_expr(self.form.scaling == "block"):
            scales = smem.allocate_array(cutlass.Float32, self.stages * self.tile_m, byte_alignment=16)

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
                    cute.arch.mbarrier_init(full + stage, self.full_arrivals)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()  # the lane that arrives at them may be another
            if cutlass.const_expr(self.cluster > 1):
                cute.arch.cluster_arrive_relaxed()
            else:
                cute.arch.barrier_arrive(barrier_id=_FULL_READY, number_of_threads=self.threads)
            if cutlass.const_expr(self.overlap != "serial"):
                cute.arch.griddepcontrol_launch_dependents()
            shared_a, shared_b = (right, left) if self.swapped else (left, right)
            shared_a = cute.make_tensor(shared_a.iterator, pieces.outer)
            place = (tile, block_m, batch, member, rank, first_k, count_k, tokens)
            feed_a, feed_b = (a_atom, a, shared_a, scale_a, scales), (b_atom, b_tma, shared_b)
            self._feed(feed_a, feed_b, full, empty, place)
        else:
            scaling = (scales, scale_b, cute.size(b, mode=[0]))
            outputs = (d, residual, scale_d, terms, (scale_a, scale_b, bias), scaling)
            slices = (tile, block_m, member, rank, first_k, count_k, tokens)
            self._consume(tiled_mma, multiplied, b, outputs, sums, (full, empty, arrived), slices)

    @cute.jit
    def _consume(
        self,
        tiled_mma: cute.TiledMma,
        multiplied: Any,
        b: cute.Tensor,
        outputs: Any,
        sums: cute.Pointer,
        barriers: Any,
        place: Any,
    ) -> None:
        """The multiplying warpgroups: sums, what others have of them, and D."""
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        full, empty, arrived = barriers
        d, residual, scale_d, terms, (scale_a, scale_b, bias), scaling = outputs
        tile, block_m, member, rank, first_k, count_k, tokens = place
        if warp == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(self.stages):
                    cute.arch.mbarrier_init(empty + stage, self.cluster_n * self.empty_arrivals)
                if cutlass.const_expr(self.split_k > 1):
                    cute.arch.mbarrier_init(arrived, 1)
                cute.arch.mbarrier_init_fence()
            if cutlass.const_expr(self.split_k > 1):
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(arrived, self.output.pushed_bytes(rank, tokens))
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
        else:
            cute.arch.barrier_arrive(barrier_id=_EMPTY_READY, number_of_threads=self.threads)
        if cutlass.const_expr(self.overlap != "serial"):
            cute.arch.griddepcontrol_wait()
        self.output.prepare(terms, (scale_a, scale_b, bias), (tile, block_m, thread), d, b)
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier(barrier_id=_FULL_READY, number_of_threads=self.threads)
        slices = (tile, rank, first_k, count_k)
        accumulator = self._multiply(tiled_mma, multiplied, (full, empty), slices, thread, scaling)

        # The stages of this CTA are done with, so sums can take their place.
        cute.arch.barrier(barrier_id=_DRAINED, number_of_threads=self.consumers)
        if cutlass.const_expr(self.split_k > 1 and self.memory.apart == 0):
            cute.arch.cluster_arrive()
        self.output.stage(tiled_mma, accumulator, sums, tokens, thread)
        if cutlass.const_expr(self.split_k > 1):
            if cutlass.const_expr(self.memory.apart == 0):
                cute.arch.cluster_wait()
            self.output.push(sums, arrived, (member, rank), tokens, thread)
        self.output.store(d, sums, (terms, residual, scale_a, scale_b, scale_d), (tile, block_m, rank), thread)

    @cute.jit
    def _feed(self, load_a: Any, load_b: Any, full: cute.Pointer, empty: cute.Pointer, place: Any) -> None:
        """The loading warp: keep every stage full. An operand is its TMA atom, its tensor and its shared memory."""
        a_atom, a, shared_a, scale_a, scales = load_a
        b_atom, b, shared_b = load_b
        tile, block_m, batch, member, rank, first_k, count_k, tokens = place
        # (rows, K, pieces of M, tiles of K)
        tiled_a = cute.local_tile(a, (self.piece, self.tile_k), (None, None, *batch))
        to_a, from_a = cpasync.tma_partition(
            a_atom, 0, cute.make_layout(1), cute.group_modes(shared_a, 0, 2), cute.group_modes(tiled_a, 0, 2)
        )
        tiled_b = self.rows.tiles(b, self.tile_k, tile, batch)
        to_b, from_b = cpasync.tma_partition(b_atom, 0, cute.make_layout(1), cute.group_modes(shared_b, 0, 2), tiled_b)
        pieces = cutlass.min(cute.ceil_div(tokens, self.piece), self.tile_m // self.piece)
        row_bytes = self.tile_k * shared_b.element_type.width // 8
        stage_bytes = pieces * (self.piece * row_bytes) + self.tile_n * row_bytes
        policy = cutlass.Int64(_EVICT_FIRST)
        mask = None
        if cutlass.const_expr(self.cluster_n > 1):
            every_member = sum(1 << (other * self.split_k) for other in range(self.cluster_n))
            mask = cutlass.Int16(every_member) << cutlass.Int16(rank)
        feed_a = (a_atom, from_a, to_a, (block_m, member, pieces), mask)

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
                self._feed_a(feed_a, first_k + i, i, full + i)
                self._feed_scales(scale_a, scales, block_m, first_k + i, i, full + i)
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_wait()
        else:
            cute.arch.barrier(barrier_id=_EMPTY_READY, number_of_threads=self.threads)
        if cutlass.const_expr(self.overlap == "weights"):
            cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(apart):
            for i in cutlass.range(early, unroll=1):
                self._feed_a(feed_a, first_k + i, i, full + i)
                self._feed_scales(scale_a, scales, block_m, first_k + i, i, full + i)

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
            self._feed_a(feed_a, k, stage, bar)
            self._feed_scales(scale_a, scales, block_m, k, stage, bar)
            stage += 1
            if stage == self.stages:
                stage = cutlass.Int32(0)
                phase ^= 1

    @cute.jit
    def _feed_a(self, feed: Any, k: cutlass.Int32, stage: cutlass.Int32, bar: cute.Pointer) -> None:
        """This CTA's share of the pieces of A that go with tile `k` of K, to all that multiply them."""
        a_atom, from_a, to_a, (block_m, member, pieces), mask = feed
        share = self.tile_m // self.piece // self.cluster_n
        for i in cutlass.range_constexpr(share):
            at = member * share + i
            if at < pieces:
                source = from_a[None, block_m * (self.tile_m // self.piece) + at, k]
                cute.copy(a_atom, source, to_a[None, at, stage], tma_bar_ptr=bar, mcast_mask=mask)

    @cute.jit
    def _feed_scales(
        self,
        scale_a: cute.Tensor | None,
        scales: cute.Pointer,
        block_m: cutlass.Int32,
        k: cutlass.Int32,
        stage: cutlass.Int32,
        bar: cute.Pointer,
    ) -> None:
        """The loading warp, a token a lane: the scales of A that go with tile `k` of K. Nothing for other scalings."""
        if cutlass.const_expr(self.form.scaling == "block"):
            lane = cute.arch.lane_idx()
            load = cute.make_copy_atom(cpasync.CopyG2SOp(), cutlass.Float32, num_bits_per_copy=32)
            shared = cute.make_tensor(scales, cute.make_layout((1, self.tile_m, self.stages)))
            for step in cutlass.range_constexpr(-(-self.tile_m // _WARP)):
                slot = step * _WARP + lane
                token = block_m * self.tile_m + slot
                if slot < self.tile_m and token < cute.size(scale_a, mode=[0]):
                    source = cute.domain_offset((token, k), scale_a).iterator
                    cute.copy(load, cute.make_tensor(source, cute.make_layout(1)), shared[None, slot, stage])
            cute.arch.cp_async_mbarrier_arrive_noinc(bar)

    @cute.jit
    def _multiply(
        self,
        tiled_mma: cute.TiledMma,
        shared: Any,
        barriers: Any,
        place: Any,
        thread: cutlass.Int32,
        scaling: Any,
    ) -> cute.Tensor:
        """The multiplying warpgroups: this slice's sums in registers, in WGMMA's layout."""
        left, right = shared
        full, empty = barriers
        tile, rank, first_k, count_k = place
        # Descriptors are the warpgroup's, so its first thread stands for all.
        mine = tiled_mma.get_slice(cute.arch.make_warp_uniform(thread // _WARPGROUP) * _WARPGROUP)
        lefts = tiled_mma.make_fragment_A(mine.partition_A(left))
        rights = tiled_mma.make_fragment_B(mine.partition_B(right))
        shape = tiled_mma.partition_shape_C((self.mma_rows, self.right_rows))
        sums = cute.make_rmem_tensor(shape, cutlass.Float32)
        sums.fill(0.0)
        part = sums
        if cutlass.const_expr(self.exact_stages > 0):
            part = cute.make_rmem_tensor(shape, cutlass.Float32)
            part.fill(0.0)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        stage = cutlass.Int32(0)
        phase = cutlass.Int32(0)
        previous = cutlass.Int32(0)
        for i in cutlass.range(count_k, unroll=1):
            cute.arch.mbarrier_wait(full + stage, phase)
            warpgroup.fence()
            for block in cutlass.range_constexpr(cute.size(lefts, mode=[2])):
                at = (None, None, block, stage)
                if cutlass.const_expr(self.exact_stages == 1):
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, block > 0)
                elif cutlass.const_expr(self.exact_stages > 1 and block == 0):
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, i % self.exact_stages != 0)
                elif cutlass.const_expr(self.exact_stages > 1):
                    tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
                cute.gemm(tiled_mma, part, lefts[at], rights[at], part)
            warpgroup.commit_group()
            if cutlass.const_expr(self.exact_stages == 1):
                warpgroup.wait_group(0)
                self._promote(part, sums, scaling, (tile, first_k + i, stage), thread)
                if i + self.stages < count_k:
                    self._release(empty + stage, rank)
            else:
                warpgroup.wait_group(1)
                # The stage before this one is free. Say so only where it is filled again: who no longer waits may be
                # gone.
                if i > 0 and i - 1 + self.stages < count_k:
                    self._release(empty + previous, rank)
                if cutlass.const_expr(self.exact_stages > 1):
                    last = i % self.exact_stages == self.exact_stages - 1 or i == count_k - 1
                    if last:
                        warpgroup.wait_group(0)
                        self._promote(part, sums, scaling, (tile, first_k + i, stage), thread)
            previous = stage
            stage += 1
            if stage == self.stages:
                stage = cutlass.Int32(0)
                phase ^= 1
        warpgroup.wait_group(0)
        return sums

    @cute.jit
    def _release(self, bar: cute.Pointer, rank: cutlass.Int32) -> None:
        """A warp of the multiplying ones: a stage may be filled again, here and where its A comes from."""
        if cutlass.const_expr(self.form.scaling == "block"):
            self._arrive(bar, rank)
        else:
            with cute.arch.elect_one():
                self._arrive(bar, rank)

    def _arrive(self, bar: cute.Pointer, rank: cutlass.Int32) -> None:
        """Arrive at the barrier of a stage that is empty, in every CTA that fills it."""
        if self.cluster_n == 1:
            cute.arch.mbarrier_arrive(bar)
        else:
            for member in range(self.cluster_n):
                cute.arch.mbarrier_arrive(bar, rank + member * self.split_k)

    @cute.jit
    def _promote(self, part: cute.Tensor, sums: cute.Tensor, scaling: Any, place: Any, thread: cutlass.Int32) -> None:
        """Add what the tensor cores have summed up to the f32 sums, times the scales of its blocks if it has such."""
        scales, scale_b, extent_n = scaling
        tile, k, stage = place
        if cutlass.const_expr(self.form.scaling != "block"):
            for i in cutlass.range_constexpr(cute.size(sums)):
                sums[i] += part[i]
        else:
            groups = self.tile_m // 8
            shared = cute.make_tensor(scales, cute.make_layout((2, 4, groups, self.stages)))
            pair = thread % 4
            for block in cutlass.range_constexpr(cute.size(sums, mode=[1])):
                for half in cutlass.range_constexpr(2):
                    row = (
                        thread // _WARP * 16 + thread % _WARP // 4 + half * 8 + block * (_WGMMA_ROWS * self.warpgroups)
                    )
                    at = row_of_b(self.tile_n, self.form, tile, row, extent_n)
                    at = cutlass.min(at, extent_n - 1) // SCALE_BLOCK
                    of_weights = scale_b[at, k]
                    for group in cutlass.range_constexpr(groups):
                        for token in cutlass.range_constexpr(2):
                            i = token + 2 * (half + 2 * (group + groups * block))
                            sums[i] += part[i] * (of_weights * shared[token, pair, group, stage])
