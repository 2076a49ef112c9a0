"""A product of gates with the activation after it, as an operator of torch's: `cute_aot::gated`.

One kernel computes both or, at the M where an archive says that this is faster, a product's kernel and then the
server's own activation. Knows nothing of who puts it into a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..torch.operator import OPERATORS, TAGS, bare, library_of
from .activations import swiglu

EVERY_M = 2**31 - 1  # the end of an interval without end: operators take integers alone
Activation = Callable[[torch.Tensor], torch.Tensor]
# By the number of a library, since operators take no functions; torch's where no server gave its own.
_activations: dict[int, Activation] = {}


def use(library: int, activation: Activation) -> None:
    """Let calls of this library take a server's own activation, (M, D) of (M, 2 D), where it is computed apart."""
    _activations[library] = activation


def activation_of(library: int) -> Activation:
    """What `use` was told for this library."""
    return _activations.get(library, swiglu)


def flat(apart: Sequence[tuple[int, int | None]]) -> tuple[int, ...]:
    """Intervals of M, of an entry of an archive, as the operator takes them: first, last, first, last."""
    return tuple(m for first, last in apart for m in (first, EVERY_M if last is None else last))


# Generated code calls it through the dispatcher: a server's activation gives its result where it likes, and a copy to
# where Inductor likes it would be one more kernel.
OPERATORS.define(
    "gated(int library, Tensor a, Tensor b, str epilogue, str overlap, str overlap_apart, int[] apart) -> Tensor",
    tags=TAGS,
)


def _gated(
    library: int, a: torch.Tensor, b: torch.Tensor, epilogue: str, overlap: str, overlap_apart: str, apart: list[int]
) -> torch.Tensor:
    lib, a, b = library_of(library), bare(a), bare(b)
    m = a.numel() // a.shape[-1]
    if any(first <= m <= last for first, last in zip(apart[::2], apart[1::2], strict=True)):
        return activation_of(library)(lib.gemm(a, b, overlap=overlap_apart))
    found: torch.Tensor = lib.gemm(a, b, epilogue=epilogue, overlap=overlap)
    return found


for _key in ("CUDA", "CPU"):
    OPERATORS.impl("gated", _gated, _key)


@torch.library.register_fake("cute_aot::gated", lib=OPERATORS)
def _fake(library: int, a: torch.Tensor, b: torch.Tensor, *_how: object) -> torch.Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[0] // 2))


GATED = torch.ops.cute_aot.gated.default
