"""The least that a GEMM can take, roughly: sizes graphs, and stands in where no family has an estimate. Pure."""

from __future__ import annotations

from runtime.gemm.signature import Signature


def expected_us(signature: Signature, m: int) -> float:
    """A floor in microseconds: 4 TB/s or 800 TFLOP/s (an H200's), whichever takes longer, and no launch takes less than
    two."""
    return max(signature.bytes(m) / 4e6, signature.flops(m) / 800e6, 2.0)


def power_bound(signature: Signature, m: int) -> bool:
    """Whether operations take so much longer than memory that power decides, by the rates of `expected_us`."""
    return signature.flops(m) / 800e6 > 2 * signature.bytes(m) / 4e6
