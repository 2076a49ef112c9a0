"""From f32 values in registers to D: converted, to shared memory, and from there by TMA, an epilogue tile at a time.

Knows nothing of how the values are computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from ..sizes import WARP, WARP_GROUP, WGMMA_ROWS
from .epilogue_operands import EpilogueOperands
from .pipeline import meet_in_epilogue
from .plan import STORE_BUFFERS, Plan
from .scheduler import TileCoord

_PIECE_BYTES = 16  # that a thread stores at a time


class Output(NamedTuple):
    """D: its TMA atom, its tensor, and (rows, columns, buffers of all warp groups) in shared memory; and D in memory
    where tiles may have rows that are none of theirs to store."""

    atom: Any
    tensor: Any
    shared: Any
    memory: Any = None


class Store(NamedTuple):
    """How a thread stores an epilogue tile."""

    operands: EpilogueOperands
    copy: Any  # to shared memory
    partition: Any  # by thread
    staged: Any  # the thread's part of shared memory
    output: Output
    values: Any  # registers, in f32
    converted: Any  # and in D's type


class EpilogueTile(NamedTuple):
    """An epilogue tile of a warp group's part of a tile of D: its WGMMA atom of 64 rows, and its place across."""

    coord: TileCoord
    atom: Any
    across: Any

    @classmethod
    def of(cls, plan: Plan, coord: TileCoord, number: Any) -> EpilogueTile:
        """Epilogue tile `number` of `Plan.epilogue_tiles`."""
        return cls(coord, number // plan.epilogue_tiles_across, number % plan.epilogue_tiles_across)


def prepare_store(plan: Plan, output: Output, operands: EpilogueOperands) -> Store:
    """What `store_epilogue_tile` needs besides values."""
    element = output.shared.element_type
    tile = (WGMMA_ROWS, plan.epilogue_tile_columns)
    # What an epilogue tile's accumulators are to WGMMA, whatever was multiplied.
    smem, k = warpgroup.OperandSource.SMEM, OperandMajorMode.K
    wgmma = warpgroup.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (*tile, 16), smem, k, k)
    mma = cute.make_tiled_mma(cute.make_mma_atom(wgmma))
    if element.width == 16:
        matrices = 4 if plan.epilogue_tile_columns % 16 == 0 else 2
        copy = cute.make_copy_atom(warp.StMatrix8x8x16bOp(plan.swap, matrices), element)
    else:
        copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), element, num_bits_per_copy=2 * element.width)
    partition = cute.make_tiled_copy_C(copy, mma).get_slice(operands.thread)
    staged = partition.partition_D(output.shared)
    shape = mma.partition_shape_C(tile)
    values = cute.make_rmem_tensor(shape, cutlass.Float32)
    converted = cute.make_rmem_tensor(shape, element)
    return Store(operands, copy, partition, staged, output, values, converted)


def _tma(store: Store, tile: EpilogueTile) -> tuple[Any, Any]:
    """An epilogue tile for TMA: in shared memory, (its box, buffers), and in D, (its box)."""
    operands, coord = store.operands, tile.coord
    atom, tensor, shared, _ = store.output
    first = operands.first_row(coord, tile.atom), operands.first_column(coord, tile.across)
    batch = (coord.batch,) if cute.rank(tensor) == 3 else ()
    box = (WGMMA_ROWS, operands.plan.epilogue_tile_columns)
    out = cute.local_tile(cute.domain_offset((*first, *(0 for _ in batch)), tensor), box, (0, 0, *batch))
    grouped = cute.group_modes(shared, 0, 2), cute.group_modes(out, 0, 2)
    source, target = cpasync.tma_partition(atom, 0, cute.make_layout(1), *grouped)
    return source, target


