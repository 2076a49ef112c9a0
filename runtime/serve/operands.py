"""What a caller passes to a library of one device: tensors as views there, and the stream that is meant.

Knows nothing of functions and plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..device.driver import Driver
from ..errors import ArgumentError
from ..program.record import TensorView
from ..program.streams import stream_handle, torch_current_stream
from ..program.tensor import UNKNOWN_DEVICE, is_torch, view


def device_view(x: Any, name: str, stream: int, driver: Driver, writable: bool = False) -> TensorView:
    """`x` as a view, on the driver's device; raises ArgumentError if it is elsewhere."""
    seen = view(x, name, stream=stream, driver=driver, writable=writable)
    if seen.device not in (driver.device, UNKNOWN_DEVICE):
        raise ArgumentError(
            f"{name} is on device {seen.device}, this library serves device {driver.device}; "
            f"load the archive with device={seen.device} as well"
        )
    return seen


def resolve_stream(stream: Any, arguments: Sequence[Any], driver: Driver) -> int:
    """The handle of `stream`; None is torch's current stream if any argument is a torch tensor on a GPU, else 0."""
    if stream is not None:
        return stream_handle(stream)
    if any(is_torch(x) and x.device.type == "cuda" for x in arguments):
        return int(torch_current_stream()(driver.device))
    return 0


def flatten(arguments: Sequence[Any]) -> list[Any]:
    """Arguments in order, with those inside tuples and lists."""
    flat = []
    for argument in arguments:
        flat += flatten(argument) if isinstance(argument, tuple | list) else [argument]
    return flat
