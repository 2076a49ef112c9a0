"""Launches that are prepared once and then want only pointers and a stream; how they are made without native code."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from .launch import Launch
from .libcuda import LaunchConfig

# A launch reads its parameters from here; the strictest of them, a TMA descriptor, wants 64 bytes.
_PARAMETER_ALIGNMENT_BYTES = 64


class PreparedLaunch(Protocol):
    """A launch that wants only pointers and a stream; any number of threads may make it at once."""

    def launch(self, pointers: Sequence[int], stream: int) -> None:
        """Launch; a failure is a `DeviceError`."""


class PooledLaunch:
    """A prepared launch without native code.

    Buffers wait in a pool and are taken out of it while in use, so that no two threads write one and none waits for
    another; list.pop and list.append are atomic.
    """

    def __init__(self, call: Any, kernel: Any, launch: Launch, failed: Callable[..., None]) -> None:
        self._call, self._kernel, self._launch, self._failed = call, kernel, launch, failed
        self._pool = [self._prepare()]

    def launch(self, pointers: Sequence[int], stream: int) -> None:
        """Write the pointers and launch."""
        try:
            ready = self._pool.pop()
        except IndexError:
            ready = self._prepare()
        slots, words, config, address, _ = ready
        for index, pointer, addend, mask in slots:
            words[index] = (pointers[pointer] + addend) & mask
        config.set_stream(stream)
        error = self._call(config.address, self._kernel, address, None)
        self._pool.append(ready)
        if error:
            launch = self._launch
            self._failed(self, (launch.grid, launch.block, launch.shared_bytes), pointers, stream, error)

    def _prepare(self) -> tuple[Any, ...]:
        launch = self._launch
        size = max(len(launch.parameters), 8)
        storage = (ctypes.c_uint64 * (-(-size // 8) + _PARAMETER_ALIGNMENT_BYTES // 8))()
        start = -ctypes.addressof(storage) % _PARAMETER_ALIGNMENT_BYTES
        base = ctypes.addressof(storage) + start
        ctypes.memmove(base, launch.parameters, len(launch.parameters))
        words = memoryview(storage).cast("B")[start:].cast("Q")
        parameters = (ctypes.c_void_p * max(len(launch.offsets), 1))(*(base + o for o in launch.offsets))
        slots = tuple((s.offset // 8, s.pointer, s.addend, s.mask) for s in launch.slots)
        config = LaunchConfig(launch.grid, launch.block, launch.shared_bytes, launch.attributes)
        return slots, words, config, ctypes.addressof(parameters), (storage, parameters)
