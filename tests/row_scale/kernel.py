"""A kernel for row-wise scaling: one CTA a row, one element at a time."""

from typing import Any

import cutlass
from cutlass import cute


class RowScale:
    def __init__(self, threads: int) -> None:
        self.threads = threads

    @cute.jit
    def __call__(
        self, x: cute.Tensor, weight: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32, stream: Any
    ) -> None:
        self.kernel(x, weight, y, factor).launch(
            grid=[cute.size(x, mode=[0]), 1, 1], block=[self.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, weight: cute.Tensor, y: cute.Tensor, factor: cutlass.Float32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        for i in cutlass.range(thread, cute.size(x, mode=[1]), self.threads):
            value = x[row, i].to(cutlass.Float32) * weight[i].to(cutlass.Float32) * factor
            y[row, i] = value.to(y.element_type)
