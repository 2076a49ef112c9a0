"""Memory that kernels see: global memory that they were given, a CTA's shared memory, and mbarriers in it."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arithmetic import Values

DYNAMIC = 1024  # where a kernel's dynamic shared memory begins
CTA_SHIFT = 24  # of a shared address, above which the number of the CTA in its cluster stands
_FILL = 0xA5  # of shared memory that nobody wrote


class Fault(Exception):
    """A kernel does what would be an error, or undefined, on a GPU."""


class GlobalMemory:
    """The ranges of this process's memory that a launch may touch; of some it may only read."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[tuple[int, Values, bool]] = []

    def give(self, address: int, size: int, writable: bool) -> None:
        """Let kernels use `size` bytes at `address`, which must outlive this."""
        if not size:
            return
        place = bisect_right(self._starts, address)
        data: Values = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        self._starts.insert(place, address)
        self._ranges.insert(place, (address, data, writable))

    def bytes_of(self, address: int, size: int, write: bool) -> Values:
        """A view of `size` bytes."""
        place = bisect_right(self._starts, address) - 1
        if place >= 0:
            start, data, writable = self._ranges[place]
            if address + size <= start + len(data):
                if write and not writable:
                    raise Fault(f"writes {size} bytes at {address:#x}, which are an input")
                return data[address - start : address - start + size]
        near = f", {address - self._starts[place]} bytes behind the start of a range" if place >= 0 else ""
        raise Fault(f"{'writes' if write else 'reads'} {size} bytes at {address:#x}, which nobody gave it{near}")

    def load(self, addresses: Values, size: int) -> Values:
        """(lanes, size) bytes."""
        if (found := self._one_range(addresses, size, False)) is not None:
            data, offsets = found
            return data[offsets[:, None] + np.arange(size)]
        return np.stack([self.bytes_of(int(a), size, False) for a in addresses])

    def store(self, addresses: Values, values: Values) -> None:
        """Of lanes in order, so that the last wins."""
        size = values.shape[1]
        if (found := self._one_range(addresses, size, True)) is not None:
            data, offsets = found
            data[offsets[:, None] + np.arange(size)] = values
            return
        for address, value in zip(addresses, values, strict=True):
            self.bytes_of(int(address), size, True)[:] = value

    def _one_range(self, addresses: Values, size: int, write: bool) -> tuple[Values, Values] | None:
        """A range that all lanes are in, and where; None where there is none, of which lanes one by one say why."""
        first, last = int(addresses.min()), int(addresses.max())
        place = bisect_right(self._starts, first) - 1
        if place < 0:
            return None
        start, data, writable = self._ranges[place]
        if last + size > start + len(data) or (write and not writable):
            return None
        return data, (addresses - np.uint64(start)).astype(np.int64)


@dataclass
class MBarrier:
    """An mbarrier: arrivals that it waits for in a phase, those that are missing, and bytes that are under way."""

    count: int
    missing: int
    bytes: int = 0
    phase: int = 0

    def arrive(self, count: int = 1) -> None:
        if count > self.missing:
            raise Fault(f"{count} arrive at an mbarrier that waits for {self.missing}")
        self.missing -= count
        self._maybe_flip()

    def expect(self, size: int) -> None:
        self.bytes += size

    def complete(self, size: int) -> None:
        self.bytes -= size
        self._maybe_flip()

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is over."""
        return self.phase & 1 != parity

    def _maybe_flip(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phase += 1
            self.missing = self.count


class SharedMemory:
    """That of one CTA, `rank` in its cluster; its addresses have the rank in their upper bits."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.base = rank << CTA_SHIFT
        self.data = np.full(size, _FILL, np.uint8)
        self.barriers: dict[int, MBarrier] = {}

    def offset(self, address: int, size: int) -> int:
        offset = address - self.base
        if not 0 <= offset <= len(self.data) - size:
            raise Fault(f"{size} bytes at shared {address:#x}, of {len(self.data)} at {self.base:#x}")
        return offset

    def own(self, address: int) -> int:
        """The address here of what is at the same offset in a CTA of the cluster."""
        return self.base | address & (1 << CTA_SHIFT) - 1

    def load(self, addresses: Values, size: int) -> Values:
        """(lanes, size) bytes."""
        offsets = addresses.astype(np.int64) - self.base
        self._check(offsets, size)
        return self.data[offsets[:, None] + np.arange(size)]

    def store(self, addresses: Values, values: Values) -> None:
        offsets, size = addresses.astype(np.int64) - self.base, values.shape[1]
        self._check(offsets, size)
        self.data[offsets[:, None] + np.arange(size)] = values

    def _check(self, offsets: Values, size: int) -> None:
        if len(offsets) and (offsets.min() < 0 or offsets.max() > len(self.data) - size):
            raise Fault(f"{size} bytes at shared offsets {offsets.min()} to {offsets.max()}, of {len(self.data)}")

    def barrier(self, address: int) -> MBarrier:
        offset = self.offset(address, 8)
        if offset not in self.barriers:
            raise Fault(f"no mbarrier was initialised at shared offset {offset}")
        return self.barriers[offset]

    def initialise(self, address: int, count: int) -> None:
        self.barriers[self.offset(address, 8)] = MBarrier(count, count)


def aligned(addresses: Values, size: int) -> None:
    """Refuse accesses that are not naturally aligned."""
    if np.any(addresses % addresses.dtype.type(size)):
        raise Fault(f"an access of {size} bytes is not aligned: {int(addresses[0]):#x}")


def as_bytes(values: Any) -> Values:
    """(lanes, bytes) of (lanes,) or (lanes, elements)."""
    array = np.ascontiguousarray(values)
    return array.reshape(array.shape[0], -1).view(np.uint8).reshape(array.shape[0], -1)
