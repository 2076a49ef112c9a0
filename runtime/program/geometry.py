"""Where the elements of a tensor are: strides, the bytes it spans, and whether two tensors share any.

Knows `TensorView`s, and nothing of whose tensors they are.
"""

from __future__ import annotations

import math

from ..errors import LayoutError
from ..numbers.dtypes import DTYPES
from .record import TensorView


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The row-major strides of `shape`, in elements."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def flatten_rows(t: TensorView, name: str) -> TensorView:
    """`t` with all dimensions but the last made one, without a copy.

    Raises:
        LayoutError: the strides do not allow it.
    """
    rows = math.prod(t.shape[:-1])
    if len(t.shape) == 2:
        return t
    stride = None
    expected = 0
    for extent, step in zip(reversed(t.shape[:-1]), reversed(t.strides[:-1]), strict=True):
        if extent == 1:
            continue
        if stride is None:
            stride = step
        elif step != expected and rows:
            raise LayoutError(
                f"{name} of shape {t.shape} and strides {t.strides} cannot be seen as a matrix of {rows} rows; "
                "make it contiguous (for a torch tensor: .contiguous())",
                f"strides of {name}",
            )
        expected = step * extent
    row_stride = t.shape[-1] if stride is None else stride
    return t._replace(shape=(rows, t.shape[-1]), strides=(row_stride, t.strides[-1]))


def span_bytes(t: TensorView) -> int:
    """Bytes from the first element to the end of the last; strides must not be negative."""
    if 0 in t.shape:
        return 0
    last = sum([(n - 1) * s for n, s in zip(t.shape, t.strides, strict=True)])
    return DTYPES[t.dtype].bytes_of(last + 1)


def overlaps_itself(t: TensorView) -> bool:
    """Whether two indices of `t` may name one element; exact for anything sliced out of a contiguous tensor."""
    reach = 0
    for step, extent in sorted((s, n) for n, s in zip(t.shape, t.strides, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += step * (extent - 1)
    return False


def same_elements(x: TensorView, y: TensorView) -> bool:
    """Whether `x` and `y` are one, element by element: strides of extents of 1 lead nowhere, and may differ."""
    if (x.pointer, x.dtype, x.shape) != (y.pointer, y.dtype, y.shape):
        return False
    return all(s == t or extent == 1 for extent, s, t in zip(x.shape, x.strides, y.strides, strict=True))


def share_memory(x: TensorView, y: TensorView) -> bool:
    """Whether `x` and `y` may share a byte; exact for columns of matrices with one row stride."""
    if x.pointer >= y.pointer + span_bytes(y) or y.pointer >= x.pointer + span_bytes(x):
        return False
    if len(x.shape) == len(y.shape) == 2 and (pitch := _bytes_apart(x)) and pitch == _bytes_apart(y):
        row_x, row_y = (span_bytes(t._replace(shape=(1, t.shape[1]))) for t in (x, y))
        gap = (y.pointer - x.pointer) % pitch
        return not (row_x <= gap and gap + row_y <= pitch)
    return True


def _bytes_apart(t: TensorView) -> int:
    """Bytes from row to row of a matrix; 0 where rows begin within bytes too."""
    bits = t.strides[0] * DTYPES[t.dtype].bits
    return 0 if bits % 8 else bits // 8
