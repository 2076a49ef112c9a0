"""The least that a problem can take, roughly: sizes graphs, and stands in where no family has an estimate. Pure."""

from __future__ import annotations

from runtime.program.operation import Signature

from ..search.h200 import ROOF
from .operation import tuning

# Of 113 problems on H100s, what functions take beside each other after a pause is off what they take in long runs by
# 5.5% above this (root mean square), and by 1.5% below; none had a share of 0.73 to 1.14
# (`scripts/study_screening.py`).
OVER_MEMORY = 1.15
# On H200s power decides from this share on in launches of some 17 us or longer, perhaps since their memory takes more
# power than an H100's: of drawn layers in 16 bits that another had tuned after a pause, what served took 1.07 times as
# long as predicted (kernels for few tokens 1.09 times, others 1.06) in 72 cases from here to the share above. It took
# 1.02 times as long in 309 cases above, tuned after load, and 1.01 times in 28 cases of shorter launches.
_NEAR_MEMORY, _LONG_US = 0.4, 12.0  # by the rates of `expected_us`, at which 17 us are some 12


def expected_us(signature: Signature, m: int) -> float:
    """A floor in microseconds on an H200: bytes or operations, whichever take longer, or a launch."""
    work = tuning(signature).work(signature, m)
    return max(work.bytes / ROOF.bytes_per_us, work.flops / ROOF.flops_per_us, ROOF.launch_us)


def power_bound(signature: Signature, m: int) -> bool:
    """Whether operations take so long beside memory that power decides."""
    return over_memory(signature, m) > (_NEAR_MEMORY if expected_us(signature, m) >= _LONG_US else OVER_MEMORY)


def over_memory(signature: Signature, m: int) -> float:
    """How many times as long operations take as memory, by the rates of `expected_us`."""
    work = tuning(signature).work(signature, m)
    return work.flops / ROOF.flops_per_us / (work.bytes / ROOF.bytes_per_us)
