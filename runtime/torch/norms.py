"""RMSNorm behind the addition of a residual as an operator of torch's, `cute_aot::add_rmsnorm`, which returns both."""

from __future__ import annotations

import torch

from ..rmsnorm import USUAL_EPS
from ..serve.library import Library
from .operator import OPERATORS, TAGS, bare, library_of, number_of, refuse_gradient, register

OPERATORS.define(
    "add_rmsnorm(int library, Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)", tags=TAGS
)


def _add_rmsnorm(
    library: int, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    found: tuple[torch.Tensor, torch.Tensor] = library_of(library).call(
        "rmsnorm", bare(x), bare(weight), residual=bare(residual), eps=eps
    )
    return found


for _key in ("CUDA", "CPU"):  # the CPU too, where the library itself says what is wrong
    OPERATORS.impl("add_rmsnorm", _add_rmsnorm, _key)


@torch.library.register_fake("cute_aot::add_rmsnorm", lib=OPERATORS)
def _fake(
    library: int, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), residual.new_empty(x.shape)


ADD_RMSNORM = torch.ops.cute_aot.add_rmsnorm.default


def add_rmsnorm(
    lib: Library, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = USUAL_EPS
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm(x + residual), x + residual) for x and residual (..., N) and weight (N), in eager mode and inside
    torch.compile (fullgraph, dynamic M): `lib.call("rmsnorm", x, weight, residual=residual, eps=eps)`.

    Raises:
        ArgumentError: the tensors do not go together, or a gradient would have to be recorded.
        KernelMiss: the archive has no such signature.
    """
    number = number_of(id(lib)) if torch.compiler.is_compiling() else register(lib)
    refuse_gradient("add_rmsnorm", (x, residual, weight))
    found: tuple[torch.Tensor, torch.Tensor] = ADD_RMSNORM(number, x, residual, weight, eps)
    return found
