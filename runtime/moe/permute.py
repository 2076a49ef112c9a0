"""Rows of tokens in the order of experts, as an operation: what a grouped GEMM of experts reads.

Each token has `top_k` assignments, each to an expert, by its id. Assignment (t, j) gets a row of its own: those of
expert e follow each other, by token and then by j, behind those of all experts before. Ids are known to the device
alone, so a launch that a CUDA graph captured serves whatever they are when it is replayed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import ArgumentError
from ..program.field_operation import FieldOperation, FieldSignature
from ..program.geometry import flatten_rows
from ..program.operation import Asked, Operand
from ..program.outputs import allocate, check_apart
from ..program.record import TensorView
from .packed import packed

_KEY = re.compile(
    r"(?P<x>[^_]+)_moe_permute_e(?P<experts>\d{1,10})(?:of(?P<global_experts>\d{1,10}))?_top(?P<top_k>\d{1,10})"
    r"_k(?P<k>\d{1,10})",
    re.ASCII,
)


@dataclass(frozen=True)
class Signature(FieldSignature):
    """x (M, K) of an element type by short name, ids (M, top_k), rows (top_k * M, K), ends (experts) and positions (M,
    top_k); all but x and rows are i32.

    With `global_experts`, ids are of so many, and expert_map (global_experts) says which of `experts` each is, or -1.
    """

    operation: ClassVar[str] = "moe_permute"

    x: str
    experts: int
    top_k: int
    k: int
    global_experts: int = 0

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

    def extents(self) -> Mapping[str, int]:
        """The extent of each axis of `operands` that does not depend on M."""
        found = {"experts": self.experts, "top_k": self.top_k, "K": self.k}
        return found | ({"global_experts": self.global_experts} if self.global_experts else {})


class MoePermute(FieldOperation[Signature]):
    """The operation; see `runtime.program.operation.Operation`."""

    name = "moe_permute"
    signature = Signature
    pattern = _KEY
    labels: Mapping[str, str] = {"global_experts": "global experts", "k": "K"}
    usual: Mapping[str, Any] = {"global_experts": 0}
    minor = ("global_experts",)

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
            integers = (allocate(x, shape, "i32") for shape in ((experts,), (tokens, top_k)))
            out = allocate(x, (tokens * top_k, k), seen.dtype), *integers
        rows, ends, positions = _three(out)
        to = flatten_rows(view(rows, "rows", True), "rows")
        of_ids = packed(of_ids, "ids", "i32")
        of_ends = packed(view(ends, "ends", True), "ends", "i32")
        of_positions = packed(view(positions, "positions", True), "positions", "i32")
        if of_map is not None and (len(of_map.shape) != 1 or not of_map.shape[0]):
            raise ArgumentError(f"expert_map must say of each global expert which it is here, found {of_map.shape}")
        wanted = {"rows": (tokens * top_k, k), "ends": (experts,), "positions": (tokens, top_k)}
        tensors = [seen, of_ids, *([of_map] if of_map is not None else [])]
        for name, written in (("rows", to), ("ends", of_ends), ("positions", of_positions)):
            if written.shape != wanted[name]:
                raise ArgumentError(f"{name} must have the shape {wanted[name]}, found {written.shape}")
            check_apart(name, written, tensors)
            tensors.append(written)
        signature = Signature(seen.dtype, experts, top_k, k, of_map.shape[0] if of_map is not None else 0)
        return Asked(signature, tokens, tuple(tensors), (rows, ends, positions))


def _three(out: Any) -> tuple[Any, Any, Any]:
    try:
        rows, ends, positions = out
    except (TypeError, ValueError):
        raise ArgumentError("out of moe_permute must be (rows, ends, positions)") from None
    return rows, ends, positions


MOE_PERMUTE = MoePermute()
