"""What the epilogue reads from memory besides A and B, as one thread sees it: scales, bias and residual.

Rows and columns are WGMMA's. A thread has two rows of each WGMMA atom of 64, 8 apart, and of each 8 columns two
neighbours. What is read for rows and columns past the edge of D is that of the last ones inside, so that nothing needs
a condition: TMA stores nothing there. Knows nothing of what is computed of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import cute

from runtime.numbers.epilogue import Epilogue

from ..sizes import WARP, WARP_GROUP, WGMMA_ROWS
from .plan import Plan
from .scheduler import TileCoord


@dataclass(frozen=True)
class EpilogueOperands:
    """The tensors, None where the form has none, and where the thread is in the tile."""

    plan: Plan
    m: Any  # extents of A and B
    n: Any
    scale_a: Any
    scale_b: Any
    bias: Any
    residual: Any
    scale_d: Any
    parts: Epilogue
    shared_scales: Any  # room for all warp groups' scales along columns, or for largest magnitudes, or None
    group: Any  # the consumer warp group
    thread: Any  # in it
    row: Any  # its first, in an atom of 64 rows
    column: Any  # and in 8 columns

    @classmethod
    def of(cls, plan: Plan, extents: Any, extras: Any, shared_scales: Any, thread: cutlass.Int32) -> EpilogueOperands:
        """What consumer thread `thread` reads of `extras`, for A and B of `extents` rows."""
        group = cute.arch.make_warp_uniform(thread // WARP_GROUP)
        thread = thread % WARP_GROUP
        lane = thread % WARP
        row, column = thread // WARP * 16 + lane // 4, lane % 4 * 2
        parts = Epilogue.of(plan.form.epilogue)
        (m, n), (scale_a, scale_b, bias, residual, scale_d) = extents, extras
        return cls(
            plan=plan,
            m=m,
            n=n,
            scale_a=scale_a,
            scale_b=scale_b,
            bias=bias,
            residual=residual,
            scale_d=scale_d,
            parts=parts,
            shared_scales=shared_scales,
            group=group,
            thread=thread,
            row=row,
            column=column,
        )

    def of_group(self, coord: TileCoord) -> EpilogueOperands:
        """The same for one tile, with what its group has of scales and bias, if there are groups."""
        form, group = self.plan.form, coord.batch
        if not form.grouped:
            return self
        scale_a = _of_batch(self.scale_a, group) if form.masked else self.scale_a
        return replace(self, scale_a=scale_a, scale_b=_of_batch(self.scale_b, group), bias=_of_batch(self.bias, group))

    def atom_row(self, coord: TileCoord, atom: int) -> Any:
        """The number of an atom of 64 rows, of those that are stored."""
        plan = self.plan
        part = self.group if plan.atom_layout.rows > 1 else 0
        if plan.pairs_atoms:  # a warp group's rows follow each other
            return (coord.row * plan.atom_layout.rows + part) * plan.out_atoms + atom
        return (coord.row * plan.m_atoms + atom) * plan.atom_layout.rows + part

    def first_row(self, coord: TileCoord, atom: int) -> Any:
        """The first row of an atom."""
        if self.plan.ragged:
            return coord.row * self.plan.out_rows + self.atom_row(coord._replace(row=0), atom) * WGMMA_ROWS
        first = self.atom_row(coord, atom) * WGMMA_ROWS
        return first if self.plan.swap else first - coord.moved_up

    def makes_rows(self, coord: TileCoord) -> Any:
        """Whether the warp group's rows of a tile, which are those of A, have any to store that no tile before has."""
        needed = False
        for atom in range(self.plan.m_atoms):
            first = self.first_row(coord, atom)
            needed |= (first < coord.end) & (first + WGMMA_ROWS > coord.begin)
        return needed

    def first_token(self, coord: TileCoord) -> Any:
        """The first row of A, and of D, in a tile."""
        plan = self.plan
        return (coord.column * plan.columns if plan.swap else coord.row * plan.rows) - coord.moved_up

    def first_column(self, coord: TileCoord, across: int) -> Any:
        """The first column of an epilogue tile."""
        plan = self.plan
        part = self.group if plan.atom_layout.columns > 1 else 0
        first = (coord.column * plan.atom_layout.columns + part) * plan.part_columns + plan.epilogue_tile_start(across)
        return first - coord.moved_up if plan.swap else first

    def of_tokens(self, first: Any, step: int) -> list[Any]:
        """What multiplies the sums of two tokens `step` apart, where each token has its scale."""
        last = self.m - 1
        return [self.scale_a[cutlass.min(first + i * step, last)] for i in range(2)]

    def of_channels(self, tensor: cute.Tensor, first: Any, step: int) -> list[Any]:
        """Two elements of what has one for each row of B, `step` apart, as f32."""
        if step > 1:
            last = self.n - 1
            return [tensor[cutlass.min(first + i * step, last)].to(cutlass.Float32) for i in range(2)]
        return _pair(tensor, cutlass.min(first, self.n - 2) // 2)

    def channel_pairs(self, tensor: Any, column: Any) -> list[list[Any]]:
        """Of two neighbouring columns of D, the elements of `tensor` for their sums, or their gates and then
        partners."""
        if self.parts.interleaved:
            (gate, partner), (next_gate, next_partner) = (
                self.of_channels(tensor, 2 * column + 2 * i, 1) for i in range(2)
            )
            return [[gate, next_gate], [partner, next_partner]]
        channels = [column, self.n // 2 + column] if self.plan.form.gated else [column]
        return [self.of_channels(tensor, channel, 1) for channel in channels]

    def channels_of_rows(self, tensor: Any, coord: TileCoord, atom: int) -> list[list[Any]]:
        """Of the thread's two rows of an atom, which are columns of D, the elements of `tensor` for their sums, or for
        their gates and then those for their partners."""
        first = self.first_row(coord, atom) + self.row
        if self.parts.interleaved:
            return [self.of_channels(tensor, 2 * first + lane, 16) for lane in range(2)]
        channels = [first, self.n // 2 + first] if self.plan.form.gated else [first]
        return [self.of_channels(tensor, channel, 8) for channel in channels]

    def residual_of(self, coord: TileCoord, atom: int, across: int) -> list[Any]:
        """The residual of an epilogue tile, in the order of its values."""
        plan = self.plan
        residual = self.residual
        if cute.rank(residual) == 3:
            residual = residual[None, None, coord.batch]
        row = self.first_row(coord, atom) + self.row
        found: list[Any] = []
        last_row, last_column = (cute.size(residual, mode=[mode]) - 1 for mode in (0, 1))
        for j in range(plan.epilogue_tile_columns // 8):
            column = self.first_column(coord, across) + 8 * j + self.column
            for half in range(2):
                if plan.swap:
                    at = cutlass.min(row + 8 * half, last_column)
                    found += [residual[cutlass.min(column + i, last_row), at] for i in range(2)]
                else:
                    vector = residual[cutlass.min(row + 8 * half, last_row), None]
                    found += _pair(vector, cutlass.min(column, last_column - 1) // 2, convert=False)
        return found


def _of_batch(tensor: Any, batch: Any) -> Any:
    """A batch of a tensor whose first mode they are; None of none."""
    return None if tensor is None else tensor[(batch, *(None for _ in range(cute.rank(tensor) - 1)))]


def _pair(vector: cute.Tensor, number: Any, convert: bool = True) -> list[Any]:
    """Elements 2 `number` and 2 `number` + 1 of a vector."""
    element = vector.element_type
    pairs = cute.zipped_divide(vector, (2,))
    values = cute.make_rmem_tensor((2,), element)
    load = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), element, num_bits_per_copy=2 * element.width)
    cute.copy(load, pairs[None, number], values)
    return [values[i].to(cutlass.Float32) if convert else values[i] for i in range(2)]
