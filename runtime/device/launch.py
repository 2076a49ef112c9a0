"""What launch programs make: kernel launches for one shape, complete but for the pointers.

Knows nothing of how they are made, of tensors, archives or the driver.
"""

from __future__ import annotations

from typing import Any

from ..errors import ProgramError
from ..limits import MAX_BLOCK_THREADS, MAX_GRID
from ..named_tuple import NamedTuple

# Launch attributes by their CUlaunchAttributeID, with the number of 32-bit words of their value.
COOPERATIVE, CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION, PREFERRED_CLUSTER_DIMENSION = 2, 4, 6, 11
ATTRIBUTE_WORDS = {
    COOPERATIVE: 1,
    CLUSTER_DIMENSION: 3,
    PROGRAMMATIC_STREAM_SERIALIZATION: 1,
    PREFERRED_CLUSTER_DIMENSION: 3,
}

# A TMA descriptor's first word holds address bits 4 to 56: ((p >> 4) & (2^53 - 1)) << 4.
_TMA_ADDRESS_MASK = ((1 << 53) - 1) << 4
_MASK_64 = (1 << 64) - 1


class Slot(NamedTuple):
    """Eight bytes at `offset` of a launch's parameter buffer that hold a pointer.

    `tma`: the slot is word 0 of a TMA descriptor, else the plain address. `addend` is added to the pointer first.
    """

    offset: int
    tma: bool
    pointer: int
    addend: int = 0

    @property
    def mask(self) -> int:
        """What the slot keeps of pointer + addend."""
        return _TMA_ADDRESS_MASK if self.tma else _MASK_64


class Launch(NamedTuple):
    """One kernel launch for one shape: everything but the pointers, which `slots` say where to write.

    `parameters` holds each kernel parameter at its `offsets` entry; `attributes` pairs a CUlaunchAttributeID
    with the 32-bit words of its value. Grid counts CTAs, shared memory is dynamic, in bytes.
    """

    kernel: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    attributes: tuple[tuple[int, tuple[int, ...]], ...]
    parameters: bytes
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    slots: tuple[Slot, ...]


class LaunchShape(NamedTuple):
    """What a launch has for every shape: its kernel, which launch attributes, and where its kernel's parameters are."""

    kernel: int
    attributes: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Evaluation(NamedTuple):
    """A program's launches for one shape, and what its evaluator needs to make others from them.

    `small`: these launches differ from those of the evaluation before, which this was made from, in their grids and in
    words of their parameters only.
    """

    launches: tuple[Launch, ...]
    small: bool
    numbers: Any = None


def refuse_input(name: str, value: int, width: int) -> ProgramError:
    """An input has more bits than it was compiled with."""
    return ProgramError(f"{name} = {value} does not fit the {width} bits this kernel was compiled with")


def refuse(what: str, found: Any) -> ProgramError:
    """A launch's grid, block or shared memory ("grid", "block", "shared_bytes") is none that a GPU has."""
    if what == "grid":
        return ProgramError(f"the launch grid would be {found}; each extent must be 1 to {MAX_GRID}")
    if what == "block":
        return ProgramError(f"the launch block would be {found}; at most {MAX_BLOCK_THREADS} threads are possible")
    return ProgramError(f"the launch would need {found} bytes of shared memory")
