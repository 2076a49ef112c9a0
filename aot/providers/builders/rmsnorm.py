"""RMSNorm by rows."""

from __future__ import annotations

from runtime.program.arguments import Argument, ScalarArgument, StreamArgument, Symbol, TensorArgument

from ...search.provider import Buildable
from ...search.variants import Variant
from ..arguments import stand_ins_by_name

_OPERANDS = "x", "residual", "weight", "y", "sum", "eps", "stream"  # in the order that the kernel takes them


def rmsnorm(variant: Variant) -> Buildable:
    """RMSNorm over x (M, N), perhaps a residual (M, N), weight (N), y (M, N), with a residual the sum (M, N), an f32
    eps and a stream; rows of matrices may lie apart."""
    from ...kernels.rmsnorm import RmsNorm

    added = len(variant.elements) == 5
    rows = {"x": "ldx", "y": "ldy", **({"residual": "ldr", "sum": "lds"} if added else {})}
    symbols = {"m": Symbol(32, 1), "n": Symbol(32, 8), **dict.fromkeys(rows.values(), Symbol(64, 8))}
    dtype = variant.a  # of all operands

    def matrix(name: str) -> Argument:
        return TensorArgument(name, dtype, ("m", "n"), (rows[name], 1), 16)

    tree: list[Argument] = [
        matrix("x"),
        *([matrix("residual")] if added else []),
        TensorArgument("weight", dtype, ("n",), (1,), 16),
        matrix("y"),
        *([matrix("sum")] if added else []),
        ScalarArgument("eps", "f32"),
        StreamArgument("stream"),
    ]
    made = RmsNorm(variant.integer("threads"), bool(variant.options["overlap"]))
    return Buildable(made, stand_ins_by_name(tree, symbols, _OPERANDS), tree, symbols)
