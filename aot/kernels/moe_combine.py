"""What the experts of each token made, added up: y[t] = sum over j of weights[t, j] * rows[positions[t, j]], or of the
rows alone where there are no weights.

Each thread makes 16 bytes of y, from as many of each row, of which some are loaded before the first is added. Sums and
products are in f32, j ascends, and y is rounded once. A position that is no row adds nothing: what is loaded for it is
row 0, which there always is, so that no load waits for a branch.

With `overlap`, from Hopper on, blocks start while the kernel before ends, and nothing is read or written before it has.
"""

from typing import Any

import cutlass
from cutlass import cute

from .moe_sizes import MOST_TOP_K

_VECTOR = 8  # 16-bit elements in 16 bytes


class MoeCombine:
    """The kernel for blocks of `threads` threads, each of which has loads of `at_once` rows in flight."""

    def __init__(self, threads: int, at_once: int, overlap: bool = False) -> None:
        self.threads, self.at_once, self.overlap = threads, at_once, overlap

    @cute.jit
    def __call__(self, rows: cute.Tensor, positions: cute.Tensor, weights: Any, y: cute.Tensor, stream: Any) -> None:
        """Launch over rows (T * top_k, N), positions (T, top_k), weights (T, top_k) or None, y (T, N)."""
        tokens, extent = cute.size(y, mode=[0]), cute.size(y, mode=[1])
        self.kernel(rows, positions, weights, y).launch(
            grid=[tokens, cute.ceil_div(extent, _VECTOR * self.threads), 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=self.overlap,
        )

    @cute.kernel
    def kernel(self, rows: cute.Tensor, positions: cute.Tensor, weights: Any, y: cute.Tensor) -> None:
        """Add up one token's rows, in the columns that the block's second index names."""
        thread, _, _ = cute.arch.thread_idx()
        token, slice_n, _ = cute.arch.block_idx()
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        smem = cutlass.memory.SmemAllocator()
        places = smem.allocate_tensor(cutlass.Int32, cute.make_layout(MOST_TOP_K), 16)
        factors: Any = None
        if cutlass.const_expr(weights is not None):
            factors = smem.allocate_tensor(cutlass.Float32, cute.make_layout(MOST_TOP_K), 16)
        if thread < cute.size(positions, mode=[1]):
            place = positions[token, thread]
            places[thread] = cutlass.select_(place < cute.size(rows, mode=[0]), place, cutlass.Int32(-1))
            if cutlass.const_expr(weights is not None):
                factors[thread] = weights[token, thread]
        cute.arch.sync_threads()
        top_k = cute.size(positions, mode=[1])
        self._add_up(rows, (places, factors, top_k), y[token, None], slice_n * self.threads + thread)

    @cute.jit
    def _add_up(self, rows: cute.Tensor, terms: Any, y: cute.Tensor, vector: cutlass.Int32) -> None:
        """Make elements 8 * `vector` and the seven after it of `y` (N), if it has them, of `terms`: which rows, by
        which factors or None, and how many."""
        places, factors, top_k = terms
        last = cute.size(y) // _VECTOR - 1
        at = cutlass.min(vector, last)  # all threads load, and reach the barriers
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), rows.element_type, num_bits_per_copy=128)
        loaded = cute.make_rmem_tensor((_VECTOR, self.at_once), rows.element_type)
        total = cute.make_rmem_tensor((_VECTOR,), cutlass.Float32)
        total.fill(0.0)
        for first in cutlass.range(0, top_k, self.at_once, unroll=1):
            for i in cutlass.range_constexpr(self.at_once):
                row = rows[cutlass.max(_place(places, first + i, top_k), 0), None]
                cute.copy(copy, cute.zipped_divide(row, (_VECTOR,))[None, at], loaded[None, i])
            # Factors are read behind a barrier: else ptxas adds each row as soon as it is loaded, to save registers,
            # and one load waits for the other.
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(self.at_once):
                if _place(places, first + i, top_k) >= 0:
                    if cutlass.const_expr(factors is not None):
                        factor = factors[first + i]
                        for e in cutlass.range_constexpr(_VECTOR):
                            total[e] = total[e] + loaded[e, i].to(cutlass.Float32) * factor
                    else:
                        for e in cutlass.range_constexpr(_VECTOR):
                            total[e] = total[e] + loaded[e, i].to(cutlass.Float32)
        made = cute.make_rmem_tensor((_VECTOR,), y.element_type)
        made.store(total.load().to(y.element_type))
        if vector <= last:
            cute.copy(copy, made, cute.zipped_divide(y, (_VECTOR,))[None, vector])


@cute.jit
def _place(places: cute.Tensor, index: cutlass.Int32, count: cutlass.Int32) -> cutlass.Int32:
    """The row that is added at `index`, or less than 0 where there is none."""
    found = cutlass.Int32(-1)
    if index < count:
        found = places[index]
    return found
