"""Launch programs: data that turns extents, strides and scalars into kernel launches.

A program is what remains of a compiled function's host code: grid, block, cluster, shared memory, launch
attributes and the bytes of every kernel parameter (TMA descriptors included), as integer arithmetic
(`runtime.arithmetic`) over the function's inputs. Pointers are no inputs of that arithmetic: they appear only as
*slots*, 8-byte places in the parameters, so that a plan made once for a shape serves every set of pointers.

Knows nothing of tensors, GEMMs, archives or the driver.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .arithmetic import WIDTHS, NodeReader, Poison, Step, Values, exact_fields, exact_list, fail, is_int, signed
from .errors import ProgramError

# Kernel parameters: at most 32,764 bytes on compute capability 7.0 and later (CUDA C++ programming guide, 10.1).
MAX_PARAMETER_BYTES = 32_764
MAX_GRID = (2**31 - 1, 65_535, 65_535)
MAX_BLOCK_THREADS = 1_024
# The most a block may opt in to on any GPU so far is 227 KiB; anything above 256 KiB is a damaged record.
MAX_SHARED_BYTES = 256 * 1024

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

    def encode(self, pointer: int) -> int:
        """The 64-bit word for the address `pointer`."""
        return (pointer + self.addend) & self.mask


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

    def with_pointers(self, pointers: Sequence[int]) -> bytearray:
        """A copy of the parameter bytes with every slot written."""
        buffer = bytearray(self.parameters)
        for slot in self.slots:
            struct.pack_into("<Q", buffer, slot.offset, slot.encode(pointers[slot.pointer]))
        return buffer


class _LaunchShape(NamedTuple):
    """A launch before evaluation: value numbers in place of values."""

    kernel: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    attributes: tuple[tuple[int, tuple[int, ...]], ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    template: bytes  # the parameters, with every constant word in place
    words: tuple[tuple[int, int, int], ...]
    slots: tuple[tuple[int, bool, int, int | None], ...]


@dataclass(frozen=True)
class Program:
    """A checked launch program over the integer inputs `values` (name, width in bits) and the inputs `pointers`."""

    values: tuple[tuple[str, int], ...]
    pointers: tuple[str, ...]
    kernels: int
    launches: tuple[_LaunchShape, ...]
    _constants: tuple[int | None, ...] = field(repr=False)  # what each value is where that is known from the start
    _steps: tuple[tuple[int, Step], ...] = field(repr=False)  # how the others are computed, in order
    _inputs: tuple[int, ...] = field(repr=False)  # for each value a bit for each input that it depends on
    _limits: tuple[tuple[int, int, int], ...] = field(repr=False)  # of each of `values`: least, most, mask
    _changes: dict[int, _Change] = field(default_factory=dict, repr=False, compare=False)  # by the inputs that differ

    @classmethod
    def from_json(cls, obj: Any, kernels: int) -> Program:
        """Check and read a program that launches kernels 0 to `kernels` - 1.

        Raises:
            RecordError: anything is missing, unknown, out of range or out of order.
        """
        obj = exact_fields(obj, {"values", "pointers", "nodes", "launches"}, "program")
        values = []
        for item in exact_list(obj["values"], "values"):
            name, width = exact_list(item, "values", 2)
            if not isinstance(name, str) or not name or width not in WIDTHS or type(width) is not int:
                fail("values", f"needs [name, width], found {item!r:.200}")
            values.append((name, width))
        pointers = exact_list(obj["pointers"], "pointers")
        if any(not isinstance(p, str) or not p for p in pointers):
            fail("pointers", f"must be names, found {pointers!r:.200}")
        for what, names in (("values", [n for n, _ in values]), ("pointers", pointers)):
            if len(set(names)) != len(names):
                fail(what, f"a name appears twice in {names!r:.200}")
        reader = NodeReader([w for _, w in values])
        nodes = obj["nodes"]
        steps = [(len(values) + i, step) for i, step in enumerate(reader.nodes(nodes, "node"))]
        constants = (*(None for _ in values), *(n[2] if n[0] == "const" else None for n in nodes))
        launches = exact_list(obj["launches"], "launches")
        if not launches:
            fail("launches", "there is none")
        shapes = tuple(_read_launch(x, i, reader, constants, len(pointers), kernels) for i, x in enumerate(launches))
        if {s.kernel for s in shapes} != set(range(kernels)):
            fail("launches", f"they must use each of the {kernels} kernels")
        steps = [(number, step) for number, step in steps if constants[number] is None]
        limits = tuple((-(1 << (width - 1)), (1 << width) - 1, (1 << width) - 1) for _, width in values)
        return cls(
            tuple(values), tuple(pointers), kernels, shapes, constants, tuple(steps), tuple(reader.inputs), limits
        )

    def plan(self, values: Sequence[int]) -> tuple[Launch, ...]:
        """The launches for one shape; see `evaluate`."""
        return self.evaluate(values).launches

    def evaluate(self, values: Sequence[int], last: Evaluation | None = None) -> Evaluation:
        """Evaluate for one shape; `values` in the order of `self.values`, signed or unsigned.

        With the evaluation of another shape only what depends on values that differ is computed again.

        Raises:
            ProgramError: a value does not fit its width, or these values make the launch undefined or illegal.
        """
        if len(values) != len(self.values):
            raise ProgramError(f"this program takes {len(self.values)} values, {len(values)} were given")
        v: Values = list(self._constants) if last is None else last.numbers.copy()
        changed = 0
        for number, (x, (least, most, mask)) in enumerate(zip(values, self._limits, strict=True)):
            if not least <= x <= most:
                name, width = self.values[number]
                raise ProgramError(f"{name} = {x} does not fit the {width} bits this kernel was compiled with")
            x &= mask
            if v[number] != x:
                changed |= 1 << number
                v[number] = x
        if last is None:
            for number, step in self._steps:
                v[number] = step(v)
            return Evaluation(v, tuple(_evaluate_launch(shape, v) for shape in self.launches), False)
        change = self._changes.get(changed)
        if change is None:
            change = self._changes[changed] = self._change(changed)
        for number, step in change.steps:
            v[number] = step(v)
        again = zip(self.launches, last.launches, change.words, strict=True)
        return Evaluation(v, tuple([_update(shape, launch, words, v) for shape, launch, words in again]), change.small)

    def _change(self, changed: int) -> _Change:
        """What depends on the inputs with a bit in `changed`."""
        inputs = self._inputs
        words: list[tuple[tuple[int, int, int], ...] | None] = []
        for shape in self.launches:
            fixed = (*shape.block, shape.shared_bytes, *(r for _, refs in shape.attributes for r in refs))
            addends = (addend for _, _, _, addend in shape.slots if addend is not None)
            anew = any(inputs[ref] & changed for ref in (*fixed, *addends))
            words.append(None if anew else tuple(word for word in shape.words if inputs[word[2]] & changed))
        steps = tuple((number, step) for number, step in self._steps if inputs[number] & changed)
        return _Change(steps, tuple(words), all(found is not None for found in words))


class _Change(NamedTuple):
    """What to compute again where some inputs differ: steps, and for each launch the words of its parameters besides
    its grid, or None where it is more than that. `small`: that it is nowhere more."""

    steps: tuple[tuple[int, Step], ...]
    words: tuple[tuple[tuple[int, int, int], ...] | None, ...]
    small: bool


class Evaluation(NamedTuple):
    """A program's launches for one shape, and all numbers on the way to them, in their order.

    `small`: these launches differ from those of the evaluation before, which this was made from, in their grids and in
    words of their parameters only.
    """

    numbers: Values
    launches: tuple[Launch, ...]
    small: bool


def _number(v: Values, ref: int) -> int:
    """A value that is needed."""
    value = v[ref]
    if type(value) is Poison:
        raise ProgramError(value.reason)
    return int(value)


def _evaluate_grid(shape: _LaunchShape, v: Values) -> tuple[int, int, int]:
    grid = x, y, z = (_number(v, shape.grid[0]), _number(v, shape.grid[1]), _number(v, shape.grid[2]))
    if not (1 <= x <= MAX_GRID[0] and 1 <= y <= MAX_GRID[1] and 1 <= z <= MAX_GRID[2]):
        raise ProgramError(f"the launch grid would be {grid}; each extent must be 1 to {MAX_GRID}")
    return grid


def _update(shape: _LaunchShape, last: Launch, words: tuple[tuple[int, int, int], ...] | None, v: Values) -> Launch:
    """The launch that differs from `last` in its grid and in these words, or in anything if they are None."""
    if words is None:
        return _evaluate_launch(shape, v)
    parameters = bytearray(last.parameters)
    for offset, size, ref in words:
        value = v[ref]
        parameters[offset : offset + size] = (value if type(value) is int else _number(v, ref)).to_bytes(size, "little")
    kernel, _, block, shared_bytes, attributes, _, offsets, sizes, slots = last
    grid = _evaluate_grid(shape, v)
    return Launch(kernel, grid, block, shared_bytes, attributes, bytes(parameters), offsets, sizes, slots)


def _evaluate_launch(shape: _LaunchShape, v: Values) -> Launch:
    grid = _evaluate_grid(shape, v)
    block = (_number(v, shape.block[0]), _number(v, shape.block[1]), _number(v, shape.block[2]))
    if any(b < 1 for b in block) or block[0] * block[1] * block[2] > MAX_BLOCK_THREADS:
        raise ProgramError(f"the launch block would be {block}; at most {MAX_BLOCK_THREADS} threads are possible")
    shared_bytes = _number(v, shape.shared_bytes)
    if shared_bytes > MAX_SHARED_BYTES:
        raise ProgramError(f"the launch would need {shared_bytes} bytes of shared memory")
    parameters = bytearray(shape.template)
    for offset, size, ref in shape.words:
        parameters[offset : offset + size] = _number(v, ref).to_bytes(size, "little")
    return Launch(
        kernel=shape.kernel,
        grid=grid,
        block=block,
        shared_bytes=shared_bytes,
        attributes=tuple((i, tuple(_number(v, r) for r in refs)) for i, refs in shape.attributes),
        parameters=bytes(parameters),
        offsets=shape.offsets,
        sizes=shape.sizes,
        slots=tuple(
            Slot(offset, tma, pointer, 0 if addend is None else signed(_number(v, addend), 64))
            for offset, tma, pointer, addend in shape.slots
        ),
    )


def _read_launch(
    obj: Any, number: int, reader: NodeReader, constants: Sequence[int | None], pointers: int, kernels: int
) -> _LaunchShape:
    where = f"launch {number}"
    obj = exact_fields(obj, {"kernel", "grid", "block", "shared_bytes", "attributes", "parameters"}, where)
    if not is_int(obj["kernel"], 0, kernels - 1):
        fail(where, f"kernel {obj['kernel']!r} is not one of {kernels}")
    grid = tuple(reader.reference(r, where, 32) for r in exact_list(obj["grid"], where, 3))
    block = tuple(reader.reference(r, where, 32) for r in exact_list(obj["block"], where, 3))
    shared = reader.reference(obj["shared_bytes"], where, 64)
    attributes = []
    for item in exact_list(obj["attributes"], where):
        identity, words = exact_list(item, where, 2)
        if type(identity) is not int or identity not in ATTRIBUTE_WORDS:
            fail(where, f"unknown launch attribute {identity!r}")
        refs = exact_list(words, where, ATTRIBUTE_WORDS[identity])
        attributes.append((identity, tuple(reader.reference(r, where, 32) for r in refs)))
    if len({i for i, _ in attributes}) != len(attributes):
        fail(where, "a launch attribute appears twice")
    offsets, sizes, words_out, slots_out, total = [], [], [], [], 0
    for index, item in enumerate(exact_list(obj["parameters"], where)):
        here = f"{where} parameter {index}"
        item = exact_fields(item, {"size", "words", "slots"}, here)
        size = item["size"]
        if not is_int(size, 1, MAX_PARAMETER_BYTES):
            fail(here, f"size must be 1 to {MAX_PARAMETER_BYTES} bytes, found {size!r}")
        taken: list[tuple[int, int]] = []
        for word in exact_list(item["words"], here):
            offset, count, ref = exact_list(word, here, 3)
            if count not in (1, 2, 4, 8) or type(count) is not int or not is_int(offset, 0, size - count):
                fail(here, f"word {word!r} does not fit {size} bytes")
            ref = reader.reference(ref, here)
            if reader.widths[ref] != (count * 8) and not (count == 1 and reader.widths[ref] == 1):
                fail(here, f"word {word!r} takes a {reader.widths[ref]}-bit value")
            taken.append((offset, count))
            words_out.append((total + offset, count, ref))
        for slot in exact_list(item["slots"], here):
            offset, kind, pointer, addend = exact_list(slot, here, 4)
            if kind not in ("raw", "tma") or not is_int(offset, 0, size - 8) or not is_int(pointer, 0, pointers - 1):
                fail(here, f"slot {slot!r} is malformed")
            if offset % 8:
                fail(here, f"slot {slot!r} holds a pointer at no multiple of 8")
            addend = None if addend is None else reader.reference(addend, here, 64)
            taken.append((offset, 8))
            slots_out.append((total + offset, kind == "tma", pointer, addend))
        taken.sort()
        if any(o + c > following for (o, c), (following, _) in itertools.pairwise(taken)):
            fail(here, "two words overlap")
        offsets.append(total)
        sizes.append(size)
        total += -(-size // 16) * 16
    if sum(sizes) > MAX_PARAMETER_BYTES:
        fail(where, f"the parameters take more than {MAX_PARAMETER_BYTES} bytes")
    template = bytearray(total)
    for offset, count, ref in words_out:
        template[offset : offset + count] = (constants[ref] or 0).to_bytes(count, "little")
    return _LaunchShape(
        obj["kernel"],
        grid,
        block,
        shared,
        tuple(attributes),
        tuple(offsets),
        tuple(sizes),
        bytes(template),
        tuple(w for w in words_out if constants[w[2]] is None),
        tuple(slots_out),
    )
