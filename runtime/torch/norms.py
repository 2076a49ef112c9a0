"""RMSNorm behind the addition of a residual as an operator of torch's, `cute_aot::add_rmsnorm`.

It returns both in one tensor (2, ..., N), as generated code calls what returns one without torch's dispatcher.
"""

from __future__ import annotations

import torch

from ..errors import ArgumentError
from ..rmsnorm import USUAL_EPS
from ..serve.library import Library
from . import direct
from .direct_calls import DIRECT, Direct
from .operator import OPERATORS, TAGS, number_of, refuse_gradient, tell_inductor

OPERATORS.define("add_rmsnorm(int library, Tensor x, Tensor residual, Tensor weight, float eps) -> Tensor", tags=TAGS)


def _add_rmsnorm(
    library: int, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    both = x.new_empty((2, *x.shape))
    launched = direct.add_rmsnorm(library, "x", "residual", "weight", eps=eps)
    launched(x, residual, weight, out=both)
    return both


for _key in ("CUDA", "CPU"):  # the CPU too, where the library itself says what is wrong
    OPERATORS.impl("add_rmsnorm", _add_rmsnorm, _key)


@torch.library.register_fake("cute_aot::add_rmsnorm", lib=OPERATORS)
def _fake(library: int, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    tell_inductor()
    given = x, residual, weight
    if not x.dim() or residual.shape != x.shape or weight.shape != x.shape[-1:]:
        shapes = ", ".join(str(tuple(t.shape)) for t in given)
        raise ArgumentError(f"add_rmsnorm takes x and residual (..., N) and weight (N); found {shapes}")
    if len({(t.dtype, t.device) for t in given}) > 1:
        types = ", ".join(f"{t.dtype} on {t.device}" for t in given)
        raise ArgumentError(f"x, residual and weight must be of one element type and on one device; found {types}")
    return x.new_empty((2, *x.shape))


ADD_RMSNORM = torch.ops.cute_aot.add_rmsnorm.default
DIRECT[ADD_RMSNORM] = Direct(f"{__package__}.direct", "add_rmsnorm")


def add_rmsnorm(
    lib: Library, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = USUAL_EPS
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm(x + residual), x + residual), in x's type, for x and residual (..., N) and weight (N), in eager mode and
    inside torch.compile (fullgraph, dynamic M): `lib.call("rmsnorm", x, weight, residual=residual, eps=eps)`.

    Raises:
        ArgumentError: the tensors do not go together, or a gradient would have to be recorded.
        KernelMiss: the archive has no such signature.
    """
    number = number_of(lib)
    refuse_gradient("add_rmsnorm", (x, residual, weight))
    y, total = ADD_RMSNORM(number, x, residual, weight, eps)
    return y, total
