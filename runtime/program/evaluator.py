"""Launch programs in Python: how they are read, checked and evaluated where native code does not.

Knows nothing of tensors, GEMMs, archives or the driver.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from ..container.fields import exact_fields, exact_list, fail, is_int
from ..device.launch import ATTRIBUTE_WORDS, Evaluation, Launch, LaunchShape, Slot, refuse, refuse_input
from ..errors import ProgramError
from ..limits import MAX_BLOCK_THREADS, MAX_GRID, MAX_PARAMETER_BYTES, MAX_PARAMETERS, MAX_SHARED_BYTES
from ..named_tuple import NamedTuple
from .arithmetic import Poison, Step, Values
from .nodes import NodeReader
from .poison import signed

_MAX_CHANGES = 64  # that a program remembers; one would do where only the number of rows changes


class _Launch(NamedTuple):
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


class _Change(NamedTuple):
    """What to compute again where some inputs differ: steps, and for each launch the words of its parameters besides
    its grid, or None where it is more than that. `small`: that it is nowhere more."""

    steps: tuple[tuple[int, Step], ...]
    words: tuple[tuple[tuple[int, int, int], ...] | None, ...]
    small: bool


class PythonEvaluator:
    """A program that was read by this module."""

    def __init__(
        self,
        values: tuple[tuple[str, int], ...],
        launches: tuple[_Launch, ...],
        constants: tuple[int | None, ...],  # what each value is where that is known from the start
        steps: tuple[tuple[int, Step], ...],  # how the others are computed, in order
        inputs: tuple[int, ...],  # for each value a bit for each input that it depends on
        most_steps: int,  # that its nodes take
    ) -> None:
        self._values, self._launches, self._constants = values, launches, constants
        self._steps, self._inputs = steps, inputs
        self._limits = tuple((-(1 << (width - 1)), (1 << width) - 1) for _, width in values)
        self._changes: dict[int, _Change] = {}  # by the inputs that differ
        self.steps = most_steps + sum(len(x.words) + len(x.slots) for x in launches)
        self.launches = tuple(
            LaunchShape(x.kernel, tuple(i for i, _ in x.attributes), x.offsets, x.sizes) for x in launches
        )

    @classmethod
    def from_json(
        cls, values: tuple[tuple[str, int], ...], nodes: Any, launches: Any, pointers: int, kernels: int
    ) -> PythonEvaluator:
        """Check and read the nodes and launches of a program.

        Raises:
            RecordError: anything is missing, unknown, out of range or out of order.
        """
        reader = NodeReader([w for _, w in values])
        steps = [(len(values) + i, step) for i, step in enumerate(reader.nodes(nodes, "node"))]
        constants = (*(None for _ in values), *(n[2] if n[0] == "const" else None for n in nodes))
        read = tuple(_read_launch(x, i, reader, constants, pointers, kernels) for i, x in enumerate(launches))
        steps = [(number, step) for number, step in steps if constants[number] is None]
        return cls(values, read, constants, tuple(steps), tuple(reader.inputs), len(nodes) + reader.loop_steps)

    def evaluate(self, values: tuple[int, ...], last: Evaluation | None) -> Evaluation:
        """See `Program.evaluate`: after another one only what depends on values that differ is computed."""
        v: Values = list(self._constants) if last is None else last.numbers.copy()
        changed = 0
        for number, (x, (least, most)) in enumerate(zip(values, self._limits, strict=True)):
            if not least <= x <= most:
                name, width = self._values[number]
                raise refuse_input(name, x, width)
            x &= most
            if v[number] != x:
                changed |= 1 << number
                v[number] = x
        if last is None:
            for number, step in self._steps:
                v[number] = step(v)
            return Evaluation(tuple(_evaluate_launch(shape, v) for shape in self._launches), False, v)
        change = self._changes.get(changed)
        if change is None:
            if len(self._changes) >= _MAX_CHANGES:
                self._changes.clear()
            change = self._changes[changed] = self._change(changed)
        for number, step in change.steps:
            v[number] = step(v)
        again = zip(self._launches, last.launches, change.words, strict=True)
        return Evaluation(tuple([_update(shape, launch, words, v) for shape, launch, words in again]), change.small, v)

    def _change(self, changed: int) -> _Change:
        """What depends on the inputs with a bit in `changed`."""
        inputs = self._inputs
        words: list[tuple[tuple[int, int, int], ...] | None] = []
        for shape in self._launches:
            fixed = (*shape.block, shape.shared_bytes, *(r for _, refs in shape.attributes for r in refs))
            addends = (addend for _, _, _, addend in shape.slots if addend is not None)
            anew = any(inputs[ref] & changed for ref in (*fixed, *addends))
            words.append(None if anew else tuple(word for word in shape.words if inputs[word[2]] & changed))
        steps = tuple((number, step) for number, step in self._steps if inputs[number] & changed)
        return _Change(steps, tuple(words), all(found is not None for found in words))


def _number(v: Values, ref: int) -> int:
    """A value that is needed."""
    value = v[ref]
    if type(value) is Poison:
        raise ProgramError(value.reason)
    return int(value)


def _evaluate_grid(shape: _Launch, v: Values) -> tuple[int, int, int]:
    grid = x, y, z = (_number(v, shape.grid[0]), _number(v, shape.grid[1]), _number(v, shape.grid[2]))
    if not (1 <= x <= MAX_GRID[0] and 1 <= y <= MAX_GRID[1] and 1 <= z <= MAX_GRID[2]):
        raise refuse("grid", grid)
    return grid


def _update(shape: _Launch, last: Launch, words: tuple[tuple[int, int, int], ...] | None, v: Values) -> Launch:
    """The launch that differs from `last` in its grid and in these words, or in anything if they are None."""
    if words is None:
        return _evaluate_launch(shape, v)
    grid = _evaluate_grid(shape, v)
    parameters = bytearray(last.parameters)
    for offset, size, ref in words:
        value = v[ref]
        parameters[offset : offset + size] = (value if type(value) is int else _number(v, ref)).to_bytes(size, "little")
    kernel, _, block, shared_bytes, attributes, _, offsets, sizes, slots = last
    return Launch(kernel, grid, block, shared_bytes, attributes, bytes(parameters), offsets, sizes, slots)


def _evaluate_launch(shape: _Launch, v: Values) -> Launch:
    grid = _evaluate_grid(shape, v)
    block = (_number(v, shape.block[0]), _number(v, shape.block[1]), _number(v, shape.block[2]))
    if any(b < 1 for b in block) or block[0] * block[1] * block[2] > MAX_BLOCK_THREADS:
        raise refuse("block", block)
    shared_bytes = _number(v, shape.shared_bytes)
    if shared_bytes > MAX_SHARED_BYTES:
        raise refuse("shared_bytes", shared_bytes)
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
) -> _Launch:
    where = f"launch {number}"
    obj = exact_fields(obj, {"kernel", "grid", "block", "shared_bytes", "attributes", "parameters"}, where)
    if not is_int(obj["kernel"], 0, kernels - 1):
        fail(where, f"kernel {obj['kernel']!r:.50} is not one of {kernels}")
    grid = tuple(reader.reference(r, where, 32) for r in exact_list(obj["grid"], where, 3))
    block = tuple(reader.reference(r, where, 32) for r in exact_list(obj["block"], where, 3))
    shared = reader.reference(obj["shared_bytes"], where, 64)
    attributes = []
    for item in exact_list(obj["attributes"], where):
        identity, words = exact_list(item, where, 2)
        if type(identity) is not int or identity not in ATTRIBUTE_WORDS:
            fail(where, f"unknown launch attribute {identity!r:.50}")
        refs = exact_list(words, where, ATTRIBUTE_WORDS[identity])
        attributes.append((identity, tuple(reader.reference(r, where, 32) for r in refs)))
    if len({i for i, _ in attributes}) != len(attributes):
        fail(where, "a launch attribute appears twice")
    offsets, sizes, words_out, slots_out, total = [], [], [], [], 0
    if len(exact_list(obj["parameters"], where)) > MAX_PARAMETERS:
        fail(where, f"has {len(obj['parameters'])} parameters, at most {MAX_PARAMETERS} are read")
    for index, item in enumerate(obj["parameters"]):
        here = f"{where} parameter {index}"
        item = exact_fields(item, {"size", "words", "slots"}, here)
        size = item["size"]
        if not is_int(size, 1, MAX_PARAMETER_BYTES):
            fail(here, f"size must be 1 to {MAX_PARAMETER_BYTES} bytes, found {size!r:.50}")
        taken: list[tuple[int, int]] = []
        for word in exact_list(item["words"], here):
            offset, count, ref = exact_list(word, here, 3)
            if count not in (1, 2, 4, 8) or type(count) is not int or not is_int(offset, 0, size - count):
                fail(here, f"word {word!r:.100} does not fit {size} bytes")
            ref = reader.reference(ref, here)
            if reader.widths[ref] != (count * 8) and not (count == 1 and reader.widths[ref] == 1):
                fail(here, f"word {word!r:.100} takes a {reader.widths[ref]}-bit value")
            taken.append((offset, count))
            words_out.append((total + offset, count, ref))
        for slot in exact_list(item["slots"], here):
            offset, kind, pointer, addend = exact_list(slot, here, 4)
            if kind not in ("raw", "tma") or not is_int(offset, 0, size - 8) or not is_int(pointer, 0, pointers - 1):
                fail(here, f"slot {slot!r:.100} is malformed")
            if offset % 8:
                fail(here, f"slot {slot!r:.100} holds a pointer at no multiple of 8")
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
    return _Launch(
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
