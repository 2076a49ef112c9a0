"""Row-wise RMSNorm: y[m, n] = x[m, n] * weight[n] / sqrt(mean over n of x[m, n]^2 + eps). With a residual the sum of
both, rounded, is written and takes the place of x.

One block a row, 16-byte loads and stores, sums and products in f32. Any M, any N that is a multiple of 8, any leading
strides that are. The first 32 elements of each thread stay in registers, 8 in blocks of more than 512 threads, so that
a row of so many for each thread or fewer is read once; of a longer one the rest is read again, from a cache unless it
is longer than that. Any GPU since Ampere.

With `overlap`, from Hopper on, blocks start while the kernel before this one on the stream ends, where that kernel lets
them, and let the next kernel start at once. Nothing is read or written before the kernel before has ended; the weight
is brought to L2, where what others write is seen.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm

_VECTOR = 8  # 16-bit elements in 16 bytes
_WARP = 32


class RmsNorm:
    """The kernel for blocks of `threads` threads, a multiple of the warp size."""

    def __init__(self, threads: int, overlap: bool = False) -> None:
        self.threads, self.overlap = threads, overlap
        # Vectors of a row that a thread keeps, with as many of the residual and the weight: 1,024 threads have 64
        # registers each, which two of each would overflow.
        self.held = 4 if threads <= 512 else 1

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        residual: Any,
        weight: cute.Tensor,
        y: cute.Tensor,
        total: Any,
        eps: cutlass.Float32,
        stream: Any,
    ) -> None:
        """Launch over x (M, N), residual (M, N) or None, weight (N), y (M, N), and, with a residual, the sum (M, N)."""
        self.kernel(x, residual, weight, y, total, eps).launch(
            grid=[cute.size(x, mode=[0]), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.overlap,
        )

    @cute.kernel
    def kernel(
        self, x: cute.Tensor, residual: Any, weight: cute.Tensor, y: cute.Tensor, total: Any, eps: cutlass.Float32
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
        for i in cutlass.range(thread + self.held * self.threads, vectors, self.threads):
            cute.copy(copy, x_row[None, i], other)
            if cutlass.const_expr(residual is not None):
                cute.copy(copy, added[0][None, i], more[None, 0])
                both = other.load().to(cutlass.Float32) + more[None, 0].load().to(cutlass.Float32)
                other.store(both.to(x.element_type))
                cute.copy(copy, other, added[1][None, i])
            squares += _sum_of_squares(other)

        squares = self._sum_over_block(squares, thread)
        scale = cute.math.rsqrt(squares / cutlass.Float32(extent) + eps)

        for i in cutlass.range_constexpr(self.held):
            _scale(held[None, i], scale, factors[None, i])
            if thread + i * self.threads < vectors:
                cute.copy(copy, held[None, i], y_row[None, thread + i * self.threads])
        of_rest = x_row if cutlass.const_expr(residual is None) else added[1]
        for i in cutlass.range(thread + self.held * self.threads, vectors, self.threads):
            cute.copy(copy, of_rest[None, i], other)
            cute.copy(copy, weights[None, i], factors[None, 0])
            _scale(other, scale, factors[None, 0])
            cute.copy(copy, other, y_row[None, i])

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


def _bring(vector: cute.Tensor) -> None:
    """Begin to bring a vector to L2."""
    address = cutlass.Int64(vector.iterator.toint())
    llvm.inline_asm(None, [address.ir_value()], "prefetch.global.L2 [$0];", "l", has_side_effects=True)
