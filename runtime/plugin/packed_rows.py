"""Packed rows: M * K elements of e4m3 and behind them their scales, in the memory of M * K elements of 16 bits.

So what quantises gives one tensor of the shape and type that was there, which only a GEMM that knows may read.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..numbers.quantised import scale_shape
from ..serve.library import Library
from .scaled_products import in_f32


def pack(lib: Library, x: torch.Tensor, scaling: str, rows: torch.Tensor, activation: str = "none") -> None:
    """Pack x into rows (M, K): as it is, or the activation of x (M, 2 K).

    Raises:
        KernelMiss, ArgumentError: the library refuses it.
    """
    words = "quantise", scaling, activation
    if not lib.launch_packed(words, x, rows):
        out = unpacked(rows, scaling)
        lib.call_packed(words, (x, rows), (0, 1, 1), "quantise", x, scaling=scaling, activation=activation, out=out)


def multiply_packed(
    lib: Library,
    rows: torch.Tensor,
    b: torch.Tensor,
    scale_b: torch.Tensor,
    scaling: str,
    overlap: str,
    out: torch.Tensor,
    epilogue: str = "none",
) -> None:
    """Write the product of packed rows (M, K) and b (N, K) to `out`, by `Library.gemm`.

    Raises:
        KernelMiss, ArgumentError: the library refuses it.
    """
    words, held = ("gemm", scaling, overlap, epilogue), (rows, b, in_f32(scale_b), out)
    if not lib.launch_packed(words, *held):
        a, scale_a = unpacked(rows, scaling)
        more: dict[str, Any] = {"scale_a": scale_a, "scale_b": held[2], "epilogue": epilogue, "overlap": overlap}
        lib.call_packed(words, held, (0, 1, 3, 0, 2), "gemm", a, b, out=out, **more)


def unpacked(rows: torch.Tensor, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements (M, K) and the scales of packed rows (M, K), which are contiguous: both as views."""
    m, k = rows.shape
    shape = _scale_shape(scaling, m, k)
    scale = rows.view(torch.float32).as_strided(shape, (*shape[1:], 1), rows.storage_offset() // 2 + m * k // 4)
    return rows.view(torch.float8_e4m3fn).as_strided((m, k), (k, 1)), scale


_scale_shape = functools.lru_cache(4096)(scale_shape)  # whose arithmetic takes the host longer than a launch
