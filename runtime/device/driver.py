"""The few CUDA driver calls that serving needs: a device, its kernels, and launches made ready once.

Every return code is checked; a failure is a `DeviceError` that names the call and what the driver says of it.
libcuda is loaded and initialised when a device is first asked for something, never before. Launches, and the
questions for a kernel's parameters, go through `runtime.native._native` where that was built, else through ctypes.
Knows nothing of archives, tensors or GEMMs; of a launch program it knows only the evaluated `Launch`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from ctypes import byref
from typing import Any, NoReturn

from ..errors import DeviceError, WorkspaceError
from ..native import _native
from . import libcuda
from .gpus import Gpu
from .launch import CLUSTER_DIMENSION, Launch
from .libcuda import LaunchConfig
from .prepared_launch import PooledLaunch, PreparedLaunch

# CUresult, CUdevice_attribute and CUfunction_attribute values of cuda.h; part of its ABI.
_SUCCESS, _INVALID_VALUE, _INVALID_CONTEXT = 0, 1, 201
_MULTIPROCESSOR_COUNT, _CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MAX_SHARED_BYTES_OPTIN = 16, 75, 76, 97
_MEMORY_CLOCK_KHZ, _MEMORY_BUS_BITS = 36, 37
_NAME_BYTES = 256
_STATIC_SHARED_BYTES, _MAX_DYNAMIC_SHARED_BYTES, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 1, 8, 14
_POINTER_DEVICE_ORDINAL = 9
_EVENT_DISABLE_TIMING = 2
_OUT_OF_MEMORY = 2  # of CUresult
_UNREADABLE = (200, 209, 222)  # CUDA_ERROR_INVALID_IMAGE, NO_BINARY_FOR_GPU and UNSUPPORTED_PTX_VERSION
_STREAM_NON_BLOCKING = 1
NO_CAPTURE = -1  # in `Driver.stream_key`
_CAPTURE_ACTIVE, _CAPTURE_RELAXED = 1, 2  # of CUstreamCaptureStatus, of CUstreamCaptureMode

# NULL, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD mean a stream of whichever context is current.
LAST_DEFAULT_STREAM = 2


class Driver:
    """One device, seen through the driver API.

    Its context is the one that is current at first use, or else the device's primary context, which the frameworks
    of a process share and which is never given up; what a device can do is answered without one. `device` is an
    ordinal; None means that of the current context, or 0 if there is none. Methods may be called from any thread,
    inside `with driver.current()` where they touch the context; in a process forked after the first use none may, as
    CUDA wants it.
    """

    def __init__(self, device: int | None = None) -> None:
        self._requested = device
        self._lock = threading.RLock()
        self._attributes: dict[int, int] = {}
        self._addresses: dict[str, tuple[Any, int]] = {}  # libcuda's functions, and where they are
        self._binaries: dict[int, bytes] = {}
        self._cuda: Any = None
        self._device: Any = None
        self._context: Any = None
        self._count: int | None = None
        self._gpu: Gpu | None = None
        self._process = 0

    # --- the device ---

    @property
    def device(self) -> int:
        """The device's ordinal."""
        self._open()
        return self._device

    @property
    def known_device(self) -> int | None:
        """The device's ordinal, where that is settled already; the driver is not asked."""
        return self._requested if self._device is None else int(self._device)

    @property
    def device_count(self) -> int:
        """How many devices this process sees."""
        self._open()
        if self._count is None:
            self._count = self._get(ctypes.c_int, "cuDeviceGetCount")
        return self._count

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Such as (9, 0)."""
        return self._attribute(_CAPABILITY_MAJOR), self._attribute(_CAPABILITY_MINOR)

    @property
    def multiprocessors(self) -> int:
        """How many SMs the device has."""
        return self._attribute(_MULTIPROCESSOR_COUNT)

    @property
    def gpu(self) -> Gpu:
        """Which kind of GPU the device is."""
        if self._gpu is None:
            clock_khz, bus_bits = self._attribute(_MEMORY_CLOCK_KHZ), self._attribute(_MEMORY_BUS_BITS)
            name = ctypes.create_string_buffer(_NAME_BYTES)
            self._call("cuDeviceGetName", name, _NAME_BYTES, self._device)
            # Two transfers a clock, as double data rate has them.
            gbps = round(2 * clock_khz * bus_bits / 8 / 1e6)
            self._gpu = Gpu(name.value.decode(errors="replace"), self.multiprocessors, gbps)
        return self._gpu

    @property
    def max_shared_bytes(self) -> int:
        """The most shared memory one block can opt in to."""
        return self._attribute(_MAX_SHARED_BYTES_OPTIN)

    @property
    def cuda_version(self) -> str:
        """The newest version of CUDA that the driver supports, such as "13.0"."""
        self._open()
        version = self._get(ctypes.c_int, "cuDriverGetVersion")
        return f"{version // 1000}.{version % 1000 // 10}"

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's context current for the calling thread, and put back what was."""
        context = self._retained()
        if self._get(ctypes.c_void_p, "cuCtxGetCurrent") == context:
            yield
            return
        self._call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._get(ctypes.c_void_p, "cuCtxPopCurrent")

    def context_question(self) -> tuple[int, int]:
        """The address of cuCtxGetCurrent, and what it answers where the device's context is current."""
        context = self._retained()
        return self._address("cuCtxGetCurrent"), context

    def synchronize(self) -> None:
        """Wait until the device has done all it was given.

        Raises:
            DeviceError: a stream is being captured, which allows no such wait and may be lost by it; or a kernel failed
                before.
        """
        with self.current():
            self._call("cuCtxSynchronize")

    def pointer_device(self, pointer: int) -> int:
        """The ordinal of the device that owns the memory at `pointer`."""
        self._open()
        return self._get(ctypes.c_int, "cuPointerGetAttribute", _POINTER_DEVICE_ORDINAL, pointer)

    def order(self, earlier: int, later: int) -> None:
        """Make stream `later` wait for what stream `earlier` holds so far; both are of this device."""
        with self.current():
            event = self._get(ctypes.c_void_p, "cuEventCreate", _EVENT_DISABLE_TIMING)
            try:
                self._call("cuEventRecord", event, earlier)
                self._call("cuStreamWaitEvent", later, event, 0)
            finally:
                self._call("cuEventDestroy", event)

    # --- memory that kernels need besides their operands ---

    def stream_key(self, stream: int) -> tuple[int, int]:
        """What no other stream of this process ever has: its capture, or `NO_CAPTURE`, and what it is there.

        That is the handle in a capture, which does not survive a question for the identity. The context is current.
        """
        status, capture = ctypes.c_int(), ctypes.c_uint64()
        self._call("cuStreamGetCaptureInfo", stream, byref(status), byref(capture), None, None, None)
        if status.value == _CAPTURE_ACTIVE:
            return capture.value, stream
        return NO_CAPTURE, self._get(ctypes.c_uint64, "cuStreamGetId", stream, last=True)

    def allocate(self, size: int, zeroed: bool) -> int:
        """The address of `size` bytes of device memory, zero on return if `zeroed`; the context is current.

        The calling thread may be capturing a stream: nothing of this gets into that graph, or stands in its way.

        Raises:
            WorkspaceError: there is not so much memory.
        """
        with self._beside_captures():
            address = ctypes.c_uint64()
            error = self._cuda.cuMemAlloc(byref(address), size)
            if error == _OUT_OF_MEMORY:
                raise WorkspaceError(
                    f"device {self.device} has no {size} bytes left for a workspace, of which each stream and each "
                    "capture has its own; free memory, load the library with capture_workspaces='shared' if graphs are "
                    "replayed one after the other, or call Library.forget_captures() where they are gone"
                )
            self._check("cuMemAlloc", error)
            if zeroed:
                try:
                    self._clear(address.value, size)
                except BaseException:
                    self._call("cuMemFree", address.value)
                    raise
        return address.value

    @contextlib.contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """Let this thread do what may not be part of a graph, such as allocating, while streams are being captured: by
        default CUDA would refuse, and end the captures."""
        mode = ctypes.c_int(_CAPTURE_RELAXED)  # and then what it was before
        self._call("cuThreadExchangeStreamCaptureMode", byref(mode))
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", byref(mode))

    def _clear(self, pointer: int, size: int) -> None:
        stream = self._get(ctypes.c_void_p, "cuStreamCreate", _STREAM_NON_BLOCKING)
        try:
            self._call("cuMemsetD8Async", pointer, 0, size, stream)
            self._call("cuStreamSynchronize", stream)
        finally:
            self._call("cuStreamDestroy", stream)

    def free(self, pointer: int) -> None:
        """Give back what `allocate` gave; nothing that uses it may be running or launched again."""
        if os.getpid() != self._process:
            return  # in a forked child: it is the parent's
        with self.current():
            self._call("cuMemFree", pointer)

    # --- kernels ---

    def load(self, cubin: bytes) -> int:
        """Load a cubin; its bytes are kept until `unload`."""
        self._open()
        library = ctypes.c_void_p()
        with self._beside_captures():
            error = self._cuda.cuLibraryLoadData(byref(library), cubin, None, None, 0, None, None, 0)
        if error in _UNREADABLE:
            newer = "a kernel that was compiled with a newer CUDA needs a newer driver"
            self._check("cuLibraryLoadData", error, f" (this driver supports CUDA {self.cuda_version}; {newer})")
        self._check("cuLibraryLoadData", error)
        self._binaries[library.value or 0] = cubin
        return library.value or 0

    def unload(self, library: Any) -> None:
        """Unload what `load` gave; its kernels must not be running or launched again."""
        if os.getpid() != self._process:
            return  # in a forked child: they are the parent's
        self._call("cuLibraryUnload", library)
        self._binaries.pop(library, None)

    def kernel_count(self, library: Any) -> int:
        """How many kernels a loaded cubin holds."""
        return self._get(ctypes.c_uint32, "cuLibraryGetKernelCount", library)

    def kernel(self, library: Any, symbol: str) -> Any:
        """The kernel `symbol` of a loaded cubin."""
        return self._get(ctypes.c_void_p, "cuLibraryGetKernel", library, symbol.encode("ascii"))

    def parameter_sizes(self, kernel: Any) -> tuple[int, ...]:
        """The size in bytes of each kernel parameter, in order."""
        if _native is not None:
            found = _native.parameter_sizes(self._address("cuKernelGetParamInfo"), kernel)
            if found is not None:
                return tuple(found)
        sizes = []
        offset, size, ask = ctypes.c_size_t(), ctypes.c_size_t(), self._cuda.cuKernelGetParamInfo
        out = byref(offset), byref(size)
        for index in itertools.count():
            # Older drivers cannot count parameters; all of them call an index past the last an invalid value.
            error = ask(kernel, index, *out)
            if error == _INVALID_VALUE:
                break
            self._check("cuKernelGetParamInfo", error)
            sizes.append(size.value)
        return tuple(sizes)

    def set_attributes(self, kernel: Any) -> None:
        """Allow `kernel` all the shared memory and cluster sizes the device has, and bring it into the context.

        The last part is what makes a first launch under stream capture legal: nothing is left to load lazily.
        """
        static = self._get(ctypes.c_int, "cuKernelGetAttribute", _STATIC_SHARED_BYTES, kernel, self._device)
        allowed = self.max_shared_bytes - static
        self._call("cuKernelSetAttribute", _MAX_DYNAMIC_SHARED_BYTES, allowed, kernel, self._device)
        if self.compute_capability >= (9, 0):
            self._call("cuKernelSetAttribute", _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, kernel, self._device)
        with self._beside_captures():
            self._get(ctypes.c_void_p, "cuKernelGetFunction", kernel)

    def max_active_clusters(
        self, kernel: Any, cluster: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int
    ) -> int:
        """How many clusters of `cluster` CTAs can be resident at once; 0 when not even one fits."""
        # A CUkernel stands for a CUfunction here and in launches, independent of any context.
        if cluster == (1, 1, 1) and self.compute_capability < (9, 0):
            threads = block[0] * block[1] * block[2]
            name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
            return self._get(ctypes.c_int, name, kernel, threads, shared_bytes) * self.multiprocessors
        config = LaunchConfig(cluster, block, shared_bytes, ((CLUSTER_DIMENSION, cluster),))
        return self._get(ctypes.c_int, "cuOccupancyMaxActiveClusters", kernel, config.address)

    def prepare(self, kernel: Any, launch: Launch, pointers: int, like: PreparedLaunch | None = None) -> PreparedLaunch:
        """Build the launch configuration and the parameters, once, for `pointers` pointers.

        `like` was prepared for a launch that differs from this one in its grid and its parameters' bytes only.
        """
        if _native is not None:
            if isinstance(like, _native.Launch):
                return like.again(launch.grid, launch.parameters)
            shape = (*launch.grid, *launch.block, launch.shared_bytes)
            attributes = [(identity, *words) for identity, words in launch.attributes]
            slots = [(slot.offset, slot.pointer, slot.addend, slot.mask) for slot in launch.slots]
            parts = (attributes, launch.parameters, launch.offsets, slots, pointers, self._retry)
            try:
                return _native.Launch(self._address("cuLaunchKernelEx"), kernel, shape, *parts)
            except OverflowError:  # larger than it has room for
                pass
        return PooledLaunch(self._cuda.cuLaunchKernelEx, kernel, launch, self._retry)

    def _retry(
        self, again: PreparedLaunch, shape: tuple[Any, ...], pointers: Sequence[int], stream: int, error: int
    ) -> None:
        """Launch again with the context current if a default stream was asked for where none was, else raise."""
        if error == _INVALID_CONTEXT and stream <= LAST_DEFAULT_STREAM and not self._current_context():
            with self.current():
                return again.launch(pointers, stream)
        grid, block, shared_bytes = shape
        detail = f" (grid {grid}, block {block}, {shared_bytes} bytes of shared memory, stream {stream:#x})"
        return self._check("cuLaunchKernelEx", error, detail)

    # --- below: how the driver is reached ---

    def _open(self) -> None:
        """Find the device. Others may be creating its context meanwhile, which takes a quarter of a second."""
        if self._device is not None:
            self._check_process()
            return
        with self._lock:
            if self._device is not None:
                return
            self._cuda, self._process = libcuda.load(), os.getpid()
            self._call("cuInit", 0)
            current = self._current_context()
            ordinal = self._get(ctypes.c_int, "cuCtxGetDevice") if current else None
            if ordinal is not None and self._requested in (None, ordinal):
                self._context = current
            else:
                ordinal = self._requested or 0
            self._device = self._get(ctypes.c_int, "cuDeviceGet", ordinal)

    def _retained(self) -> int:
        """The device's context, which the calling thread gets if it has none."""
        self._open()
        if self._context is None:
            with self._lock:
                if self._context is None:
                    context = self._get(ctypes.c_void_p, "cuDevicePrimaryCtxRetain", self._device)
                    if not self._current_context():
                        self._call("cuCtxSetCurrent", context)
                    self._context = context
        return int(self._context)

    def _current_context(self) -> int:
        """The calling thread's context, or 0."""
        return self._get(ctypes.c_void_p, "cuCtxGetCurrent") or 0

    def _address(self, name: str) -> int:
        """Where one of libcuda's functions is, for native code."""
        function = getattr(self._cuda, name)
        known = self._addresses.get(name)
        if known is None or known[0] is not function:
            known = self._addresses[name] = function, ctypes.cast(function, ctypes.c_void_p).value or 0
        return known[1]

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise DeviceError(
                f"the GPU was first used in process {self._process}, and this is a process forked from it, which CUDA "
                "does not allow; fork before the first use, or start processes by spawning them"
            )

    def _attribute(self, number: int) -> int:
        if number not in self._attributes:
            self._open()
            self._attributes[number] = self._get(ctypes.c_int, "cuDeviceGetAttribute", number, self._device)
        return self._attributes[number]

    def _get(self, kind: Any, name: str, *arguments: Any, last: bool = False) -> Any:
        """Call a function that writes one result of this type, at its first argument, or its last."""
        result = kind()
        self._call(name, *((*arguments, byref(result)) if last else (byref(result), *arguments)))
        return result.value

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._cuda, name)(*arguments))

    def _check(self, name: str, error: int, detail: str = "") -> None:
        if error != _SUCCESS:
            self._fail(name, error, detail)

    def _fail(self, name: str, error: int, detail: str) -> NoReturn:
        self._check_process()
        word, text = ctypes.c_char_p(), ctypes.c_char_p()
        self._cuda.cuGetErrorName(error, byref(word))
        self._cuda.cuGetErrorString(error, byref(text))
        said = (text.value or b"the driver has no text for it").decode()
        raise DeviceError(f"{name}{detail} failed: {(word.value or b'CUresult').decode()} ({error}), {said}")
