"""The least that a problem can take, roughly: sizes graphs, and stands in where no family has an estimate. Pure."""

from __future__ import annotations

from runtime.program.operation import Signature

from ..search.h200 import ROOF
from .operation import tuning

# Of 113 problems on H100s, what functions take beside each other after a pause is off what they take in long runs by
# 5.5% above this (root mean square), and by 1.5% below; none had a share of 0.73 to 1.14
# (`scripts/study_screening.py`).
_OVER_MEMORY = 1.15


def expected_us(signature: Signature, m: int) -> float:
    """A floor in microseconds on an H200: bytes or operations, whichever take longer, or a launch."""
    work = tuning(signature).work(signature, m)
    return max(work.bytes / ROOF.bytes_per_us, work.flops / ROOF.flops_per_us, ROOF.launch_us)


def power_bound(signature: Signature, m: int) -> bool:
    """Whether operations take so much longer than memory that power decides, by the rates of `expected_us`."""
    work = tuning(signature).work(signature, m)
    return work.flops / ROOF.flops_per_us > _OVER_MEMORY * work.bytes / ROOF.bytes_per_us
