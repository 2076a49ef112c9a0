"""What code that Inductor generated calls in the place of an operator: the library, with no dispatcher in between.

Each function here is asked once, when generated code is loaded, for the call of one place in it: `library` is the
number by which operators know the library, the names are those of the tensors that the call is given by place, and the
words are what is the same at every call. The call writes to `out`, which Inductor allocated. Generated code is kept on
disk and loaded before the library may be there, so names and parameters here must stay, and the library is looked up
when it is called. Knows nothing of Inductor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..serve.library import Library
from .operator import bare, library_of

Call = Callable[..., None]  # tensors by place, and `out` by keyword


def gemm(
    library: int, *names: str, epilogue: str = "none", overlap: str = "serial", dtype: torch.dtype | None = None
) -> Call:
    """The call of `Library.gemm` with these operands, a and b first; `dtype` is that of `out`."""
    given = {"epilogue": (epilogue, "none"), "overlap": (overlap, "serial")}
    words: Any = {name: word for name, (word, usual) in given.items() if word != usual}
    extras = names[2:]
    name = extras[0] if extras else ""

    # Most calls have two or three operands, where a loop over them takes longer than all the rest of this.
    def of_two(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
        library_of(library).gemm(bare(a), bare(b), out=out, **words)

    def of_three(a: torch.Tensor, b: torch.Tensor, third: torch.Tensor, *, out: torch.Tensor) -> None:
        library_of(library).gemm(bare(a), bare(b), out=out, **{name: bare(third)}, **words)

    def of_more(a: torch.Tensor, b: torch.Tensor, *more: torch.Tensor, out: torch.Tensor) -> None:
        given = dict(zip(extras, map(bare, more), strict=True))
        library_of(library).gemm(bare(a), bare(b), out=out, **given, **words)

    return (of_two, of_three, of_more)[min(len(extras), 2)]


def add_rmsnorm(library: int, *_names: str, eps: float) -> Call:
    """The call of `Library.call` for RMSNorm with a residual; `out` (2, ..., N) is the norm and the sum."""

    def launch(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> None:
        norm_and_sum(library_of(library), bare(x), bare(residual), bare(weight), out, eps)

    return launch


def norm_and_sum(
    lib: Library, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    """Write RMSNorm(x + residual), and the sum, to out (2, ..., N)."""
    words, held = ("rmsnorm", "none", eps), (x, residual, weight, out)
    if not lib.launch_packed(words, *held):
        both = out.unbind()
        lib.call_packed(words, held, (0, 2, 1, 3, 3), "rmsnorm", x, weight, residual=residual, out=both, eps=eps)


def call(library: int, operation: str, tensors: int, /, *names: str, **words: Any) -> Call:
    """The call of `Library.call` for an operation that takes its first `tensors` by place and others by keyword."""
    by_keyword = names[tensors:]

    def launch(*given: torch.Tensor, out: torch.Tensor) -> None:
        inputs = list(map(bare, given))
        more = dict(zip(by_keyword, inputs[tensors:], strict=True))
        library_of(library).call(operation, *inputs[:tensors], out=out, **more, **words)

    return launch
