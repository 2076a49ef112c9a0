"""The archive that comes with this package."""

from __future__ import annotations

from pathlib import Path


def universal() -> Path:
    """The archive of this package, for `load`: common forms of GEMM on Hopper, served at any N and K.

    16-bit GEMMs plain, with bias, residual or SwiGLU, and e4m3 ones scaled by tensor, by row and column or by blocks,
    each also with `overlap="weights"`. Every kernel was found right on an NVIDIA H200; which one serves is predicted.
    """
    return Path(__file__).with_name("universal.aot")
