"""The tensors of a GEMM as arguments of a function, whoever's kernel it is."""

from __future__ import annotations

import math
from typing import Any

from runtime.gemm.signature import Operand, extra_operands
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.epilogue import Epilogue
from runtime.numbers.scaling import FRAGMENTS, SCALINGS, TILE_SCALES, symbol_of
from runtime.numbers.weights import BLOCK_COLUMNS, BLOCK_ROWS
from runtime.program.arguments import Argument, Symbol, TensorArgument

from ..search.variants import Variant
from .arguments import ALIGNMENT_BYTES

_SCALE_TILES_ALIGNMENT_BYTES = 32  # what block-scaled kernels of nvidia-cutlass-operators 0.3.0 assume


def gemm_tensors(variant: Variant, n_multiple: int = 1) -> tuple[dict[str, Symbol], list[Argument]]:
    """The symbols of a GEMM's tensors, and these as arguments: every extent and leading stride free, but
    that n is a multiple of `n_multiple`.

    A, B and D, then what `runtime.gemm.signature.extra_operands` lists. Extents are m, n, k, l (batch), p (columns of D
    where the epilogue is gated), mb, nb and kb (blocks of M, N and K); leading strides lda, ldb and so on. scale_a has
    both strides free where it is a matrix of scales; tiles of scales have no gap, kt of them for each row of tiles.
    """
    gated = Epilogue.of(variant.epilogue).gated
    fragments = SCALINGS[variant.scaling].layout == FRAGMENTS
    batch = ("batch",) if variant.batched else ()
    operands = (
        Operand("a", variant.a, (*batch, "M", "K")),
        Operand("b", variant.b, (*batch, "N", "K"), "tiles" if fragments else "rows"),
        Operand("d", variant.d, (*batch, "M", "P" if gated else "N")),
        *extra_operands(variant.d, variant.scaling, variant.epilogue, variant.batched),
    )
    whole = {t: d.filling(ALIGNMENT_BYTES) for t, d in DTYPES.items()}  # elements in an access
    columns = whole[variant.d]
    if variant.b_major == "n":
        columns = max(columns, whole[variant.b])
    divisibility = {
        "n": math.lcm(columns, n_multiple),
        "k": max(whole[variant.a], whole[variant.b]),
        "p": whole[variant.d],
    }
    divisibility["kt"] = TILE_SCALES
    if fragments:
        divisibility |= {"n": BLOCK_ROWS, "k": BLOCK_COLUMNS}
    symbols: dict[str, Symbol] = {}
    tree = list[Argument]()
    for operand in operands:
        shape: list[Any] = [symbol_of(axis) for axis in operand.axes]
        symbols |= {e: Symbol(32, divisibility.get(e, 1)) for e in shape if isinstance(e, str)}
        tiles = operand.layout == "tiles"
        # Read one by one, not in whole pieces.
        by_one = operand.name.startswith("scale") and operand.axes != ("N",) and not tiles
        leading = f"ld{operand.name}"
        strides: list[Any] = [leading, 1][-len(shape) :]
        if operand.name == "b" and variant.b_major == "n":
            strides = [1, leading]
        elif tiles:
            strides = [shape[-1], 1]
        elif operand.name == "scale_a" and len(shape) == 2:
            strides = [leading, "step_scale_a"]
        if len(shape) == 3:
            strides = [f"batch_stride_{operand.name}", *strides]
        pieces = 1 if by_one else whole[operand.dtype]
        symbols |= {s: Symbol(64, pieces) for s in strides if isinstance(s, str) and s not in symbols}
        alignment = DTYPES[operand.dtype].bytes if by_one else ALIGNMENT_BYTES
        if tiles:
            alignment = _SCALE_TILES_ALIGNMENT_BYTES
        tree.append(TensorArgument(operand.name, operand.dtype, tuple(shape), tuple(strides), alignment))
    return symbols, tree
