"""What providers share: the arguments of a GEMM, stand-ins to compile with, and a digest of sources.

Knows nothing of any particular provider, and imports no compiler until `stand_ins` is called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from runtime.dtypes import DTYPES
from runtime.gemm.signature import Epilogue, Operand, extra_operands

from ..search.provider import ProviderError
from ..search.variants import Variant

_ALIGNMENT_BYTES = 16
_WORKSPACE_ALIGNMENT_BYTES = 128  # cuMemAlloc gives at least that


def gemm_tensors(variant: Variant) -> tuple[dict[str, dict[str, int]], list[dict[str, Any]]]:
    """The symbols of a GEMM's tensors, and their argument nodes: every extent and leading stride free.

    A, B and D, then what `runtime.gemm.signature.extra_operands` lists. Extents are m, n, k, l (batch), p (columns of D
    where the epilogue is gated), kb and nb (blocks of 128 of K and N); leading strides lda, ldb and so on. scale_a of
    block scaling has both strides free.
    """
    gated = Epilogue.of(variant.epilogue).gated
    batch = ("batch",) if variant.batched else ()
    operands = (
        Operand("a", variant.a, (*batch, "M", "K")),
        Operand("b", variant.b, (*batch, "N", "K")),
        Operand("d", variant.d, (*batch, "M", "P" if gated else "N")),
        *extra_operands(variant.d, variant.scaling, variant.epilogue, variant.batched),
    )
    whole = {t: _ALIGNMENT_BYTES // DTYPES[t].bytes for t in DTYPES}  # elements in an access
    columns = whole[variant.d]
    if variant.b_major == "n":
        columns = max(columns, whole[variant.b])
    divisibility = {"m": 1, "n": columns, "k": max(whole[variant.a], whole[variant.b]), "l": 1, "kb": 1, "nb": 1}
    divisibility["p"] = whole[variant.d]
    names: dict[str, str | int] = {
        "batch": "l",
        "M": "m",
        "N": "n",
        "K": "k",
        "P": "p",
        "K/128": "kb",
        "N/128": "nb",
        "1": 1,
    }
    symbols: dict[str, dict[str, int]] = {}
    tree = []
    for operand in operands:
        shape: list[Any] = [names[axis] for axis in operand.axes]
        symbols |= {e: {"width": 32, "divisibility": divisibility[e]} for e in shape if isinstance(e, str)}
        by_one = operand.name.startswith("scale") and operand.axes != ("N",)  # read one by one, not in whole pieces
        leading = f"ld{operand.name}"
        strides: list[Any] = [leading, 1][-len(shape) :]
        if operand.name == "b" and variant.b_major == "n":
            strides = [1, leading]
        elif operand.name == "scale_a" and len(shape) == 2:
            strides = [leading, "step_scale_a"]
        if len(shape) == 3:
            strides = [f"batch_stride_{operand.name}", *strides]
        pieces = 1 if by_one else whole[operand.dtype]
        symbols |= {s: {"width": 64, "divisibility": pieces} for s in strides if isinstance(s, str)}
        node: dict[str, Any] = {"kind": "tensor", "name": operand.name, "dtype": operand.dtype}
        node["alignment"] = DTYPES[operand.dtype].bytes if by_one else _ALIGNMENT_BYTES
        tree.append(node | {"shape": shape, "strides": strides})
    return symbols, tree


def stand_ins(tree: list[dict[str, Any]], symbols: dict[str, dict[str, int]]) -> list[Any]:
    """What to compile with for the arguments that `tree` describes: fake tensors, pointers and streams, and scalars of
    no matter what value.

    Imports the DSL, so it belongs in a worker process.
    """
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor, make_ptr

    types = {"bf16": cutlass.BFloat16, "f16": cutlass.Float16, "f32": cutlass.Float32, "e4m3": cutlass.Float8E4M3FN}
    types |= {"e5m2": cutlass.Float8E5M2, "u8": cutlass.Uint8}
    types |= {"i64": cutlass.Int64, "i32": cutlass.Int32, "i8": cutlass.Int8}
    free = {n: cute.sym_int(s["width"], divisibility=s["divisibility"], symbol=n) for n, s in symbols.items()}

    def stand_in(node: dict[str, Any]) -> Any:
        if node["kind"] == "tensor":
            shape, strides = (tuple(free.get(e, e) for e in node[part]) for part in ("shape", "strides"))
            return make_fake_tensor(types[node["dtype"]], shape, strides, assumed_align=node["alignment"])
        if node["kind"] == "scalar":
            return types[node["dtype"]](0)
        if node["kind"] == "device":
            return cutlass.Int32(1)
        if node["kind"] == "workspace":
            return make_ptr(cutlass.Uint8, 0, cute.AddressSpace.gmem, assumed_align=_WORKSPACE_ALIGNMENT_BYTES)
        if node["kind"] == "stream":
            return make_fake_stream()
        raise ProviderError(f"no stand-in for an argument of kind {node['kind']!r}")

    return [stand_in(node) for node in tree]


def digest(items: Iterable[tuple[str, bytes]]) -> str:
    """SHA-256 over named contents, in the order of their names; no content can pass for another's name."""
    state = hashlib.sha256()
    for name, content in sorted(items):
        for part in (name.encode(), content):
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
    return state.hexdigest()
