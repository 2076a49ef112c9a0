"""libcuda as C functions that answer what a test says, under everything that asks the driver."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from runtime.device.libcuda import FUNCTIONS

from .native_stand_in import read_config, write


class StandInCuda:
    """libcuda as C functions with the types that the runtime declares, each of them answered from here.

    A function is a method of its name, or logs its arguments and writes what `answers` has for it where results go.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.current = 0
        self.sizes: tuple[int, ...] = (128, 8, 24)
        self.size_errors: dict[int, int] = {}  # by the index of a parameter
        self.launch_errors: list[int] = []
        self.launched: list[Launched] = []
        self.errors: dict[str, int] = {}
        self.answers: dict[str, tuple[Any, int]] = {  # what is written, and to which argument
            "cuDriverGetVersion": (ctypes.c_int(12_080), 0),
            "cuCtxGetDevice": (ctypes.c_int(1), 0),
            "cuDeviceGet": (ctypes.c_int(0), 0),
            "cuDevicePrimaryCtxRetain": (ctypes.c_void_p(0xC0), 0),
            "cuLibraryLoadData": (ctypes.c_void_p(0x11B), 0),
            "cuLibraryGetKernelCount": (ctypes.c_uint32(1), 0),
            "cuLibraryGetKernel": (ctypes.c_void_p(0x5E), 0),
            "cuKernelGetAttribute": (ctypes.c_int(1024), 0),
            "cuKernelGetFunction": (ctypes.c_void_p(0x5E), 0),
            "cuOccupancyMaxActiveClusters": (ctypes.c_int(66), 0),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": (ctypes.c_int(2), 0),
            "cuMemAlloc": (ctypes.c_uint64(0xA000), 0),
            "cuStreamCreate": (ctypes.c_void_p(0x51), 0),
            "cuStreamGetId": (ctypes.c_uint64(17), 1),
        }
        self.texts = ctypes.c_char_p(b"CUDA_ERROR_INVALID_VALUE"), ctypes.c_char_p(b"a text")
        for name, (symbol, arguments) in FUNCTIONS.items():
            function = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(self._function(name))
            setattr(self, symbol or name, function)

    def _function(self, name: str) -> Any:
        own = getattr(self, f"_{name}", None)

        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            error = self.errors.get(name, 0)
            if error == 0 and own is not None:
                return int(own(*arguments) or 0)
            if error == 0 and name in self.answers:
                value, place = self.answers[name]
                write(arguments[place], value)
            return error

        return call

    def _cuGetErrorName(self, error: int, out: int) -> None:
        write(out, self.texts[0])

    def _cuGetErrorString(self, error: int, out: int) -> None:
        write(out, self.texts[1])

    def _cuCtxGetCurrent(self, out: int) -> None:
        write(out, ctypes.c_void_p(self.current))

    def _cuCtxSetCurrent(self, context: int) -> None:
        self.current = context

    _cuCtxPushCurrent = _cuCtxSetCurrent

    def _cuCtxPopCurrent(self, out: int) -> None:
        self.current = 0

    def _cuDeviceGetAttribute(self, out: int, attribute: int, device: int) -> None:
        write(out, ctypes.c_int({75: 9, 76: 0, 16: 132, 97: 232_448, 36: 3_201_000, 37: 6_144}[attribute]))

    def _cuDeviceGetName(self, out: int, room: int, device: int) -> None:
        name = b"NVIDIA H200"
        assert room > len(name)
        ctypes.memmove(out, name + b"\0", len(name) + 1)

    def _cuKernelGetParamInfo(self, kernel: int, index: int, offset: int, size: int) -> int:
        if index in self.size_errors:
            return self.size_errors[index]
        if index >= len(self.sizes):
            return 1
        write(size, ctypes.c_size_t(self.sizes[index]))
        return 0

    def _cuLaunchKernelEx(self, config: int, function: int, parameters: int, extra: int) -> int:
        pointers = (ctypes.c_void_p * len(self.sizes)).from_address(parameters)
        values = tuple(ctypes.string_at(p or 0, s) for p, s in zip(pointers, self.sizes, strict=True))
        aligned = (pointers[0] or 1) % 64 == 0
        self.launched.append(Launched(function, values, aligned, self.current, *read_config(config)))
        return self.launch_errors.pop(0) if self.launch_errors else 0


class Launched(NamedTuple):
    function: int
    values: tuple[bytes, ...]
    aligned: bool
    context: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    attributes: list[tuple[int, ...]]
