"""How clusters that share a tile of the last, partial wave reduce its accumulators: `stream_k`.

Each such tile's K is cut into as many slices as there are idle clusters to take them (`scheduler`), and their partial
sums meet in a workspace. The epilogue tiles of a warp group's part of D fall to the slices in turn, as with `split_k`:
everybody writes the partial sums of others' epilogue tiles, says so, waits until all have, and reduces its own in the
order of slices. The same thread has the same accumulators in every CTA, so they are laid out by thread, 16 bytes each.
Nobody waits for a CTA that has not begun: all are resident, and a slice is the last thing that any of them does.

A warp group's counter says in its lower half how many slices were written, in its upper half how many CTAs have seen
that this was all of them; the last one leaves it zero.

Knows nothing of how tiles are shared out, nor of what the epilogue does with the sums.
"""

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from ..sizes import WARP_GROUP
from .epilogue import epilogue_tile_values, store_tile
from .epilogue_operands import EpilogueOperands
from .output import EpilogueTile, Output, Store, prepare_store, store_epilogue_tile
from .pipeline import CONSUMER_THREADS, await_drained, meet_in_epilogue
from .plan import CONSUMERS, COUNTER_BYTES, STORE_BUFFERS, Plan
from .scales import Scales
from .scheduler import TileCoord, TileSlice

_SEEN = 1 << 16
_COUNTER_WORDS = COUNTER_BYTES // 4


class Workspace(NamedTuple):
    """A CTA's stages, which partial sums take the place of, and all clusters' partial sums and counters."""

    stages: Any
    partials: Any
    counters: Any


class _Partials(NamedTuple):
    """Where a tile's partial sums are, (4 values, threads, vectors of an epilogue tile, ...) each, and the copy of 16
    bytes between them and registers."""

    local: Any  # in shared memory: others' and this slice's own (..., slices of an epilogue tile by epilogue tile)
    slots: Any  # in the workspace: (..., epilogue tiles, slots)
    first_slot: Any  # of the tile's first slice; the next one's is `Plan.cluster` further on
    copy: Any


@cute.jit
def finish_tile(
    plan: cutlass.Constexpr,
    accumulators: cute.Tensor,
    output: Output,
    coord: TileCoord,
    operands: EpilogueOperands,
    scales: Scales,
    shared: TileSlice,
    workspace: Workspace,
) -> None:
    """Write a warp group's part of a tile to D, or what of it this slice of K reduces."""
    if shared.slices == 1:
        store_tile(plan, accumulators, output, coord, operands, scales, None)
    else:
        _finish_shared(plan, accumulators, output, coord, operands, scales, shared, workspace)


@cute.jit
def _finish_shared(
    plan: cutlass.Constexpr,
    accumulators: cute.Tensor,
    output: Output,
    coord: TileCoord,
    operands: EpilogueOperands,
    scales: Scales,
    shared: TileSlice,
    workspace: Workspace,
) -> None:
    here, slices = shared.number, shared.slices
    block, _, _ = cute.arch.block_idx()
    rank = block % plan.cluster
    thread = operands.group * WARP_GROUP + operands.thread
    partials = _partials(plan, workspace, shared, rank)
    await_drained()
    values = cute.make_rmem_tensor((4,), cutlass.Float32)
    _write(plan, accumulators, partials, shared, values, thread)
    meet_in_epilogue(operands.group)
    counter = cute.recast_ptr(workspace.counters, dtype=cutlass.Int32)
    counter += ((shared.tile * plan.cluster + rank) * CONSUMERS + operands.group) * _COUNTER_WORDS
    if operands.thread == 0:
        _await_others(counter, slices)
    meet_in_epilogue(operands.group)
    left = cutlass.Int32(0)
    if operands.thread == 0:  # what comes back is looked at when nobody waits for it any more
        left = cute.arch.atomic_add(counter, cutlass.Int32(_SEEN), sem="relaxed", scope="gpu")
    _read(plan, partials, shared, thread)

    store = prepare_store(plan, output, operands)
    total = cute.make_rmem_tensor((plan.epilogue_tile_accumulators,), cutlass.Float32)
    nth = cutlass.Int32(0)
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    for number in cutlass.range(here, plan.epilogue_tiles, slices, unroll=1):
        total.fill(0.0)
        for other in cutlass.range(slices, unroll=1):
            for vector in cutlass.range_constexpr(plan.epilogue_tile_accumulators // 4):
                cute.copy(partials.copy, partials.local[None, thread, vector, number - here + other], values)
                for i in cutlass.range_constexpr(4):
                    total[4 * vector + i] = total[4 * vector + i] + values[i]
        _store(plan, total, store, coord, number, nth, scales)
        nth += 1
    if left == (slices - 1) * _SEEN + slices:
        cute.arch.store(counter, cutlass.Int32(0), sem="relaxed", scope="gpu")


def _partials(plan: Plan, workspace: Workspace, shared: TileSlice, rank: Any) -> _Partials:
    vectors = plan.epilogue_tile_accumulators // 4
    shape = (4, CONSUMER_THREADS, vectors, plan.stages * (plan.rows + plan.columns))
    local = cute.make_tensor(cute.recast_ptr(workspace.stages, dtype=cutlass.Float32), cute.make_layout(shape))
    slot_shape = (4, CONSUMER_THREADS, vectors, plan.epilogue_tiles, 1 << 16)
    slots = cute.make_tensor(cute.recast_ptr(workspace.partials, dtype=cutlass.Float32), cute.make_layout(slot_shape))
    first_slot = shared.tile * shared.slices * plan.cluster + rank
    copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=128)
    return _Partials(local, slots, first_slot, copy)


