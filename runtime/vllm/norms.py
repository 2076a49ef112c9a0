"""RMSNorm in vLLM's models, by kernels of an archive that let the GEMM behind them begin early: which modules have
one, and how a module is left to it.

A GEMM that overlaps can load weights while the kernel before it runs only if that kernel lets it begin, as vLLM's
norms do not. Knows modules by the attributes that vLLM gives them, and nothing of archives' files.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import AotError
from ..plugin.linears import FP8, NORM, Besides, Decision, is_tuned, vector_problem
from ..program.tensor import dtype_name
from ..rmsnorm import RMSNORM, Signature
from ..serve.library import Library
from ..torch.norms import ADD_RMSNORM
from ..torch.operations import operators_of
from .packed_tokens import Rows, norm_of

_NUMBER, _PLAIN, _OWN = "_cute_aot_number", "_cute_aot_plain_norm", "_cute_aot_forward"
_FORWARD = "_forward_method"  # what vLLM's custom operators call, chosen when they are made
_READ = "weight", "has_weight", "variance_size_override", "variance_epsilon", _FORWARD


def norms(model: Any, rms_norm: Any) -> Iterator[Any]:
    """The modules of a model that are vLLM's RMSNorm of whole rows, x * weight and no other."""
    every: Iterable[Any] = model.modules()
    for module in every:
        known = type(module) is rms_norm and all(hasattr(module, name) for name in _READ)
        if known and module.has_weight and module.variance_size_override is None:
            yield module


def quantises_apart(decisions: Iterable[Decision], left: Iterable[tuple[str, str]]) -> bool:
    """Whether no norm of a model is fused with quantising tokens: `decisions` about its layers leave tokens of all fp8
    layers to the archive, and of quantised ones that are `left` to the server, by kind and reason, there is none."""
    return all(each.besides for each in decisions if each.kind == FP8) and not any(kind == FP8 for kind, _ in left)


def decide(lib: Library, module: Any, read: Iterable[Rows] = ()) -> Decision:
    """What `lib` has for a norm with a residual and, as `biased`, for one without, and `besides` for one that quantises
    what is in `read`; only what was tuned."""
    weight = module.weight
    if problem := vector_problem(lib, weight):
        return Decision(NORM, reason=problem)
    try:
        dtype = dtype_name(weight.dtype)
        added, plain = (Signature(dtype, dtype, dtype, weight.shape[0], of) for of in (dtype, "none"))
        with_residual, without = (s.key() if lib.is_tuned(s) else "" for s in (added, plain))
    except AotError:  # an element type, or no table of this operation
        with_residual = without = ""
    if not with_residual:
        return Decision(NORM, biased=without, reason="its norm was not tuned")
    besides = set[Besides]()
    for rows in read:
        quantises = norm_of(dtype, weight.shape[0], rows.scaling)
        if (rows.dtype, rows.k) == (dtype, weight.shape[0]) and is_tuned(lib, quantises):
            besides.add(Besides(quantises.key(), rows.few + 1, None))
    return Decision(NORM, with_residual, without, besides=tuple(sorted(besides)))


def key_of(module: Any) -> str:
    """The key of the signature that a norm with a residual has, empty where no signature has its element type."""
    try:
        dtype = dtype_name(module.weight.dtype)
    except AotError:
        return ""
    of = Signature(dtype, dtype, dtype, module.weight.shape[0], dtype)
    return of.key() if RMSNORM.of_key(of.key()) == of else ""


def take(module: Any, decision: Decision, number: int) -> None:
    """Let the library with this number compute a norm, as was decided."""
    restore(module)
    setattr(module, _NUMBER, number)
    setattr(module, _PLAIN, bool(decision.biased))
    setattr(module, _OWN, getattr(module, _FORWARD))
    setattr(module, _FORWARD, types.MethodType(_computed, module))


def restore(module: Any) -> None:
    """Let vLLM compute a norm."""
    if _OWN in vars(module):
        setattr(module, _FORWARD, getattr(module, _OWN))
        for name in (_NUMBER, _PLAIN, _OWN):
            delattr(module, name)


_RMSNORM = operators_of("rmsnorm").functional


def _computed(module: Any, x: Any, residual: Any = None) -> Any:
    """What vLLM's `RMSNorm` gives; torch.compile traces it."""
    number, weight, eps = getattr(module, _NUMBER), module.weight, module.variance_epsilon
    if x.dtype != weight.dtype or x.dim() < 2 or (residual is not None and residual.dtype != x.dtype):
        return getattr(module, _OWN)(x) if residual is None else getattr(module, _OWN)(x, residual)
    if residual is not None:
        y, total = ADD_RMSNORM(number, x.contiguous(), residual.contiguous(), weight, eps)
        return y, total
    if getattr(module, _PLAIN) and x.is_contiguous():  # else a copy would come before it, as of a slice of a product
        return _RMSNORM(number, x, weight, eps=eps)
    return getattr(module, _OWN)(x)
