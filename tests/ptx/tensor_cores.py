"""What tensor cores compute: WGMMA's part of a warp, mma.sync, and matrices between registers and shared memory.

Fragments are as the PTX ISA draws them, descriptors of WGMMA as its "Matrix descriptor" says. Sums are those of f32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .arithmetic import E4M3, Values, from_bf16
from .memory import Fault, SharedMemory
from .tensor_map import swizzled

LANES = 32
_LANE = np.arange(LANES)
_GROUP, _IN_GROUP = _LANE // 4, _LANE % 4  # rows and columns of fragments
_WIDTHS = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a swizzled row, by a descriptor's mode
_BITS = {0: 0, 1: 0x70, 2: 0x30, 3: 0x10}


def decoded(data: Values, kind: str) -> Values:
    """Bytes, the last axis, as f32."""
    data = np.ascontiguousarray(data)
    if kind == "e4m3":
        return E4M3[data]
    if kind == "bf16":
        return from_bf16(data.view(np.uint16))
    if kind == "f16":
        return data.view(np.float16).astype(np.float32)
    raise Fault(f"a product of {kind}")


class Descriptor(NamedTuple):
    """Of a matrix in shared memory: its address in a window of 256 KB, byte offsets between core matrices, swizzle."""

    start: int
    leading: int
    stride: int
    swizzle: int

    @classmethod
    def read(cls, word: int) -> Descriptor:
        return cls((word & 0x3FFF) << 4, (word >> 16 & 0x3FFF) << 4, (word >> 32 & 0x3FFF) << 4, word >> 62)

    def raw(self, memory: SharedMemory, rows: range, k_bytes: int) -> Values:
        """(rows, bytes of K)."""
        return memory.data[self._places(memory, rows, k_bytes, False, 1)]

    def matrix(self, memory: SharedMemory, rows: range, k_bytes: int, transposed: bool, kind: str) -> Values:
        """(rows, K) in f32. `transposed`: rows are contiguous instead of K."""
        element = 1 if kind == "e4m3" else 2
        places = self._places(memory, rows, k_bytes, transposed, element)
        return decoded(memory.data[places[..., None] + np.arange(element)], kind)[..., 0]

    def _places(self, memory: SharedMemory, rows: range, k_bytes: int, transposed: bool, element: int) -> Values:
        row, column = np.array(rows)[:, None], np.arange(k_bytes // element)[None, :]
        width = _WIDTHS[self.swizzle]
        if transposed:
            row, column = column, row  # of what is contiguous, and what is not
            row, column = np.broadcast_arrays(row, column)
            inner, outer = column * element, row
            if self.swizzle:
                offsets = inner // width * self.leading + outer // 8 * self.stride + outer % 8 * width + inner % width
            else:
                offsets = inner // 16 * self.stride + outer // 8 * self.leading + outer % 8 * 16 + inner % 16
        elif self.swizzle:
            offsets = row // 8 * self.stride + row % 8 * width + column * element
        else:
            inner = column * element
            offsets = row // 8 * self.stride + inner // 16 * self.leading + row % 8 * 16 + inner % 16
        places = swizzled(self.start + offsets, _BITS[self.swizzle])
        if places.max() + element > len(memory.data):
            raise Fault(f"a product reads up to shared offset {places.max()}, of {len(memory.data)}")
        return places


def a_registers(registers: Sequence[Values], kind: str) -> Values:
    """(16 rows, K) in f32 of operand A in a warp's four registers, 16 or 32 columns."""
    each = 4 if kind == "e4m3" else 2
    found = np.zeros((16, 8 * each), np.float32)
    for number, register in enumerate(registers):
        values = decoded(register.view(np.uint8).reshape(LANES, 4), kind)
        rows, first = _GROUP + 8 * (number % 2), 4 * each * (number // 2) + each * _IN_GROUP
        found[rows[:, None], first[:, None] + np.arange(each)] = values
    return found


def b_registers(registers: Sequence[Values], kind: str) -> Values:
    """(8 columns, K) in f32 of operand B of mma.sync in a warp's two registers."""
    each = 4 if kind == "e4m3" else 2
    found = np.zeros((8, 8 * each), np.float32)
    for number, register in enumerate(registers):
        values = decoded(register.view(np.uint8).reshape(LANES, 4), kind)
        found[_GROUP[:, None], (4 * each * number + each * _IN_GROUP)[:, None] + np.arange(each)] = values
    return found


def sums_of(registers: Sequence[Values]) -> Values:
    """(16, N) of a warp's accumulators."""
    found = np.zeros((16, 2 * len(registers)), np.float32)
    for number, register in enumerate(registers):
        found[_rows(number), _columns(number)] = register.view(np.float32)
    return found


def registers_of(sums: Values) -> list[Values]:
    """A warp's accumulators of (16, N)."""
    count = sums.shape[1] // 2
    return [np.ascontiguousarray(sums[_rows(i), _columns(i)], np.float32).view(np.uint32) for i in range(count)]


def _rows(number: int) -> Values:
    return _GROUP + 8 * (number // 2 % 2)


def _columns(number: int) -> Values:
    return number // 4 * 8 + 2 * _IN_GROUP + number % 2


def load_matrices(memory: SharedMemory, addresses: Values, count: int, transposed: bool) -> list[Values]:
    """ldmatrix: `count` registers, of 8 x 8 matrices of 16 bits whose rows are at the addresses of eight lanes each."""
    found = []
    for number in range(count):
        rows = memory.load(addresses[8 * number : 8 * number + 8], 16).view(np.uint16)
        matrix = rows.T if transposed else rows
        pairs = np.ascontiguousarray(matrix).reshape(8, 4, 2)
        found.append(np.ascontiguousarray(pairs[_GROUP, _IN_GROUP]).view(np.uint32)[:, 0])
    return found


def store_matrices(memory: SharedMemory, addresses: Values, registers: Sequence[Values], transposed: bool) -> None:
    """stmatrix, the other way."""
    for number, register in enumerate(registers):
        matrix = np.zeros((8, 8), np.uint16)
        pairs = np.ascontiguousarray(register).view(np.uint16).reshape(LANES, 2)
        matrix[_GROUP[:, None], 2 * _IN_GROUP[:, None] + np.arange(2)] = pairs
        rows = np.ascontiguousarray(matrix.T if transposed else matrix).view(np.uint8)
        memory.store(addresses[8 * number : 8 * number + 8], rows)
