"""Scales of numbers that become e4m3, made of the largest magnitude of those that share one.

A module of its own, since kernels that quantise rows and epilogues that quantise what they made have little else alike.
"""

import cutlass
from cutlass import cute

_LARGEST = 448.0  # number of e4m3
_LEAST_AMAX = 1e-10  # so that what is all zeros has a scale


def over_threads(value: cutlass.Float32, threads: int) -> cutlass.Float32:
    """The largest that so many neighbouring threads of a warp have, a power of two; all of the warp are here."""
    step = 1
    while step < threads:
        value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, step))
        step *= 2
    return value


def scale_of(amax: cutlass.Float32) -> cutlass.Float32:
    """The scale of numbers whose largest magnitude is `amax`."""
    return cute.arch.fmax(amax, cutlass.Float32(_LEAST_AMAX)) / cutlass.Float32(_LARGEST)


def inverse_of(amax: cutlass.Float32) -> cutlass.Float32:
    """What numbers are multiplied by, the inverse of `scale_of` but for its own rounding."""
    return cutlass.Float32(_LARGEST) / cute.arch.fmax(amax, cutlass.Float32(_LEAST_AMAX))
