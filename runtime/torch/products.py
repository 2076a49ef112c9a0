"""Which matrix products of a compiled graph an archive can compute, by their shapes, strides and element types.

Knows nothing of graphs or of Inductor: extents are integers, or symbols of torch's where they are not known.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..errors import ArgumentError
from ..gemm.signature import Signature
from ..numbers.epilogue import Epilogue
from ..program.tensor import dtype_name
from ..serve.library import Library
from .layers import choose
from .operator import ALIGNMENT_BYTES

MATMULS = {
    torch.ops.aten.mm.default: "mm",
    torch.ops.aten.addmm.default: "addmm",
    torch.ops.aten.bmm.default: "bmm",
}


class Operand(NamedTuple):
    """A tensor of a graph; strides and offset in elements, all extents integers or `torch.SymInt`."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, x: torch.Tensor) -> Operand:
        """What is known of a tensor, fake or real."""
        return cls(tuple(x.shape), tuple(x.stride()), x.storage_offset(), x.dtype, str(x.device))


def value_of(node: Any) -> torch.Tensor | None:
    """The fake tensor that a node of a graph stands for, where that is known."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def is_scaled(node: torch.fx.Node) -> bool:
    """Whether a matrix product of a graph has an alpha or a beta that is not 1."""
    return any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))


def match(
    lib: Library, overlap: str, d: Operand, a: Operand, b: Operand, bias: Operand | None, scaled: bool
) -> tuple[Signature | None, str]:
    """The signature by which `lib` has a checked kernel for d = a @ b + bias, or None and why there is none.

    Checked are kernels of tuned entries, and those that a table predicts whose functions were checked.

    a is (..., M, K) and b (..., K, N), batched if both are of three dimensions. `scaled` says that the product has an
    alpha or a beta that is not 1.
    """
    extents = [*b.shape, a.shape[-1], *(a.shape[:-2])]
    if not all(type(n) is int and n > 0 for n in extents):
        return None, "N, K or batch is not static, or is 0"
    if scaled:
        return None, "alpha or beta is not 1"
    n, k = b.shape[-1], b.shape[-2]
    if bias is not None and (bias.shape != (n,) or bias.strides != (1,) or bias.dtype != d.dtype):
        return None, "the bias is not a vector of N elements of D's type"
    if any(x.device != lib.device for x in (d, a, b, bias or a)):
        return None, f"its device is {a.device}, the library's {lib.device}"
    try:
        of_a, of_b, of_d = (dtype_name(x.dtype) for x in (a, b, d))
    except ArgumentError:
        return None, f"its element type is {a.dtype}"
    major = "n" if b.strides[-2] != 1 < k and b.strides[-1] == 1 else "k"
    if reason := _layout_problem(a, b, d, major):
        return None, reason
    batch = b.shape[0] if len(b.shape) == 3 else 1
    word = Epilogue(bias=bias is not None).word()
    return choose(lib, Signature(of_a, of_b, of_d, "f32", word, n, k, batch, b_major=major, overlap=overlap))


def _layout_problem(a: Operand, b: Operand, d: Operand, major: str) -> str:
    """What of these strides and offsets no kernel takes, or, of the result, the operator does not give."""
    of_b = (b.strides[-2], b.strides[-1]) if major == "k" else (b.strides[-1], b.strides[-2])
    for name, x, (inner, outer) in (("a", a, (a.strides[-1], a.strides[-2])), ("b", b, of_b)):
        unit = ALIGNMENT_BYTES // x.dtype.itemsize
        steps = [outer, x.offset]
        if len(x.shape) == 3 and not statically_known_true(x.strides[0] == x.shape[1] * x.shape[2]):
            steps.append(x.strides[0])
        expanded = any(type(step) is int and step == 0 for step in x.strides)
        if inner != 1 or expanded or any(type(step) is not int or step % unit for step in steps):
            return f"strides {x.strides} or offset of {name}"
    strides = (d.shape[-1], 1) if len(d.shape) == 2 else (d.shape[-2] * d.shape[-1], d.shape[-1], 1)
    if not all(statically_known_true(x == y) for x, y in zip(d.strides, strides, strict=True)):
        return f"the result has strides {d.strides}, not row-major"
    return ""