@cute.jit
def store_epilogue_tile(computed: Any, store: Store, tile: EpilogueTile, buffer: Any, under_way: Any) -> None:
    """Write the f32 values `computed` of an epilogue tile to D, through buffer number `buffer` of the warp group's; so
    many stores from the others may be under way."""
    operands, values, converted = store.operands, store.values, store.converted
    number = operands.group * STORE_BUFFERS + buffer
    for i in cutlass.range_constexpr(len(computed)):
        values[i] = computed[i]
    converted.store(values.load().to(converted.element_type))
    cute.arch.cp_async_bulk_wait_group(under_way, read=True)
    meet_in_epilogue(operands.group)
    cute.copy(store.copy, store.partition.retile(converted), store.staged[None, None, None, number])
    cute.arch.fence_proxy("async.shared", space="cta")
    meet_in_epilogue(operands.group)
    if cutlass.const_expr(store.output.memory is None):
        _store_by_tma(store, tile, number)
    elif cutlass.const_expr(operands.plan.ragged):
        _store_some(store, tile, number)
    else:
        first, tokens = operands.first_token(tile.coord), operands.plan.tokens
        if first + tokens <= tile.coord.end:
            _store_by_tma(store, tile, number)
        else:
            _store_some(store, tile, number)


@cute.jit
def stage_epilogue_tile(computed: Any, store: Store, buffer: Any) -> None:
    """Write the f32 values `computed` of an epilogue tile to buffer number `buffer` of the warp group's."""
    values, converted = store.values, store.converted
    number = store.operands.group * store.operands.plan.output_buffers + buffer
    for i in cutlass.range_constexpr(len(computed)):
        values[i] = computed[i]
    converted.store(values.load().to(converted.element_type))
    cute.copy(store.copy, store.partition.retile(converted), store.staged[None, None, None, number])


def await_staged(store: Store) -> None:
    """Wait until TMA may read all that the warp group's threads wrote to buffers."""
    cute.arch.fence_proxy("async.shared", space="cta")
    meet_in_epilogue(store.operands.group)


def store_staged(store: Store, tile: EpilogueTile, buffer: Any) -> None:
    """Begin to write the epilogue tile in buffer number `buffer` to D."""
    _store_by_tma(store, tile, store.operands.group * store.operands.plan.output_buffers + buffer)


@cute.jit
def _store_by_tma(store: Store, tile: EpilogueTile, number: Any) -> None:
    """Begin to write what is in buffer `number` to D; one warp does."""
    source, target = _tma(store, tile)
    if store.operands.thread < WARP:
        cute.copy(store.output.atom, source[None, number], target)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _store_some(store: Store, tile: EpilogueTile, number: Any) -> None:
    """Write what is in buffer `number` to D but for rows of D from the tile's end on, and columns that are another
    tile's."""
    operands, output, coord = store.operands, store.output, tile.coord
    plan, element = operands.plan, output.shared.element_type
    piece = _PIECE_BYTES * 8 // element.width
    rows, columns = WGMMA_ROWS, plan.epilogue_tile_columns
    pieces, tokens = (rows // piece, columns) if plan.swap else (columns // piece, rows)
    shape = (piece, 1) if plan.swap else (1, piece)
    staged = cute.zipped_divide(output.shared[None, None, number], shape)
    memory = output.memory
    if cutlass.const_expr(cute.rank(memory) == 3):
        memory = memory[None, None, coord.batch]
    memory = cute.zipped_divide(memory, shape)
    row, column = operands.first_row(coord, tile.atom), operands.first_column(coord, tile.across)
    first_token, first_piece = (column, row // piece) if plan.swap else (row, column // piece)
    of_n = cute.size(output.memory, mode=[0 if plan.swap else 1]) // piece
    if cutlass.const_expr(plan.ragged):
        of_n = cutlass.min(of_n, (coord.row + 1) * (plan.out_rows // piece))
    copy = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), element, num_bits_per_copy=_PIECE_BYTES * 8)
    values = cute.make_rmem_tensor((piece,), element)
    for step in cutlass.range_constexpr(-(-pieces * tokens // WARP_GROUP)):
        item = operands.thread + step * WARP_GROUP
        token, across = item // pieces, item % pieces
        inside = (first_token + token < coord.end) & (first_piece + across < of_n) & (token < tokens)
        if inside:
            here, there = (token, across), (first_token + token, first_piece + across)
            if cutlass.const_expr(plan.swap):
                here, there = here[::-1], there[::-1]
            cute.copy(copy, staged[None, here], values)
            cute.copy(copy, values, memory[None, there])
