"""Row-wise RMSNorm: y[m, n] = x[m, n] * weight[n] / sqrt(mean over n of x[m, n]^2 + eps). With a residual the sum of
both, rounded, is written and takes the place of x. With scales y, rounded as x is, becomes e4m3 with a scale for each
128 elements of a row, or for each row: bit for bit what `quantise` makes of it.

One block a row, 16-byte loads and stores, sums and products in f32. Any M, any N that is a multiple of 8, any leading
strides that are. The first 32 elements of each thread stay in registers, fewer in large blocks, so that a row of so
many for each thread or fewer is read once; of a longer one the rest is read again, from a cache unless it is longer
than that. Any GPU since Ampere.

A scale for 128 elements is of 16 neighbouring threads' vectors, and one for a row of all threads', which then read what
is not in registers a third time.

With `overlap`, from Hopper on, blocks start while the kernel before this one on the stream ends, where that kernel lets
them, and let the next kernel start at once. Nothing is read or written before the kernel before has ended; the weight
is brought to L2, where what others write is seen.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm

from .amax import inverse_of, over_threads, scale_of

_VECTOR = 8  # 16-bit elements in 16 bytes
_THREADS_OF_BLOCK = 16  # which have 128 elements
_WARP = 32
_UNROLL = 2  # of loops over what is not in registers, of which four at once overflow them on sm_103a


class RmsNorm:
    """The kernel for blocks of `threads` threads, a multiple of the warp size; `scaled` if y has scales."""

    def __init__(self, threads: int, overlap: bool = False, scaled: bool = False) -> None:
        self.threads, self.overlap = threads, overlap
        # Vectors of a row that a thread keeps, with as many of the residual and the weight: 1,024 threads have 64
        # registers each, which two of each would overflow, as four would that many of 512 threads on sm_120a.
        self.held = 1 if threads > 512 else 2 if scaled and threads > 256 else 4

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        residual: Any,
        weight: cute.Tensor,
        y: cute.Tensor,
        scale: Any,
        total: Any,
        eps: cutlass.Float32,
        stream: Any,
    ) -> None:
        """Launch over x (M, N), residual (M, N) or None, weight (N) and y (M, N); if y is e4m3 its scales, (M, N/128)
        or (M), else None; with a residual the sum (M, N)."""
        self.kernel(x, residual, weight, y, scale, total, eps).launch(
            grid=[cute.size(x, mode=[0]), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.overlap,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        residual: Any,
        weight: cute.Tensor,
        y: cute.Tensor,
        scale: Any,
        total: Any,
        eps: cutlass.Float32,
    ) -> None:
        """Normalise the row that the block's index names."""
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        extent = cute.size(x, mode=[1])
        vectors = extent // _VECTOR  # thread t has vectors t, t + threads, ...
        weights = cute.zipped_divide(weight, (_VECTOR,))  # (vector, number of vectors)
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            for i in cutlass.range_constexpr(self.held):
                if thread + i * self.threads < vectors:
                    _bring(weights[None, thread + i * self.threads])
            cute.arch.griddepcontrol_wait()

        x_row = cute.zipped_divide(x[row, None], (_VECTOR,))
        y_row = cute.zipped_divide(y[row, None], (_VECTOR,))
        added: Any = None
        if cutlass.const_expr(residual is not None):
            added = (
                cute.zipped_divide(residual[row, None], (_VECTOR,)),
                cute.zipped_divide(total[row, None], (_VECTOR,)),
            )
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), x.element_type, num_bits_per_copy=128)
        held = cute.make_rmem_tensor((_VECTOR, self.held), x.element_type)
        held.fill(0.0)
        factors = cute.make_rmem_tensor((_VECTOR, self.held), weight.element_type)
        if cutlass.const_expr(scale is not None):
            factors.fill(0.0)  # threads behind the end of a row have zeros, not just anything times zero
        more = cute.make_rmem_tensor((_VECTOR, self.held), x.element_type)
        more.fill(0.0)
        # All loads are in flight before the first is waited for.
        for i in cutlass.range_constexpr(self.held):
            if thread + i * self.threads < vectors:
                cute.copy(copy, x_row[None, thread + i * self.threads], held[None, i])
                if cutlass.const_expr(residual is not None):
                    cute.copy(copy, added[0][None, thread + i * self.threads], more[None, i])
                cute.copy(copy, weights[None, thread + i * self.threads], factors[None, i])

        squares = cutlass.Float32(0.0)
        for i in cutlass.range_constexpr(self.held):
            if cutlass.const_expr(residual is not None):
                both = held[None, i].load().to(cutlass.Float32) + more[None, i].load().to(cutlass.Float32)
                held[None, i].store(both.to(x.element_type))
                if thread + i * self.threads < vectors:
                    cute.copy(copy, held[None, i], added[1][None, thread + i * self.threads])
            squares += _sum_of_squares(held[None, i])
        other = cute.make_rmem_tensor((_VECTOR,), x.element_type)
        for i in cutlass.range(thread + self.held * self.threads, vectors, self.threads, unroll=_UNROLL):
            cute.copy(copy, x_row[None, i], other)
            if cutlass.const_expr(residual is not None):
                cute.copy(copy, added[0][None, i], more[None, 0])
                both = other.load().to(cutlass.Float32) + more[None, 0].load().to(cutlass.Float32)
                other.store(both.to(x.element_type))
                cute.copy(copy, other, added[1][None, i])
            squares += _sum_of_squares(other)

        squares = self._sum_over_block(squares, thread)
        over_rms = cute.math.rsqrt(squares / cutlass.Float32(extent) + eps)
        of_rest = x_row if cutlass.const_expr(residual is None) else added[1]
        if cutlass.const_expr(scale is not None):
            for i in cutlass.range_constexpr(self.held):
                _scale(held[None, i], over_rms, factors[None, i])
        if cutlass.const_expr(scale is None):
            for i in cutlass.range_constexpr(self.held):
                _scale(held[None, i], over_rms, factors[None, i])
                if thread + i * self.threads < vectors:
                    cute.copy(copy, held[None, i], y_row[None, thread + i * self.threads])
            for i in cutlass.range(thread + self.held * self.threads, vectors, self.threads, unroll=_UNROLL):
                self._norm(of_rest, weights, i, over_rms, other)
                cute.copy(copy, other, y_row[None, i])
        elif cutlass.const_expr(cute.rank(scale) == 1):
            self._by_row(held, of_rest, weights, over_rms, y_row, scale, row)
        else:
            self._by_blocks(held, of_rest, weights, over_rms, y_row, scale[row, None])

    @cute.jit
    def _norm(
        self, x_row: cute.Tensor, weights: cute.Tensor, at: cutlass.Int32, over_rms: cutlass.Float32, to: cute.Tensor
    ) -> None:
        """Read vector `at` of a row, or of the sum, again, and normalise it."""
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), to.element_type, num_bits_per_copy=128)
        factors = cute.make_rmem_tensor((_VECTOR,), weights.element_type)
        cute.copy(copy, x_row[None, at], to)
        cute.copy(copy, weights[None, at], factors)
        _scale(to, over_rms, factors)

    @cute.jit
    def _by_row(
        self,
        held: cute.Tensor,
        of_rest: cute.Tensor,
        weights: cute.Tensor,
        over_rms: cutlass.Float32,
        y_row: cute.Tensor,
        scale: cute.Tensor,
        row: cutlass.Int32,
    ) -> None:
        """Write a normalised row, of which `held` is in registers, in e4m3 with one scale."""
        thread, _, _ = cute.arch.thread_idx()
        vectors, behind = cute.size(y_row, mode=[1]), thread + self.held * self.threads
        other = cute.make_rmem_tensor((_VECTOR,), held.element_type)
        amax = cutlass.Float32(0.0)
        for i in cutlass.range_constexpr(self.held):
            amax = cute.arch.fmax(amax, _magnitude(held[None, i]))
        for i in cutlass.range(behind, vectors, self.threads, unroll=_UNROLL):
            self._norm(of_rest, weights, i, over_rms, other)
            amax = cute.arch.fmax(amax, _magnitude(other))
        amax = self._largest_over_block(amax, thread)
        for i in cutlass.range_constexpr(self.held):
            if thread + i * self.threads < vectors:
                _store_narrow(held[None, i], amax, y_row[None, thread + i * self.threads])
        for i in cutlass.range(behind, vectors, self.threads, unroll=_UNROLL):
            self._norm(of_rest, weights, i, over_rms, other)
            _store_narrow(other, amax, y_row[None, i])
        if thread == 0:
            scale[row] = scale_of(amax)

    @cute.jit
    def _by_blocks(
        self,
        held: cute.Tensor,
        of_rest: cute.Tensor,
        weights: cute.Tensor,
        over_rms: cutlass.Float32,
        y_row: cute.Tensor,
        scales: cute.Tensor,
    ) -> None:
        """Write a normalised row, of which `held` is in registers, in e4m3 with a scale for each 128 elements."""
        thread, _, _ = cute.arch.thread_idx()
        vectors = cute.size(y_row, mode=[1])
        for i in cutlass.range_constexpr(self.held):
            _store_block(held[None, i], thread + i * self.threads, y_row, scales)
        other = cute.make_rmem_tensor((_VECTOR,), held.element_type)
        for first in cutlass.range(self.held * self.threads, vectors, self.threads):  # all threads, which shuffle
            other.fill(0.0)
            if first + thread < vectors:
                self._norm(of_rest, weights, first + thread, over_rms, other)
            _store_block(other, first + thread, y_row, scales)

    @cute.jit
    def _largest_over_block(self, value: cutlass.Float32, thread: cutlass.Int32) -> cutlass.Float32:
        """The largest `value` of the block's threads, in every thread."""
        warps = self.threads // _WARP
        value = over_threads(value, _WARP)
        largest = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(warps), 16)
        if thread % _WARP == 0:
            largest[thread // _WARP] = value
        cute.arch.sync_threads()
        for warp in cutlass.range_constexpr(warps):
            value = cute.arch.fmax(value, largest[warp])
        return value

    @cute.jit
    def _sum_over_block(self, value: cutlass.Float32, thread: cutlass.Int32) -> cutlass.Float32:
        """The sum of `value` over the block's threads, in every thread, always added in the same order."""
        warps = self.threads // _WARP
        value = cute.arch.warp_reduction_sum(value)
        partial = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(warps), 16)
        if thread % _WARP == 0:
            partial[thread // _WARP] = value
        cute.arch.sync_threads()
        total = cutlass.Float32(0.0)
        for warp in cutlass.range_constexpr(warps):
            total += partial[warp]
        return total


def _sum_of_squares(vector: cute.Tensor) -> cutlass.Float32:
    values = vector.load().to(cutlass.Float32)
    return (values * values).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), reduction_profile=0)


