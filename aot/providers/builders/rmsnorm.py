"""RMSNorm by rows."""

from __future__ import annotations

from runtime.numbers.dtypes import DTYPES
from runtime.numbers.quantised import NARROW
from runtime.program.arguments import Argument, ScalarArgument, StreamArgument, Symbol, TensorArgument

from ...search.provider import Buildable
from ...search.variants import Variant
from ..arguments import ALIGNMENT_BYTES, stand_ins_by_name
from .quantise import scale_argument

# In the order that the kernel takes them.
_OPERANDS = "x", "residual", "weight", "y", "scale", "sum", "eps", "stream"


def rmsnorm(variant: Variant) -> Buildable:
    """RMSNorm over x (M, N), perhaps a residual (M, N), weight (N), y (M, N), where that is narrow its scales, with a
    residual the sum (M, N), an f32 eps and a stream; rows of matrices may lie apart."""
    from ...kernels.rmsnorm import RmsNorm

    dtype, scaled = variant.a, variant.scaling != "none"
    y = NARROW if scaled else dtype
    added = len(variant.elements) - scaled == 5
    rows = {"x": "ldx", "y": "ldy", **({"residual": "ldr", "sum": "ldt"} if added else {})}
    wide, pieces = (DTYPES[of].filling(ALIGNMENT_BYTES) for of in (dtype, y))
    symbols = {
        "m": Symbol(32, 1),
        "n": Symbol(32, pieces),
        **{of: Symbol(64, pieces if name == "y" else wide) for name, of in rows.items()},
    }

    def matrix(name: str, of: str) -> Argument:
        return TensorArgument(name, of, ("m", "n"), (rows[name], 1), ALIGNMENT_BYTES)

    tree: list[Argument] = [
        matrix("x", dtype),
        *([matrix("residual", dtype)] if added else []),
        TensorArgument("weight", dtype, ("n",), (1,), ALIGNMENT_BYTES),
        matrix("y", y),
        *([scale_argument(variant.scaling, "m", symbols, "N")] if scaled else []),
        *([matrix("sum", dtype)] if added else []),
        ScalarArgument("eps", "f32"),
        StreamArgument("stream"),
    ]
    made = RmsNorm(variant.integer("threads"), bool(variant.options["overlap"]), scaled)
    return Buildable(made, stand_ins_by_name(tree, symbols, _OPERANDS), tree, symbols)
