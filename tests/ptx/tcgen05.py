"""Blackwell's fifth generation of tensor cores: tensor memory, and products between it and shared memory.

Layouts and descriptors are those of the PTX ISA, chapter "TensorCore 5th Generation Family Instructions". Products,
copies and commits of a CTA happen in their order, at drawn moments; stores to tensor memory at their wait.

That manual does not describe what Rubin's own kernels ask for. It is inferred from them: a bit of the instruction
descriptor makes a product twice as deep along K, more than four scales of a row lie in words that are a whole tile of
scales apart, and addresses in descriptors have two bits more, for a larger shared memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import tensor_cores
from .arithmetic import E2M1, E4M3, UE8M0, Values
from .memory import Fault
from .parse import Instruction

if TYPE_CHECKING:
    from .code import Code
    from .machine import Cta, Warp

ROWS, COLUMNS = 128, 576  # 512 before sm_107a
_LANE = np.arange(32)
_F8F6F4 = {0: "e4m3", 5: "e2m1"}
_SWIZZLES = {0: 0, 2: 1, 4: 2, 6: 3}  # to those of WGMMA's descriptors
_DEEP_BITS = {"f8f6f4": 29, "mxf8f6f4": 31, "mxf4nvf4": 3}  # by kind, of instruction descriptors; inferred


class TensorMemory:
    """That of a CTA: (lanes, columns) of 32 bits."""

    def __init__(self) -> None:
        self.data = np.full((ROWS, COLUMNS), 0xA5A5A5A5, np.uint32)
        self.used = 0

    def allocate(self, columns: int) -> int:
        """The first of so many columns."""
        if self.used + columns > COLUMNS:
            raise Fault(f"{columns} columns of tensor memory, of which {COLUMNS - self.used} are left")
        first, self.used = self.used, self.used + columns
        return first


class Shape(NamedTuple):
    """What the descriptor of a product says."""

    rows: int
    columns: int
    a: str
    b: str
    a_transposed: bool
    b_transposed: bool
    scale: str
    scale_a_place: int
    scale_b_place: int
    k_bytes: int  # of a row of A or of B in shared memory

    @classmethod
    def read(cls, word: int, kind: str) -> Shape:
        """Of an instruction descriptor, for a kind such as "f16" or "mxf4nvf4"."""
        a, b = word >> 7 & 7, word >> 10 & 7
        names = {0: "f16", 1: "bf16"} if kind == "f16" else {1: "e2m1"} if kind.startswith("mxf4") else _F8F6F4
        if a not in names or b not in names:
            raise NotImplementedError(f"operands of the formats {a} and {b} in {kind}")
        scaled = kind.startswith("mx")
        if not scaled and word >> 4 & 3 != 1:
            raise NotImplementedError("sums that are not f32")
        return cls(
            (word >> 24 & 31) << 4,
            (word >> 17 & 63) << 3,
            names[a],
            names[b],
            bool(word >> 15 & 1),
            bool(word >> 16 & 1),
            ("ue8m0" if word >> 23 & 1 else "ue4m3") if scaled else "",
            word >> 29 & 3,
            word >> 4 & 3,
            64 if kind in _DEEP_BITS and word >> _DEEP_BITS[kind] & 1 else 32,
        )


def _start(of: int) -> int:
    """The address in shared memory that a matrix descriptor has, of whose 16 bits two are Rubin's."""
    return (of & 0xFFFF) << 4


def _matrix(of: int, cta: Cta, rows: int, kind: str, transposed: bool, k_bytes: int) -> Values:
    """(rows, K) in f32 of an operand in shared memory, for the bytes of K of one product."""
    swizzle = _SWIZZLES[of >> 61]
    found = tensor_cores.Descriptor(_start(of), (of >> 16 & 0x3FFF) << 4, (of >> 32 & 0x3FFF) << 4, swizzle)
    if kind != "e2m1":
        return found.matrix(cta.shared, range(rows), k_bytes, transposed, kind)
    packed = found.raw(cta.shared, range(rows), k_bytes)
    return E2M1[np.stack([packed & 15, packed >> 4], 2).reshape(rows, 2 * k_bytes)]


def _of_tensor_memory(cta: Cta, address: int, rows: int, group: int, kind: str) -> Values:
    """(rows, K) of operand A in tensor memory, a row a lane."""
    lanes, column = (address >> 16) + _lanes(rows, group), address & 0xFFFF
    words = np.ascontiguousarray(cta.tensor.data[lanes, column : column + 8])
    return tensor_cores.decoded(words.view(np.uint8), kind)


def _scales(cta: Cta, address: int, rows: int, place: int, count: int, kind: str) -> Values:
    """(rows, blocks) of scales: 32 rows a column, one a lane, and blocks in the bytes of a word from `place`, four a
    word, of which the next is behind those of all rows."""
    row = np.arange(rows)
    column, whole = (address & 0xFFFF) + row // 32, 4 * -(-rows // 128)
    values = []
    for word, byte in (divmod(place + i, 4) for i in range(count)):
        words = cta.tensor.data[row % 32, column + word * whole]
        values.append(words >> np.uint32(8 * byte) & np.uint32(255))
    return (UE8M0 if kind == "ue8m0" else np.abs(E4M3))[np.stack(values, 1)]


