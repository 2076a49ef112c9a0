"""What providers share: the arguments of a GEMM, stand-ins to compile with, and a digest of sources.

Knows nothing of any particular provider, and imports no compiler until `stand_ins` is called.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from runtime.gemm.signature import Epilogue, Operand, extra_operands
from runtime.grouped_gemm import group_operands
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.scaling import TILE_SCALES, symbol_of
from runtime.program.arguments import (
    Argument,
    DeviceArgument,
    ScalarArgument,
    StreamArgument,
    Symbol,
    TensorArgument,
    WorkspaceArgument,
)

from ..search.provider import ProviderError
from ..search.variants import Variant

_ALIGNMENT_BYTES = 16
_SCALE_TILES_ALIGNMENT_BYTES = 32  # what block-scaled kernels of nvidia-cutlass-operators 0.3.0 assume
_WORKSPACE_ALIGNMENT_BYTES = 128  # cuMemAlloc gives at least that


def gemm_tensors(variant: Variant) -> tuple[dict[str, Symbol], list[Argument]]:
    """The symbols of a GEMM's tensors, and these as arguments: every extent and leading stride free.

    A, B and D, then what `runtime.gemm.signature.extra_operands` lists. Extents are m, n, k, l (batch), p (columns of D
    where the epilogue is gated), mb, nb and kb (blocks of M, N and K); leading strides lda, ldb and so on. scale_a has
    both strides free where it is a matrix of scales; tiles of scales have no gap, kt of them for each row of tiles.
    """
    gated = Epilogue.of(variant.epilogue).gated
    batch = ("batch",) if variant.batched else ()
    operands = (
        Operand("a", variant.a, (*batch, "M", "K")),
        Operand("b", variant.b, (*batch, "N", "K")),
        Operand("d", variant.d, (*batch, "M", "P" if gated else "N")),
        *extra_operands(variant.d, variant.scaling, variant.epilogue, variant.batched),
    )
    whole = {t: d.filling(_ALIGNMENT_BYTES) for t, d in DTYPES.items()}  # elements in an access
    columns = whole[variant.d]
    if variant.b_major == "n":
        columns = max(columns, whole[variant.b])
    divisibility = {"n": columns, "k": max(whole[variant.a], whole[variant.b]), "p": whole[variant.d]}
    divisibility["kt"] = TILE_SCALES
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
        alignment = DTYPES[operand.dtype].bytes if by_one else _ALIGNMENT_BYTES
        if tiles:
            alignment = _SCALE_TILES_ALIGNMENT_BYTES
        tree.append(TensorArgument(operand.name, operand.dtype, tuple(shape), tuple(strides), alignment))
    return symbols, tree


def grouped_tensors(
    variant: Variant, rows: str = "contiguous", n_multiple: int = 1
) -> tuple[dict[str, Symbol], list[Argument]]:
    """The symbols of a grouped GEMM's tensors, and these as arguments, in order: A (m, k), B (groups, n, k), ends
    (groups) and D (m, n), or (m, p) where the epilogue is gated, and what `runtime.grouped_gemm.group_operands` lists;
    every extent and leading stride free, but that n is a multiple of `n_multiple`. Where `rows` are "gathered", A is
    (t, k), and indices (m) come before ends; where they are "masked", A and D have groups in front, and there are
    counts (groups) in place of ends."""
    a, b, d = variant.elements
    of_k, of_n = (DTYPES[t].filling(_ALIGNMENT_BYTES) for t in (a, d))
    columns = "p" if Epilogue.of(variant.epilogue).gated else "n"
    symbols = {
        **dict.fromkeys(("m", "groups"), Symbol(32, 1)),
        **{columns: Symbol(32, of_n), "n": Symbol(32, math.lcm(of_n, n_multiple)), "k": Symbol(32, of_k)},
        **dict.fromkeys(("lda", "ldb", "group_stride_b"), Symbol(64, of_k)),
        "ldd": Symbol(64, of_n),
    }
    tree: list[Argument] = [
        TensorArgument("a", a, ("m", "k"), ("lda", 1), _ALIGNMENT_BYTES),
        TensorArgument("b", b, ("groups", "n", "k"), ("group_stride_b", "ldb", 1), _ALIGNMENT_BYTES),
        TensorArgument("ends", "i32", ("groups",), (1,), DTYPES["i32"].bytes),
        TensorArgument("d", d, ("m", columns), ("ldd", 1), _ALIGNMENT_BYTES),
    ]
    if rows == "gathered":
        symbols["t"] = Symbol(32, 1)
        tree[0] = TensorArgument("a", a, ("t", "k"), ("lda", 1), _ALIGNMENT_BYTES)
        tree.insert(2, TensorArgument("indices", "i32", ("m",), (1,), DTYPES["i32"].bytes))
    if rows == "masked":
        symbols |= {"group_stride_a": Symbol(64, of_k), "group_stride_d": Symbol(64, of_n)}
        shapes = ("groups", "m", "k"), ("groups", "m", columns)
        tree[0] = TensorArgument("a", a, shapes[0], ("group_stride_a", "lda", 1), _ALIGNMENT_BYTES)
        tree[2] = TensorArgument("counts", "i32", ("groups",), (1,), DTYPES["i32"].bytes)
        tree[3] = TensorArgument("d", d, shapes[1], ("group_stride_d", "ldd", 1), _ALIGNMENT_BYTES)
    for operand in group_operands(d, variant.scaling, variant.epilogue, rows == "masked"):
        shape = tuple(axis if axis == "groups" else symbol_of(axis) for axis in operand.axes)
        name, by_one = operand.name, operand.name.startswith("scale")  # read one by one, not in whole pieces
        last = f"step_{name}" if operand.layout == "free" else 1
        strides = (f"group_stride_{name}", f"ld{name}", last)[-len(shape) :]
        symbols |= {e: Symbol(32, 1) for e in shape if isinstance(e, str) and e not in symbols}
        symbols |= {stride: Symbol(64, 1 if by_one else of_n) for stride in strides if isinstance(stride, str)}
        alignment = DTYPES[operand.dtype].bytes if by_one else _ALIGNMENT_BYTES
        tree.append(TensorArgument(name, operand.dtype, shape, strides, alignment))
    return symbols, tree


def stand_ins(tree: Iterable[Argument], symbols: Mapping[str, Symbol]) -> list[Any]:
    """What to compile with for the arguments that `tree` describes: fake tensors, pointers and streams, and scalars of
    no matter what value.

    Imports the DSL, so it belongs in a worker process.
    """
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor, make_ptr

    types = {name: getattr(cutlass, d.dsl) for name, d in DTYPES.items() if d.dsl}
    free: dict[int | str, Any] = {
        n: cute.sym_int(s.width, divisibility=s.divisibility, symbol=n) for n, s in symbols.items()
    }

    def stand_in(a: Argument) -> Any:
        if isinstance(a, TensorArgument):
            shape, strides = (tuple(free.get(e, e) for e in part) for part in (a.shape, a.strides))
            return make_fake_tensor(types[a.dtype], shape, strides, assumed_align=a.alignment)
        if isinstance(a, ScalarArgument):
            return types[a.dtype](0)
        if isinstance(a, DeviceArgument):
            return cutlass.Int32(1)
        if isinstance(a, WorkspaceArgument):
            return make_ptr(cutlass.Uint8, 0, cute.AddressSpace.gmem, assumed_align=_WORKSPACE_ALIGNMENT_BYTES)
        if isinstance(a, StreamArgument):
            return make_fake_stream()
        raise ProviderError(f"no stand-in for {a}")

    return [stand_in(a) for a in tree]


def digest(items: Iterable[tuple[str, bytes]]) -> str:
    """SHA-256 over named contents, in the order of their names; no content can pass for another's name."""
    state = hashlib.sha256()
    for name, content in sorted(items):
        for part in (name.encode(), content):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
    return state.hexdigest()
