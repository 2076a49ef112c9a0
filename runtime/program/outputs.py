"""What calls write to: memory for results where the caller brought none, and that nothing else of the call is there.

Imports no framework; where a tensor is torch's, torch is already there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from ..errors import ArgumentError
from ..numbers.dtypes import DTYPES
from .geometry import overlaps_itself, share_memory
from .record import TensorView
from .tensor import is_torch


def result_dtype(dtype: str) -> str:
    """The element type of a result that was neither given nor said, for A's."""
    return "bf16" if DTYPES[dtype].narrow else dtype


def allocate(like: Any, shape: tuple[int, ...], dtype: str, stream: int | None = None) -> Any:
    """A torch tensor on the device of `like`, from the memory pool of `stream` if that is given, so that it is not
    reused too early.

    Raises:
        ArgumentError: `like` is not a torch tensor.
    """
    if not is_torch(like):
        raise ArgumentError(f"out is needed: there is no allocating for a {type(like).__name__}")
    torch = sys.modules["torch"]
    with on_stream(stream, like):
        return like.new_empty(shape, dtype=getattr(torch, DTYPES[dtype].torch))


def on_stream(stream: int | None, like: Any) -> Any:
    """A context in which `stream` is torch's current stream; None changes nothing."""
    torch = sys.modules["torch"]
    return torch.cuda.stream(None if stream is None else torch.cuda.ExternalStream(stream, device=like.device))


def check_apart(name: str, written: TensorView, others: Iterable[TensorView]) -> None:
    """Whether an operand that is written, called `name`, has memory of its own for each element.

    Raises:
        ArgumentError: two of its elements are one, or it shares memory with one of `others`.
    """
    if overlaps_itself(written) or any(share_memory(written, other) for other in others):
        raise ArgumentError(f"{name} names elements twice, or shares memory with another operand; pass another")