def _lanes(rows: int, group: int) -> Values:
    """Where 64 or 128 rows of a CTA are: 64 of a CTA alone are 16 of each 32 lanes."""
    row = np.arange(rows)
    return row // 16 * 32 + row % 16 if rows == 64 and group == 1 else row


def _places(of: Shape, group: int, rank: int) -> list[tuple[slice, Values, slice]]:
    """Where D is in a CTA's tensor memory: rows of D, their lanes, and columns of D, which begin at the address."""
    whole = slice(0, of.columns)
    each = of.rows // group
    rows = slice(rank * each, rank * each + each)
    if each == 128 or group == 1:
        return [(rows, _lanes(each, group), whole)]
    half = of.columns // 2  # 64 rows of each CTA: columns of the second half in the upper lanes
    return [(rows, np.arange(64), slice(0, half)), (rows, np.arange(64, 128), slice(half, of.columns))]


def effect(code: Code, given: Instruction) -> Any:
    """The step of a tcgen05 instruction."""
    how = given.words[1]
    made: dict[str, Callable[[Code, Instruction], Any]] = {
        "alloc": _allocate,
        "dealloc": _free,
        "ld": _load,
        "st": _store,
        "mma": _product,
        "cp": _copy,
        "commit": _commit,
        "wait_ld": _wait,
        "wait_st": _wait,
    }
    return made[how](code, given) if how in made else lambda warp: None


def _group(given: Instruction) -> int:
    return 2 if "cta_group_2" in given.words else 1


def _pair(warp: Warp, given: Instruction) -> list[Cta]:
    """The CTA, or with its peer the two, the leader first."""
    cta = warp.cta
    if _group(given) == 1:
        return [cta]
    return [cta.cluster.ctas[cta.rank & ~1], cta.cluster.ctas[cta.rank | 1]]


def _allocate(code: Code, given: Instruction) -> Any:
    place, count = code.address(given.operands[0]), code.value(given.operands[1], "u32")

    def allocate(warp: Warp) -> None:
        first = warp.cta.tensor.allocate(int(count(warp)[0]))
        warp.cta.shared.store(place(warp)[:1], np.array([[first]], np.uint32).view(np.uint8))

    return allocate


def _free(code: Code, given: Instruction) -> Any:
    count = code.value(given.operands[1], "u32")

    def free(warp: Warp) -> None:
        warp.cta.tensor.used -= int(count(warp)[0])

    return free


