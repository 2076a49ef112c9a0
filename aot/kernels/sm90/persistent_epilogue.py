"""From a warpgroup's sums to D: scales, bias, activation, gate, residual, output scale, conversion, and stores by TMA.

Rows and columns are WGMMA's, as in `persistent`. A thread has two rows of each block of 64, 8 apart, and of each 8
columns two neighbours. What is read for rows and columns past the edge of D is that of the last ones inside, so that
nothing needs a condition: TMA stores nothing there.
"""

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup

from runtime.gemm.signature import Epilogue
from runtime.numbers.scaling import SCALE_BLOCK

from .epilogue import activate, gate
from .persistent_choices import STORE_BUFFERS, WGMMA_ROWS, Plan
from .persistent_scales import Scales
from .persistent_split import gather

_WARP = 32
_WARPGROUP = 128
_STORED = 4  # named barriers, one for each warpgroup


class Fused:
    """What is read from memory besides A and B, as one thread sees it."""

    def __init__(self, plan: Plan, extents: Any, extras: Any, thread: cutlass.Int32, shared: Any) -> None:
        self.plan, self.extents, self.shared = plan, extents, shared
        self.scale_a, self.scale_b, self.bias, self.residual, self.scale_d = extras
        self.parts = Epilogue.of(plan.form.epilogue)
        self.group = cute.arch.make_warp_uniform(thread // _WARPGROUP)
        self.thread = thread % _WARPGROUP
        lane = self.thread % _WARP
        self.row, self.column = self.thread // _WARP * 16 + lane // 4, lane % 4 * 2

    def block_row(self, place: Any, block: int) -> Any:
        """The number of a block of 64 rows."""
        part = self.group if self.plan.parts[0] > 1 else 0
        return (place[0] * self.plan.blocks + block) * self.plan.parts[0] + part

    def piece_column(self, place: Any, piece: int) -> Any:
        """The number of a piece along columns of D."""
        part = self.group if self.plan.parts[1] > 1 else 0
        return (place[1] * self.plan.parts[1] + part) * self.plan.pieces + piece

    def piece_at(self, place: Any, block: int, piece: int) -> tuple[Any, Any]:
        """The numbers of a piece along rows and columns of D."""
        return self.block_row(place, block), self.piece_column(place, piece)

    def first_row(self, place: Any, block: int) -> Any:
        """The first of the thread's two rows in a block; the other is 8 further on."""
        return self.block_row(place, block) * WGMMA_ROWS + self.row

    def scale_a_of_block(self, row: Any, block_k: Any) -> Any:
        """The scale of a row of A in a block of K."""
        return self.scale_a[cutlass.min(row, self.extents[0] - 1), self._inside(self.scale_a, block_k)]

    def scale_b_of_block(self, row: Any, block_k: Any) -> Any:
        """The scale of the block of B that holds a row of it."""
        row = cutlass.min(row, self.extents[1] - 1)
        return self.scale_b[row // SCALE_BLOCK, self._inside(self.scale_b, block_k)]

    def _inside(self, scales: cute.Tensor, block_k: Any) -> Any:
        """A block of K, or the last one for blocks of zeros behind it."""
        return cutlass.min(block_k, cute.size(scales, mode=[1]) - 1)

    def of_tokens(self, first: Any, step: int) -> list[Any]:
        """What multiplies the sums of two tokens `step` apart, where each token has its scale."""
        last = self.extents[0] - 1
        return [self.scale_a[cutlass.min(first + i * step, last)] for i in range(2)]

    def of_channels(self, tensor: cute.Tensor, first: Any, step: int) -> list[Any]:
        """Two elements of what has one for each row of B, `step` apart, as f32."""
        if step > 1:
            last = self.extents[1] - 1
            return [tensor[cutlass.min(first + i * step, last)].to(cutlass.Float32) for i in range(2)]
        return _pair(tensor, cutlass.min(first, self.extents[1] - 2) // 2)

    def residual_of(self, place: Any, block: int, piece: int) -> list[Any]:
        """The residual of a piece, in the order of its values."""
        plan = self.plan
        residual = self.residual
        if cute.rank(residual) == 3:
            residual = residual[None, None, place[2]]
        row = self.first_row(place, block)
        found: list[Any] = []
        last_row, last_column = (cute.size(residual, mode=[mode]) - 1 for mode in (0, 1))
        for j in range(plan.piece_columns // 8):
            column = self.piece_column(place, piece) * plan.piece_columns + 8 * j + self.column
            for half in range(2):
                if plan.swap:
                    at = cutlass.min(row + 8 * half, last_column)
                    found += [residual[cutlass.min(column + i, last_row), at] for i in range(2)]
                else:
                    vector = residual[cutlass.min(row + 8 * half, last_row), None]
                    found += _pair(vector, cutlass.min(column, last_column - 1) // 2, convert=False)
        return found

    def channels_of(self, column: Any) -> list[Any]:
        """Rows of B, the first of two neighbours', behind a column of D: of the sum, or of gate and partner."""
        if not self.plan.form.gated:
            return [column]
        return [column, self.extents[1] // 2 + column]


def _pair(vector: cute.Tensor, number: Any, convert: bool = True) -> list[Any]:
    """Elements 2 `number` and 2 `number` + 1 of a vector."""
    element = vector.element_type
    pairs = cute.zipped_divide(vector, (2,))
    values = cute.make_rmem_tensor((2,), element)
    load = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), element, num_bits_per_copy=2 * element.width)
    cute.copy(load, pairs[None, number], values)
    return [values[i].to(cutlass.Float32) if convert else values[i] for i in range(2)]


def _channel_pairs(fused: Fused, tensor: Any, column: Any) -> list[list[Any]]:
    """Of two neighbouring columns of D, the elements of `tensor` for their sums, or their gates and then partners."""
    if fused.parts.interleaved:
        first, second = (fused.of_channels(tensor, 2 * column + 2 * i, 1) for i in range(2))
        return [[first[0], second[0]], [first[1], second[1]]]
    return [fused.of_channels(tensor, channel, 1) for channel in fused.channels_of(column)]


def piece_values(
    fused: Fused,
    scales: Scales,
    sums: cute.Tensor,
    place: Any,
    block: Any,
    piece: Any,
    residual: list[Any],
    first: int | None = None,
) -> list[Any]:
    """The f32 values of a piece of D, in the order of the sums of WGMMA for as many columns.

    `sums` are those of a tile, or those that begin at `first` are the piece's.
    """
    plan, parts = fused.plan, fused.parts
    width = plan.columns // plan.parts[1]
    lanes = 2 if parts.gated else 1
    base = block * width // 2 + piece * plan.piece_columns * lanes // 2 if first is None else first
    # Scale and bias of the thread's two rows.
    by_row: list[Any] = scales.of_rows[block] if scales.of_rows else [None, None]
    bias_by_row: list[Any] = [None, None]
    if parts.bias and plan.swap:
        bias_by_row = fused.of_channels(fused.bias, fused.first_row(place, block), 8)
    values: list[Any] = []
    for j in range(plan.piece_columns // 8):
        column = fused.piece_column(place, piece) * plan.piece_columns + 8 * j + fused.column
        by_column: Any = None
        bias: Any = None
        if scales.of_columns is not None:
            by_column = scales.of_pair(piece * plan.piece_columns // 2 + 4 * j + fused.column // 2)
        if parts.bias and not plan.swap:
            bias = _channel_pairs(fused, fused.bias, column)
        for half in range(2):
            for i in range(2):
                found = []
                for lane in range(lanes):
                    x = sums[base + 4 * (j * lanes + lane) + 2 * half + i]
                    if by_row[half] is not None:
                        x = x * by_row[half]
                    if by_column is not None:
                        x = x * by_column[lane][i]
                    if bias is not None:
                        x = x + bias[lane][i]
                    if bias_by_row[half] is not None:
                        x = x + bias_by_row[half]
                    found.append(x)
                x = gate(parts.activation, *found) if parts.gated else activate(parts.activation, found[0])
                if parts.residual:
                    x = x + residual[len(values)].to(cutlass.Float32)
                if parts.scale:
                    x = x * fused.scale_d[0]
                values.append(x)
    return values


@cute.jit
def store_tile(plan: cutlass.Constexpr, sums: cute.Tensor, of_out: Any, place: Any, given: Any, slices: Any) -> None:
    """Write a warpgroup's part of a tile to D, or what of it falls to this slice of K, a piece at a time: registers,
    shared memory, TMA. `given` is what is read from memory, and the scales of this tile."""
    fused, scales = given
    stores, registers = prepare_stores(plan, of_out, fused)
    scales.arrive(_STORED + fused.group)
    # What a piece adds is on its way while the one before it is stored.
    ahead = cutlass.const_expr(fused.parts.residual and plan.split_k == 1)
    residual = fused.residual_of(place, 0, 0) if ahead else []
    for number in cutlass.range_constexpr(plan.blocks * plan.pieces):
        if cutlass.const_expr(plan.split_k > 1):
            if slices[2] == number % plan.split_k:
                _add_and_store(plan, sums, registers, stores, (place, number, slices[0]), given)
        else:
            later = []
            if cutlass.const_expr(ahead and number + 1 < plan.blocks * plan.pieces):
                later = fused.residual_of(place, (number + 1) // plan.pieces, (number + 1) % plan.pieces)
            at = number // plan.pieces, number % plan.pieces
            computed = piece_values(fused, scales, sums, place, *at, residual)
            residual = later
            _store_turn(plan, computed, registers, stores, (place, number), fused)


def prepare_stores(plan: Plan, of_out: Any, fused: Any) -> tuple[Any, Any]:
    """What `store_piece` needs besides a piece: how it goes to D, and registers on its way."""
    out_atom, out, shared_out = of_out
    element = shared_out.element_type
    batched = cute.rank(out) == 3
    tail_modes = (None,) if cutlass.const_expr(batched) else ()
    tiled_out = cute.local_tile(out, (WGMMA_ROWS, plan.piece_columns), (None, None, *tail_modes))
    from_out, to_out = cpasync.tma_partition(
        out_atom, 0, cute.make_layout(1), cute.group_modes(shared_out, 0, 2), cute.group_modes(tiled_out, 0, 2)
    )
    # What a piece's sums are to WGMMA, whatever was multiplied.
    smem, k = warpgroup.OperandSource.SMEM, OperandMajorMode.K
    wgmma = warpgroup.MmaF16BF16Op(cutlass.BFloat16, cutlass.Float32, (WGMMA_ROWS, plan.piece_columns, 16), smem, k, k)
    piece_mma = cute.make_tiled_mma(cute.make_mma_atom(wgmma))
    if cutlass.const_expr(element.width == 16):
        matrices = 4 if plan.piece_columns % 16 == 0 else 2
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(plan.swap, matrices), element)
    else:
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), element, num_bits_per_copy=2 * element.width)
    mine = cute.make_tiled_copy_C(atom, piece_mma).get_slice(fused.thread)
    staged = mine.partition_D(shared_out)
    shape = piece_mma.partition_shape_C((WGMMA_ROWS, plan.piece_columns))
    values = cute.make_rmem_tensor(shape, cutlass.Float32)
    piece = cute.make_rmem_tensor(shape, element)
    return (atom, mine, staged, out_atom, from_out, to_out), (values, piece)


@cute.jit
def _add_and_store(
    plan: cutlass.Constexpr, sums: cute.Tensor, registers: Any, stores: Any, which: Any, given: Any
) -> None:
    """Write a piece of D whose sums are spread over the cluster."""
    fused, scales = given
    place, number, stages = which
    block, column = number // plan.pieces, number % plan.pieces
    gather(plan, sums, stages, number, fused.group * _WARPGROUP + fused.thread)
    residual = fused.residual_of(place, block, column) if cutlass.const_expr(fused.parts.residual) else []
    computed = piece_values(fused, scales, sums, place, block, column, residual)
    _store_turn(plan, computed, registers, stores, (place, number), fused)


def _store_turn(plan: Plan, computed: Any, registers: Any, stores: Any, which: Any, fused: Any) -> None:
    """Write the f32 values of piece `number` of a tile to D."""
    place, number = which
    turn = number // plan.split_k
    at = fused.piece_at(place, number // plan.pieces, number % plan.pieces)
    # The last tile's last piece may have had this buffer too, and was stored long ago.
    turns = turn % STORE_BUFFERS, STORE_BUFFERS - 1 if turn > 0 else 0
    store_piece(computed, registers, stores, turns, (at, place[2]), fused)


@cute.jit
def store_piece(computed: Any, registers: Any, stores: Any, turns: Any, where: Any, fused: Any) -> None:
    """Write the f32 values of the piece `where` says to D, through one of the warpgroup's buffers; `turns` says which,
    and how many stores from the others may be under way."""
    values, piece = registers
    atom, mine, staged, out_atom, from_out, to_out = stores
    buffer, under_way = fused.group * STORE_BUFFERS + turns[0], turns[1]
    for i in cutlass.range_constexpr(len(computed)):
        values[i] = computed[i]
    piece.store(values.load().to(piece.element_type))
    cute.arch.cp_async_bulk_wait_group(under_way, read=True)
    cute.arch.barrier(barrier_id=_STORED + fused.group, number_of_threads=_WARPGROUP)
    cute.copy(atom, mine.retile(piece), staged[None, None, None, buffer])
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=_STORED + fused.group, number_of_threads=_WARPGROUP)
    at, batch = where
    tail = (batch,) if cutlass.const_expr(cute.rank(to_out) == 4) else ()
    source, target = from_out[None, buffer], to_out[(None, *at, *tail)]
    if fused.thread < _WARP:
        cute.copy(out_atom, source, target)
        cute.arch.cp_async_bulk_commit_group()
