"""The epilogue of a warp group's part of a tile: scales, bias, activation or gate, residual, output scale, and stores.

Works an epilogue tile at a time: 64 rows by `Plan.epilogue_tile_columns`. Rows and columns are WGMMA's. Knows nothing
of the mainloop.
"""

from typing import Any

import cutlass
from cutlass import cute

from ...activations import activate, gate
from .epilogue_operands import EpilogueOperands
from .output import (
    EpilogueTile,
    Output,
    Store,
    await_staged,
    prepare_store,
    stage_epilogue_tile,
    store_epilogue_tile,
    store_staged,
)
from .pipeline import await_drained, meet_in_epilogue
from .plan import STORE_BUFFERS, Plan
from .quantised_output import quantised
from .scales import Scales
from .scheduler import TileCoord
from .split_k import SplitK, reduce


@cute.jit
def store_tile(
    plan: cutlass.Constexpr,
    accumulators: cute.Tensor,
    output: Output,
    coord: TileCoord,
    operands: EpilogueOperands,
    scales: Scales,
    split: Any,
) -> None:
    """Write a warp group's part of a tile to D, or what this slice of K reduces of it: `split`, a `SplitK` or None."""
    store = prepare_store(plan, output, operands)
    scales.arrive(operands.group)
    if cutlass.const_expr(plan.nonpersistent):
        _await_stages(plan, operands)
    # What an epilogue tile adds is on its way while the one before it is stored.
    ahead = cutlass.const_expr(operands.parts.residual and plan.split_k == 1)
    residual = operands.residual_of(coord, 0, 0) if ahead else []
    for number in cutlass.range_constexpr(plan.epilogue_tiles):
        tile = EpilogueTile.of(plan, coord, number)
        if cutlass.const_expr(plan.split_k > 1):
            if split.slice_k == number % plan.split_k:
                _reduce_and_store(plan, accumulators, store, tile, number, scales, split)
        else:
            later = []
            if cutlass.const_expr(ahead and number + 1 < plan.epilogue_tiles):
                following = EpilogueTile.of(plan, coord, number + 1)
                later = operands.residual_of(coord, following.atom, following.across)
            computed = epilogue_tile_values(operands, scales, accumulators, tile, residual)
            residual = later
            if cutlass.const_expr(plan.form.quantises):
                computed = quantised(operands, computed, tile)
            _store_next(plan, computed, store, tile, number)
    if cutlass.const_expr(plan.nonpersistent):
        _store_all(plan, store, coord, split)


def _await_stages(plan: Plan, operands: EpilogueOperands) -> None:
    """Wait until all that read the stages have, so that epilogue tiles may take their place. Of slices of K, all have
    when partial sums are exchanged."""
    if plan.split_k == 1 and plan.pingpong:
        meet_in_epilogue(operands.group)
    elif plan.split_k == 1:
        await_drained()


@cute.jit
def _store_all(plan: cutlass.Constexpr, store: Store, coord: TileCoord, split: Any) -> None:
    """Write all epilogue tiles that this CTA has of a tile to D, which wait in buffers of their own."""
    await_staged(store)
    for number in cutlass.range_constexpr(plan.epilogue_tiles):
        tile, buffer = EpilogueTile.of(plan, coord, number), number // plan.split_k
        if cutlass.const_expr(plan.split_k > 1):
            if split.slice_k == number % plan.split_k:
                store_staged(store, tile, buffer)
        else:
            store_staged(store, tile, buffer)


@cute.jit
def _reduce_and_store(
    plan: cutlass.Constexpr,
    accumulators: cute.Tensor,
    store: Store,
    tile: EpilogueTile,
    number: cutlass.Constexpr,
    scales: Scales,
    split: SplitK,
) -> None:
    """Write epilogue tile `number`, whose partial sums are spread over the cluster."""
    operands = store.operands
    reduce(plan, accumulators, split, number, operands)
    residual = []
    if cutlass.const_expr(operands.parts.residual):
        residual = operands.residual_of(tile.coord, tile.atom, tile.across)
    computed = epilogue_tile_values(operands, scales, accumulators, tile, residual)
    _store_next(plan, computed, store, tile, number)


def _store_next(plan: Plan, computed: Any, store: Store, tile: EpilogueTile, number: int) -> None:
    """Write the f32 values of epilogue tile `number`, through the buffers in turn."""
    nth = number // plan.split_k
    if plan.nonpersistent:
        stage_epilogue_tile(computed, store, nth)
        return
    # The last tile's last epilogue tile may have had this buffer too, and was stored long ago.
    store_epilogue_tile(computed, store, tile, nth % STORE_BUFFERS, STORE_BUFFERS - 1 if nth > 0 else 0)


def epilogue_tile_values(
    operands: EpilogueOperands,
    scales: Scales,
    accumulators: cute.Tensor,
    tile: EpilogueTile,
    residual: list[Any],
    first: int | None = None,
) -> list[Any]:
    """The f32 values of an epilogue tile, in the order of WGMMA's accumulators for as many columns.

    `accumulators` are those of a tile, or those that begin at `first` are the epilogue tile's.
    """
    plan, parts = operands.plan, operands.parts
    coord, atom, across = tile
    width = plan.columns // plan.atom_layout.columns
    lanes = 2 if parts.gated else 1
    start = plan.epilogue_tile_start(across)
    base, per_pair, to_partner = atom * width // 2 + start * lanes // 2, 4 * lanes, 4
    if plan.pairs_atoms:
        base, per_pair, to_partner = atom * width + start // 2, 4, width // 2
    if first is not None:
        base = first
    # Scale and bias of the thread's two rows, for sums, or for gates and then their partners.
    by_row: list[Any] = scales.of_rows[atom] if scales.of_rows else [[None, None]] * lanes
    bias_by_row: list[Any] = [[None, None]] * lanes
    if parts.bias and plan.swap:
        bias_by_row = operands.channels_of_rows(operands.bias, coord, atom)
    values: list[Any] = []
    for j in range(plan.epilogue_tile_columns // 8):
        column = operands.first_column(coord, across) + 8 * j + operands.column
        by_column: Any = None
        bias: Any = None
        if scales.of_columns is not None:
            by_column = scales.of_pair(start // 2 + 4 * j + operands.column // 2)
        if parts.bias and not plan.swap:
            bias = operands.channel_pairs(operands.bias, column)
        for half in range(2):
            for i in range(2):
                found = []
                for lane in range(lanes):
                    x = accumulators[base + per_pair * j + to_partner * lane + 2 * half + i]
                    if by_row[lane][half] is not None:
                        x = x * by_row[lane][half]
                    if by_column is not None:
                        x = x * by_column[0 if plan.swap else lane][i]
                    if bias is not None:
                        x = x + bias[lane][i]
                    if bias_by_row[lane][half] is not None:
                        x = x + bias_by_row[lane][half]
                    found.append(x)
                x = gate(parts.activation, *found) if parts.gated else activate(parts.activation, found[0])
                if parts.residual:
                    x = x + residual[len(values)].to(cutlass.Float32)
                if parts.scale:
                    x = x * operands.scale_d[0]
                values.append(x)
    return values
