"""Launch programs: data that turns extents, strides and scalars into kernel launches.

A program is what remains of a compiled function's host code: grid, block, cluster, shared memory, launch
attributes and the bytes of every kernel parameter (TMA descriptors included), as integer arithmetic
(`runtime.program.arithmetic`) over the function's inputs. Pointers are no inputs of that arithmetic: they appear only
as *slots*, 8-byte places in the parameters, so that a plan made once for a shape serves every set of pointers.

Programs are read and evaluated by native code where that was built, else, and where it declines, by
`runtime.program.evaluator`. Knows nothing of tensors, GEMMs, archives or the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING, Any

from .. import native
from ..container.fields import WIDTHS, exact_fields, exact_list, fail
from ..device.launch import Evaluation, Launch, LaunchShape, Slot, refuse, refuse_input
from ..errors import ProgramError
from ..limits import MAX_INPUTS, MAX_LAUNCHES, MAX_POINTERS
from ..named_tuple import NamedTuple
from .poison import why

if TYPE_CHECKING:
    from .evaluator import PythonEvaluator


class ParameterSource(NamedTuple):
    """A kernel parameter of `size` bytes: `words` as (offset, bytes, value), `slots` as (offset, "raw" or "tma",
    pointer, addend), where what is a value is the number of one and an addend may be None; zero elsewhere."""

    size: int
    words: Sequence[tuple[int, int, int]]
    slots: Sequence[tuple[int, str, int, int | None]]

    def to_json(self) -> dict[str, Any]:
        """It as a program has it."""
        return {"size": self.size, "words": [list(w) for w in self.words], "slots": [list(s) for s in self.slots]}


class LaunchSource(NamedTuple):
    """A launch of a kernel: numbers of the values that are its grid, block, dynamic shared memory, and the words of its
    attributes, by CUlaunchAttributeID."""

    kernel: int
    grid: Sequence[int]
    block: Sequence[int]
    shared_bytes: int
    attributes: Sequence[tuple[int, Sequence[int]]]
    parameters: Sequence[ParameterSource]

    def to_json(self) -> dict[str, Any]:
        """It as a program has it."""
        return {
            "kernel": self.kernel,
            "grid": list(self.grid),
            "block": list(self.block),
            "shared_bytes": self.shared_bytes,
            "attributes": [[identity, list(words)] for identity, words in self.attributes],
            "parameters": [parameter.to_json() for parameter in self.parameters],
        }


class ProgramSource(NamedTuple):
    """What a launch program is written from; `nodes` as `runtime.program.arithmetic` takes them."""

    values: Sequence[tuple[str, int]]
    pointers: Sequence[str]
    nodes: Sequence[list[Any]]
    launches: Sequence[LaunchSource]

    def to_json(self) -> dict[str, Any]:
        """The program, as `Program.from_json` reads it."""
        return {
            "values": [list(value) for value in self.values],
            "pointers": list(self.pointers),
            "nodes": list(self.nodes),
            "launches": [launch.to_json() for launch in self.launches],
        }


class Program:
    """A checked launch program over the integer inputs `values` (name, width in bits) and the inputs `pointers`."""

    def __init__(
        self,
        values: tuple[tuple[str, int], ...],
        pointers: tuple[str, ...],
        kernels: int,
        evaluator: NativeEvaluator | PythonEvaluator,
    ) -> None:
        self.values, self.pointers, self.kernels, self._evaluator = values, pointers, kernels, evaluator

    @classmethod
    def from_json(cls, obj: Any, kernels: int) -> Program:
        """Check and read a program that launches kernels 0 to `kernels` - 1.

        Raises:
            RecordError: anything is missing, unknown, out of range or out of order.
        """
        obj = exact_fields(obj, {"values", "pointers", "nodes", "launches"}, "program")
        for what, most in (("values", MAX_INPUTS), ("pointers", MAX_POINTERS), ("launches", MAX_LAUNCHES)):
            if len(exact_list(obj[what], what)) > most:
                fail(what, f"there are {len(obj[what])}, at most {most} are read")
        if not obj["launches"]:
            fail("launches", "there is none")
        values = []
        for item in obj["values"]:
            name, width = exact_list(item, "values", 2)
            if not isinstance(name, str) or not name or type(width) is not int or width not in WIDTHS:
                fail("values", f"needs [name, width], found {item!r:.200}")
            values.append((name, width))
        pointers = obj["pointers"]
        if any(not isinstance(p, str) or not p for p in pointers):
            fail("pointers", f"must be names, found {pointers!r:.200}")
        for what, names in (("values", [n for n, _ in values]), ("pointers", pointers)):
            if len(set(names)) != len(names):
                fail(what, f"a name appears twice in {names!r:.200}")
        evaluator = _evaluator(tuple(values), obj["nodes"], obj["launches"], len(pointers), kernels)
        if {shape.kernel for shape in evaluator.launches} != set(range(kernels)):
            fail("launches", f"they must use each of the {kernels} kernels")
        return cls(tuple(values), tuple(pointers), kernels, evaluator)

    @property
    def launches(self) -> tuple[LaunchShape, ...]:
        """What it launches."""
        return self._evaluator.launches

    @property
    def steps(self) -> int:
        """The most steps that an evaluation takes: nodes, those of loops in every round, words and slots written."""
        return self._evaluator.steps

    def plan(self, values: Sequence[int]) -> tuple[Launch, ...]:
        """The launches for one shape; see `evaluate`."""
        return self.evaluate(values).launches

    def evaluate(self, values: Sequence[int], last: Evaluation | None = None) -> Evaluation:
        """Evaluate for one shape; `values` in the order of `self.values`, signed or unsigned.

        The evaluation of another shape makes this one quicker.

        Raises:
            ProgramError: a value does not fit its width, or these values make the launch undefined or illegal.
            TypeError: a value is no integer.
        """
        if len(values) != len(self.values):
            raise ProgramError(f"this program takes {len(self.values)} values, {len(values)} were given")
        return self._evaluator.evaluate(tuple(map(index, values)), last)


def _evaluator(
    values: tuple[tuple[str, int], ...], nodes: Any, launches: Any, pointers: int, kernels: int
) -> NativeEvaluator | PythonEvaluator:
    if native._native is not None:
        found = native._native.Program.read([width for _, width in values], nodes, launches, pointers, kernels)
        if found is not None:
            return NativeEvaluator(values, found)
    from .evaluator import PythonEvaluator  # not imported where native code reads everything

    return PythonEvaluator.from_json(values, nodes, launches, pointers, kernels)


class NativeEvaluator:
    """A program that `runtime.native._native` has read."""

    def __init__(self, values: tuple[tuple[str, int], ...], program: Any) -> None:
        self._values, self._evaluate, self.steps = values, program.evaluate, program.steps()
        shapes = program.shapes()
        self.launches = tuple([LaunchShape(*shape[:4]) for shape in shapes])
        self._slots = tuple([tuple([Slot(*slot) for slot in shape[4]]) for shape in shapes])

    def evaluate(self, values: tuple[int, ...], last: Evaluation | None) -> Evaluation:
        """See `Program.evaluate`."""
        found = self._evaluate(values)
        if type(found) is tuple:
            raise self._refuse(values, *found)
        launches = []
        numbers = tuple([rest for _, _, rest in found])
        small = last is not None and last.numbers == numbers
        for place, (grid, parameters, (block, shared_bytes, attributes, addends)) in enumerate(found):
            if last is not None and small:
                slots = last.launches[place].slots
            else:
                slots = self._slots[place]
                if any(addends):
                    slots = tuple([slot._replace(addend=a) for slot, a in zip(slots, addends, strict=True)])
            kernel, _, offsets, sizes = self.launches[place]
            launches.append(Launch(kernel, grid, block, shared_bytes, attributes, parameters, offsets, sizes, slots))
        return Evaluation(tuple(launches), small, numbers)

    def _refuse(self, values: tuple[int, ...], what: str, *facts: Any) -> ProgramError:
        """Why there are no launches."""
        if what == "poison":
            return ProgramError(why(*facts))
        (found,) = facts
        if what != "input":
            return refuse(what, found)
        name, width = self._values[found]
        return refuse_input(name, values[found], width)
