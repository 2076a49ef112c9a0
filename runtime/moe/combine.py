"""What the experts of each token made, added up, as an operation: y[t] = sum over j of weights[t, j] * rows[positions[
t, j]], in f32, j ascending, rounded once. A position that is no row, as -1 is, adds nothing."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..container.fields import is_int
from ..errors import ArgumentError, RecordError
from ..limits import MAX_EXTENT
from ..numbers.dtypes import DTYPES
from ..program.operation import Asked, Operand, Operation, contiguous
from ..program.record import TensorView
from ..program.tensor import flatten_rows, overlaps_itself, share_memory
from .packed import packed

_KEY = re.compile(r"(?P<rows>[^_]+)_(?P<y>[^_]+)_moe_combine_top(?P<top_k>\d{1,10})_n(?P<n>\d{1,10})", re.ASCII)
_LABELS = (("rows", "rows"), ("y", "y"), ("top_k", "top_k"), ("n", "N"))


@dataclass(frozen=True)
class Signature:
    """rows (top_k * M, N) and y (M, N) of these element types, by short name; positions (M, top_k), i32, and weights
    (M, top_k), f32."""

    rows: str
    y: str
    top_k: int
    n: int

    @property
    def operation(self) -> str:
        """The name of the operation that it is of."""
        return "moe_combine"

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

    def numbers(self) -> tuple[tuple[str, str], ...]:
        """The numbers that kernels take after these: none."""
        return ()

    def extents(self) -> Mapping[str, int]:
        """The extent of each axis of `operands` that does not depend on M."""
        return {"top_k": self.top_k, "N": self.n}

    def to_json(self) -> dict[str, Any]:
        """What `MoeCombine.read` reads."""
        return asdict(self)


class MoeCombine(Operation):
    """The operation; see `runtime.program.operation.Operation`."""

    name = "moe_combine"
    fields = tuple(f.name for f in dataclasses.fields(Signature))

    def read(self, obj: Any) -> Signature:
        """The signature that `Signature.to_json` wrote.

        Raises:
            RecordError: it is malformed.
        """
        if not isinstance(obj, dict) or set(obj) != set(self.fields):
            names = sorted(self.fields)
            raise RecordError(f"a signature of moe_combine needs exactly the fields {names}, found {obj!r:.200}")
        for name in ("rows", "y"):
            if not isinstance(obj[name], str) or obj[name] not in DTYPES:
                raise RecordError(f"signature field {name!r}: unknown element type {obj[name]!r:.50}")
        for name in ("top_k", "n"):
            if not is_int(obj[name], 1, MAX_EXTENT):
                raise RecordError(f"signature field {name!r} must be 1 to {MAX_EXTENT}, found {obj[name]!r:.50}")
        return Signature(**obj)

    def of_key(self, key: str) -> Signature | None:
        """The signature whose `key` this is, or None."""
        parts = _KEY.fullmatch(key)
        if parts is None:
            return None
        try:
            found = self.read(parts.groupdict() | {name: int(parts[name]) for name in ("top_k", "n")})
        except RecordError:
            return None
        return found if found.key() == key else None

    def differences(self, have: Signature, wanted: Signature) -> list[str]:
        """How two signatures differ, in words, for people."""
        pairs = ((label, getattr(have, name), getattr(wanted, name)) for name, label in _LABELS)
        return [f"{label} is {had}, wanted {want}" for label, had, want in pairs if had != want]

    def distance(self, have: Signature, wanted: Signature) -> float:
        """How far apart two signatures are: types before extents."""
        types = (have.rows != wanted.rows) + (have.y != wanted.y)
        return 1000.0 * types + sum(abs(math.log2(getattr(have, e) / getattr(wanted, e))) for e in ("top_k", "n"))

    def arguments(self, signature: Signature, m: int, device: int) -> tuple[Any, ...]:
        """What a function takes for contiguous operands at `m` tokens, at made-up addresses."""
        return contiguous(signature, m, device)

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
            if not hasattr(rows, "new_empty"):
                raise ArgumentError(f"out is needed: there is no allocating for a {type(rows).__name__}")
            out = rows.new_empty(shape, dtype=rows.dtype)
        y = view(out, "out", True)
        if y.shape != shape:
            raise ArgumentError(f"out must have the shape {shape}, found {y.shape}")
        if overlaps_itself(y) or any(share_memory(y, other) for other in (flat, of_positions, of_weights)):
            raise ArgumentError("out names elements twice, or shares memory with an input; pass another")
        signature = Signature(flat.dtype, y.dtype, top_k, shape[1])
        return Asked(signature, tokens, (flat, of_positions, of_weights, y), out)


MOE_COMBINE = MoeCombine()
