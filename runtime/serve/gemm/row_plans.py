"""Plans for new numbers of rows, from one for the same call with another: what a server meets again and again.

Knows torch's tensors by their methods, and plans; nothing of archives or the driver.
"""

from __future__ import annotations

from typing import Any

from ...gemm.call import Call
from ...gemm.universal import AnyEntry
from ...named_tuple import NamedTuple
from ...numbers.dtypes import DTYPES
from ...program.record import TensorView
from .plan import GemmPlan

_WITH_ROWS = (0, 2, 3, 7)  # of a, b, out and `call.EXTRAS`: a, out, scale_a, residual


class Known(NamedTuple):
    """A plan for a call with `rows` rows; `steps` are the bytes from row to row of each operand, 0."""

    gemm: GemmPlan
    rows: int
    steps: tuple[int, ...]


class RowPlans:
    """The plans of calls that are alike but for their number of rows, one for each function."""

    def __init__(self, entry: AnyEntry) -> None:
        self.entry = entry
        self._known: dict[str, Known] = {}

    def find(self, rows: int) -> Known | None:
        """What is known of the function that is best for `rows` rows."""
        return self._known.get(self.entry.best(rows))

    def keep(self, known: Known) -> None:
        """Remember this, if there is nothing for its function."""
        self._known.setdefault(known.gemm.function.name, known)


def rows_of(call: Call, key: tuple[Any, ...]) -> tuple[int, Any] | None:
    """The rows of a call of torch tensors, and what else it is, which is the same for calls that are alike.

    `key` is `call.key()`. None where its tensors are no matrices, or have one row: extents of 1 let strides be ignored.
    """
    for x in (call.a, call.b, call.out) if call.plain else (call.a, call.b, call.out, *call.operands):
        if x is not None and x.storage_offset() and not x.untyped_storage().nbytes():
            return None  # its storage was freed, which is an error to be told
    if call.plain:
        return _rows_of_plain(call, key)
    *words, a, b, out = key[:6]
    rows = a[0][0] if a[0] else 0
    if rows < 2 or any(seen is not None and len(seen[0]) != 2 for seen in (a, b, out)):
        return None
    parts: list[Any] = [*words, call.stream is None]
    for place, seen in enumerate(key[3:]):
        if place in _WITH_ROWS and seen is not None and seen[0] and seen[0][0] == rows:
            seen = (-1, *seen[0][1:]), *seen[1:]
        parts.append(seen)
    return rows, tuple(parts)


def _rows_of_plain(call: Call, key: tuple[Any, ...]) -> tuple[int, Any] | None:
    shape = key[0]
    if len(shape) != 2 or len(key[3]) != 2 or shape[0] < 2:
        return None
    rows, columns = shape
    if call.out is None:
        return rows, (call.stream is None, columns, *key[1:])
    if len(key[6]) != 2 or key[6][0] != rows:
        return None
    return rows, (call.stream is None, columns, key[6][1], *key[1:6], *key[7:])


def steps_of(call: Call, views: tuple[TensorView, ...], rows: int) -> tuple[int, ...]:
    """Bytes from row to row of each operand that is given, in the order of `views`; 0 where it has no rows."""
    places = [place for place, x in enumerate((call.a, call.b, 0, *call.operands)) if x is not None]
    return tuple(
        DTYPES[v.dtype].bytes_of(v.strides[0]) if place in _WITH_ROWS and v.shape[0] == rows else 0
        for place, v in zip(places, views, strict=True)
    )