@cute.jit
def _write(
    plan: cutlass.Constexpr,
    accumulators: cute.Tensor,
    partials: _Partials,
    shared: TileSlice,
    values: cute.Tensor,
    thread: Any,
) -> None:
    """Write this slice's partial sums: others' epilogue tiles to the workspace, its own to shared memory."""
    local, slots, copy = partials.local, partials.slots, partials.copy
    mine = partials.first_slot + shared.number * plan.cluster
    for number in cutlass.range_constexpr(plan.epilogue_tiles):
        own = number - number // shared.slices * shared.slices == shared.number
        for vector in cutlass.range_constexpr(plan.epilogue_tile_accumulators // 4):
            for i in cutlass.range_constexpr(4):
                values[i] = accumulators[number * plan.epilogue_tile_accumulators + 4 * vector + i]
            if own:
                cute.copy(copy, values, local[None, thread, vector, number])
            else:
                cute.copy(copy, values, slots[None, thread, vector, number, mine])


@cute.jit
def _read(plan: cutlass.Constexpr, partials: _Partials, shared: TileSlice, thread: Any) -> None:
    """Bring others' partial sums of this slice's epilogue tiles from the workspace to shared memory."""
    load = cute.make_copy_atom(
        cpasync.CopyG2SOp(cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL), cutlass.Float32, num_bits_per_copy=128
    )
    for number in cutlass.range(shared.number, plan.epilogue_tiles, shared.slices, unroll=1):
        for other in cutlass.range(shared.slices, unroll=1):
            if other != shared.number:
                for vector in cutlass.range_constexpr(plan.epilogue_tile_accumulators // 4):
                    slot = partials.first_slot + other * plan.cluster
                    source = partials.slots[None, thread, vector, number, slot]
                    cute.copy(load, source, partials.local[None, thread, vector, number - shared.number + other])
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)


@cute.jit
def _store(
    plan: cutlass.Constexpr, total: cute.Tensor, store: Store, coord: TileCoord, number: Any, nth: Any, scales: Scales
) -> None:
    """Write epilogue tile `number`, whose sums are `total`, as the `nth` of this slice."""
    operands, tile = store.operands, EpilogueTile.of(plan, coord, number)
    residual = []
    if cutlass.const_expr(operands.parts.residual):
        residual = operands.residual_of(coord, tile.atom, tile.across)
    computed = epilogue_tile_values(operands, scales, total, tile, residual, 0)
    store_epilogue_tile(computed, store, tile, nth & 1, STORE_BUFFERS - 1)


@cute.jit
def _await_others(counter: cute.Pointer, slices: cutlass.Int32) -> None:
    """Say that this slice is written, and wait until all are."""
    cute.arch.red(counter, cutlass.Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
    written = cutlass.Int32(0)
    while written != slices:
        written = cute.arch.load(counter, cutlass.Int32, sem="acquire", scope="gpu") & (_SEEN - 1)
