"""Kernels for row-wise scaling; imports the compiler only where one is built."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from aot.providers.arguments import stand_ins
from aot.search.legal import legal_functions
from aot.search.provider import Buildable
from aot.search.variants import Family, Variant
from runtime.program.arguments import Argument, ScalarArgument, StreamArgument, Symbol, TensorArgument

SYMBOLS = {"m": Symbol(32, 1), "n": Symbol(32, 8), "ldx": Symbol(64, 8), "ldy": Symbol(64, 8)}
SAME = tuple((dtype,) * 3 for dtype in ("bf16", "f16"))


def tree(x: str, weight: str, y: str, number: str = "factor") -> list[Argument]:
    """x (M, N), weight (N), y (M, N), a number and a stream; rows of x and y may lie apart."""
    return [
        TensorArgument("x", x, ("m", "n"), ("ldx", 1), 16),
        TensorArgument("weight", weight, ("n",), (1,), 16),
        TensorArgument("y", y, ("m", "n"), ("ldy", 1), 16),
        ScalarArgument(number, "f32"),
        StreamArgument("stream"),
    ]


FAMILY = Family("row_scale", ("sm_90a",), SAME, {"threads": (128, 256)}, batched=(False,))


class RowScales:
    name = "row_scales"
    families: Mapping[str, Family] = MappingProxyType({"row": FAMILY})

    def variants(self, target: str, signature: object) -> list[Variant]:
        return []

    def functions(self, target: str) -> list[Variant]:
        return legal_functions(self.name, target)

    def source_digest(self, family: str) -> str:
        return "0" * 64

    def build(self, variant: Variant) -> Buildable:
        from .kernel import RowScale

        arguments = tree(*variant.elements)
        return Buildable(RowScale(variant.integer("threads")), stand_ins(arguments, SYMBOLS), arguments, dict(SYMBOLS))
