"""From the sums of `small_m.SmallM` to D: added up over the slices of K, then what `runtime.gemm.signature.Epilogue`
names.

Sums go through shared memory, a row a token: to the CTA of the cluster that adds them up, and to the thread that makes
eight columns of D of them.
"""

from collections.abc import Mapping
from typing import Any

import cutlass
from cutlass import cute

from runtime.gemm.signature import Epilogue

from ..activations import activate, gate
from .choices import Form, Memory, row_of_b, sums_pitch, swapped, terms

_COLUMNS = 8  # of D that a thread makes at a time
_STAGED, _PREPARED = 4, 5  # named barriers


class Output:
    """What the multiplying threads of a CTA, `consumers` of them, do with their sums."""

    def __init__(self, options: Mapping[str, Any], form: Form, memory: Memory, consumers: int) -> None:
        self.tile_m, self.tile_n, self.split_k = (options[o] for o in ("tile_m", "tile_n", "split_k"))
        self.form, self.consumers, self.swapped = form, consumers, swapped(options)
        self.epilogue = Epilogue.of(form.epilogue)
        self.pitch = sums_pitch(options)
        self.share = self.tile_m // self.split_k  # tokens that a CTA adds up
        # Where sums of others lie, in f32 elements: behind the stages, or behind this CTA's own.
        self.partial = (memory.block - memory.apart) // 4 if memory.apart else memory.staging // 4
        self.terms = terms(options, form)
        self.bias_at = self.tile_m + self.tile_n if form.scaling == "row_column" else 0

    def pushed_bytes(self, rank: cutlass.Int32, tokens: cutlass.Int32) -> cutlass.Int32:
        """How many bytes of sums the CTA of slice `rank` gets from the others; `tokens` is what the tile has."""
        mine = cutlass.min(cutlass.max(tokens - rank * self.share, 0), self.share)
        return mine * ((self.split_k - 1) * self.tile_n * 4)

    @cute.jit
    def prepare(self, kept: cute.Pointer, given: Any, place: Any, d: cute.Tensor, b: cute.Tensor) -> None:
        """Fetch scales and bias of the tile to shared memory while the first loads are under way."""
        scale_a, scale_b, bias = given
        tile, block_m, thread = place
        extent_n = cute.size(b, mode=[0])
        values = cute.make_tensor(kept, cute.make_layout(max(self.terms, 1)))
        if cutlass.const_expr(self.form.scaling == "row_column"):
            for step in cutlass.range_constexpr(-(-self.tile_m // self.consumers)):
                slot = thread + step * self.consumers
                token = block_m * self.tile_m + slot
                if slot < self.tile_m and token < cute.size(d, mode=[0]):
                    values[slot] = scale_a[token]
        if cutlass.const_expr(self.terms > 0):
            for step in cutlass.range_constexpr(-(-self.tile_n // self.consumers)):
                slot = thread + step * self.consumers
                row = row_of_b(self.tile_n, self.form, tile, slot, extent_n)
                if slot < self.tile_n and row < extent_n:
                    if cutlass.const_expr(self.form.scaling == "row_column"):
                        values[self.tile_m + slot] = scale_b[row]
                    if cutlass.const_expr(self.epilogue.bias):
                        values[self.bias_at + slot] = bias[row].to(cutlass.Float32)

    @cute.jit
    def stage(
        self,
        tiled_mma: cute.TiledMma,
        accumulator: cute.Tensor,
        sums: cute.Pointer,
        tokens: cutlass.Int32,
        thread: cutlass.Int32,
    ) -> None:
        """Write the sums in registers to shared memory, a row a token."""
        rows = cute.make_layout((2, self.tile_n // 2, self.tile_m), stride=(1, 2, self.pitch))
        staged = cute.make_tensor(sums, rows)
        blocks = cute.size(accumulator, mode=[1])
        tokens = cutlass.min(tokens, self.tile_m)
        if cutlass.const_expr(self.swapped):
            places = self._places(tiled_mma, (64 * blocks * self.consumers // 128, self.tile_m), thread)
            for i in cutlass.range_constexpr(cute.size(accumulator)):
                row, token = places[i]
                if token < tokens and row < self.tile_n:
                    staged[row % 2, row // 2, token] = accumulator[i]
        else:
            places = self._places(tiled_mma, (64 * blocks * self.consumers // 128, self.tile_n), thread)
            store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=64)
            pair = cute.make_rmem_tensor((2,), cutlass.Float32)
            for i in cutlass.range_constexpr(0, cute.size(accumulator), 2):
                token, column = places[i]
                if token < tokens:
                    pair[0], pair[1] = accumulator[i], accumulator[i + 1]
                    cute.copy(store, pair, staged[None, column // 2, token])
        cute.arch.barrier(barrier_id=_STAGED, number_of_threads=self.consumers)

    def _places(self, tiled_mma: cute.TiledMma, shape: tuple[int, int], thread: cutlass.Int32) -> cute.Tensor:
        """(row, column) of each of a thread's sums."""
        return tiled_mma.get_slice(thread).partition_C(cute.make_identity_tensor(shape))

    @cute.jit
    def push(
        self, sums: cute.Pointer, arrived: cute.Pointer, place: Any, tokens: cutlass.Int32, thread: cutlass.Int32
    ) -> None:
        """Give each other CTA of the cluster the sums of its share of the tokens; return when one's own are here."""
        member, rank = place
        vectors = self.tile_n // 4
        layout = cute.make_layout((4, vectors, self.tile_m), stride=(1, 4, self.pitch))
        mine, theirs = cute.make_tensor(sums, layout), cute.make_tensor(sums + self.partial, layout)
        load = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=128)
        values = cute.make_rmem_tensor((4,), cutlass.Float32)
        words = cute.recast_tensor(values, cutlass.Int32)
        items = vectors * self.tile_m
        for step in cutlass.range_constexpr(-(-items // self.consumers)):
            item = thread + step * self.consumers
            vector, token = item % vectors, item // vectors
            receiver = token // self.share
            if item < items and token < tokens and receiver != rank:
                cute.copy(load, mine[None, vector, token], values)
                slot = rank - 1 if rank > receiver else rank
                cute.arch.store_async_dsmem(
                    theirs[None, vector, slot * self.share + token % self.share].iterator,
                    (words[0], words[1], words[2], words[3]),
                    arrived,
                    member * self.split_k + receiver,
                )
        cute.arch.mbarrier_wait(arrived, 0)

    @cute.jit
    def store(self, d: cute.Tensor, sums: cute.Pointer, given: Any, place: Any, thread: cutlass.Int32) -> None:
        """Add up this CTA's share of the tokens over the slices of K, in order, and write it."""
        kept, residual, scale_a, scale_b, scale_d = given
        tile, block_m, rank = place
        width = _COLUMNS * 2 if self.epilogue.gated else _COLUMNS  # sums that make eight columns
        vectors = self.tile_n // width
        first_token = block_m * self.tile_m + rank * self.share
        extent_m, extent_n = cute.size(d, mode=[0]), cute.size(d, mode=[1])
        factor = cutlass.Float32(1.0)
        if cutlass.const_expr(self.form.scaling == "tensor"):
            factor = scale_a[0] * scale_b[0]
        total = cute.make_rmem_tensor((width,), cutlass.Float32)
        out = cute.make_rmem_tensor((_COLUMNS,), d.element_type)
        store = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), d.element_type, num_bits_per_copy=_COLUMNS * d.element_type.width
        )
        items = vectors * self.share
        for step in cutlass.range_constexpr(-(-items // self.consumers)):
            item = thread + step * self.consumers
            vector, token = item % vectors, item // vectors
            column = (tile * vectors + vector) * _COLUMNS
            if item < items and first_token + token < extent_m and column < extent_n:
                self._add_up(total, sums, (vector, token, rank), width)
                self._scale(total, kept, factor, vector, rank * self.share + token)
                self._finish(total, out, residual, scale_d, first_token + token, column)
                row = cute.zipped_divide(d[first_token + token, None], (_COLUMNS,))
                cute.copy(store, out, row[None, column // _COLUMNS])

    @cute.jit
    def _add_up(self, total: cute.Tensor, sums: cute.Pointer, place: Any, width: cutlass.Constexpr) -> None:
        """The sums of one item over all slices of K, in their order."""
        vector, token, rank = place
        load = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=128)
        part = cute.make_rmem_tensor((width,), cutlass.Float32)
        own = rank * self.share * self.pitch
        for other in cutlass.range_constexpr(self.split_k):
            slot = other - 1 if other > rank else other
            at = own if other == rank else self.partial + slot * self.share * self.pitch
            if cutlass.const_expr(self.split_k == 1):
                at = 0
            row = cute.make_tensor(
                sums + cute.assume(at + token * self.pitch + vector * width, divby=4), cute.make_layout((width,))
            )
            cute.copy(load, cute.zipped_divide(row, (4,)), cute.zipped_divide(part, (4,)))
            if cutlass.const_expr(other == 0):
                total.store(part.load())
            else:
                total.store(total.load() + part.load())

    @cute.jit
    def _scale(
        self,
        total: cute.Tensor,
        kept: cute.Pointer,
        factor: cutlass.Float32,
        vector: cutlass.Int32,
        token: cutlass.Int32,
    ) -> None:
        """Times the scales, plus bias."""
        width = cute.size(total)
        values = cute.make_tensor(kept, cute.make_layout(max(self.terms, 1)))
        if cutlass.const_expr(self.form.scaling == "tensor"):
            total.store(total.load() * factor)
        if cutlass.const_expr(self.form.scaling == "row_column"):
            of_token = values[token]
            for i in cutlass.range_constexpr(width):
                total[i] = total[i] * (of_token * values[self.tile_m + vector * width + i])
        if cutlass.const_expr(self.epilogue.bias):
            for i in cutlass.range_constexpr(width):
                total[i] = total[i] + values[self.bias_at + vector * width + i]

    @cute.jit
    def _finish(
        self,
        total: cute.Tensor,
        out: cute.Tensor,
        residual: Any,
        scale_d: Any,
        token: cutlass.Int32,
        column: cutlass.Int32,
    ) -> None:
        """Activation or gate, residual, scale_d, conversion."""
        name = self.epilogue.activation
        made = cute.make_rmem_tensor((_COLUMNS,), cutlass.Float32)
        for i in cutlass.range_constexpr(_COLUMNS):
            if cutlass.const_expr(self.epilogue.gated):
                made[i] = gate(name, total[i], total[_COLUMNS + i])
            else:
                made[i] = activate(name, total[i])
        if cutlass.const_expr(residual is not None):
            load = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), residual.element_type, num_bits_per_copy=128)
            more = cute.make_rmem_tensor((_COLUMNS,), residual.element_type)
            row = cute.zipped_divide(residual[token, None], (_COLUMNS,))
            cute.copy(load, row[None, column // _COLUMNS], more)
            made.store(made.load() + more.load().to(cutlass.Float32))
        if cutlass.const_expr(scale_d is not None):
            made.store(made.load() * scale_d[0])
        out.store(made.load().to(out.element_type))
