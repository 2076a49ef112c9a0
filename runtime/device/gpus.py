"""Kinds of GPU: what tells apart those that run the same kernels, and which of several is nearest to another.

GPUs of one target (an H100, an H200, an H20) run the same cubins and are fastest with different ones. Knows nothing of
archives or the driver.
"""

from __future__ import annotations

import math

from ..named_tuple import NamedTuple


class Gpu(NamedTuple):
    """A kind of GPU: the name that the driver gives it, its SMs, and its peak memory rate in 1e9 bytes a second.

    The rate is that of CUDA's attributes, twice the memory clock times the width of the bus; 0 where they do not say.
    """

    name: str
    multiprocessors: int
    memory_gbps: int

    def same_kind(self, other: Gpu) -> bool:
        """Whether what was tuned on one was tuned for the other: name and SMs agree (a part of a GPU has its name)."""
        return self.name == other.name and self.multiprocessors == other.multiprocessors

    def words(self) -> str:
        """Such as "NVIDIA H200 (132 SMs, 4800 GB/s)"."""
        rate = f", {self.memory_gbps} GB/s" if self.memory_gbps else ""
        return f"{self.name} ({self.multiprocessors} SMs{rate})"


H100, H200 = Gpu("NVIDIA H100 80GB HBM3", 132, 3352), Gpu("NVIDIA H200", 132, 4917)
KNOWN = {gpu.name: gpu for gpu in (H100, H200)}


def distance(one: Gpu, other: Gpu) -> tuple[float, float, str]:
    """How far `one` is from `other`, to be compared: by the ratio of their SMs, then by that of their memory rates.

    SMs come first because they decide how tiles fill a wave. A rate that is not known is as far as any could be; ties
    go by the name of `one`.
    """
    rates = one.memory_gbps, other.memory_gbps
    memory = abs(math.log(rates[0] / rates[1])) if all(rates) else math.inf
    return abs(math.log(one.multiprocessors / other.multiprocessors)), memory, one.name
