"""How `persistent.Persistent` shares the tiles of a last, partial wave among all clusters that there are: `stream_k`.

Each such tile's K is cut into as many slices as there are idle clusters to take them, and the slices' sums meet in a
workspace. The pieces of a warpgroup's part of D fall to the slices by turns, as with `split_k`: everybody writes the
sums of others' pieces, says so, waits until all have, and adds up its own in the order of slices. The same thread has
the same sums in every CTA, so they are laid out by thread, 16 bytes each. Nobody waits for a CTA that has not begun:
all are resident, and a slice is the last thing that any of them does.

A warpgroup's counter says in its lower half how many slices were written, in its upper half how many CTAs have seen
that this was all of them; the last one leaves it zero.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from .persistent_choices import COUNTER_BYTES, STORE_BUFFERS, WARPGROUPS, Plan
from .persistent_epilogue import piece_values, prepare_stores, store_piece, store_tile

_WARPGROUP = 128
_THREADS = WARPGROUPS * _WARPGROUP
_IDLE, _WRITTEN = 7, 4  # named barriers: of all that multiply, and of each warpgroup (the epilogue's)
_SEEN = 1 << 16
_COUNTER_WORDS = COUNTER_BYTES // 4


def shares(plan: Plan, tiles: Any, clusters: Any, count_k: Any) -> tuple[Any, Any, Any]:
    """Of `tiles` on so many clusters: items of work, tiles that are items each, and slices of each other tile."""
    whole = tiles // clusters * clusters
    rest = tiles - whole
    most = cutlass.min(clusters // cutlass.max(rest, 1), count_k // plan.least_slice)
    slices = cutlass.Int32(1)
    for count in plan.slices:
        slices = cutlass.select_(most >= count, cutlass.Int32(count), slices)
    return whole + rest * slices, whole, slices


def item(plan: Plan, index: Any, tiles: Any) -> tuple[Any, Any, Any, Any]:
    """Item `index` of the work: its tile, the first stage and the number of stages along K, and for `finish` which of
    the shared tiles it is, which slice, and of how many. Where no tiles are shared, an item is a tile.

    Neighbours have the same slice of different tiles, so that they read the same rows of A or B at the same time.
    """
    if not plan.stream_k:
        return index, tiles[4], tiles[3], None
    count_k, whole, slices = tiles[3], tiles[5], tiles[6]
    rest = cutlass.max(index - whole, 0)
    each = cutlass.max((tiles[2] - whole) // slices, 1)
    here = rest // each
    shared = rest - here * each
    count = cutlass.select_(index >= whole, slices, cutlass.Int32(1))
    first = count_k * here // count
    return cutlass.min(index, whole) + shared, first, count_k * (here + 1) // count - first, (shared, here, count)


@cute.jit
def finish(
    plan: cutlass.Constexpr, sums: cute.Tensor, of_out: Any, place: Any, given: Any, share: Any, spaces: Any
) -> None:
    """Write a warpgroup's part of a tile to D, or what of it falls to this slice of K."""
    _, _, slices = share
    if slices == 1:
        store_tile(plan, sums, of_out, place, given, (None, None, 0))
    else:
        _share(plan, sums, of_out, place, given, share, spaces)


