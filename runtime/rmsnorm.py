"""RMSNorm by rows as an operation: y[m, n] = x[m, n] * weight[n] / sqrt(mean over n of x[m, n]^2 + eps).

With a residual x is first added to it, and the sum, rounded, takes the place of x; it is written too. y may be
quantised: it is then rounded to x's type, and that is made e4m3 with scales as `runtime.quantise` does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .errors import ArgumentError, RecordError
from .numbers.quantised import NARROW, SCALINGS_OF_ROWS, scale_axes, scale_shape
from .numbers.scaling import extent_of
from .program.field_operation import FieldOperation, FieldSignature
from .program.geometry import flatten_rows, same_elements
from .program.operation import Asked, Operand
from .program.outputs import allocate, check_apart
from .program.record import TensorView

USUAL_EPS = 1e-6
_KEY = re.compile(
    r"(?P<x>[^_]+)_(?P<weight>[^_]+)_(?P<y>[^_]+)_rmsnorm_n(?P<n>\d{1,10})(?:_residual_(?P<residual>bf16|f16))?"
    r"(?:_(?P<scaling>block|row_column))?",
    re.ASCII,
)


@dataclass(frozen=True)
class Signature(FieldSignature):
    """x (M, N), weight (N) and y (M, N) of these element types, by short name, and residual and sum (M, N), both of
    one, unless `residual` is "none"; rows of all but weight may lie apart.

    Where `scaling` is "block" or "row_column", behind y there is scale, f32: (M, N/128), or (M).
    """

    operation: ClassVar[str] = "rmsnorm"
    added: ClassVar[tuple[str, ...]] = ("residual", "scaling")

    x: str
    weight: str
    y: str
    n: int
    residual: str = "none"
    scaling: str = "none"

    def key(self) -> str:
        """One readable word, the same for equal signatures and only for them."""
        word = f"{self.x}_{self.weight}_{self.y}_rmsnorm_n{self.n}"
        word = word if self.residual == "none" else f"{word}_residual_{self.residual}"
        return word if self.scaling == "none" else f"{word}_{self.scaling}"

    def operands(self) -> tuple[Operand, ...]:
        """The tensors that kernels take, in order."""
        of_sum = () if self.residual == "none" else (self.residual,)
        return (
            Operand("x", self.x, ("M", "N")),
            *(Operand("residual", dtype, ("M", "N")) for dtype in of_sum),
            Operand("weight", self.weight, ("N",)),
            Operand("y", self.y, ("M", "N")),
            *(() if self.scaling == "none" else (Operand("scale", "f32", scale_axes(self.scaling, "N")),)),
            *(Operand("sum", dtype, ("M", "N")) for dtype in of_sum),
        )

    def numbers(self) -> tuple[tuple[str, str], ...]:
        """The numbers that kernels take after these, each with its type."""
        return (("eps", "f32"),)

    def extents(self) -> Mapping[str, int]:
        """The extent of each axis of `operands` that does not depend on M."""
        axes = () if self.scaling == "none" else scale_axes(self.scaling, "N")[1:]
        return {"N": self.n} | {axis: extent_of(axis, {"N": self.n}) for axis in axes}


class RmsNorm(FieldOperation[Signature]):
    """The operation; see `runtime.program.operation.Operation`."""

    name = "rmsnorm"
    signature = Signature
    pattern = _KEY
    labels: Mapping[str, str] = {"n": "N"}
    words: Mapping[str, tuple[str, ...]] = {
        "residual": ("none", "bf16", "f16"),
        "scaling": ("none", *SCALINGS_OF_ROWS),
    }
    beyond_operator = ("residual", "scaling")

    def read(self, obj: Any) -> Signature:
        """The signature that `to_json` wrote.

        Raises:
            RecordError: it is malformed.
        """
        found = super().read(obj)
        if (found.y == NARROW) != (found.scaling != "none"):
            raise RecordError(f"signature field 'scaling' is {found.scaling} of a y in {found.y}: e4m3 has scales")
        return found

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
        scaling: str = "none",
        out: Any = None,
        eps: float = USUAL_EPS,
    ) -> Asked:
        """y = RMSNorm(x) for x (..., N) and weight (N); without `out` a torch `x` gives a new tensor like it.

        With `residual`, like x, (y, sum): y = RMSNorm(sum) for sum = x + residual. Either may be written to where x or
        residual is. With `scaling` "block" or "row_column" y is in e4m3, and behind it there is scale, f32, (M, N/128)
        or (M) for M rows: (y, scale), or (y, scale, sum).

        Raises:
            ArgumentError: the tensors do not go together.
        """
        if scaling not in self.words["scaling"]:
            raise ArgumentError(f"rmsnorm has scaling {', '.join(self.words['scaling'])}; found {scaling!r:.50}")
        seen, of_weight = view(x, "x", False), view(weight, "weight", False)
        others = [] if residual is None else [view(residual, "residual", False)]
        _check_alike(seen, of_weight, others)
        rows = flatten_rows(seen, "x")
        like_x = {"y": (seen.shape, seen.dtype)}
        if scaling != "none":
            like_x = {"y": (seen.shape, NARROW), "scale": (scale_shape(scaling, *rows.shape), "f32")}
        if others:
            like_x["sum"] = seen.shape, others[0].dtype
        names = list(like_x)
        if out is None:
            made = tuple(allocate(x, *like_x[name]) for name in names)
            out = made if len(names) > 1 else made[0]
        try:
            given = dict(zip(names, out if len(names) > 1 else (out,), strict=True))
        except (TypeError, ValueError):
            words = {"scale": "a scaling", "sum": "a residual"}
            what = " and ".join(words[name] for name in names[1:])
            raise ArgumentError(f"out of rmsnorm with {what} must be ({', '.join(names)})") from None
        to = {name: view(of, "out" if name == "y" else name, True) for name, of in given.items()}
        _check_alike(seen, of_weight, [*others, *(of for name, of in to.items() if name != "scale")])
        _check_written(to, like_x, (seen, *others), of_weight)
        residual_type = others[0].dtype if others else "none"
        signature = Signature(seen.dtype, of_weight.dtype, to["y"].dtype, seen.shape[-1], residual_type, scaling)
        added = [flatten_rows(other, "residual") for other in others]
        outputs = [of if name == "scale" else flatten_rows(of, name) for name, of in to.items()]
        return Asked(signature, rows.shape[0], (rows, *added, of_weight, *outputs, float(eps)), out)


def _check_alike(x: TensorView, weight: TensorView, others: list[TensorView]) -> None:
    """Refuse tensors that are not x (..., N), weight (N), and others like x."""
    if not x.shape or weight.shape != x.shape[-1:] or any(t.shape != x.shape for t in others):
        found = ", ".join(str(t.shape) for t in (x, weight, *others))
        raise ArgumentError(f"rmsnorm takes x (..., N), weight (N), and out, residual and sum like x; found {found}")


def _check_written(
    to: Mapping[str, TensorView],
    wanted: Mapping[str, tuple[tuple[int, ...], str]],
    rows: tuple[TensorView, ...],
    weight: TensorView,
) -> None:
    """Refuse outputs of other shapes or types than `wanted` has, where y may have any type but e4m3 without scales, and
    outputs that share memory, unless one is exactly x or the residual, which are `rows`."""
    if (to["y"].dtype == NARROW) != ("scale" in to):
        raise ArgumentError(f"out of rmsnorm is in {NARROW} with a scaling, and never else; found {to['y'].dtype}")
    for name, of in to.items():
        if name == "scale" and (of.shape, of.dtype) != wanted[name]:
            raise ArgumentError(f"scale must be f32 {wanted[name][0]}; found {of.dtype} {of.shape}")
        apart = [t for t in rows if not same_elements(of, t)]
        check_apart("out" if name == "y" else name, of, (*apart, weight, *(t for t in to.values() if t is not of)))
        if name == "sum" and of.dtype != wanted[name][1]:
            raise ArgumentError(f"sum must be of residual's type, {wanted[name][1]}; found {of.dtype}")


RMSNORM = RmsNorm()
