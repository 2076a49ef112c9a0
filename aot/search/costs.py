"""Arithmetic that estimates of times are written in, over numbers or over symbols.

An estimate that uses Python's `+ - * /`, and `ceil`, `maximum` and so on from here where it branches or rounds, gives a
time for numbers. For symbols it leaves its operations in a `Tape`, of which `Tape.program` makes the cost program that
an archive holds (`runtime.program.costs`). Knows nothing of kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias

from runtime.program.costs import CostSource

# Below this JSON has more than one spelling of a number, and a rate is easier to read than its reciprocal.
_LEAST_CONSTANT = 1e-4
_CONST = "const"  # the node of a number


class Machine(NamedTuple):
    """What of a GPU an estimate depends on: its SMs, and the peak rate of its memory in GB/s, as CUDA's attributes give
    it (twice the memory clock times the bytes that the bus is wide)."""

    multiprocessors: Number
    memory_gbps: Number


class Extents(Protocol):
    """Of a signature, what an estimate depends on besides M."""

    @property
    def n(self) -> Any:
        """Rows of B."""

    @property
    def k(self) -> Any:
        """Columns of A and B."""

    @property
    def batch(self) -> Any:
        """Products side by side."""


class CostError(ValueError):
    """An estimate cannot be written as a cost program."""


@dataclass
class Tape:
    """The operations of estimates over the same inputs, each once however often it is asked for."""

    inputs: tuple[str, ...]
    nodes: list[list[Any]] = field(default_factory=list)
    _known: dict[tuple[Any, ...], Symbol] = field(default_factory=dict)
    _numbers: dict[float, int] = field(default_factory=dict)  # places of those that were asked for

    def symbols(self) -> tuple[Symbol, ...]:
        """The inputs, to call an estimate with."""
        return tuple(Symbol(self, place) for place in range(len(self.inputs)))

    def add(self, operation: str, *operands: Number) -> Symbol:
        """The result of an operation."""
        # Most operands are symbols of this tape, and a ranking adds some hundred thousand operations.
        node = (operation, *[x.place if type(x) is Symbol and x.tape is self else self.place(x) for x in operands])
        known = self._known.get(node)
        return self._node(node) if known is None else known

    def place(self, x: Number) -> int:
        """Where `x` is; a number gets a node of its own."""
        if isinstance(x, Symbol):
            if x.tape is not self:
                raise CostError("an estimate mixes symbols of two tapes")
            return x.place
        if (known := self._numbers.get(x)) is not None:
            return known
        if not math.isfinite(x) or 0 < abs(x) < _LEAST_CONSTANT:
            raise CostError(
                f"an estimate has the constant {x!r}; divide by a rate in place of multiplying by so little"
            )
        self._numbers[x] = place = self._node((_CONST, int(x) if x == int(x) else float(x))).place
        return place

    def _node(self, node: tuple[Any, ...]) -> Symbol:
        if (known := self._known.get(node)) is None:
            self._known[node] = known = Symbol(self, len(self.inputs) + len(self.nodes))
            self.nodes.append(list(node))
        return known

    def program(self, results: Sequence[Number]) -> CostSource:
        """The program that gives `results`, without the operations that none of them needs.

        Operations of one kind that do not depend on each other follow each other, which are evaluated together.
        """
        wanted = [self.place(x) for x in results]
        first, used = len(self.inputs), [False] * (len(self.inputs) + len(self.nodes))
        for place in wanted:
            used[place] = True
        for place in range(len(used) - 1, first - 1, -1):  # from the last, as operands are before what they are of
            if used[place]:
                name, *operands = self.nodes[place - first]
                if name != _CONST:
                    for operand in operands:
                        used[operand] = True
        constants, operations, depth = list[int](), list[int](), [0] * len(used)
        for place in range(first, len(used)):
            if used[place]:
                name, *operands = self.nodes[place - first]
                if name == _CONST:
                    constants.append(place)
                else:
                    operations.append(place)
                    depth[place] = 1 + max([depth[operand] for operand in operands])
        operations.sort(key=lambda place: (depth[place], self.nodes[place - first][0]))
        moved = {place: i for i, place in enumerate([*range(first), *constants, *operations])}
        return CostSource(
            constants=[self.nodes[place - first][1] for place in constants],
            operations=[self.nodes[place - first][0] for place in operations],
            operands=[moved[x] for place in operations for x in self.nodes[place - first][1:]],
            results=[moved[place] for place in wanted],
        )


class Symbol:
    """A number that is not known yet. It cannot be compared or made an integer: use the functions of this module."""

    __slots__ = ("place", "tape")

    def __init__(self, tape: Tape, place: int) -> None:
        self.tape, self.place = tape, place

    def __add__(self, other: Number) -> Symbol:
        return self.tape.add("add", self, other)

    def __radd__(self, other: Number) -> Symbol:
        return self.tape.add("add", other, self)

    def __sub__(self, other: Number) -> Symbol:
        return self.tape.add("sub", self, other)

    def __rsub__(self, other: Number) -> Symbol:
        return self.tape.add("sub", other, self)

    def __mul__(self, other: Number) -> Symbol:
        return self.tape.add("mul", self, other)

    def __rmul__(self, other: Number) -> Symbol:
        return self.tape.add("mul", other, self)

    def __truediv__(self, other: Number) -> Symbol:
        return self.tape.add("div", self, other)

    def __rtruediv__(self, other: Number) -> Symbol:
        return self.tape.add("div", other, self)

    def __bool__(self) -> bool:
        raise CostError("an estimate branches on a symbol; use aot.search.costs.select")

    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = lambda self, other: self.__bool__()
    __hash__ = None  # type: ignore[assignment]


Number: TypeAlias = float | Symbol  # and int, as Python has it


def _tape(*given: Number) -> Tape | None:
    return next((x.tape for x in given if isinstance(x, Symbol)), None)


def ceil(x: Number) -> Any:
    """`x` rounded up to a whole number."""
    return x.tape.add("ceil", x) if isinstance(x, Symbol) else float(math.ceil(x))


def floor(x: Number) -> Any:
    """`x` rounded down to a whole number."""
    return x.tape.add("floor", x) if isinstance(x, Symbol) else float(math.floor(x))


def sqrt(x: Number) -> Any:
    """The square root."""
    return x.tape.add("sqrt", x) if isinstance(x, Symbol) else math.sqrt(x)


def log(x: Number) -> Any:
    """The natural logarithm."""
    return x.tape.add("log", x) if isinstance(x, Symbol) else math.log(x)


def exp(x: Number) -> Any:
    """e to the power of `x`."""
    return x.tape.add("exp", x) if isinstance(x, Symbol) else math.exp(x)


def maximum(a: Number, b: Number) -> Any:
    """The greater."""
    tape = _tape(a, b)
    return tape.add("max", a, b) if tape else max(a, b)


def minimum(a: Number, b: Number) -> Any:
    """The lesser."""
    tape = _tape(a, b)
    return tape.add("min", a, b) if tape else min(a, b)


def select(a: Number, b: Number, then: Number, otherwise: Number) -> Any:
    """`then` where `a` is at most `b`, else `otherwise`; both are computed."""
    tape = _tape(a, b, then, otherwise)
    return tape.add("select", a, b, then, otherwise) if tape else then if a <= b else otherwise
