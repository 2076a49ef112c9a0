"""What all instructions' steps share: how one says that its warp waits, or that lanes which are to meet are apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .arithmetic import Values
from .memory import Fault
from .parse import Instruction

if TYPE_CHECKING:
    from .machine import Warp

WAIT = object()  # what a step gives where the warp waits, until `Warp.blocked` says that it need not
LANES = 32
Step = Any


class Apart(Fault):
    """Only some of the lanes that are to meet are there."""


def require_all(warp: Warp, given: Instruction, members: Values | None = None) -> None:
    """Lanes that meet must be there together."""
    if members is None:
        if not warp.full:
            raise Apart(f"{given.text}: only some lanes of a warp are there")
    elif int(members[warp.active()[0]]) != sum(1 << int(lane) for lane in warp.active()):
        raise Apart(f"{given.text}: the lanes that are there are not its members")
