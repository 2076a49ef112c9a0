"""What a mixture of experts does around its grouped GEMMs."""

from __future__ import annotations

from runtime.numbers.dtypes import DTYPES
from runtime.numbers.quantised import NARROW
from runtime.program.arguments import Argument, StreamArgument, Symbol, TensorArgument

from ...search.provider import Buildable
from ...search.variants import Variant
from ..arguments import stand_ins_by_name
from .quantise import scale_argument

# In the order that the kernel takes them.
_OF_PERMUTE = "x", "ids", "expert_map", "weights", "rows", "ends", "positions", "scale", "stream"
_OF_COMBINE = "rows", "positions", "weights", "y", "stream"


def moe_permute(variant: Variant) -> Buildable:
    """Over x (m, k), ids (m, top_k), perhaps an expert map, perhaps weights (m, top_k), rows (r, k), ends, positions,
    perhaps scales, and a stream."""
    from ...kernels.moe_permute import MoePermute

    scaled = variant.scaling != "none"
    weighted = "f32" in variant.elements[:4]  # before rows
    mapped, rows = len(variant.elements) - scaled - weighted == 6, NARROW if scaled else variant.a
    pieces = DTYPES[rows].filling(16)
    symbols = {
        **dict.fromkeys(("m", "top_k", "r", "experts", *(("global_experts",) if mapped else ())), Symbol(32, 1)),
        "k": Symbol(32, pieces),
        **dict.fromkeys(("ldx", "ldr"), Symbol(64, pieces)),
    }
    tree: list[Argument] = [
        TensorArgument("x", variant.a, ("m", "k"), ("ldx", 1), 16),
        TensorArgument("ids", "i32", ("m", "top_k"), ("top_k", 1), 4),
        *([TensorArgument("expert_map", "i32", ("global_experts",), (1,), 4)] if mapped else []),
        *([TensorArgument("weights", "f32", ("m", "top_k"), ("top_k", 1), 4)] if weighted else []),
        TensorArgument("rows", rows, ("r", "k"), ("ldr", 1), 16),
        TensorArgument("ends", "i32", ("experts",), (1,), 4),
        TensorArgument("positions", "i32", ("m", "top_k"), ("top_k", 1), 4),
    ]
    if scaled:
        tree.append(scale_argument(variant.scaling, "r", symbols))
    tree.append(StreamArgument("stream"))
    arguments = stand_ins_by_name(tree, symbols, _OF_PERMUTE)
    schedule, overlap = str(variant.options["schedule"]), bool(variant.options["overlap"])
    made = MoePermute(schedule, variant.integer("threads"), overlap, variant.scaling, mapped)
    return Buildable(made, arguments, tree, symbols)


def moe_combine(variant: Variant) -> Buildable:
    """Over rows (r, n), positions (m, top_k), perhaps weights (m, top_k), y (m, n) and a stream; rows of rows and y may
    lie apart."""
    from ...kernels.moe_combine import MoeCombine

    symbols = {
        **dict.fromkeys(("m", "r", "top_k"), Symbol(32, 1)),
        "n": Symbol(32, 8),
        **dict.fromkeys(("ldr", "ldy"), Symbol(64, 8)),
    }
    rows, _, *weights, y = variant.elements
    tree: list[Argument] = [
        TensorArgument("rows", rows, ("r", "n"), ("ldr", 1), 16),
        TensorArgument("positions", "i32", ("m", "top_k"), ("top_k", 1), 4),
        *([TensorArgument("weights", "f32", ("m", "top_k"), ("top_k", 1), 4)] if weights else []),
        TensorArgument("y", y, ("m", "n"), ("ldy", 1), 16),
        StreamArgument("stream"),
    ]
    made = MoeCombine(variant.integer("threads"), variant.integer("at_once"), bool(variant.options["overlap"]))
    return Buildable(made, stand_ins_by_name(tree, symbols, _OF_COMBINE), tree, symbols)
