"""The least that a GEMM can take, roughly: sizes graphs, and stands in where no family has an estimate. Pure."""

from __future__ import annotations

from runtime.gemm.signature import Signature

from ..search.h200 import ROOF_BYTES_PER_US, ROOF_FLOPS_PER_US, ROOF_LAUNCH_US


def expected_us(signature: Signature, m: int) -> float:
    """A floor in microseconds on an H200: bytes or operations, whichever take longer, or a launch."""
    return max(signature.bytes(m) / ROOF_BYTES_PER_US, signature.flops(m) / ROOF_FLOPS_PER_US, ROOF_LAUNCH_US)


def power_bound(signature: Signature, m: int) -> bool:
    """Whether operations take so much longer than memory that power decides, by the rates of `expected_us`."""
    return signature.flops(m) / ROOF_FLOPS_PER_US > 2 * signature.bytes(m) / ROOF_BYTES_PER_US
