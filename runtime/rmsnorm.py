"""RMSNorm by rows as an operation: y[m, n] = x[m, n] * weight[n] / sqrt(mean over n of x[m, n]^2 + eps).

With a residual x is first added to it, and the sum, rounded, takes the place of x; it is written too.
"""

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
_KEY = re.compile(
    r"(?P<x>[^_]+)_(?P<weight>[^_]+)_(?P<y>[^_]+)_rmsnorm_n(?P<n>\d{1,10})(?:_residual_(?P<residual>bf16|f16))?",
    re.ASCII,
)


@dataclass(frozen=True)
class Signature(FieldSignature):
    """x (M, N), weight (N) and y (M, N) of these element types, by short name, and residual and sum (M, N), both of
    one, unless `residual` is "none"; rows of all but weight may lie apart."""

    operation: ClassVar[str] = "rmsnorm"

    x: str
    weight: str
    y: str
    n: int
    residual: str = "none"

    def key(self) -> str:
        """One readable word, the same for equal signatures and only for them."""
        word = f"{self.x}_{self.weight}_{self.y}_rmsnorm_n{self.n}"
        return word if self.residual == "none" else f"{word}_residual_{self.residual}"

    def operands(self) -> tuple[Operand, ...]:
        """The tensors that kernels take, in order."""
        of_sum = () if self.residual == "none" else (self.residual,)
        return (
            Operand("x", self.x, ("M", "N")),
            *(Operand("residual", dtype, ("M", "N")) for dtype in of_sum),
            Operand("weight", self.weight, ("N",)),
            Operand("y", self.y, ("M", "N")),
            *(Operand("sum", dtype, ("M", "N")) for dtype in of_sum),
        )

    def numbers(self) -> tuple[tuple[str, str], ...]:
        """The numbers that kernels take after these, each with its type."""
        return (("eps", "f32"),)

    def extents(self) -> Mapping[str, int]:
        """The extent of each axis of `operands` that does not depend on M."""
        return {"N": self.n}

    def to_json(self) -> dict[str, Any]:
        """What `RmsNorm.read` reads. No residual is not mentioned, as before there could be none."""
        return {name: value for name, value in super().to_json().items() if (name, value) != ("residual", "none")}


class RmsNorm(FieldOperation[Signature]):
    """The operation; see `runtime.program.operation.Operation`."""

    name = "rmsnorm"
    signature = Signature
    pattern = _KEY
    labels: Mapping[str, str] = {"n": "N"}
    usual: Mapping[str, Any] = {"residual": "none"}
    words: Mapping[str, tuple[str, ...]] = {"residual": ("none", "bf16", "f16")}
    beyond_operator = ("residual",)

    def read(self, obj: Any) -> Signature:
        """The signature that `Signature.to_json` wrote; `residual` may be absent.

        Raises:
            RecordError: it is malformed.
        """
        return super().read({**self.usual, **obj} if isinstance(obj, dict) else obj)

    def arguments(self, signature: Signature, m: int, device: int) -> tuple[Any, ...]:
        """What a function takes for contiguous operands at `m` rows, at made-up addresses."""
        return (*super().arguments(signature, m, device), USUAL_EPS)

    def ask(
        self,
        view: Callable[[Any, str, bool], TensorView],
        x: Any,
        weight: Any,
        *,
        residual: Any = None,
        out: Any = None,
        eps: float = USUAL_EPS,
    ) -> Asked:
        """y = RMSNorm(x) for x (..., N) and weight (N); without `out` a torch `x` gives a new tensor like it.

        With `residual`, like x, (y, sum): y = RMSNorm(sum) for sum = x + residual. Either may be written to where x or
        residual is.

        Raises:
            ArgumentError: the tensors do not go together.
        """
        seen, of_weight = view(x, "x", False), view(weight, "weight", False)
        others = [] if residual is None else [view(residual, "residual", False)]
        if out is None:
            out = allocate(x, seen.shape, seen.dtype)
            if others:
                out = out, allocate(x, seen.shape, others[0].dtype)
        try:
            y, total = out if others else (out, None)
        except (TypeError, ValueError):
            raise ArgumentError("out of rmsnorm with a residual must be (y, sum)") from None
        to, totals = view(y, "out", True), [view(total, "sum", True) for _ in others]
        like_x = (*others, to, *totals)
        if not seen.shape or of_weight.shape != seen.shape[-1:] or any(t.shape != seen.shape for t in like_x):
            found = ", ".join(str(t.shape) for t in (seen, of_weight, *like_x))
            raise ArgumentError(
                f"rmsnorm takes x (..., N), weight (N), and out, residual and sum like x; found {found}"
            )
        for name, written in (("out", to), *(("sum", t) for t in totals)):
            check_apart(name, written, (*(t for t in (seen, *others) if not _same(written, t)), of_weight))
        if totals:
            check_apart("sum", totals[0], (to,))
            if others[0].dtype != totals[0].dtype:
                raise ArgumentError(f"sum must be of residual's type, {others[0].dtype}; found {totals[0].dtype}")
        dtype = others[0].dtype if others else "none"
        signature = Signature(seen.dtype, of_weight.dtype, to.dtype, seen.shape[-1], dtype)
        rows, of_y = flatten_rows(seen, "x"), flatten_rows(to, "out")
        added, sums = ([flatten_rows(t, name) for t in of] for name, of in (("residual", others), ("sum", totals)))
        return Asked(signature, rows.shape[0], (rows, *added, of_weight, of_y, *sums, float(eps)), out)


def _same(one: TensorView, other: TensorView) -> bool:
    """Whether two tensors are one, element by element."""
    return (one.pointer, one.strides, one.dtype) == (other.pointer, other.strides, other.dtype)


RMSNORM = RmsNorm()
