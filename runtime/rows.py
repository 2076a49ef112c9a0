"""Plans for new numbers of rows, from one for the same call with another: what a server meets again and again.

Knows torch's tensors by their methods, and plans; nothing of archives or the driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .call import Call
from .dtypes import DTYPES
from .record import TensorView
from .tuples import NamedTuple
from .universal import AnyEntry

if TYPE_CHECKING:
    from .contents import GemmPlan

_WITH_ROWS = (0, 2, 3, 6)  # of a, b, out and `call.EXTRAS`: a, out, scale_a, residual


class Known(NamedTuple):
    """A plan for a call with `rows` rows; `steps` are the bytes from row to row of each operand, 0."""

    gemm: GemmPlan
    rows: int
    steps: tuple[int, ...]


class Rows:
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


def rows_of(call: Call) -> tuple[int, Any] | None:
    """The rows of a call of torch tensors, and what else it is, which is the same for calls that are alike.

    None where its tensors are no matrices, or have one row: extents of 1 let strides be ignored.
    """
    a, b, out = call.a, call.b, call.out
    if a.dim() != 2 or b.dim() != 2 or (out is not None and out.dim() != 2):
        return None
    rows = a.shape[0]
    if rows < 2:
        return None
    parts: list[Any] = [call.epilogue, call.overlap, call.dtype, call.plain, call.stream is None]
    for place, x in enumerate((a, b, out, *call.operands)):
        if x is None:
            parts.append(None)
            continue
        if x.storage_offset() and not x.untyped_storage().nbytes():
            return None  # its storage was freed, which is an error to be told
        shape = tuple(x.shape)
        if place in _WITH_ROWS and shape and shape[0] == rows:
            shape = (-1, *shape[1:])
        parts.append((shape, x.stride(), x.dtype, x.get_device()))
    return rows, tuple(parts)


def steps_of(call: Call, views: tuple[TensorView, ...], rows: int) -> tuple[int, ...]:
    """Bytes from row to row of each operand that is given, in the order of `views`; 0 where it has no rows."""
    places = [place for place, x in enumerate((call.a, call.b, 0, *call.operands)) if x is not None]
    return tuple(
        v.strides[0] * DTYPES[v.dtype].bytes if place in _WITH_ROWS and v.shape[0] == rows else 0
        for place, v in zip(places, views, strict=True)
    )
