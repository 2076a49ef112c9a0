"""RMSNorm by rows as an operation: y[m, n] = x[m, n] * weight[n] / sqrt(mean over n of x[m, n]^2 + eps)."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .container.fields import is_int
from .errors import ArgumentError, RecordError
from .limits import MAX_EXTENT
from .numbers.dtypes import DTYPES
from .program.operation import Asked, Operand, Operation, contiguous
from .program.record import TensorView
from .program.tensor import flatten_rows, overlaps_itself, share_memory

USUAL_EPS = 1e-6
_KEY = re.compile(r"(?P<x>[^_]+)_(?P<weight>[^_]+)_(?P<y>[^_]+)_rmsnorm_n(?P<n>\d{1,10})", re.ASCII)
_LABELS = (("x", "x"), ("weight", "weight"), ("y", "y"), ("n", "N"))


@dataclass(frozen=True)
class Signature:
    """x (M, N), weight (N) and y (M, N) of these element types, by short name; rows of x and y may lie apart."""

    x: str
    weight: str
    y: str
    n: int

    @property
    def operation(self) -> str:
        """The name of the operation that it is of."""
        return "rmsnorm"

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

    def to_json(self) -> dict[str, Any]:
        """What `RmsNorm.read` reads."""
        return asdict(self)


class RmsNorm(Operation):
    """The operation; see `runtime.program.operation.Operation`."""

    name = "rmsnorm"
    fields = tuple(f.name for f in dataclasses.fields(Signature))

    def read(self, obj: Any) -> Signature:
        """The signature that `Signature.to_json` wrote.

        Raises:
            RecordError: it is malformed.
        """
        if not isinstance(obj, dict) or set(obj) != set(self.fields):
            names = sorted(self.fields)
            raise RecordError(f"a signature of rmsnorm needs exactly the fields {names}, found {obj!r:.200}")
        for name in ("x", "weight", "y"):
            if not isinstance(obj[name], str) or obj[name] not in DTYPES:
                raise RecordError(f"signature field {name!r}: unknown element type {obj[name]!r:.50}")
        if not is_int(obj["n"], 1, MAX_EXTENT):
            raise RecordError(f"signature field 'n' must be 1 to {MAX_EXTENT}, found {obj['n']!r:.50}")
        return Signature(**obj)

    def of_key(self, key: str) -> Signature | None:
        """The signature whose `key` this is, or None."""
        parts = _KEY.fullmatch(key)
        if parts is None:
            return None
        try:
            found = self.read(parts.groupdict() | {"n": int(parts["n"])})
        except RecordError:
            return None
        return found if found.key() == key else None

    def differences(self, have: Signature, wanted: Signature) -> list[str]:
        """How two signatures differ, in words, for people."""
        pairs = ((label, getattr(have, name), getattr(wanted, name)) for name, label in _LABELS)
        return [f"{label} is {had}, wanted {want}" for label, had, want in pairs if had != want]

    def distance(self, have: Signature, wanted: Signature) -> float:
        """How far apart two signatures are: types before extents."""
        types = sum(getattr(have, name) != getattr(wanted, name) for name in ("x", "weight", "y"))
        return 1000.0 * types + abs(math.log2(have.n / wanted.n))

    def arguments(self, signature: Signature, m: int, device: int) -> tuple[Any, ...]:
        """What a function takes for contiguous operands at `m` rows, at made-up addresses."""
        return (*contiguous(signature, m, device), USUAL_EPS)

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
        if out is None:
            if not hasattr(x, "new_empty"):
                raise ArgumentError(f"out is needed: there is no allocating for a {type(x).__name__}")
            out = x.new_empty(x.shape, dtype=x.dtype)
        seen, of_weight, y = view(x, "x", False), view(weight, "weight", False), view(out, "out", True)
        if not seen.shape or of_weight.shape != seen.shape[-1:] or y.shape != seen.shape:
            raise ArgumentError(
                f"rmsnorm takes x (..., N), weight (N) and out like x; found {seen.shape}, {of_weight.shape}, {y.shape}"
            )
        same = seen.pointer == y.pointer and seen.strides == y.strides
        if overlaps_itself(y) or share_memory(of_weight, y) or (share_memory(seen, y) and not same):
            raise ArgumentError(
                "out names elements twice, or shares memory with x or weight; pass x itself, or another"
            )
        signature = Signature(seen.dtype, of_weight.dtype, y.dtype, seen.shape[-1])
        rows, to = flatten_rows(seen, "x"), flatten_rows(y, "out")
        return Asked(signature, rows.shape[0], (rows, of_weight, to, float(eps)), out)


RMSNORM = RmsNorm()
