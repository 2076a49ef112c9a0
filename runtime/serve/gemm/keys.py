"""What a call of `gemm` is but for its pointers: the keys under which a plan is kept and found.

A plan depends on the words of a call, and on each operand's extents, strides, element type and device. That is said in
three ways, of which the first is the store's, and the others are for time:

- `shape_key`, of operands as views: of every call, with or without torch, and of shapes that are prepared before there
  is a call. To view the tensors of a call takes some 18 us, which only the first call of a shape spends.
- `Call.key`, of torch's tensors as they are, which takes some 0.5 us; native code reads the same through DLPack
  (runtime/native/call_key.c) in a fraction of that. A plan has one for each way in which the call was made: with `out`
  or without, a word left out or given. These are caches of the store, filled by calls.
- `rows_of`, the last without the rows: what calls with other rows are grown from, in half the time of a first one.

Knows torch's tensors by their methods, and nothing of plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...gemm.call import EXTRAS
from ...gemm.signature import Signature
from ...named_tuple import NamedTuple
from ...numbers.dtypes import DTYPES
from ...program.record import TensorView

_OPERANDS = ("a", "b", "out", *EXTRAS)
_WITH_ROWS = tuple(map(_OPERANDS.index, ("a", "out", "scale_a", "residual")))


def shape_key(of_torch: bool, signature: Signature, views: Sequence[TensorView]) -> tuple[Any, ...]:
    """The key in the store, of operands as the caller has them: a, b and d, and those of `EXTRAS` that are given."""
    return (of_torch, signature.epilogue, signature.overlap, *[view[1:] for view in views])


def with_other_tensors(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The `shape_key` of the same call with others' tensors where those were torch's, and the other way round."""
    return (not key[0], *key[1:])


class Call(NamedTuple):
    """The arguments of one call of `gemm`; `operands` in the order of `EXTRAS`, None for what was not given."""

    a: Any
    b: Any
    out: Any
    stream: Any
    operands: tuple[Any, ...] = (None,) * len(EXTRAS)
    epilogue: Any = "none"
    overlap: Any = "serial"
    dtype: Any = None
    plain: bool = True  # came without any of the above

    def key(self) -> tuple[Any, ...]:
        """The key of a call of torch tensors."""
        a, b, out = self.a, self.b, self.out
        if not self.plain:
            tensors = (a, b, out, *self.operands)
            seen = [None if x is None else (x.shape, x.stride(), x.dtype, x.get_device()) for x in tensors]
            return (self.epilogue, self.overlap, self.dtype, *seen)
        return key_of_plain(a, b, out)


def key_of_plain(a: Any, b: Any, out: Any) -> tuple[Any, ...]:
    """`Call.key` of a call of a, b and perhaps out alone. Each attribute of a torch tensor costs 40 to 90 ns, and this
    is all of them."""
    if out is None:
        return (a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype, a.get_device(), b.get_device())
    # fmt: off
    return (a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype, out.shape, out.stride(), out.dtype,
            a.get_device(), b.get_device(), out.get_device())
    # fmt: on


def rows_of(call: Call, key: tuple[Any, ...]) -> tuple[int, Any] | None:
    """The rows of a call of torch tensors, and its key without them, which is that of calls with other rows.

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
