"""Rows of 16-bit numbers in e4m3, with f32 scales of 128 elements each, or of whole rows.

A thread has 16 neighbouring elements of a row, two loads and one store of 16 bytes, so 8 neighbouring threads have what
shares a scale where that is a block. `Quantise` gives each 8 threads a block of 128 of any row, or each row a block of
threads, which keep up to 16,384 elements in registers and read the rest twice. Rows behind the end of the last group,
where there are groups, are left alone.

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
_HELD = 1024  # times 16 elements of a row that a block's threads keep in registers, with as many gates before
_MOST_HELD = 8  # of these that a thread keeps


class Quantise:
    """The kernel for blocks of `threads` threads, a multiple of the warp size; `by_row` if a row shares a scale.
    `activation` is "none" or one of `runtime.numbers.epilogue.GATED`."""

    def __init__(self, by_row: bool, threads: int, overlap: bool = False, activation: str = "none") -> None:
        self.by_row, self.threads, self.overlap, self.activation = by_row, threads, overlap, activation
        self.held = max(1, min(_HELD // threads, _MOST_HELD))  # so often a thread keeps 16 elements of a row

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
        row, _, _ = cute.arch.block_idx()
        maxima = allocate_maxima(self.threads, cutlass.memory.SmemAllocator())
        if row < _rows(x, ends):
            self._whole_row(x[row, None], y, scale, cutlass.Int32(row), maxima)

    @cute.jit
    def _whole_row(
        self, x_row: cute.Tensor, y: cute.Tensor, scale: cute.Tensor, row: cutlass.Int32, maxima: cute.Tensor
    ) -> None:
        """Quantise one row into row `row` of y; `maxima` is of `allocate_maxima`."""
        thread, _, _ = cute.arch.thread_idx()
        vectors, behind = cute.size(y, mode=[1]) // WIDTH, thread + self.held * self.threads
        values = cute.make_rmem_tensor((WIDTH,), cutlass.Float32)
        made = cute.make_rmem_tensor((WIDTH,), y.element_type)
        # All loads are in flight before the first is waited for.
        parts = _parts(self.activation, x_row)
        loaded = [cute.make_rmem_tensor((WIDTH, self.held), x_row.element_type) for _ in parts]
        for i in cutlass.range_constexpr(self.held):
            for part, to in zip(parts, loaded, strict=True):
                to[None, i].fill(0.0)
                if thread + i * self.threads < vectors:
                    _copy_in(part, thread + i * self.threads, to[None, i])
        amax = cutlass.Float32(0.0)
        for i in cutlass.range_constexpr(self.held):
            if i * self.threads < vectors:
                _activate(self.activation, [of[None, i] for of in loaded], values)
                loaded[0][None, i].store(values.load().to(x_row.element_type))
                amax = cute.arch.fmax(amax, magnitude(values))
        for at in cutlass.range(behind, vectors, self.threads, unroll=1):
            self._load(x_row, at, values)
            amax = cute.arch.fmax(amax, magnitude(values))
        amax = _largest_of_block(self.threads, amax, maxima)
        for i in cutlass.range_constexpr(self.held):
            if thread + i * self.threads < vectors:
                values.store(loaded[0][None, i].load().to(cutlass.Float32))
                narrow(values, amax, made)
                store(made, y, row, thread + i * self.threads)
        for at in cutlass.range(behind, vectors, self.threads, unroll=1):
            self._load(x_row, at, values)
            narrow(values, amax, made)
            store(made, y, row, at)
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
    load_activated("none", row, at, values)


@cute.jit
def load_activated(activation: cutlass.Constexpr, row: cute.Tensor, at: cutlass.Int32, values: cute.Tensor) -> None:
    """As `load`, of `row` (K) as it is, or of what gates make of `row` (2 K)."""
    parts = _parts(activation, row)
    inside = at < cute.size(parts[0]) // WIDTH
    loaded = [cute.make_rmem_tensor((WIDTH,), row.element_type) for _ in parts]
    for part, to in zip(parts, loaded, strict=True):
        _copy_in(part, cutlass.select_(inside, at, cutlass.Int32(0)), to)
    _activate(activation, loaded, values)
    for i in cutlass.range_constexpr(WIDTH):
        values[i] = cutlass.select_(inside, values[i], cutlass.Float32(0.0))


def _parts(activation: str, row: cute.Tensor) -> list[cute.Tensor]:
    """`row` (K) itself, or of one that has gates (2 K) these, and what they gate."""
    if activation == "none":
        return [row]
    k = cute.size(row) // (2 * WIDTH) * WIDTH  # as a multiple of what is loaded at once
    halves = cute.make_tensor(row.iterator, cute.make_layout((k, 2), stride=(1, k)))
    return [halves[None, 0], halves[None, 1]]


def _copy_in(row: cute.Tensor, at: cutlass.Int32, to: cute.Tensor) -> None:
    """Fill `to` with elements 16 * `at` and the 15 after it of `row`."""
    copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), row.element_type, num_bits_per_copy=128)
    from_, pieces = cute.zipped_divide(row, (_LOAD,)), cute.zipped_divide(to, (_LOAD,))
    for i in range(WIDTH // _LOAD):
        cute.copy(copy, from_[None, at * (WIDTH // _LOAD) + i], pieces[None, i])


def _activate(activation: str, loaded: list[cute.Tensor], values: cute.Tensor) -> None:
    """Fill `values` with what was loaded of `_parts`, or with what gates make of it, rounded to its type."""
    for i in range(WIDTH):
        value = loaded[0][i].to(cutlass.Float32)
        if activation != "none":
            made = gate(activation, value, loaded[1][i].to(cutlass.Float32))
            value = made.to(loaded[0].element_type).to(cutlass.Float32)
        values[i] = value


def magnitude(values: cute.Tensor) -> cutlass.Float32:
    """The largest of this thread's."""
    found = cutlass.Float32(0.0)
    for i in range(WIDTH):
        found = cute.arch.fmax(found, cute.math.absf(values[i]))
    return found


@cute.jit
def magnitude_of_row(threads: cutlass.Constexpr, row: cute.Tensor, maxima: cute.Tensor) -> cutlass.Float32:
    """The largest of a row, in every thread of the block; `maxima` is of `allocate_maxima`."""
    thread, _, _ = cute.arch.thread_idx()
    values = cute.make_rmem_tensor((WIDTH,), cutlass.Float32)
    amax = cutlass.Float32(0.0)
    for at in cutlass.range(thread, cute.size(row) // WIDTH, threads):
        load(row, at, values)
        amax = cute.arch.fmax(amax, magnitude(values))
    return _largest_of_block(threads, amax, maxima)


@cute.jit
def _largest_of_block(threads: cutlass.Constexpr, amax: cutlass.Float32, maxima: cute.Tensor) -> cutlass.Float32:
    """The largest that any thread of the block has, in every one."""
    thread, _, _ = cute.arch.thread_idx()
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
