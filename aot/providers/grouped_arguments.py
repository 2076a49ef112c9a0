"""The tensors of a grouped GEMM as arguments of a function, whoever's kernel it is."""

from __future__ import annotations

import math

from runtime.grouped_gemm import group_operands
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.epilogue import Epilogue
from runtime.numbers.scaling import FRAGMENTS, SCALINGS, symbol_of
from runtime.numbers.weights import BLOCK_COLUMNS, BLOCK_ROWS
from runtime.program.arguments import Argument, Symbol, TensorArgument

from ..search.variants import Variant
from .arguments import ALIGNMENT_BYTES


def grouped_tensors(
    variant: Variant, rows: str = "contiguous", n_multiple: int = 1
) -> tuple[dict[str, Symbol], list[Argument]]:
    """The symbols of a grouped GEMM's tensors, and these as arguments, in order: A (m, k), B (groups, n, k), ends
    (groups) and D (m, n), or (m, p) where the epilogue is gated, and what `runtime.grouped_gemm.group_operands` lists;
    every extent and leading stride free, but that n is a multiple of `n_multiple`. Where `rows` are "gathered", A is
    (t, k), and indices (m) come before ends; where they are "masked", A and D have groups in front, and there are
    counts (groups) in place of ends. Prepared weights and their scales have no gap in a group."""
    a, b, d = variant.elements
    of_k, of_n = (DTYPES[t].filling(ALIGNMENT_BYTES) for t in (a, d))
    columns = "p" if Epilogue.of(variant.epilogue).gated else "n"
    symbols = {
        **dict.fromkeys(("m", "groups"), Symbol(32, 1)),
        **{columns: Symbol(32, of_n), "n": Symbol(32, math.lcm(of_n, n_multiple)), "k": Symbol(32, of_k)},
        **dict.fromkeys(("lda", "ldb", "group_stride_b"), Symbol(64, of_k)),
        "ldd": Symbol(64, of_n),
    }
    tree: list[Argument] = [
        TensorArgument("a", a, ("m", "k"), ("lda", 1), ALIGNMENT_BYTES),
        TensorArgument("b", b, ("groups", "n", "k"), ("group_stride_b", "ldb", 1), ALIGNMENT_BYTES),
        TensorArgument("ends", "i32", ("groups",), (1,), DTYPES["i32"].bytes),
        TensorArgument("d", d, ("m", columns), ("ldd", 1), ALIGNMENT_BYTES),
    ]
    if rows == "gathered":
        symbols["t"] = Symbol(32, 1)
        tree[0] = TensorArgument("a", a, ("t", "k"), ("lda", 1), ALIGNMENT_BYTES)
        tree.insert(2, TensorArgument("indices", "i32", ("m",), (1,), DTYPES["i32"].bytes))
    if rows == "masked":
        symbols |= {"group_stride_a": Symbol(64, of_k), "group_stride_d": Symbol(64, of_n)}
        shapes = ("groups", "m", "k"), ("groups", "m", columns)
        tree[0] = TensorArgument("a", a, shapes[0], ("group_stride_a", "lda", 1), ALIGNMENT_BYTES)
        tree[2] = TensorArgument("counts", "i32", ("groups",), (1,), DTYPES["i32"].bytes)
        tree[3] = TensorArgument("d", d, shapes[1], ("group_stride_d", "ldd", 1), ALIGNMENT_BYTES)
    prepared = SCALINGS[variant.scaling].layout == FRAGMENTS
    if prepared:
        symbols["n"] = Symbol(32, math.lcm(symbols["n"].divisibility, BLOCK_ROWS))
        symbols |= {"k": Symbol(32, BLOCK_COLUMNS), "group_stride_b": Symbol(64, DTYPES[b].filling(ALIGNMENT_BYTES))}
        del symbols["ldb"]
        tree[1] = TensorArgument("b", b, ("groups", "n", "k"), ("group_stride_b", "k", 1), ALIGNMENT_BYTES)
    for operand in group_operands(d, variant.scaling, variant.epilogue, rows == "masked"):
        shape = tuple(axis if axis == "groups" else symbol_of(axis) for axis in operand.axes)
        if operand.layout == "tiles":
            pieces = DTYPES[operand.dtype].filling(ALIGNMENT_BYTES)
            symbols |= {e: Symbol(32, 1) for e in shape if isinstance(e, str) and e not in symbols}
            symbols[f"group_stride_{operand.name}"] = Symbol(64, pieces)
            strides: tuple[int | str, ...] = (f"group_stride_{operand.name}", shape[-1], 1)
            tree.append(TensorArgument(operand.name, operand.dtype, shape, strides, ALIGNMENT_BYTES))
            continue
        name, by_one = operand.name, operand.name.startswith("scale")  # read one by one, not in whole pieces
        last = f"step_{name}" if operand.layout == "free" else 1
        strides = (f"group_stride_{name}", f"ld{name}", last)[-len(shape) :]
        symbols |= {e: Symbol(32, 1) for e in shape if isinstance(e, str) and e not in symbols}
        symbols |= {stride: Symbol(64, 1 if by_one else of_n) for stride in strides if isinstance(stride, str)}
        alignment = DTYPES[operand.dtype].bytes if by_one else ALIGNMENT_BYTES
        tree.append(TensorArgument(name, operand.dtype, shape, strides, alignment))
    return symbols, tree
