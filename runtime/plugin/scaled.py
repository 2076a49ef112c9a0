"""Products with scales as an operator of torch's: `cute_aot::scaled_gemm`, which serves every M.

Where no kernel of the library takes a call, which the library itself refuses in fp8, torch computes it inside.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArgumentError, KernelMiss
from ..numbers.scaling import SCALE_BLOCK
from ..serve.library import Library
from ..torch.operator import DIRECT, OPERATORS, TAGS, Direct, bare, library_of, tell_inductor

# Where it is said that torch computed a call of a library; that of no server, as far as nothing else was said.
_logs: weakref.WeakKeyDictionary[Library, logging.Logger] = weakref.WeakKeyDictionary()


def log_to(lib: Library, log: logging.Logger) -> None:
    """Let calls of `lib` that torch computes be said in `log`."""
    _logs[lib] = log


OPERATORS.define(
    "scaled_gemm(int library, Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType dtype) -> Tensor",
    tags=TAGS,
)


def _scaled_gemm(
    library: int, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    return _computed(library, a, b, scale_a, scale_b, {"dtype": dtype})


def direct(library: int, *_names: str, dtype: torch.dtype) -> Callable[..., None]:
    """What generated code calls in the place of the operator; see `runtime.torch.direct`."""

    def call(
        a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, *, out: torch.Tensor
    ) -> None:
        _computed(library, a, b, scale_a, scale_b, {"out": out})

    return call


def _computed(
    library: int, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, to: dict[str, Any]
) -> torch.Tensor:
    """The product in the element type `to["dtype"]`, or written to `to["out"]`."""
    a, b, scale_a, scale_b = bare(a), bare(b), _in_f32(scale_a), _in_f32(scale_b)
    try:
        found: torch.Tensor = library_of(library).gemm(a, b, scale_a=scale_a, scale_b=scale_b, **to)
    except (KernelMiss, ArgumentError) as error:
        say_once(library_of(library), "an fp8 GEMM", b.shape[0], b.shape[1], error)
        found = _widened(a, scale_a) @ _widened(b, scale_b).T
        found = to["out"].copy_(found) if "out" in to else found.to(to["dtype"])
    return found


def _in_f32(scales: torch.Tensor) -> torch.Tensor:
    """Scales as kernels take them; of checkpoints, some are ue8m0."""
    scales = bare(scales)
    return scales if scales.dtype is torch.float32 else scales.float()


def _widened(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x (rows, K) in float32, scaled: by one number, one for each row, or one for each 1 or 128 rows by 128 columns."""
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    for axis in (0, 1):
        if scales.shape[axis] not in (1, x.shape[axis]):
            scales = scales.repeat_interleave(SCALE_BLOCK, axis).narrow(axis, 0, x.shape[axis])
    return x.float() * scales


def say_once(lib: Library, what: str, n: int, k: int, error: Exception) -> None:
    """Say that torch computes `what` of N and K, since `lib` refused it with this error."""
    reason = getattr(error, "reason", "its operands")
    _say_once(_logs.get(lib, logging.getLogger("cute_aot")), what, n, k, type(error).__name__, reason)


@functools.lru_cache(1024)
def _say_once(log: logging.Logger, what: str, n: int, k: int, error: str, reason: str) -> None:
    log.warning("%s of N %d and K %d was computed by torch, slowly: %s, %s", what, n, k, error, reason)


for _key in ("CUDA", "CPU"):
    OPERATORS.impl("scaled_gemm", _scaled_gemm, _key)


@torch.library.register_fake("cute_aot::scaled_gemm", lib=OPERATORS)
def _fake(library: int, a: torch.Tensor, b: torch.Tensor, _a: Any, _b: Any, dtype: torch.dtype) -> torch.Tensor:
    tell_inductor()
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


SCALED = torch.ops.cute_aot.scaled_gemm.default
DIRECT[SCALED] = Direct(__name__, "direct")
