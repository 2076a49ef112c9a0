"""Rows of 16-bit numbers in 8 bits with scales made of the numbers themselves, as an operation: what a GEMM with
scales reads as A.

A scale is the largest magnitude that it is for, at least 1e-10, over the largest number of the narrow type; y is x
times the inverse of that quotient, in f32, and rounded to nearest. So y times its scale is x, but for rounding, and
what is all zeros stays so. With an activation x has gates, and behind them as many columns that they gate; what comes
of both, computed in f32 and rounded to x's type, takes its place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .errors import ArgumentError
from .numbers.quantised import NARROW, SCALINGS_OF_ROWS, scale_axes, scale_shape
from .numbers.scaling import extent_of
from .program.field_operation import FieldOperation, FieldSignature
from .program.geometry import flatten_rows
from .program.operation import Asked, Operand
from .program.outputs import allocate, check_apart
from .program.record import TensorView

_KEY = re.compile(
    r"(?P<x>[^_]+)_(?P<y>[^_]+)_quantise_k(?P<k>\d{1,10})_(?P<scaling>block|row_column)(?:_g(?P<groups>\d{1,10}))?"
    r"(?:_(?P<activation>swiglu))?",
    re.ASCII,
)
ACTIVATIONS = ("none", "swiglu")  # of `runtime.numbers.epilogue`: silu(gate) * up


@dataclass(frozen=True)
class Signature(FieldSignature):
    """x (M, K) and y (M, K) of element types, by short name, and scale, f32: (M, K/128) where `scaling` is "block", (M)
    where it is "row_column" (`runtime.numbers.scaling`).

    With `groups`, rows are by groups, and ends (groups), i32, say before which row each ends, as a grouped GEMM has
    them: rows behind the last one's end are neither read nor written. With an `activation` but "none" x is (M, 2 K),
    gates first.
    """

    operation: ClassVar[str] = "quantise"
    added: ClassVar[tuple[str, ...]] = ("activation",)

    x: str
    y: str
    k: int
    scaling: str
    groups: int = 0
    activation: str = "none"

    def key(self) -> str:
        """One readable word, the same for equal signatures and only for them."""
        word = f"{self.x}_{self.y}_quantise_k{self.k}_{self.scaling}"
        word = f"{word}_g{self.groups}" if self.groups else word
        return word if self.activation == "none" else f"{word}_{self.activation}"

    def operands(self) -> tuple[Operand, ...]:
        """The tensors that kernels take, in order."""
        return (
            Operand("x", self.x, ("M", "K" if self.activation == "none" else "2*K")),
            *((Operand("ends", "i32", ("groups",)),) if self.groups else ()),
            Operand("y", self.y, ("M", "K")),
            Operand("scale", "f32", scale_axes(self.scaling)),
        )

    def extents(self) -> Mapping[str, int]:
        """The extent of each axis of `operands` that does not depend on M."""
        blocks = {axis: extent_of(axis, {"K": self.k}) for axis in scale_axes(self.scaling)[1:]}
        gated = {} if self.activation == "none" else {"2*K": 2 * self.k}
        return {"K": self.k} | gated | blocks | ({"groups": self.groups} if self.groups else {})


class Quantise(FieldOperation[Signature]):
    """The operation; see `runtime.program.operation.Operation`."""

    name = "quantise"
    signature = Signature
    pattern = _KEY
    labels: Mapping[str, str] = {"k": "K"}
    words: Mapping[str, tuple[str, ...]] = {"scaling": SCALINGS_OF_ROWS, "activation": ACTIVATIONS}
    minor = ("groups",)

    def ask(
        self,
        view: Callable[[Any, str, bool], TensorView],
        x: Any,
        ends: Any = None,
        *,
        scaling: str,
        activation: str = "none",
        out: Any = None,
    ) -> Asked:
        """(y, scale) for x (..., K), its rows being M; without `out` a torch `x` gives new tensors, y in e4m3. With
        `ends` (groups), i32, rows from the last of them on are left as they are in both. With `activation` "swiglu" x
        is (..., 2 K), and y of silu(x[..., :K]) * x[..., K:].

        Raises:
            ArgumentError: the tensors do not go together.
        """
        if scaling not in SCALINGS_OF_ROWS:
            raise ArgumentError(f"quantise has scaling {' or '.join(SCALINGS_OF_ROWS)}; found {scaling!r:.50}")
        if activation not in ACTIVATIONS:
            raise ArgumentError(f"quantise has activation {' or '.join(ACTIVATIONS)}; found {activation!r:.50}")
        seen = view(x, "x", False)
        rows = flatten_rows(seen, "x")
        gated = activation != "none"
        if gated and rows.shape[1] % 2:
            raise ArgumentError(f"quantise with {activation} takes x (M, 2 K); found {rows.shape}")
        k = rows.shape[1] // (1 + gated)
        of_ends = None if ends is None else view(ends, "ends", False)
        if of_ends is not None and (of_ends.dtype != "i32" or len(of_ends.shape) != 1 or not of_ends.shape[0]):
            raise ArgumentError(f"ends must be i32, one for each group; found {of_ends.dtype} {of_ends.shape}")
        wanted, shape = (rows.shape[0], k), scale_shape(scaling, rows.shape[0], k)
        if out is None:
            out = allocate(x, (*seen.shape[:-1], k), NARROW), allocate(x, shape, "f32")
        try:
            y, scale = out
        except (TypeError, ValueError):
            raise ArgumentError("out of quantise must be (y, scale)") from None
        to, of_scale = flatten_rows(view(y, "y", True), "y"), view(scale, "scale", True)
        if to.shape != wanted or (of_scale.dtype, of_scale.shape) != ("f32", shape):
            raise ArgumentError(
                f"quantise of x {rows.shape} writes y {wanted} and scale f32 {shape}; found {to.shape}, "
                f"{of_scale.dtype} {of_scale.shape}"
            )
        others = [rows, *([] if of_ends is None else [of_ends])]
        check_apart("y", to, others)
        check_apart("scale", of_scale, (*others, to))
        groups = 0 if of_ends is None else of_ends.shape[0]
        signature = Signature(rows.dtype, to.dtype, k, scaling, groups, activation)
        return Asked(signature, rows.shape[0], (*others, to, of_scale), out)


QUANTISE = Quantise()
