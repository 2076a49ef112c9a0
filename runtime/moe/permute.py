"""Rows of tokens in the order of experts, as an operation: what a grouped GEMM of experts reads.

Each token has `top_k` assignments, each to an expert, by its id. Assignment (t, j) gets a row of its own: those of
expert e follow each other, by token and then by j, behind those of all experts before. Ids are known to the device
alone, so a launch that a CUDA graph captured serves whatever they are when it is replayed. Rows are copies of tokens,
or tokens in e4m3 with their scales, as `runtime.quantise` makes them; with weights, of tokens times the assignment's,
as routers want it that weigh what experts take and not what they make.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import ArgumentError
from ..numbers.quantised import NARROW, SCALINGS_OF_ROWS, scale_axes, scale_shape
from ..numbers.scaling import extent_of
from ..program.field_operation import FieldOperation, FieldSignature
from ..program.geometry import flatten_rows
from ..program.operation import Asked, Operand
from ..program.outputs import allocate, check_apart
from ..program.record import TensorView
from .contiguous import contiguous

_KEY = re.compile(
    r"(?P<x>[^_]+)_moe_permute_e(?P<experts>\d{1,10})(?:of(?P<global_experts>\d{1,10}))?_top(?P<top_k>\d{1,10})"
    r"_k(?P<k>\d{1,10})(?:_(?P<scaling>block|row_column))?(?:_weights_(?P<weights>f32))?",
    re.ASCII,
)


@dataclass(frozen=True)
class Signature(FieldSignature):
    """x (M, K) of an element type by short name, ids (M, top_k), rows (top_k * M, K), ends (experts) and positions (M,
    top_k); all but x and rows are i32.

    With `global_experts`, ids are of so many, and expert_map (global_experts) says which of `experts` each is, or -1.
    Where `scaling` is "block" or "row_column", rows are in e4m3, and behind positions there is scale, f32, of all rows,
    as `runtime.quantise.Signature` has it; else rows are of x's type. Where `weights` is "f32", behind ids and the map
    there are weights (M, top_k), by which rows are multiplied; they are rounded to x's type before anything else.
    """

    operation: ClassVar[str] = "moe_permute"
    added: ClassVar[tuple[str, ...]] = ("scaling", "weights")

    x: str
    experts: int
    top_k: int
    k: int
    global_experts: int = 0
    scaling: str = "none"
    weights: str = "none"

    @property
    def rows(self) -> str:
        """The element type of rows."""
        return self.x if self.scaling == "none" else NARROW

    def key(self) -> str:
        """One readable word, the same for equal signatures and only for them."""
        of = f"of{self.global_experts}" if self.global_experts else ""
        word = f"{self.x}_moe_permute_e{self.experts}{of}_top{self.top_k}_k{self.k}"
        word = word if self.scaling == "none" else f"{word}_{self.scaling}"
        return word if self.weights == "none" else f"{word}_weights_{self.weights}"

    def operands(self) -> tuple[Operand, ...]:
        """The tensors that kernels take, in order."""
        of_map = (Operand("expert_map", "i32", ("global_experts",)),) if self.global_experts else ()
        return (
            Operand("x", self.x, ("M", "K")),
            Operand("ids", "i32", ("M", "top_k")),
            *of_map,
            *([] if self.weights == "none" else [Operand("weights", self.weights, ("M", "top_k"))]),
            Operand("rows", self.rows, (f"{self.top_k}*M", "K")),
            Operand("ends", "i32", ("experts",)),
            Operand("positions", "i32", ("M", "top_k")),
            *self._scales(),
        )

    def _scales(self) -> tuple[Operand, ...]:
        if self.scaling == "none":
            return ()
        _, *blocks = scale_axes(self.scaling)
        return (Operand("scale", "f32", (f"{self.top_k}*M", *blocks)),)

    def extents(self) -> Mapping[str, int]:
        """The extent of each axis of `operands` that does not depend on M."""
        found = {"experts": self.experts, "top_k": self.top_k, "K": self.k}
        found |= {axis: extent_of(axis, found) for of_scale in self._scales() for axis in of_scale.axes[1:]}
        return found | ({"global_experts": self.global_experts} if self.global_experts else {})


class MoePermute(FieldOperation[Signature]):
    """The operation; see `runtime.program.operation.Operation`."""

    name = "moe_permute"
    signature = Signature
    pattern = _KEY
    labels: Mapping[str, str] = {"global_experts": "global experts", "k": "K"}
    words: Mapping[str, tuple[str, ...]] = {"scaling": ("none", *SCALINGS_OF_ROWS), "weights": ("none", "f32")}
    minor = ("global_experts",)

    def ask(
        self,
        view: Callable[[Any, str, bool], TensorView],
        x: Any,
        ids: Any,
        *,
        experts: int,
        expert_map: Any = None,
        scaling: str = "none",
        weights: Any = None,
        out: Sequence[Any] | None = None,
    ) -> Asked:
        """(rows, ends, positions) for x (T, K) and i32 ids (T, top_k), of which row t * top_k + j is assignment j of
        token t before they are put in order; with a `scaling`, (rows, ends, positions, scale).

        rows (T * top_k, K), or of that many in any dimensions: a row of x for each assignment, in the order of experts.
        ends (experts), i32: the row that each expert's rows end before. positions (T, top_k), i32: the row of each
        assignment, or -1 where its expert is not here: an id outside the range of experts, or of `expert_map`, or one
        that this takes to -1. Rows behind the last expert's stay as they are, and with no token all that is written.
        With `scaling` "block" or "row_column" rows are in e4m3, and scale, f32, is (T * top_k, K/128) or (T * top_k).
        With `weights` (T, top_k), f32, each row is the token times the assignment's. `out` has all of the results;
        without it a torch `x` gives new ones. Rows of x may lie apart; all else is contiguous.

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
        if scaling not in self.words["scaling"]:
            raise ArgumentError(f"scaling must be one of {', '.join(self.words['scaling'])}; found {scaling!r:.50}")
        (tokens, k), top_k = seen.shape, of_ids.shape[1]
        of_scale = [] if scaling == "none" else [scale_shape(scaling, tokens * top_k, k)]
        of_map = None if expert_map is None else contiguous(view(expert_map, "expert_map", False), "expert_map", "i32")
        if out is None:
            integers = (allocate(x, shape, "i32") for shape in ((experts,), (tokens, top_k)))
            made = allocate(x, (tokens * top_k, k), NARROW if of_scale else seen.dtype)
            out = made, *integers, *(allocate(x, shape, "f32") for shape in of_scale)
        rows, ends, positions, *scales = _outputs(out, 3 + len(of_scale))
        to = flatten_rows(view(rows, "rows", True), "rows")
        of_ids = contiguous(of_ids, "ids", "i32")
        of_ends = contiguous(view(ends, "ends", True), "ends", "i32")
        of_positions = contiguous(view(positions, "positions", True), "positions", "i32")
        if of_map is not None and (len(of_map.shape) != 1 or not of_map.shape[0]):
            raise ArgumentError(f"expert_map must say of each global expert which it is here, found {of_map.shape}")
        wanted = {"rows": (tokens * top_k, k), "ends": (experts,), "positions": (tokens, top_k)}
        of_weights = None if weights is None else contiguous(view(weights, "weights", False), "weights", "f32")
        if of_weights is not None and of_weights.shape != of_ids.shape:
            raise ArgumentError(f"weights must have the shape of ids, {of_ids.shape}; found {of_weights.shape}")
        tensors = [seen, of_ids, *(t for t in (of_map, of_weights) if t is not None)]
        outputs = [("rows", to), ("ends", of_ends), ("positions", of_positions)]
        for scale, shape in zip(scales, of_scale, strict=True):
            wanted["scale"] = shape
            outputs.append(("scale", contiguous(view(scale, "scale", True), "scale", "f32")))
        if of_scale and to.dtype != NARROW:
            raise ArgumentError(f"with scaling {scaling}, rows must be {NARROW}, found {to.dtype}")
        for name, written in outputs:
            if written.shape != wanted[name]:
                raise ArgumentError(f"{name} must have the shape {wanted[name]}, found {written.shape}")
            check_apart(name, written, tensors)
            tensors.append(written)
        globally = of_map.shape[0] if of_map is not None else 0
        word = "none" if of_weights is None else "f32"
        signature = Signature(seen.dtype, experts, top_k, k, globally, scaling, word)
        return Asked(signature, tokens, tuple(tensors), out)


def _outputs(out: Any, count: int) -> tuple[Any, ...]:
    found = tuple(out) if isinstance(out, Sequence) else ()
    if len(found) != count:
        names = "rows", "ends", "positions", "scale"
        raise ArgumentError(f"out of moe_permute must be ({', '.join(names[:count])})")
    return found


MOE_PERMUTE = MoePermute()
