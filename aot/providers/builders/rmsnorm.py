"""RMSNorm by rows."""

from __future__ import annotations

from runtime.program.arguments import Argument, ScalarArgument, StreamArgument, Symbol, TensorArgument

from ...search.provider import Buildable
from ...search.variants import Variant
from ..arguments import stand_ins


def rmsnorm(variant: Variant) -> Buildable:
    """RMSNorm over x (M, N), weight (N), y (M, N), an f32 eps and a stream; rows of x and y may lie apart."""
    from ...kernels.rmsnorm import RmsNorm

    symbols = {
        "m": Symbol(32, 1),
        "n": Symbol(32, 8),
        "ldx": Symbol(64, 8),
        "ldy": Symbol(64, 8),
    }
    x, weight, y = variant.elements
    tree: list[Argument] = [
        TensorArgument("x", x, ("m", "n"), ("ldx", 1), 16),
        TensorArgument("weight", weight, ("n",), (1,), 16),
        TensorArgument("y", y, ("m", "n"), ("ldy", 1), 16),
        ScalarArgument("eps", "f32"),
        StreamArgument("stream"),
    ]
    return Buildable(
        RmsNorm(variant.integer("threads"), bool(variant.options["overlap"])), stand_ins(tree, symbols), tree, symbols
    )