def _scale(vector: cute.Tensor, scale: cutlass.Float32, factors: cute.Tensor) -> None:
    """Multiply a vector, in place, by a number and by its columns' factors; rounded once."""
    values = vector.load().to(cutlass.Float32) * scale * factors.load().to(cutlass.Float32)
    vector.store(values.to(vector.element_type))


def _magnitude(vector: cute.Tensor) -> cutlass.Float32:
    """The largest of a vector's."""
    values, found = vector.load().to(cutlass.Float32), cutlass.Float32(0.0)
    for i in range(_VECTOR):
        found = cute.arch.fmax(found, cute.math.absf(values[i]))
    return found


@cute.jit
def _store_narrow(vector: cute.Tensor, amax: cutlass.Float32, y: cute.Tensor) -> None:
    """Write a vector in e4m3, whose scale is of `amax`."""
    made = cute.make_rmem_tensor((_VECTOR,), y.element_type)
    made.store((vector.load().to(cutlass.Float32) * inverse_of(amax)).to(y.element_type))
    cute.copy(cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), y.element_type, num_bits_per_copy=64), made, y)


@cute.jit
def _store_block(vector: cute.Tensor, at: cutlass.Int32, y_row: cute.Tensor, scales: cute.Tensor) -> None:
    """Write vector `at` of a row, if there is one, and as the first thread of a block of 128 its scale."""
    amax = over_threads(_magnitude(vector), _THREADS_OF_BLOCK)
    if at < cute.size(y_row, mode=[1]):
        _store_narrow(vector, amax, y_row[None, at])
        if at % _THREADS_OF_BLOCK == 0:
            scales[at // _THREADS_OF_BLOCK] = scale_of(amax)


def _bring(vector: cute.Tensor) -> None:
    """Begin to bring a vector to L2."""
    address = cutlass.Int64(vector.iterator.toint())
    llvm.inline_asm(None, [address.ir_value()], "prefetch.global.L2 [$0];", "l", has_side_effects=True)
