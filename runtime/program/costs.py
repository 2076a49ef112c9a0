"""Cost programs: data that turns the extents of a problem into estimated times, in microseconds.

A program is floating-point arithmetic without branches, in IEEE doubles: constants, then operations on inputs,
constants and each other, some of which are results. Native code reads and evaluates it where that was built, else
Python, with the same operations in the same order and so with the same bits, as far as both use one libm. Knows nothing
of tiles, GEMMs or archives: `aot.search.costs` writes programs by running the estimates of families of kernels on
symbols.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import native
from ..container.fields import fail_table, table_fields
from ..limits import MAX_COST_NODES, MAX_COST_RESULTS
from ..named_tuple import NamedTuple

_LARGEST_EXPONENT = 700.0  # of "exp"; NaN beyond, where doubles end
# Operations with their number of operands; the place of one is its code in `_costs.c` too. What IEEE 754 leaves open is
# said here: 0 divides into NaN, and comparisons with NaN are false, so that "max" and "min" give the second.
OPERATIONS: dict[str, int] = {
    "add": 2,
    "sub": 2,
    "mul": 2,
    "div": 2,
    "max": 2,
    "min": 2,
    "ceil": 1,
    "floor": 1,
    "sqrt": 1,
    "log": 1,
    "exp": 1,
    "select": 4,  # the third where the first is at most the second, else the fourth
}
_CODES = {word: code for code, word in enumerate(OPERATIONS)}
_ARITIES = tuple(OPERATIONS.values())
_FIELDS = frozenset({"constants", "operations", "operands", "results"})
_REFUSALS = (ValueError, TypeError, OverflowError)  # of what reads a program


class CostSource(NamedTuple):
    """What a cost program is read to and written from: numbers, words of `OPERATIONS`, the operands of all operations
    in a row, and which values are results. Inputs are the first values, then constants, then operations, each of which
    may take what is before it.
    """

    constants: list[float]
    operations: list[str]
    operands: list[int]
    results: list[int]

    def to_json(self) -> dict[str, Any]:
        """It as `from_json` takes it, operations in one string."""
        return {
            "constants": self.constants,
            "operations": " ".join(self.operations),
            "operands": self.operands,
            "results": self.results,
        }

    @classmethod
    def from_json(cls, obj: Any, where: str) -> CostSource:
        """Check and read all but words and places of values, which `CostProgram` looks at; `where` names it in errors.

        Raises:
            RecordError: anything is missing, unknown, or too much.
        """
        obj = table_fields(obj, _FIELDS, where)
        constants, operands, results = obj["constants"], obj["operands"], obj["results"]
        if not isinstance(obj["operations"], str):
            fail_table(where, f"operations must be words in one string, found {obj['operations']!r:.100}")
        words = obj["operations"].split(" ") if obj["operations"] else []
        for what, items in (("constants", constants), ("operands", operands), ("results", results)):
            if not isinstance(items, list):
                fail_table(where, f"{what} must be a list, found {items!r:.100}")
        if (count := len(constants) + len(words)) > MAX_COST_NODES:
            fail_table(where, f"it has {count} constants and operations, at most {MAX_COST_NODES} are read")
        if not 1 <= len(results) <= MAX_COST_RESULTS:
            fail_table(where, f"it must have 1 to {MAX_COST_RESULTS} results, found {len(results)}")
        if not all(type(x) in (int, float) and math.isfinite(x) for x in constants):
            fail_table(where, "constants must be numbers")
        return cls(constants, words, operands, results)


class CostProgram:
    """A checked program; `evaluate` gives a time for each of its `results`."""

    def __init__(self, inputs: int, evaluator: Any, results: int) -> None:
        self.inputs, self.results, self._evaluator = inputs, results, evaluator

    @classmethod
    def from_json(cls, obj: Any, inputs: int, where: str, in_python: bool = False) -> CostProgram:
        """Check and read a program over so many inputs; `where` names it in errors.

        `in_python` has Python evaluate it though native code was built, to hold the two against each other.

        Raises:
            RecordError: anything is missing, unknown, out of range or too much.
        """
        source = CostSource.from_json(obj, where)
        try:
            codes = bytes([_CODES[word] for word in source.operations])
        except KeyError as error:
            fail_table(where, f"unknown operation {error!s:.50}")
        make = _PythonCosts if in_python or native.costs is None else native.costs
        given = inputs, source.constants, codes, source.operands, source.results
        try:
            return cls(inputs, make(*given), len(source.results))
        except _REFUSALS as error:
            fail_table(where, _wording(given, error))

    def evaluate(self, values: Sequence[float]) -> list[float]:
        """The results for a value of each input, in order. What has no finite value is infinite: never the least."""
        found: list[float] = self._evaluator.evaluate(values)
        return found

    def least(self, values: Sequence[float], places: tuple[int, ...]) -> int:
        """Which of the results at `places` is the least for these values, the first of equal ones."""
        found: int = self._evaluator.least(values, places)
        return found


class _PythonCosts:
    """What `runtime.native._native.Costs` is, in Python.

    Raises:
        ValueError: operands or results are not as many as they must be, or not of what is before them.
    """

    def __init__(
        self, inputs: int, constants: list[float], codes: bytes, operands: list[int], results: list[int]
    ) -> None:
        self._inputs, self._constants = inputs, [float(x) for x in constants]
        known, at = inputs + len(constants), 0
        for code in codes:
            given = operands[at : at + _ARITIES[code]]
            at += _ARITIES[code]
            _require_places(given, known, _ARITIES[code])
            known += 1
        if at != len(operands):
            raise ValueError(f"its operations take {at} operands, found {len(operands)}")
        _require_places(results, known, len(results))
        runs = _runs(inputs + len(constants), codes, operands)
        # With the operands of a run of one, in order, or None of longer ones.
        self._runs = [(f, of, None if len(of[0]) > 1 else tuple([x for (x,) in of])) for f, of in runs]
        self._results = results

    def evaluate(self, values: Sequence[float]) -> list[float]:
        if len(values) != self._inputs:
            raise ValueError("a cost program takes a value for each input")
        known = [*map(float, values), *self._constants]
        add = known.append
        for operation, columns, alone in self._runs:
            if alone is None:
                known += map(operation, *[[known[x] for x in column] for column in columns])
            elif len(alone) == 1:  # as the next: a chain of operations has runs of one, and these need no lists
                add(operation(known[alone[0]]))
            else:
                add(operation(*[known[x] for x in alone]))
        return [known[x] if math.isfinite(known[x]) else math.inf for x in self._results]

    def least(self, values: Sequence[float], places: tuple[int, ...]) -> int:
        return min(places, key=self.evaluate(values).__getitem__)


def _runs(known: int, codes: bytes, operands: list[int]) -> Iterator[tuple[Callable[..., float], list[list[int]]]]:
    """Operations of one kind, next to each other, none of which takes what another of them gives; their operands by
    column. `known` is the place of the first."""
    at = 0
    for code, group in itertools.groupby(codes):
        arity, left = _ARITIES[code], len(list(group))
        while left:
            end = first = at
            while end < first + left * arity and operands[end] < known:
                end += 1
            count = (end - first) // arity
            at = first + count * arity
            yield _PYTHON[code], [operands[first + column : at : arity] for column in range(arity)]
            known, left = known + count, left - count


def _wording(given: tuple[Any, ...], error: Exception) -> str:
    """What Python says of a program that is refused, so that errors are the same with native code and without."""
    try:
        _PythonCosts(*given)
    except _REFUSALS as of_python:
        return str(of_python)
    return str(error)


def _require_places(places: list[int], known: int, count: int) -> None:
    if len(places) != count or not all(type(x) is int and 0 <= x < known for x in places):
        raise ValueError(f"an operation or result is of {places!r:.60}, where there are {known} values before it")


def _div(a: float, b: float) -> float:
    return a / b if b else math.nan


def _whole(rounded: Callable[[float], int]) -> Callable[[float], float]:
    return lambda a: float(rounded(a)) if math.isfinite(a) else a


# In the order of `OPERATIONS`.
_PYTHON: tuple[Callable[..., float], ...] = (
    operator.add,
    operator.sub,
    operator.mul,
    _div,
    lambda a, b: a if a > b else b,
    lambda a, b: a if a < b else b,
    _whole(math.ceil),
    _whole(math.floor),
    lambda a: math.sqrt(a) if a >= 0 else math.nan,
    lambda a: math.log(a) if 0 < a < math.inf else math.nan,
    lambda a: math.exp(a) if a < _LARGEST_EXPONENT else math.nan,
    lambda a, b, c, d: c if a <= b else d,
)
