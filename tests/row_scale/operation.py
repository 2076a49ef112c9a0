"""Row-wise scaling as an operation: y[m, n] = factor * x[m, n] * weight[n]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from runtime.errors import ArgumentError, RecordError
from runtime.limits import MAX_EXTENT
from runtime.numbers.dtypes import DTYPES
from runtime.program.geometry import flatten_rows
from runtime.program.operation import Asked, Operand, Operation, contiguous
from runtime.program.record import TensorView


@dataclass(frozen=True)
class Signature:
    """x (M, N), weight (N) and y (M, N) of these element types, by short name."""

    x: str
    weight: str
    y: str
    n: int

    @property
    def operation(self) -> str:
        return "row_scale"

    def key(self) -> str:
        return f"{self.x}_{self.weight}_{self.y}_row_scale_n{self.n}"

    def operands(self) -> tuple[Operand, ...]:
        return (
            Operand("x", self.x, ("M", "N")),
            Operand("weight", self.weight, ("N",)),
            Operand("y", self.y, ("M", "N")),
        )

    def numbers(self) -> tuple[tuple[str, str], ...]:
        return (("factor", "f32"),)

    def extents(self) -> Mapping[str, int]:
        return {"N": self.n}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class RowScale(Operation):
    name = "row_scale"
    fields = "x", "weight", "y", "n"

    def read(self, obj: Any) -> Signature:
        if not isinstance(obj, dict) or set(obj) != set(self.fields):
            raise RecordError(f"a signature of row_scale needs exactly the fields {self.fields}, found {obj!r:.200}")
        for name in ("x", "weight", "y"):
            if obj[name] not in DTYPES:
                raise RecordError(f"signature field {name!r}: unknown element type {obj[name]!r:.50}")
        if type(obj["n"]) is not int or not 1 <= obj["n"] <= MAX_EXTENT:
            raise RecordError(f"signature field 'n' must be 1 to {MAX_EXTENT}, found {obj['n']!r:.50}")
        return Signature(**obj)

    def of_key(self, key: str) -> Signature | None:
        types, _, n = key.partition("_row_scale_n")
        elements = types.split("_")
        if len(elements) != 3 or not n.isdigit():
            return None
        try:
            return self.read(dict(zip(self.fields, [*elements, int(n)], strict=True)))
        except RecordError:
            return None

    def differences(self, have: Signature, wanted: Signature) -> list[str]:
        names = {"x": "x", "weight": "weight", "y": "y", "n": "N"}
        pairs = ((label, getattr(have, name), getattr(wanted, name)) for name, label in names.items())
        return [f"{label} is {had}, wanted {want}" for label, had, want in pairs if had != want]

    def distance(self, have: Signature, wanted: Signature) -> float:
        return float(abs(have.n - wanted.n))

    def arguments(self, signature: Signature, m: int, device: int) -> tuple[Any, ...]:
        return (*contiguous(signature, m, device), 1.0)

    def ask(
        self,
        view: Callable[[Any, str, bool], TensorView],
        x: Any,
        weight: Any,
        *,
        out: Any = None,
        factor: float = 1.0,
    ) -> Asked:
        if out is None:
            out = x.new_empty(x.shape, dtype=x.dtype)
        seen, of_weight, y = view(x, "x", False), view(weight, "weight", False), view(out, "out", True)
        if of_weight.shape != seen.shape[-1:] or y.shape != seen.shape:
            raise ArgumentError(f"row_scale takes x (..., N), weight (N) and out like x; found {seen.shape}")
        signature = Signature(seen.dtype, of_weight.dtype, y.dtype, seen.shape[-1])
        rows, to = flatten_rows(seen, "x"), flatten_rows(y, "out")
        return Asked(signature, rows.shape[0], (rows, of_weight, to, float(factor)), out)


ROW_SCALE = RowScale()
