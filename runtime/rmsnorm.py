"""RMSNorm by rows as an operation: y[m, n] = x[m, n] * weight[n] / sqrt(mean over n of x[m, n]^2 + eps)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .errors import ArgumentError
from .program.field_operation import FieldOperation, FieldSignature
from .program.geometry import flatten_rows
from .program.operation import Asked, Operand
from .program.outputs import allocate, check_apart
from .program.record import TensorView

USUAL_EPS = 1e-6
_KEY = re.compile(r"(?P<x>[^_]+)_(?P<weight>[^_]+)_(?P<y>[^_]+)_rmsnorm_n(?P<n>\d{1,10})", re.ASCII)


@dataclass(frozen=True)
class Signature(FieldSignature):
    """x (M, N), weight (N) and y (M, N) of these element types, by short name; rows of x and y may lie apart."""

    operation: ClassVar[str] = "rmsnorm"

    x: str
    weight: str
    y: str
    n: int

    def key(self) -> str:
        """One readable word, the same for equal signatures and only for them."""
        return f"{self.x}_{self.weight}_{self.y}_rmsnorm_n{self.n}"

    def operands(self) -> tuple[Operand, ...]:
        """The tensors that kernels take, in order."""
        return (
            Operand("x", self.x, ("M", "N")),
            Operand("weight", self.weight, ("N",)),
            Operand("y", self.y, ("M", "N")),
        )

    def numbers(self) -> tuple[tuple[str, str], ...]:
        """The numbers that kernels take after these, each with its type."""
        return (("eps", "f32"),)

    def extents(self) -> Mapping[str, int]:
        """The extent of each axis of `operands` that does not depend on M."""
        return {"N": self.n}


class RmsNorm(FieldOperation[Signature]):
    """The operation; see `runtime.program.operation.Operation`."""

    name = "rmsnorm"
    signature = Signature
    pattern = _KEY
    labels: Mapping[str, str] = {"n": "N"}

    def arguments(self, signature: Signature, m: int, device: int) -> tuple[Any, ...]:
        """What a function takes for contiguous operands at `m` rows, at made-up addresses."""
        return (*super().arguments(signature, m, device), USUAL_EPS)

    def ask(
        self,
        view: Callable[[Any, str, bool], TensorView],
        x: Any,
        weight: Any,
        *,
        out: Any = None,
        eps: float = USUAL_EPS,
    ) -> Asked:
        """y = RMSNorm(x) for x (..., N) and weight (N); without `out` a torch `x` gives a new tensor like it.

        Raises:
            ArgumentError: the tensors do not go together.
        """
        seen, of_weight = view(x, "x", False), view(weight, "weight", False)
        if out is None:
            out = allocate(x, seen.shape, seen.dtype)
        y = view(out, "out", True)
        if not seen.shape or of_weight.shape != seen.shape[-1:] or y.shape != seen.shape:
            raise ArgumentError(
                f"rmsnorm takes x (..., N), weight (N) and out like x; found {seen.shape}, {of_weight.shape}, {y.shape}"
            )
        in_place = seen.pointer == y.pointer and seen.strides == y.strides
        check_apart("out", y, (of_weight,) if in_place else (seen, of_weight))
        signature = Signature(seen.dtype, of_weight.dtype, y.dtype, seen.shape[-1])
        rows, to = flatten_rows(seen, "x"), flatten_rows(y, "out")
        return Asked(signature, rows.shape[0], (rows, of_weight, to, float(eps)), out)


RMSNORM = RmsNorm()
