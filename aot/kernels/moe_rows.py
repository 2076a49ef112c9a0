"""A token's row written to the rows of its experts: as it is or quantised, and times the weight of each or not.

`MoePermute` ranks, and says where they go. A row comes as (K) and its weights (top_k), or None; products are rounded to
its type, and what is quantised is made of these.
"""

from typing import Any

import cutlass
from cutlass import cute

from .amax import over_threads, scale_of
from .quantise import THREADS_OF_BLOCK, WIDTH, load, magnitude, magnitude_of_row, narrow, store


@cute.jit
def _weighed(value: Any, weight: Any, element_type: cutlass.Constexpr) -> cutlass.Float32:
    """A number times a weight, rounded as numbers of a type are."""
    return cutlass.Float32(value * weight).to(element_type).to(cutlass.Float32)


@cute.jit
def copy_row(threads: cutlass.Constexpr, row: Any, rows: cute.Tensor, places: cute.Tensor) -> None:
    """The block copies `row`, (K) and perhaps weights, to each of the rows that `places` names, but for those below
    0."""
    thread, _, _ = cute.arch.thread_idx()
    x, weights = row
    width = 128 // x.element_type.width
    copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), x.element_type, num_bits_per_copy=128)
    vector = cute.make_rmem_tensor((width,), x.element_type)
    wide = cute.make_rmem_tensor((width,), cutlass.Float32)
    made = cute.make_rmem_tensor((width,), x.element_type)
    pieces = cute.zipped_divide(x, (width,))  # (vector, number of vectors)
    for i in cutlass.range(thread, cute.size(x) // width, threads):
        cute.copy(copy, pieces[None, i], vector)
        for j in cutlass.range(cute.size(places), unroll=4):
            place = places[j]
            if place >= 0:
                to = cute.zipped_divide(rows[place, None], (width,))[None, i]
                if cutlass.const_expr(weights is not None):
                    for e in cutlass.range_constexpr(width):
                        wide[e] = vector[e].to(cutlass.Float32) * weights[j]
                    made.store(wide.load().to(x.element_type))
                    cute.copy(copy, made, to)
                else:
                    cute.copy(copy, vector, to)


def _unrolled(weights: Any) -> int:
    """How many places are written at a time: with weights one, as registers are for what is made of the row."""
    return 4 if weights is None else 1


@cute.jit
def quantise_blocks(
    threads: cutlass.Constexpr, row: Any, rows: cute.Tensor, scale: cute.Tensor, places: cute.Tensor
) -> None:
    """The same in e4m3, with a scale for each 128 elements, which 8 neighbouring threads have at a time."""
    thread, _, _ = cute.arch.thread_idx()
    x, weights = row
    values = cute.make_rmem_tensor((WIDTH,), cutlass.Float32)
    weighed = cute.make_rmem_tensor((WIDTH,), cutlass.Float32)
    made = cute.make_rmem_tensor((WIDTH,), rows.element_type)
    vectors = cute.size(x) // WIDTH
    for step in cutlass.range(cute.ceil_div(vectors, threads), unroll=1):  # all threads shuffle
        at = step * threads + thread
        load(x, at, values)
        amax = over_threads(magnitude(values), THREADS_OF_BLOCK)
        if cutlass.const_expr(weights is None):
            narrow(values, amax, made)
        for j in cutlass.range(cute.size(places), unroll=_unrolled(weights)):
            of_row = amax
            if cutlass.const_expr(weights is not None):
                of_row = _narrow_weighed((values, amax), weights[j], x.element_type, weighed, made)
            store(made, rows, places[j], at)
            if places[j] >= 0 and at < vectors and thread % THREADS_OF_BLOCK == 0:
                scale[places[j], at // THREADS_OF_BLOCK] = scale_of(of_row)


@cute.jit
def quantise_row(threads: cutlass.Constexpr, row: Any, rows: Any, places: cute.Tensor, maxima: cute.Tensor) -> None:
    """The same in e4m3, with one scale; `rows` are rows and scales."""
    thread, _, _ = cute.arch.thread_idx()
    to, scale = rows
    x, weights = row
    amax = magnitude_of_row(threads, x, maxima)
    values = cute.make_rmem_tensor((WIDTH,), cutlass.Float32)
    weighed = cute.make_rmem_tensor((WIDTH,), cutlass.Float32)
    made = cute.make_rmem_tensor((WIDTH,), to.element_type)
    for at in cutlass.range(thread, cute.size(x) // WIDTH, threads):
        load(x, at, values)
        if cutlass.const_expr(weights is None):
            narrow(values, amax, made)
        for j in cutlass.range(cute.size(places), unroll=_unrolled(weights)):
            if cutlass.const_expr(weights is not None):
                _narrow_weighed((values, amax), weights[j], x.element_type, weighed, made)
            store(made, to, places[j], at)
    for j in cutlass.range(thread, cute.size(places), threads):
        if places[j] >= 0:
            of_row = amax
            if cutlass.const_expr(weights is not None):
                of_row = _weighed(amax, cute.math.absf(weights[j]), x.element_type)
            scale[places[j]] = scale_of(of_row)


@cute.jit
def _narrow_weighed(
    values: Any, weight: Any, element_type: cutlass.Constexpr, weighed: cute.Tensor, made: cute.Tensor
) -> cutlass.Float32:
    """Fill `made` with values times a weight in e4m3; the largest magnitude of those that share their scale. `values`
    are some, and their largest, which products and roundings leave the largest; `weighed` is room for as many."""
    of, amax = values
    for e in cutlass.range_constexpr(WIDTH):
        weighed[e] = _weighed(of[e], weight, element_type)
    found = _weighed(amax, cute.math.absf(weight), element_type)
    narrow(weighed, found, made)
    return found
