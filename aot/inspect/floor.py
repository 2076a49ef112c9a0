"""The least time that a problem can take on a GPU: its bytes at the rate of memory, or its products at that of tensor
cores, whichever is longer.

Bytes and operations are those of `aot.tune.operation.Work`: each operand once. So the floor leaves out launches, the
latency of memory, and what does not fit L2 twice: short problems cannot reach it. Rates are what kernels were seen to
reach, not peaks of data sheets. Knows nothing of archives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from runtime.device.gpus import Gpu
from runtime.numbers.dtypes import DTYPES
from runtime.program.operation import Signature

from ..tune.operation import is_tuned, tuning


class Rates(NamedTuple):
    """What a kind of GPU sustains: bytes of memory a microsecond, and floating-point operations a microsecond of its
    tensor cores by the bits of an element, two for a multiply-add."""

    memory_bytes_per_us: float
    flops_per_us: dict[int, float]


# Measured on H200s with default power limits, November 2026 (docs/moe.md, docs/kernels/sm90_grouped.md): cold reads
# come near 4.3 TB/s; bf16 is bound by power near 720 TFLOP/s, e4m3 near 1400.
_H200 = Rates(4.3e6, {16: 720e6, 8: 1400e6})
# Not measured: an H100 SXM has the same SMs and power limit, and its memory rate is that share of an H200's.
_H100 = Rates(4.3e6 * 3352 / 4917, {16: 720e6, 8: 1400e6})
RATES = {"NVIDIA H200": _H200, "NVIDIA H100 80GB HBM3": _H100}


class Floor(NamedTuple):
    """The least time in microseconds, what it is of ("memory" or "tensor cores"), bytes and operations, and the rate
    that bounds it, in bytes or operations a microsecond."""

    us: float
    bound: str
    bytes: int
    flops: int
    rate: float


def floor(signature: Signature, m: int, gpu: Gpu) -> Floor | None:
    """The floor of a signature at `m` rows; None where nobody knows the rates of this kind of GPU, or the work of the
    operation."""
    rates = RATES.get(gpu.name)
    if rates is None or not is_tuned(signature):
        return None
    work = tuning(signature).work(signature, m)
    memory_us = work.bytes / rates.memory_bytes_per_us
    flops_per_us = rates.flops_per_us.get(_product_bits(signature))
    if flops_per_us is not None and work.flops / flops_per_us > memory_us:
        return Floor(work.flops / flops_per_us, "tensor cores", work.bytes, work.flops, flops_per_us)
    return Floor(memory_us, "memory", work.bytes, work.flops, rates.memory_bytes_per_us)


def _product_bits(signature: Any) -> int:
    """The bits of what tensor cores multiply, the wider of A and B; 0 of operations that have no such product."""
    bits = {operand.name: DTYPES[operand.dtype].bits for operand in signature.operands()}
    return max(bits["a"], bits["b"]) if {"a", "b"} <= bits.keys() else 0
