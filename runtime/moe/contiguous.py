"""Tensors that kernels take without gaps: ids, positions, weights and the like."""

from __future__ import annotations

from ..errors import ArgumentError
from ..program.geometry import contiguous_strides
from ..program.record import TensorView


def contiguous(t: TensorView, name: str, dtype: str) -> TensorView:
    """`t` with the strides of a contiguous tensor; those of extents of 1 say nothing.

    Raises:
        ArgumentError: it has gaps, or elements of another type.
    """
    strides = contiguous_strides(t.shape)
    gaps = any(have != want for n, have, want in zip(t.shape, t.strides, strides, strict=True) if n != 1)
    if t.dtype != dtype or (gaps and 0 not in t.shape):
        raise ArgumentError(
            f"{name} must be {dtype} and contiguous, found {t.dtype} of shape {t.shape} and strides {t.strides}"
        )
    return t._replace(strides=strides)
