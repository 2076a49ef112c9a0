"""TMA's tensor maps: the 128 bytes that host code makes, and the boxes of a tensor that they describe.

Where fields are was read from the arithmetic of the DSL's host functions, which write them without the driver.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from .arithmetic import Values
from .memory import Fault, GlobalMemory, SharedMemory

_BITS = {0: 8, 1: 16, 2: 32, 3: 32, 4: 64, 5: 64, 6: 16, 7: 32, 8: 32, 9: 64, 10: 16, 11: 4}  # of an element, by code
_SWIZZLED = {0: (0, 0), 1: (0x10, 3), 2: (0x30, 3), 3: (0x70, 3)}  # bits of a shared address that get those above added
_OF_32_BYTES = (0x60, 2)  # the same in atoms of 32 bytes


class TensorMap(NamedTuple):
    """A tensor of up to five modes, the first contiguous: extents, bytes from one to the next of modes above it, and
    the extents of a box, which in shared memory lies without gaps but swizzled."""

    address: int
    bits: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: tuple[int, int]

    @classmethod
    def read(cls, data: bytes) -> TensorMap:
        """Of a kernel's parameter."""
        words = struct.unpack("<16Q", data)
        low = words[1] & 0xFFFFFFFF
        rank, code = (low >> 4 & 7) + 1, low >> 7 & 15
        halves = [half for word in words[:8] for half in (word & 0xFFFFFFFF, word >> 32)]
        extents = [half + 1 for half in halves[8:13]]
        high = halves[7]
        strides = [(half | (high >> 4 * i & 15) << 32) << 4 for i, half in enumerate(halves[3:7])]
        box = [(words[6] >> 56) + 1, *((words[7] >> 8 * i & 255) + 1 for i in range(4))]
        if words[6] >> 32 & 0xFFFFFF:
            raise Fault("a tensor map with strides between elements")
        strides = strides[: rank - 1]
        swizzle = _OF_32_BYTES if low >> 19 & 1 else _SWIZZLED[low >> 13 & 3]
        return cls(words[0], _BITS[code], tuple(extents[:rank]), tuple(strides), tuple(box[:rank]), swizzle)

    @property
    def bytes(self) -> int:
        """Of a box."""
        return int(np.prod(self.box)) * self.bits // 8

    def rows(self, at: tuple[int, ...]) -> list[tuple[int, int, int]]:
        """The rows of the box at these coordinates that are inside the tensor: offset in the box, address, and bytes.

        All but the first element of a row follow it in both memories, but for swizzling.
        """
        first, last = max(at[0], 0), min(at[0] + self.box[0], self.extents[0])
        if first >= last:
            return []
        offset, start, size = ((x * self.bits) // 8 for x in (first - at[0], first, last - first))
        found = [(offset, self.address + start, size)]
        size = self.box[0] * self.bits // 8
        for mode in range(1, len(self.box)):
            stride, rows = self.strides[mode - 1], []
            for i in range(self.box[mode]):
                place = at[mode] + i
                if 0 <= place < self.extents[mode]:
                    rows += [(offset + i * size, address + place * stride, n) for offset, address, n in found]
            found, size = rows, size * self.box[mode]
        return found

    def places(self, start: int) -> Values:
        """Where the bytes of a box are in shared memory, as offsets from address `start`."""
        if start % 128:
            raise Fault(f"a box at shared {start:#x}, which is not aligned to 128 bytes")
        offsets = np.arange(self.bytes)
        whole = start + offsets
        return swizzled(whole, *self.swizzle) - start


def swizzled(addresses: Values, bits: int, by: int = 3) -> Values:
    """Addresses with the bits that are so many places above `bits` added to those, without carry."""
    return addresses ^ (addresses >> by & bits)


def load(of: TensorMap, at: tuple[int, ...], memory: GlobalMemory, to: SharedMemory, address: int) -> None:
    """A box to shared memory; what is outside the tensor is zeros."""
    box = np.zeros(of.bytes, np.uint8)
    for offset, source, size in of.rows(at):
        box[offset : offset + size] = memory.bytes_of(source, size, False)
    start = to.offset(address, of.bytes)
    to.data[start + of.places(address)] = box


def store(of: TensorMap, at: tuple[int, ...], memory: GlobalMemory, source: SharedMemory, address: int) -> None:
    """What of a box is inside the tensor, from shared memory."""
    start = source.offset(address, of.bytes)
    box = source.data[start + of.places(address)]
    for offset, target, size in of.rows(at):
        memory.bytes_of(target, size, True)[:] = box[offset : offset + size]
