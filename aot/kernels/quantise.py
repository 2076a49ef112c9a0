"""Rows of 16-bit numbers in e4m3, with f32 scales of 128 elements each, or of whole rows.

A thread has 16 neighbouring elements of a row, two loads and one store of 16 bytes, so 8 neighbouring threads have what
shares a scale where that is a block. `Quantise` gives each 8 threads a block of 128 of any row, or each row a block of
threads, which reads it twice. Rows behind the end of the last group, where there are groups, are left alone.

With an activation a row has gates, and behind them as many elements that they gate: what comes of both, computed in f32
and rounded to the rows' type, is what is quantised.

With `overlap`, kernels start while the one before ends, and nothing is read or written before it has.
"""

from typing import Any

import cutlass
from cutlass import cute

from .activations import gate
from .amax import inverse_of, over_threads, scale_of

WIDTH = 16  # elements of a thread
THREADS_OF_BLOCK = 8  # which have 128 elements
WARP = 32
_LOAD = 8  # elements in 16 bytes


class Quantise:
    """The kernel for blocks of `threads` threads, a multiple of the warp size; `by_row` if a row shares a scale.
    `activation` is "none" or one of `runtime.numbers.epilogue.GATED`."""

    def __init__(self, by_row: bool, threads: int, overlap: bool = False, activation: str = "none") -> None:
        self.by_row, self.threads, self.overlap, self.activation = by_row, threads, overlap, activation

    @cute.jit
    def __call__(self, x: cute.Tensor, ends: Any, y: cute.Tensor, scale: cute.Tensor, stream: Any) -> None:
        """Launch over x and y (M, K), with an activation x (M, 2 K), ends (groups) or None, scale (M, K/128) or (M)."""
        rows = cute.size(x, mode=[0])
        if cutlass.const_expr(self.by_row):
            self.whole_rows(x, ends, y, scale).launch(
                grid=[rows, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=self.overlap
            )
        else:
            blocks = rows * cute.size(scale, mode=[1])
            self.blocks_of_rows(x, ends, y, scale).launch(
                grid=[cute.ceil_div(blocks, self.threads // THREADS_OF_BLOCK), 1, 1],
                block=[self.threads, 1, 1],
                stream=stream,
                use_pdl=self.overlap,
            )

    @cute.kernel
    def blocks_of_rows(self, x: cute.Tensor, ends: Any, y: cute.Tensor, scale: cute.Tensor) -> None:
        """Each 8 threads: one of all rows' blocks of 128."""
        self._wait()
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        across = cute.size(scale, mode=[1])
        item = cta * (self.threads // THREADS_OF_BLOCK) + thread // THREADS_OF_BLOCK
        row, block = item // across, item % across
        place = cutlass.Int32(-1)
        if row < _rows(x, ends):
            place = cutlass.Int32(row)
        values = cute.make_rmem_tensor((WIDTH,), cutlass.Float32)
        at = block * THREADS_OF_BLOCK + thread % THREADS_OF_BLOCK
        self._load(x[cutlass.max(place, 0), None], at, values)  # all threads load, and shuffle
        amax = over_threads(magnitude(values), THREADS_OF_BLOCK)
        made = cute.make_rmem_tensor((WIDTH,), y.element_type)
        narrow(values, amax, made)
        store(made, y, place, at)
        if place >= 0 and thread % THREADS_OF_BLOCK == 0:
            scale[place, block] = scale_of(amax)

    @cute.kernel
    def whole_rows(self, x: cute.Tensor, ends: Any, y: cute.Tensor, scale: cute.Tensor) -> None:
        """The row that the block's index names."""
        self._wait()
        thread, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        maxima = allocate_maxima(self.threads, cutlass.memory.SmemAllocator())
        if row < _rows(x, ends):
            amax = magnitude_of_row(self.threads, x[row, None], maxima, self.activation)
            values = cute.make_rmem_tensor((WIDTH,), cutlass.Float32)
            made = cute.make_rmem_tensor((WIDTH,), y.element_type)
            for at in cutlass.range(thread, cute.size(y, mode=[1]) // WIDTH, self.threads):
                self._load(x[row, None], at, values)
                narrow(values, amax, made)
                store(made, y, cutlass.Int32(row), at)
            if thread == 0:
                scale[row] = scale_of(amax)

    @cute.jit
    def _load(self, row: cute.Tensor, at: cutlass.Int32, values: cute.Tensor) -> None:
        load_activated(self.activation, row, at, values)

    @cute.jit
    def _wait(self) -> None:
        if cutlass.const_expr(self.overlap):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()


@cute.jit
def _rows(x: cute.Tensor, ends: Any) -> cutlass.Int32:
    """How many rows are quantised."""
    rows = cutlass.Int32(cute.size(x, mode=[0]))
    if cutlass.const_expr(ends is not None):
        rows = cutlass.min(ends[cute.size(ends) - 1], rows)
    return rows


def allocate_maxima(threads: int, smem: Any) -> cute.Tensor:
    """Room for what each warp of a block finds."""
    return smem.allocate_tensor(cutlass.Float32, cute.make_layout(threads // WARP), 16)


@cute.jit
def load(row: cute.Tensor, at: cutlass.Int32, values: cute.Tensor) -> None:
    """Fill `values` with elements 16 * `at` and the 15 after it of `row` (K), or with zeros behind its end."""
    copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), row.element_type, num_bits_per_copy=128)
    pieces = cute.zipped_divide(row, (_LOAD,))
    loaded = cute.make_rmem_tensor((_LOAD, WIDTH // _LOAD), row.element_type)
    inside = at < cute.size(row) // WIDTH
    first = cutlass.select_(inside, at, cutlass.Int32(0)) * (WIDTH // _LOAD)
    for i in cutlass.range_constexpr(WIDTH // _LOAD):
        cute.copy(copy, pieces[None, first + i], loaded[None, i])
    for i in cutlass.range_constexpr(WIDTH):
        value = loaded[i % _LOAD, i // _LOAD].to(cutlass.Float32)
        values[i] = cutlass.select_(inside, value, cutlass.Float32(0.0))


@cute.jit
def load_activated(activation: cutlass.Constexpr, row: cute.Tensor, at: cutlass.Int32, values: cute.Tensor) -> None:
    """As `load`, of `row` (K) as it is, or of what gates make of `row` (2 K)."""
    if cutlass.const_expr(activation == "none"):
        load(row, at, values)
    else:
        k = cute.size(row) // (2 * WIDTH) * WIDTH  # as a multiple of what is loaded at once
        halves = cute.make_tensor(row.iterator, cute.make_layout((k, 2), stride=(1, k)))
        load(halves[None, 0], at, values)
        ups = cute.make_rmem_tensor((WIDTH,), cutlass.Float32)
        load(halves[None, 1], at, ups)
        for i in cutlass.range_constexpr(WIDTH):
            made = gate(activation, values[i], ups[i]).to(row.element_type)
            values[i] = made.to(cutlass.Float32)


def magnitude(values: cute.Tensor) -> cutlass.Float32:
    """The largest of this thread's."""
    found = cutlass.Float32(0.0)
    for i in range(WIDTH):
        found = cute.arch.fmax(found, cute.math.absf(values[i]))
    return found


@cute.jit
def magnitude_of_row(
    threads: cutlass.Constexpr, row: cute.Tensor, maxima: cute.Tensor, activation: cutlass.Constexpr = "none"
) -> cutlass.Float32:
    """The largest of a row, or of what gates make of it, in every thread of the block; `maxima` is of
    `allocate_maxima`."""
    thread, _, _ = cute.arch.thread_idx()
    values = cute.make_rmem_tensor((WIDTH,), cutlass.Float32)
    amax = cutlass.Float32(0.0)
    halves = 1 if cutlass.const_expr(activation == "none") else 2
    for at in cutlass.range(thread, cute.size(row) // (halves * WIDTH), threads):
        load_activated(activation, row, at, values)
        amax = cute.arch.fmax(amax, magnitude(values))
    amax = over_threads(amax, WARP)
    if thread % WARP == 0:
        maxima[thread // WARP] = amax
    cute.arch.sync_threads()
    for warp in cutlass.range_constexpr(threads // WARP):
        amax = cute.arch.fmax(amax, maxima[warp])
    return amax


@cute.jit
def narrow(values: cute.Tensor, amax: cutlass.Float32, made: cute.Tensor) -> None:
    """Fill `made` with `values` times the inverse of their scale, which is rounded once, as the scale is."""
    inverse = inverse_of(amax)
    for i in cutlass.range_constexpr(WIDTH):
        values[i] = values[i] * inverse
    made.store(values.load().to(made.element_type))


@cute.jit
def store(made: cute.Tensor, y: cute.Tensor, place: cutlass.Int32, at: cutlass.Int32) -> None:
    """Write elements 16 * `at` and the 15 after it of row `place` of y, if there are such; none where it is below 0."""
    copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), made.element_type, num_bits_per_copy=128)
    if place >= 0 and at < cute.size(y, mode=[1]) // WIDTH:
        cute.copy(copy, made, cute.zipped_divide(y[place, None], (WIDTH,))[None, at])
