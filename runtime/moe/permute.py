"""Rows of tokens in the order of experts, as an operation: what a grouped GEMM of experts reads.

Each token has `top_k` assignments, each to an expert, by its id. Assignment (t, j) gets a row of its own: those of
expert e follow each other, by token and then by j, behind those of all experts before. Ids are known to the device
alone, so a launch that a CUDA graph captured serves whatever they are when it is replayed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
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

_KEY = re.compile(
    r"(?P<x>[^_]+)_moe_permute_e(?P<experts>\d{1,10})(?:of(?P<global_experts>\d{1,10}))?_top(?P<top_k>\d{1,10})"
    r"_k(?P<k>\d{1,10})",
    re.ASCII,
)
_EXTENTS = ("experts", "top_k", "k")
_LABELS = (("x", "x"), ("experts", "experts"), ("global_experts", "global experts"), ("top_k", "top_k"), ("k", "K"))


@dataclass(frozen=True)
class Signature:
    """x (M, K) of an element type by short name, ids (M, top_k), rows (top_k * M, K), ends (experts) and positions (M,
    top_k); all but x and rows are i32.

    With `global_experts`, ids are of so many, and expert_map (global_experts) says which of `experts` each is, or -1.
    """

    x: str
    experts: int
    top_k: int
    k: int
    global_experts: int = 0

    @property
    def operation(self) -> str:
        """The name of the operation that it is of."""
        return "moe_permute"

    def key(self) -> str:
        """One readable word, the same for equal signatures and only for them."""
        of = f"of{self.global_experts}" if self.global_experts else ""
        return f"{self.x}_moe_permute_e{self.experts}{of}_top{self.top_k}_k{self.k}"

    def operands(self) -> tuple[Operand, ...]:
        """The tensors that kernels take, in order."""
        of_map = (Operand("expert_map", "i32", ("global_experts",)),) if self.global_experts else ()
        return (
            Operand("x", self.x, ("M", "K")),
            Operand("ids", "i32", ("M", "top_k")),
            *of_map,
            Operand("rows", self.x, (f"{self.top_k}*M", "K")),
            Operand("ends", "i32", ("experts",)),
            Operand("positions", "i32", ("M", "top_k")),
        )

    def numbers(self) -> tuple[tuple[str, str], ...]:
        """The numbers that kernels take after these: none."""
        return ()

    def extents(self) -> Mapping[str, int]:
        """The extent of each axis of `operands` that does not depend on M."""
        found = {"experts": self.experts, "top_k": self.top_k, "K": self.k}
        return found | ({"global_experts": self.global_experts} if self.global_experts else {})

    def to_json(self) -> dict[str, Any]:
        """What `MoePermute.read` reads."""
        return asdict(self)


class MoePermute(Operation):
    """The operation; see `runtime.program.operation.Operation`."""

    name = "moe_permute"
    fields = tuple(f.name for f in dataclasses.fields(Signature))
    usual: Mapping[str, Any] = {"global_experts": 0}

    def read(self, obj: Any) -> Signature:
        """The signature that `Signature.to_json` wrote.

        Raises:
            RecordError: it is malformed.
        """
        if not isinstance(obj, dict) or set(obj) != set(self.fields):
            names = sorted(self.fields)
            raise RecordError(f"a signature of moe_permute needs exactly the fields {names}, found {obj!r:.200}")
        if not isinstance(obj["x"], str) or obj["x"] not in DTYPES:
            raise RecordError(f"signature field 'x': unknown element type {obj['x']!r:.50}")
        for name in (*_EXTENTS, "global_experts"):
            least = int(name in _EXTENTS)
            if not is_int(obj[name], least, MAX_EXTENT):
                raise RecordError(f"signature field {name!r} must be {least} to {MAX_EXTENT}, found {obj[name]!r:.50}")
        return Signature(**obj)

    def of_key(self, key: str) -> Signature | None:
        """The signature whose `key` this is, or None."""
        parts = _KEY.fullmatch(key)
        if parts is None:
            return None
        numbers = {name: int(parts[name] or 0) for name in (*_EXTENTS, "global_experts")}
        try:
            found = self.read({"x": parts["x"], **numbers})
        except RecordError:
            return None
        return found if found.key() == key else None

    def differences(self, have: Signature, wanted: Signature) -> list[str]:
        """How two signatures differ, in words, for people."""
        pairs = ((label, getattr(have, name), getattr(wanted, name)) for name, label in _LABELS)
        return [f"{label} is {had}, wanted {want}" for label, had, want in pairs if had != want]

    def distance(self, have: Signature, wanted: Signature) -> float:
        """How far apart two signatures are: types before extents."""
        extents = sum(abs(math.log2(getattr(have, name) / getattr(wanted, name))) for name in _EXTENTS)
        return 1000.0 * (have.x != wanted.x) + 10.0 * (have.global_experts != wanted.global_experts) + extents

    def arguments(self, signature: Signature, m: int, device: int) -> tuple[Any, ...]:
        """What a function takes for contiguous operands at `m` tokens, at made-up addresses."""
        return contiguous(signature, m, device)

    def ask(
        self,
        view: Callable[[Any, str, bool], TensorView],
        x: Any,
        ids: Any,
        *,
        experts: int,
        expert_map: Any = None,
        out: Sequence[Any] | None = None,
    ) -> Asked:
        """(rows, ends, positions) for x (T, K) and i32 ids (T, top_k), of which row t * top_k + j is assignment j of
        token t before they are put in order.

        rows (T * top_k, K), or of that many in any dimensions: a row of x for each assignment, in the order of experts.
        ends (experts), i32: the row that each expert's rows end before. positions (T, top_k), i32: the row of each
        assignment, or -1 where its expert is not here: an id outside the range of experts, or of `expert_map`, or one
        that this takes to -1. Rows behind the last expert's stay as they are, and with no token all that is written.
        `out` has the three; without it a torch `x` gives new ones. Rows of x may lie apart; all else is contiguous.

        Raises:
            ArgumentError: the tensors do not go together.
        """
        seen, of_ids = view(x, "x", False), view(ids, "ids", False)
        if len(seen.shape) != 2 or len(of_ids.shape) != 2 or seen.shape[0] != of_ids.shape[0]:
            raise ArgumentError(f"moe_permute takes x (T, K) and ids (T, top_k); found {seen.shape}, {of_ids.shape}")
        if 0 in (seen.shape[1], of_ids.shape[1]):
            raise ArgumentError(f"moe_permute needs K and top_k of 1 at least; found {seen.shape}, {of_ids.shape}")
        if type(experts) is not int or experts < 1:
            raise ArgumentError(f"experts must be a positive integer, found {experts!r:.50}")
        (tokens, k), top_k = seen.shape, of_ids.shape[1]
        of_map = None if expert_map is None else packed(view(expert_map, "expert_map", False), "expert_map", "i32")
        if out is None:
            if not hasattr(x, "new_empty"):
                raise ArgumentError(f"out is needed: there is no allocating for a {type(x).__name__}")
            rows = x.new_empty((tokens * top_k, k), dtype=x.dtype)
            out = rows, *(ids.new_empty(shape, dtype=ids.dtype) for shape in ((experts,), (tokens, top_k)))
        rows, ends, positions = _three(out)
        to = flatten_rows(view(rows, "rows", True), "rows")
        of_ids = packed(of_ids, "ids", "i32")
        of_ends = packed(view(ends, "ends", True), "ends", "i32")
        of_positions = packed(view(positions, "positions", True), "positions", "i32")
        if of_map is not None and (len(of_map.shape) != 1 or not of_map.shape[0]):
            raise ArgumentError(f"expert_map must say of each global expert which it is here, found {of_map.shape}")
        wanted = {"rows": (tokens * top_k, k), "ends": (experts,), "positions": (tokens, top_k)}
        for name, have in (("rows", to), ("ends", of_ends), ("positions", of_positions)):
            if have.shape != wanted[name]:
                raise ArgumentError(f"{name} must have the shape {wanted[name]}, found {have.shape}")
        inputs = [seen, of_ids, *([of_map] if of_map is not None else [])]
        outputs = [to, of_ends, of_positions]
        for place, written in enumerate(outputs):
            others = (*inputs, *outputs[:place])
            if overlaps_itself(written) or any(share_memory(written, other) for other in others):
                raise ArgumentError("an output names elements twice, or shares memory with another tensor")
        signature = Signature(seen.dtype, experts, top_k, k, of_map.shape[0] if of_map is not None else 0)
        return Asked(signature, tokens, (*inputs, *outputs), (rows, ends, positions))


def _three(out: Any) -> tuple[Any, Any, Any]:
    try:
        rows, ends, positions = out
    except (TypeError, ValueError):
        raise ArgumentError("out of moe_permute must be (rows, ends, positions)") from None
    return rows, ends, positions


MOE_PERMUTE = MoePermute()
