"""Kinds of GPU that have a name without anybody having one at hand, and what stands for a GPU that nobody names."""

from __future__ import annotations

from typing import NamedTuple

from runtime.device.gpus import H100, H200, Gpu
from runtime.tables.dispatch import Capability
from runtime.tables.table import TARGET

from ..search.targets import TARGETS


class Kind(NamedTuple):
    """A kind of GPU and its compute capability."""

    gpu: Gpu
    capability: Capability


# Names as the driver gives them; SMs and memory rates in GB/s of NVIDIA's data sheets, an H200's and an H100's as their
# drivers' clocks and bus widths give them. The SMs of a B300 and a GB200 are those that who measured on one state:
# NVIDIA states those of the full chip only. Of a capability the first is the one that is assumed.
COMMON = (
    Kind(H200, (9, 0)),
    Kind(H100, (9, 0)),
    Kind(Gpu("NVIDIA H20", 78, 4000), (9, 0)),
    Kind(Gpu("NVIDIA A100-SXM4-80GB", 108, 2039), (8, 0)),
    Kind(Gpu("NVIDIA B200", 148, 8000), (10, 0)),
    Kind(Gpu("NVIDIA GB200", 152, 8000), (10, 0)),
    Kind(Gpu("NVIDIA B300 SXM6 AC", 148, 8000), (10, 3)),
    Kind(Gpu("NVIDIA Thor", 20, 273), (11, 0)),
    Kind(Gpu("NVIDIA GeForce RTX 5090", 170, 1792), (12, 0)),
)


def capability(target: str) -> Capability:
    """The compute capability of the oldest GPU that runs a target; of none where no GPU runs it."""
    match = TARGET.fullmatch(target)
    return (int(match[1]), int(match[2])) if match else (-1, -1)


def usual(of: Capability) -> Gpu:
    """The GPU that is assumed where nobody names one: the first common kind of a capability, or, where none is known,
    one without a name, such as "an sm_107a GPU", whose memory rate is not known."""
    known = next((kind.gpu for kind in COMMON if kind.capability == of), None)
    return known or _without_a_name(of)


def _without_a_name(of: Capability) -> Gpu:
    """SMs decide what forms predict, so that it needs some: those of the target, else an H200's."""
    target = next((t for t in TARGETS.values() if t.compute_capability == of), None)
    name = "sm_{}{}".format(*of) if target is None else target.name
    return Gpu(f"an {name} GPU", H200.multiprocessors if target is None else target.multiprocessors, 0)
