"""The bytes of a launch's parameters with pointers in them, as native code and drivers make them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from runtime.device.launch import Launch


def with_pointers(launch: Launch, pointers: Sequence[int]) -> bytearray:
    """A copy of the parameter bytes with every slot written."""
    buffer = bytearray(launch.parameters)
    for slot in launch.slots:
        struct.pack_into("<Q", buffer, slot.offset, (pointers[slot.pointer] + slot.addend) & slot.mask)
    return buffer
