"""Streams as callers name them, as the integers that the driver takes; torch's current one, where none is named.

Imports no framework; where torch's stream is asked for, torch is already there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ..device.driver import LAST_DEFAULT_STREAM
from ..errors import ArgumentError
from ..named_tuple import NamedTuple

LEGACY_STREAM = 1  # CU_STREAM_LEGACY: how protocols that forbid 0 name the legacy default stream
LAST_STREAM = (1 << 64) - 1  # a handle is a pointer


def stream_handle(stream: Any) -> int:
    """The CUstream behind an integer, a torch stream, a `cuda.bindings` stream or anything with `__cuda_stream__`."""
    handle = stream if isinstance(stream, int) else getattr(stream, "cuda_stream", None)
    if not isinstance(handle, int):
        protocol = getattr(stream, "__cuda_stream__", None)
        if callable(protocol):
            version, handle = protocol()
            if version != 0:
                raise ArgumentError(f"stream speaks version {version} of __cuda_stream__; this runtime knows 0")
            handle = int(handle)
        elif type(stream).__name__ == "CUstream":
            handle = int(stream)
    if not isinstance(handle, int) or isinstance(handle, bool):
        raise ArgumentError(
            "stream must be an integer handle, a torch.cuda.Stream, a CUstream or have __cuda_stream__; "
            f"found {type(stream).__name__}"
        )
    if not 0 <= handle <= LAST_STREAM:
        raise ArgumentError(f"stream must be a handle from 0 to 2^64 - 1, found {handle}")
    return handle


def torch_current_stream() -> Callable[[int], int]:
    """A function from a device's ordinal to the handle of torch's current stream there; torch must be imported."""
    torch = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is not None:
        return raw
    return lambda device: int(torch.cuda.current_stream(device).cuda_stream)


def torch_current_device() -> Callable[[], int]:
    """A function that gives the ordinal of torch's current device; torch must be imported."""
    torch = sys.modules["torch"]
    return getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device


class TorchStreams(NamedTuple):
    """The streams on which calls of torch tensors are launched, for a plan of one device."""

    device: int
    current_stream: Callable[[int], int]
    current_device: Callable[[], int] | None  # None where there is one device, and a default stream can be no other's

    @classmethod
    def of(cls, device: int, devices: int) -> TorchStreams:
        """Those of `device`, one of so many `devices`; torch must be imported."""
        return cls(device, torch_current_stream(), torch_current_device() if devices > 1 else None)

    def handle(self, stream: Any) -> int | None:
        """The handle of `stream` as `Library.gemm` takes it, None being torch's current one; None where that is a
        default stream while another device is current, whose it then is."""
        device, current_stream, current_device = self
        if stream is None:
            handle = current_stream(device)
        else:
            handle = stream if type(stream) is int and 0 <= stream <= LAST_STREAM else stream_handle(stream)
        if current_device is None or handle > LAST_DEFAULT_STREAM or current_device() == device:
            return handle
        return None