@cute.jit
def _share(
    plan: cutlass.Constexpr, sums: cute.Tensor, of_out: Any, place: Any, given: Any, share: Any, spaces: Any
) -> None:
    fused = given[0]
    stages, partials, counters = spaces
    shared, here, slices = share
    block, _, _ = cute.arch.block_idx()
    rank = block % plan.cluster
    thread = fused.group * _WARPGROUP + fused.thread
    vectors = plan.piece_sums // 4
    # Where others' sums come to lie, and this slice's own: (4 values, threads, vectors, slices of a piece by piece).
    shape = (4, _THREADS, vectors, plan.stages * (plan.rows + plan.columns))
    local = cute.make_tensor(cute.recast_ptr(stages, dtype=cutlass.Float32), cute.make_layout(shape))
    slot_shape = (4, _THREADS, vectors, plan.blocks * plan.pieces, 1 << 16)
    slots = cute.make_tensor(cute.recast_ptr(partials, dtype=cutlass.Float32), cute.make_layout(slot_shape))
    slot = shared * slices * plan.cluster + rank  # of the first slice; the next one's is `cluster` further on
    store = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=128)

    # The other warpgroup may still read stages.
    cute.arch.barrier(barrier_id=_IDLE, number_of_threads=_THREADS)
    values = cute.make_rmem_tensor((4,), cutlass.Float32)
    mine = slot + here * plan.cluster
    for number in cutlass.range_constexpr(plan.blocks * plan.pieces):
        turn = number // slices
        own = number - turn * slices == here
        for vector in cutlass.range_constexpr(vectors):
            for i in cutlass.range_constexpr(4):
                values[i] = sums[number * plan.piece_sums + 4 * vector + i]
            if own:
                cute.copy(store, values, local[None, thread, vector, number])
            else:
                cute.copy(store, values, slots[None, thread, vector, number, mine])
    cute.arch.barrier(barrier_id=_WRITTEN + fused.group, number_of_threads=_WARPGROUP)
    counter = cute.recast_ptr(counters, dtype=cutlass.Int32)
    counter += ((shared * plan.cluster + rank) * WARPGROUPS + fused.group) * _COUNTER_WORDS
    if fused.thread == 0:
        _meet(counter, slices)
    cute.arch.barrier(barrier_id=_WRITTEN + fused.group, number_of_threads=_WARPGROUP)
    left = cutlass.Int32(0)
    if fused.thread == 0:  # what comes back is looked at when nobody waits for it any more
        left = cute.arch.atomic_add(counter, cutlass.Int32(_SEEN), sem="relaxed", scope="gpu")

    load = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL), cutlass.Float32, num_bits_per_copy=128
    )
    for number in cutlass.range(here, plan.blocks * plan.pieces, slices, unroll=1):
        for other in cutlass.range(slices, unroll=1):
            if other != here:
                for vector in cutlass.range_constexpr(vectors):
                    source = slots[None, thread, vector, number, slot + other * plan.cluster]
                    cute.copy(load, source, local[None, thread, vector, number - here + other])
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)

    stores, registers = prepare_stores(plan, of_out, fused)
    total = cute.make_rmem_tensor((plan.piece_sums,), cutlass.Float32)
    turn = cutlass.Int32(0)
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    for number in cutlass.range(here, plan.blocks * plan.pieces, slices, unroll=1):
        total.fill(0.0)
        for other in cutlass.range(slices, unroll=1):
            for vector in cutlass.range_constexpr(vectors):
                cute.copy(store, local[None, thread, vector, number - here + other], values)
                for i in cutlass.range_constexpr(4):
                    total[4 * vector + i] = total[4 * vector + i] + values[i]
        _write(plan, total, (registers, stores), (place, number, turn), given)
        turn += 1
    if left == (slices - 1) * _SEEN + slices:
        cute.arch.store(counter, cutlass.Int32(0), sem="relaxed", scope="gpu")


@cute.jit
def _write(plan: cutlass.Constexpr, total: cute.Tensor, to: Any, which: Any, given: Any) -> None:
    """Write a piece of D whose sums are complete."""
    fused, scales = given
    registers, stores = to
    place, number, turn = which
    block, column = number // plan.pieces, number % plan.pieces
    residual = fused.residual_of(place, block, column) if cutlass.const_expr(fused.parts.residual) else []
    computed = piece_values(fused, scales, total, place, block, column, residual, 0)
    at = fused.piece_at(place, block, column)
    store_piece(computed, registers, stores, (turn & 1, STORE_BUFFERS - 1), (at, place[2]), fused)


@cute.jit
def _meet(counter: cute.Pointer, slices: cutlass.Int32) -> None:
    """Say that this slice is written, and wait until all are."""
    cute.arch.red(counter, cutlass.Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
    written = cutlass.Int32(0)
    while written != slices:
        written = cute.arch.load(counter, cutlass.Int32, sem="acquire", scope="gpu") & (_SEEN - 1)
