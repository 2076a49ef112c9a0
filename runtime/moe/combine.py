"""What the experts of each token made, added up, as an operation: y[t] = sum over j of weights[t, j] * rows[positions[
t, j]], in f32, j ascending, rounded once. A position that is no row, as -1 is, adds nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import ArgumentError
from ..program.field_operation import FieldOperation, FieldSignature
from ..program.geometry import flatten_rows
from ..program.operation import Asked, Operand
from ..program.outputs import allocate, check_apart
from ..program.record import TensorView
from .packed import packed

_KEY = re.compile(r"(?P<rows>[^_]+)_(?P<y>[^_]+)_moe_combine_top(?P<top_k>\d{1,10})_n(?P<n>\d{1,10})", re.ASCII)


@dataclass(frozen=True)
class Signature(FieldSignature):
    """rows (top_k * M, N) and y (M, N) of these element types, by short name; positions (M, top_k), i32, and weights
    (M, top_k), f32."""

    operation: ClassVar[str] = "moe_combine"

    rows: str
    y: str
    top_k: int
    n: int

    def key(self) -> str:
        """One readable word, the same for equal signatures and only for them."""
        return f"{self.rows}_{self.y}_moe_combine_top{self.top_k}_n{self.n}"

    def operands(self) -> tuple[Operand, ...]:
        """The tensors that kernels take, in order."""
        return (
            Operand("rows", self.rows, (f"{self.top_k}*M", "N")),
            Operand("positions", "i32", ("M", "top_k")),
            Operand("weights", "f32", ("M", "top_k")),
            Operand("y", self.y, ("M", "N")),
        )

    def extents(self) -> Mapping[str, int]:
        """The extent of each axis of `operands` that does not depend on M."""
        return {"top_k": self.top_k, "N": self.n}


class MoeCombine(FieldOperation[Signature]):
    """The operation; see `runtime.program.operation.Operation`."""

    name = "moe_combine"
    signature = Signature
    pattern = _KEY
    labels: Mapping[str, str] = {"n": "N"}

    def ask(
        self,
        view: Callable[[Any, str, bool], TensorView],
        rows: Any,
        positions: Any,
        weights: Any,
        *,
        out: Any = None,
    ) -> Asked:
        """y (T, N) for rows (T * top_k, N), or of that many in any dimensions, and positions, i32, and weights, f32,
        (T, top_k), both contiguous; without `out` torch `rows` give a new tensor of their type.

        Raises:
            ArgumentError: the tensors do not go together.
        """
        of_rows = view(rows, "rows", False)
        of_positions = packed(view(positions, "positions", False), "positions", "i32")
        of_weights = packed(view(weights, "weights", False), "weights", "f32")
        if len(of_positions.shape) != 2 or not of_positions.shape[1]:
            raise ArgumentError(f"positions must be (T, top_k), top_k at least 1; found {of_positions.shape}")
        flat, (tokens, top_k) = flatten_rows(of_rows, "rows"), of_positions.shape
        if of_weights.shape != of_positions.shape or flat.shape[0] != tokens * top_k:
            raise ArgumentError(
                "moe_combine takes rows (T * top_k, N), positions (T, top_k) and weights (T, top_k); found "
                f"{of_rows.shape}, {of_positions.shape}, {of_weights.shape}"
            )
        shape = (tokens, flat.shape[1])
        if out is None:
            out = allocate(rows, shape, flat.dtype)
        y = view(out, "out", True)
        if y.shape != shape:
            raise ArgumentError(f"out must have the shape {shape}, found {y.shape}")
        check_apart("out", y, (flat, of_positions, of_weights))
        signature = Signature(flat.dtype, y.dtype, top_k, shape[1])
        return Asked(signature, tokens, (flat, of_positions, of_weights, y), out)


MOE_COMBINE = MoeCombine()
