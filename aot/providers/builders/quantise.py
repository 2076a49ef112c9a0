"""Rows in 8 bits with their scales."""

from __future__ import annotations

from runtime.numbers.dtypes import DTYPES
from runtime.numbers.quantised import scale_axes
from runtime.numbers.scaling import symbol_of
from runtime.program.arguments import Argument, StreamArgument, Symbol, TensorArgument

from ...search.provider import Buildable
from ...search.variants import Variant
from ..arguments import ALIGNMENT_BYTES, stand_ins_by_name

_ARGUMENTS = "x", "ends", "y", "scale", "stream"  # in the order that the kernel takes them


def quantise(variant: Variant) -> Buildable:
    """Over x and y (m, k), x (m, 2 k) with gates, perhaps ends of groups, scales, and a stream; rows of x and y may lie
    apart."""
    from ...kernels.quantise import Quantise

    x, *ends, y, _ = variant.elements
    pieces, gated = DTYPES[y].filling(ALIGNMENT_BYTES), variant.epilogue != "none"
    symbols = {
        "m": Symbol(32, 1),
        **({"groups": Symbol(32, 1)} if ends else {}),
        "k": Symbol(32, pieces),
        **({"kx": Symbol(32, 2 * pieces)} if gated else {}),
        **dict.fromkeys(("ldx", "ldy"), Symbol(64, pieces)),
    }
    tree: list[Argument] = [
        TensorArgument("x", x, ("m", "kx" if gated else "k"), ("ldx", 1), ALIGNMENT_BYTES),
        *([TensorArgument("ends", "i32", ("groups",), (1,), 4)] if ends else []),
        TensorArgument("y", y, ("m", "k"), ("ldy", 1), ALIGNMENT_BYTES),
        scale_argument(variant.scaling, "m", symbols),
        StreamArgument("stream"),
    ]
    by_row, overlap = variant.scaling == "row_column", bool(variant.options["overlap"])
    made = Quantise(by_row, variant.integer("threads"), overlap, variant.epilogue)
    return Buildable(made, stand_ins_by_name(tree, symbols, _ARGUMENTS), tree, symbols)


def scale_argument(scaling: str, rows: str, symbols: dict[str, Symbol], along: str = "K") -> TensorArgument:
    """The scales of `rows`, a symbol, `along` an axis, as an argument; those of its symbols that `symbols` lacks are
    added there."""
    _, *blocks = (symbol_of(axis) for axis in scale_axes(scaling, along))
    strides = ("lds", 1)[-1 - len(blocks) :]
    symbols |= {str(block): Symbol(32, 1) for block in blocks} | ({"lds": Symbol(64, 1)} if blocks else {})
    return TensorArgument("scale", "f32", (rows, *blocks), strides, DTYPES["f32"].bytes)
