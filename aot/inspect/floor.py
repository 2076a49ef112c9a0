"""The least time that a problem can take on a GPU: its bytes at the rate of memory, or its products at that of tensor
cores, whichever is longer.

Bytes and operations are those of `aot.tune.operation.Work`: each operand once. So the floor leaves out launches, the
latency of memory, and what does not fit L2 twice: short problems cannot reach it. Rates are what kernels were seen to
reach, not peaks of data sheets. Knows nothing of archives.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, NamedTuple

from runtime.device.gpus import Gpu
from runtime.numbers.dtypes import DTYPES
from runtime.program.operation import Signature

from ..search import h100, h200
from ..tune.operation import is_tuned, tuning

_RATES = MappingProxyType({gpu.NAME: gpu.FLOOR for gpu in (h200, h100)})  # by the name that the driver gives a GPU


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
    rates = _RATES.get(gpu.name)
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