def _fragment(shape: str, times: int, warp: Warp, address: int) -> list[tuple[Values, Values]]:
    """For each register of a warp: the lane and the column of tensor memory of each of its lanes."""
    lane, column = address >> 16, address & 0xFFFF
    if lane // 32 != warp.number % 4:
        raise Fault(f"warp {warp.number} is at lane {lane} of tensor memory")
    if shape == "32x32b":
        return [(lane + _LANE, np.full(32, column + i)) for i in range(times)]
    if shape == "16x256b":
        return [
            (lane + _LANE // 4 + 8 * half, column + 8 * i + _LANE % 4 * 2 + odd)
            for i in range(times)
            for half in (0, 1)
            for odd in (0, 1)
        ]
    if shape == "16x128b":
        return [(lane + _LANE // 4 + 8 * half, column + 4 * i + _LANE % 4) for i in range(times) for half in (0, 1)]
    raise NotImplementedError(shape)


def _shape(given: Instruction) -> tuple[str, int]:
    shape = next(word for word in given.words if re.fullmatch(r"\d+x\d+b", word))
    return shape, next(int(word[1:]) for word in given.words if re.fullmatch(r"x\d+", word))


def _load(code: Code, given: Instruction) -> Any:
    shape, times = _shape(given)
    puts, place = code.targets(given.operands[0], "b32"), code.address(given.operands[1])

    def load(warp: Warp) -> None:
        # At once, since PTX may name a register for what comes before it waits: ptxas keeps them in order.
        fragment = _fragment(shape, times, warp, int(place(warp)[0]))
        for put, (lanes, columns) in zip(puts, fragment, strict=True):
            put(warp, warp.cta.tensor.data[lanes, columns])

    return load


def _store(code: Code, given: Instruction) -> Any:
    shape, times = _shape(given)
    place, values = code.address(given.operands[0]), code.vector(given.operands[1], "b32")

    def store(warp: Warp) -> None:
        fragment = _fragment(shape, times, warp, int(place(warp)[0]))
        given_values = [value(warp) for value in values]

        def go() -> None:
            for (lanes, columns), value in zip(fragment, given_values, strict=True):
                warp.cta.tensor.data[lanes, columns] = value

        warp.moves.append(go)

    return store


def _wait(code: Code, given: Instruction) -> Any:
    def wait(warp: Warp) -> None:
        moves, warp.moves = warp.moves, []
        for each in moves:
            each()

    return wait


def _product(code: Code, given: Instruction) -> Any:
    kind = next(word for word in given.words if word.startswith("kind_")).removeprefix("kind_")
    scaled = "block_scale" in given.words
    d, b, word = (
        code.address(given.operands[0]),
        code.value(given.operands[2], "u64"),
        code.value(given.operands[3], "u32"),
    )
    in_tensor_memory = given.operands[1].startswith("[")
    a = code.address(given.operands[1]) if in_tensor_memory else code.value(given.operands[1], "u64")
    scales = [code.address(each) for each in given.operands[4:6]] if scaled else []
    adds = code.value(given.operands[-1], "pred")
    blocks = {"mxf8f6f4": 1, "mxf4": 2, "mxf4nvf4": 4 if "block16" in given.words else 2}.get(kind, 0)

    def product(warp: Warp) -> None:
        lane, ctas = warp.active()[0], _pair(warp, given)
        if len(warp.active()) != 1:
            raise Fault(f"{given.text}: issued by {len(warp.active())} lanes")
        of = Shape.read(int(word(warp)[lane]), kind)
        if in_tensor_memory and of.k_bytes != 32:
            raise NotImplementedError("a deep product of A in tensor memory")
        count = blocks * of.k_bytes // 32
        at, of_a, of_b, add = (int(each(warp)[lane]) for each in (d, a, b, adds))
        of_scales = [int(each(warp)[lane]) for each in scales]

        def compute() -> None:
            each, columns = of.rows // len(ctas), of.columns // len(ctas)
            left = np.concatenate(
                [
                    _of_tensor_memory(cta, of_a, each, len(ctas), of.a)
                    if in_tensor_memory
                    else _matrix(of_a, cta, each, of.a, of.a_transposed, of.k_bytes)
                    for cta in ctas
                ]
            )
            right = np.concatenate([_matrix(of_b, cta, columns, of.b, of.b_transposed, of.k_bytes) for cta in ctas])
            for rank, cta in enumerate(ctas):
                scaled_left, scaled_right = left, right
                if scaled:
                    own = slice(rank * each, rank * each + each)
                    size = left.shape[1] // count
                    of_rows = _scales(cta, of_scales[0], each, of.scale_a_place, count, of.scale)
                    of_columns = _scales(cta, of_scales[1], of.columns, of.scale_b_place, count, of.scale)
                    scaled_left = np.zeros_like(left)
                    scaled_left[own] = left[own] * np.repeat(of_rows, size, 1)
                    scaled_right = right * np.repeat(of_columns, size, 1)
                sums = scaled_left @ scaled_right.T
                _add(cta, at, sums, of, len(ctas), rank, bool(add))

        warp.cta.pipe.append(compute)

    return product


def _add(cta: Cta, at: int, sums: Values, of: Shape, group: int, rank: int, add: bool) -> None:
    lane, column = at >> 16, at & 0xFFFF
    for rows, lanes, columns in _places(of, group, rank):
        values = sums[rows, columns].astype(np.float32)
        place = np.ix_(lane + lanes, column + np.arange(values.shape[1]))
        if add:
            values = values + np.ascontiguousarray(cta.tensor.data[place]).view(np.float32)
        cta.tensor.data[place] = np.ascontiguousarray(values, np.float32).view(np.uint32)


def _copy(code: Code, given: Instruction) -> Any:
    if "32x128b" not in given.words or "warpx4" not in given.words:
        raise NotImplementedError(given.text)
    place, source = code.address(given.operands[0]), code.value(given.operands[1], "u64")

    def copy(warp: Warp) -> None:
        lane, ctas = warp.active()[0], _pair(warp, given)
        column, of = int(place(warp)[lane]) & 0xFFFF, int(source(warp)[lane])
        start, stride = _start(of), (of >> 32 & 0x3FFF) << 4

        def come() -> None:
            row = np.arange(32)
            offsets = start + row // 8 * stride + row % 8 * 16
            for cta in ctas:
                words = cta.shared.data[offsets[:, None] + np.arange(16)].view(np.uint32)
                cta.tensor.data[:, column : column + 4] = np.tile(words, (4, 1))

        warp.cta.pipe.append(come)

    return copy


def _commit(code: Code, given: Instruction) -> Any:
    place = code.address(given.operands[0])
    mask = code.value(given.operands[1], "u16") if len(given.operands) > 1 else None

    def commit(warp: Warp) -> None:
        lane, cluster = warp.active()[0], warp.cta.cluster
        address = int(place(warp)[lane])
        if mask is None:
            barriers = [cluster.shared(address).barrier(address)]
        else:
            bits = int(mask(warp)[lane])
            ctas = [cta for cta in cluster.ctas if bits >> cta.rank & 1]
            barriers = [cta.shared.barrier(cta.shared.own(address)) for cta in ctas]

        def arrive() -> None:
            for barrier in barriers:
                barrier.arrive()

        warp.cta.pipe.append(arrive)

    return commit
