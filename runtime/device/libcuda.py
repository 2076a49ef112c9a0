"""libcuda's functions that serving needs, with the types of their arguments, through ctypes.

cuda.bindings has them all, but takes 50 to 220 ms to import and 2 us more for each launch than this. Knows what cuda.h
declares, and nothing of what calls are for.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

from ..errors import DeviceError

LIBRARY = "libcuda.so.1"

_INT, _U32, _U64, _SIZE, _PTR, _TEXT = (
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_uint64,
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.c_char_p,
)
# By the name in cuda.h: the symbol, where that has a version, and the arguments. All return a CUresult. Pointers,
# handles and addresses of results are _PTR, a CUdeviceptr is _U64, an enumeration _INT.
FUNCTIONS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "cuInit": ("", (_U32,)),
    "cuDriverGetVersion": ("", (_PTR,)),
    "cuGetErrorName": ("", (_INT, _PTR)),
    "cuGetErrorString": ("", (_INT, _PTR)),
    "cuDeviceGet": ("", (_PTR, _INT)),
    "cuDeviceGetCount": ("", (_PTR,)),
    "cuDeviceGetAttribute": ("", (_PTR, _INT, _INT)),
    "cuDeviceGetName": ("", (_PTR, _INT, _INT)),
    "cuDevicePrimaryCtxRetain": ("", (_PTR, _INT)),
    "cuCtxGetCurrent": ("", (_PTR,)),
    "cuCtxSetCurrent": ("", (_PTR,)),
    "cuCtxGetDevice": ("", (_PTR,)),
    "cuCtxSynchronize": ("", ()),
    "cuCtxPushCurrent": ("cuCtxPushCurrent_v2", (_PTR,)),
    "cuCtxPopCurrent": ("cuCtxPopCurrent_v2", (_PTR,)),
    "cuPointerGetAttribute": ("", (_PTR, _INT, _U64)),
    "cuEventCreate": ("", (_PTR, _U32)),
    "cuEventRecord": ("", (_PTR, _PTR)),
    "cuEventDestroy": ("cuEventDestroy_v2", (_PTR,)),
    "cuStreamCreate": ("", (_PTR, _U32)),
    "cuStreamDestroy": ("cuStreamDestroy_v2", (_PTR,)),
    "cuStreamSynchronize": ("", (_PTR,)),
    "cuStreamWaitEvent": ("", (_PTR, _PTR, _U32)),
    "cuStreamGetId": ("", (_PTR, _PTR)),
    "cuStreamGetCaptureInfo": ("cuStreamGetCaptureInfo_v2", (_PTR, _PTR, _PTR, _PTR, _PTR, _PTR)),
    "cuThreadExchangeStreamCaptureMode": ("", (_PTR,)),
    "cuMemAlloc": ("cuMemAlloc_v2", (_PTR, _SIZE)),
    "cuMemFree": ("cuMemFree_v2", (_U64,)),
    "cuMemsetD8Async": ("", (_U64, ctypes.c_ubyte, _SIZE, _PTR)),
    "cuLibraryLoadData": ("", (_PTR, _TEXT, _PTR, _PTR, _U32, _PTR, _PTR, _U32)),
    "cuLibraryUnload": ("", (_PTR,)),
    "cuLibraryGetKernelCount": ("", (_PTR, _PTR)),
    "cuLibraryGetKernel": ("", (_PTR, _PTR, _TEXT)),
    "cuKernelGetParamInfo": ("", (_PTR, _SIZE, _PTR, _PTR)),
    "cuKernelGetAttribute": ("", (_PTR, _INT, _PTR, _INT)),
    "cuKernelSetAttribute": ("", (_INT, _INT, _PTR, _INT)),
    "cuKernelGetFunction": ("", (_PTR, _PTR)),
    "cuOccupancyMaxActiveClusters": ("", (_PTR, _PTR, _PTR)),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": ("", (_PTR, _PTR, _INT, _SIZE)),
    "cuLaunchKernelEx": ("", (_PTR, _PTR, _PTR, _PTR)),
}


class NoDriver(DeviceError):
    """This machine has no driver."""


class Libcuda:
    """The functions of `FUNCTIONS` as attributes, from a loaded library."""

    def __init__(self, library: Any) -> None:
        for name, (symbol, arguments) in FUNCTIONS.items():
            try:
                function = getattr(library, symbol or name)
            except AttributeError:
                raise DeviceError(
                    f"this NVIDIA driver has no {symbol or name}; it is too old: this runtime needs what came "
                    "with CUDA 12.4; install a driver of release 550 or newer"
                ) from None
            function.argtypes, function.restype = arguments, _INT
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def load() -> Libcuda:
    """The driver of this machine.

    Raises:
        NoDriver: there is none.
        DeviceError: it is too old.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise NoDriver(f"no CUDA driver was found ({error}); install NVIDIA's driver") from None
    return Libcuda(library)


# --- structures of cuda.h ---

STREAM_OFFSET_BYTES = 32  # of hStream in a CUlaunchConfig, behind seven 32-bit fields
_CONFIG = struct.Struct("<7I4xQQI4x")  # grid, block, shared memory; hStream, attrs, numAttrs
_ATTRIBUTE_BYTES = 72  # of a CUlaunchAttribute: its id, a pad, and 64 bytes of value


class LaunchConfig:
    """A CUlaunchConfig at `address`, with its attributes: (identity, 32-bit words of its value) each."""

    def __init__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        shared_bytes: int,
        attributes: Sequence[tuple[int, Sequence[int]]],
    ) -> None:
        packed = b"".join(
            struct.pack(f"<I4x{len(words)}I", identity, *words).ljust(_ATTRIBUTE_BYTES, b"\0")
            for identity, words in attributes
        )
        self._attributes = ctypes.create_string_buffer(packed, max(len(packed), 1))
        where = ctypes.addressof(self._attributes) if attributes else 0
        self._config = ctypes.create_string_buffer(
            _CONFIG.pack(*grid, *block, shared_bytes, 0, where, len(attributes)), _CONFIG.size
        )
        self.address = ctypes.addressof(self._config)
        self._stream = ctypes.c_uint64.from_buffer(self._config, STREAM_OFFSET_BYTES)

    def set_stream(self, stream: int) -> None:
        """Launch on this stream, by its handle."""
        self._stream.value = stream
