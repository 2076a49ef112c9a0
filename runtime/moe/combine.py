"""What the experts of each token made, added up, as an operation: y[t] = sum over j of weights[t, j] * rows[positions[
t, j]], in f32, j ascending, rounded once. A position that is no row, as -1 is, adds nothing. Without weights, which
tokens were multiplied by before, the rows alone are added up."""

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
from .contiguous import contiguous

_KEY = re.compile(
    r"(?P<rows>[^_]+)_(?P<y>[^_]+)_moe_combine_top(?P<top_k>\d{1,10})_n(?P<n>\d{1,10})"
    r"(?:_weights_(?P<weights>none))?",
    re.ASCII,
)


@dataclass(frozen=True)
class Signature(FieldSignature):
    """rows (top_k * M, N) and y (M, N) of these element types, by short name; positions (M, top_k), i32, and weights
    (M, top_k), f32, unless `weights` is "none"."""

    operation: ClassVar[str] = "moe_combine"
    added: ClassVar[tuple[str, ...]] = ("weights",)

    rows: str
    y: str
    top_k: int
    n: int
    weights: str = "f32"

    def key(self) -> str:
        """One readable word, the same for equal signatures and only for them."""
        word = f"{self.rows}_{self.y}_moe_combine_top{self.top_k}_n{self.n}"
        return word if self.weights == "f32" else f"{word}_weights_{self.weights}"

    def operands(self) -> tuple[Operand, ...]:
        """The tensors that kernels take, in order."""
        return (
            Operand("rows", self.rows, (f"{self.top_k}*M", "N")),
            Operand("positions", "i32", ("M", "top_k")),
            *([] if self.weights == "none" else [Operand("weights", self.weights, ("M", "top_k"))]),
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
    words: Mapping[str, tuple[str, ...]] = {"weights": ("f32", "none")}

    def ask(
        self,
        view: Callable[[Any, str, bool], TensorView],
        rows: Any,
        positions: Any,
        weights: Any = None,
        *,
        out: Any = None,
    ) -> Asked:
        """y (T, N) for rows (T * top_k, N), or of that many in any dimensions, and positions, i32, and weights, f32, or
        None, (T, top_k), both contiguous; without `out` torch `rows` give a new tensor of their type.

        Raises:
            ArgumentError: the tensors do not go together.
        """
        of_rows = view(rows, "rows", False)
        of_positions = contiguous(view(positions, "positions", False), "positions", "i32")
        of_weights = [] if weights is None else [contiguous(view(weights, "weights", False), "weights", "f32")]
        if len(of_positions.shape) != 2 or not of_positions.shape[1]:
            raise ArgumentError(f"positions must be (T, top_k), top_k at least 1; found {of_positions.shape}")
        flat, (tokens, top_k) = flatten_rows(of_rows, "rows"), of_positions.shape
        if any(w.shape != of_positions.shape for w in of_weights) or flat.shape[0] != tokens * top_k:
            shapes = ", ".join(str(t.shape) for t in (of_rows, of_positions, *of_weights))
            raise ArgumentError(
                f"moe_combine takes rows (T * top_k, N), positions (T, top_k) and weights (T, top_k); found {shapes}"
            )
        shape = (tokens, flat.shape[1])
        if out is None:
            out = allocate(rows, shape, flat.dtype)
        y = view(out, "out", True)
        if y.shape != shape:
            raise ArgumentError(f"out must have the shape {shape}, found {y.shape}")
        check_apart("out", y, (flat, of_positions, *of_weights))
        signature = Signature(flat.dtype, y.dtype, top_k, shape[1], "f32" if of_weights else "none")
        return Asked(signature, tokens, (flat, of_positions, *of_weights, y), out)


MOE_COMBINE = MoeCombine()
