"""Arguments that a function's record takes, made up: to evaluate its launch program where there is no tensor.

Knows nothing of memory or devices: the addresses are numbers, the strides those of packed tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.program.arguments import (
    Argument,
    NoneArgument,
    ScalarArgument,
    SuppliedArgument,
    TensorArgument,
    TupleArgument,
)
from runtime.program.operation import extents_at
from runtime.program.record import Record, TensorView

_ADDRESS = 1 << 44  # a multiple of every alignment, as are those that follow
_BETWEEN = 1 << 40


def free_extents(record: Record) -> tuple[str, ...]:
    """The symbols that are extents of its tensors, in their order."""
    tensors = (a for a in record.leaves() if isinstance(a, TensorArgument))
    return tuple(dict.fromkeys(x for tensor in tensors for x in tensor.shape if isinstance(x, str)))


def extents_of(record: Record, signature: Any, m: int) -> dict[str, int]:
    """What each free extent is where the function, which must suit it, computes a signature at `m` rows."""
    known = extents_at(signature, m)
    tensors = (a for a in record.arguments if isinstance(a, TensorArgument))
    axes = (
        pair
        for operand, tensor in zip(signature.operands(), tensors, strict=False)
        for pair in zip(operand.axes, tensor.shape, strict=False)
    )
    return {extent: known[axis] for axis, extent in axes if isinstance(extent, str)}


def near(record: Record, wanted: int) -> dict[str, int]:
    """Each free extent at the least number from `wanted` on that the record allows, or the greatest below."""
    found = {}
    for name in free_extents(record):
        symbol = record.symbols[name]
        step, most = symbol.divisibility, (1 << (symbol.width - 1)) - 1
        found[name] = min(-(-wanted // step), most // step) * step
    return found


def arguments(record: Record, extents: Mapping[str, int]) -> list[Any]:
    """What a call of `Record.bind` takes: packed tensors of these extents, and 1 for every scalar."""
    return _Maker(record, extents).all_of(record.arguments)


class _Maker:
    """Makes one call's arguments; a stride that several tensors share is the first's."""

    def __init__(self, record: Record, extents: Mapping[str, int]) -> None:
        self._symbols, self._values = record.symbols, dict(extents)
        self._address = _ADDRESS

    def all_of(self, described: tuple[Argument, ...]) -> list[Any]:
        return [self._one(a) for a in described if not isinstance(a, SuppliedArgument)]

    def _one(self, a: Argument) -> Any:
        if isinstance(a, TensorArgument):
            return self._tensor(a)
        if isinstance(a, TupleArgument):
            return self.all_of(a.items)
        assert isinstance(a, ScalarArgument | NoneArgument)
        return 1 if isinstance(a, ScalarArgument) else None

    def _tensor(self, a: TensorArgument) -> TensorView:
        shape = tuple(x if isinstance(x, int) else self._values[x] for x in a.shape)
        strides, reach = [0] * len(shape), 1
        fixed_first = sorted(range(len(shape)), key=lambda i: (isinstance(a.strides[i], str), -i))
        for i in fixed_first:
            strides[i] = self._stride(a.strides[i], reach)
            reach = max(reach, strides[i] * shape[i])
        self._address += _BETWEEN
        return TensorView(self._address, a.dtype, shape, tuple(strides), 0)

    def _stride(self, wanted: int | str, reach: int) -> int:
        if isinstance(wanted, int):
            return wanted
        step = self._symbols[wanted].divisibility
        return self._values.setdefault(wanted, -(-reach // step) * step)
