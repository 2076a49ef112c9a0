"""Row-wise RMSNorm: y[m, n] = x[m, n] * weight[n] / sqrt(mean over n of x[m, n]^2 + eps).

One block a row, 16-byte loads and stores, sums and products in f32. Any M, any N that is a multiple of 8, any leading
strides that are. A row is read twice; the second time it comes from a cache unless it is longer than that. Any GPU
since Ampere.

With `overlap`, from Hopper on, blocks start while the kernel before this one on the stream ends, where that kernel lets
them, and let the next kernel start at once. Nothing is read or written before the kernel before has ended.
"""

from typing import Any

import cutlass
from cutlass import cute

_VECTOR = 8  # 16-bit elements in 16 bytes
_WARP = 32


class RmsNorm:
    """The kernel for blocks of `threads` threads, a multiple of the warp size."""

    def __init__(self, threads: int, overlap: bool = False) -> None:
        self.threads, self.overlap = threads, overlap

    @cute.jit
    def __call__(self, x: cute.Tensor, weight: cute.Tensor, y: cute.Tensor, eps: cutlass.Float32, stream: Any) -> None:
        """Launch over x (M, N), weight (N), y (M, N)."""
        self.kernel(x, weight, y, eps).launch(
            grid=[cute.size(x, mode=[0]), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.overlap,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, weight: cute.Tensor, y: cute.Tensor, eps: cutlass.Float32) -> None:
        """Normalise the row that the block's index names."""
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        extent = cute.size(x, mode=[1])
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()

        # (vector, number of vectors)
        x_row = cute.zipped_divide(x[row, None], (_VECTOR,))
        y_row = cute.zipped_divide(y[row, None], (_VECTOR,))
        weights = cute.zipped_divide(weight, (_VECTOR,))
        vectors = extent // _VECTOR

        x_vector = cute.make_rmem_tensor((_VECTOR,), x.element_type)
        weight_vector = cute.make_rmem_tensor((_VECTOR,), weight.element_type)
        y_vector = cute.make_rmem_tensor((_VECTOR,), y.element_type)
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), x.element_type, num_bits_per_copy=128)

        total = cutlass.Float32(0.0)
        for i in cutlass.range(thread, vectors, self.threads):
            cute.copy(copy, x_row[None, i], x_vector)
            values = x_vector.load().to(cutlass.Float32)
            total += (values * values).reduce(cute.ReductionOp.ADD, cutlass.Float32(0.0), reduction_profile=0)

        total = self._sum_over_block(total, thread)
        scale = cute.math.rsqrt(total / cutlass.Float32(extent) + eps)

        for i in cutlass.range(thread, vectors, self.threads):
            cute.copy(copy, x_row[None, i], x_vector)
            cute.copy(copy, weights[None, i], weight_vector)
            values = x_vector.load().to(cutlass.Float32) * scale * weight_vector.load().to(cutlass.Float32)
            y_vector.store(values.to(y.element_type))
            cute.copy(copy, y_vector, y_row[None, i])

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
