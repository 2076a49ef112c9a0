"""The few CUDA driver calls that serving needs: a device, its kernels, and launches made ready once.

Every return code is checked; a failure is a `DeviceError` that names the call and what the driver says of it.
`cuda.bindings` is imported and the driver initialised when a device is first asked for something, never before.
Knows nothing of archives, tensors or GEMMs; of a launch program it knows only the evaluated `Launch`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from . import program
from .errors import DeviceError, WorkspaceError

# CUresult, CUdevice_attribute and CUfunction_attribute values of cuda.h; part of its ABI.
_SUCCESS, _INVALID_VALUE, _INVALID_CONTEXT = 0, 1, 201
_MULTIPROCESSOR_COUNT, _CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MAX_SHARED_BYTES_OPTIN = 16, 75, 76, 97
_STATIC_SHARED_BYTES, _MAX_DYNAMIC_SHARED_BYTES, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 1, 8, 14
_POINTER_DEVICE_ORDINAL = 9
_EVENT_DISABLE_TIMING = 2
_OUT_OF_MEMORY = 2  # of CUresult
_STREAM_NON_BLOCKING = 1
NO_CAPTURE = -1  # in `Driver.stream_key`
_CAPTURE_ACTIVE, _CAPTURE_RELAXED = 1, 2  # of CUstreamCaptureStatus, of CUstreamCaptureMode

# NULL, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD mean a stream of whichever context is current.
LAST_DEFAULT_STREAM = 2
# A launch reads its parameters from here; the strictest of them, a TMA descriptor, wants 64 bytes.
_PARAMETER_ALIGNMENT_BYTES = 64
_CONFIG_STREAM_OFFSET_BYTES = 32  # CUlaunchConfig.hStream, behind seven 32-bit fields


@dataclass(frozen=True)
class PreparedLaunch:
    """A launch that wants only pointers and a stream: write 64-bit `words` at byte offset / 8, then `launch(stream)`.

    One thread at a time: the driver reads the words during the call.
    """

    words: memoryview
    launch: Callable[[int], None]


class Driver:
    """One device, seen through the driver API.

    Its context is the one that is current at first use, or else the device's primary context, which the frameworks
    of a process share and which is never given up. `device` is an ordinal; None means that of the current context,
    or 0 if there is none. Methods may be called from any thread, inside `with driver.current()` where they touch
    the context; in a process forked after the first use none may, as CUDA wants it.
    """

    def __init__(self, device: int | None = None) -> None:
        self._requested = device
        self._lock = threading.RLock()
        self._attributes: dict[int, int] = {}
        self._binaries: dict[int, bytes] = {}
        self._cuda: Any = None
        self._device: Any = None
        self._context: Any = None
        self._count: int | None = None
        self._process = 0

    # --- the device ---

    @property
    def device(self) -> int:
        """The device's ordinal."""
        self._open()
        return int(self._device)

    @property
    def device_count(self) -> int:
        """How many devices this process sees."""
        self._open()
        if self._count is None:
            self._count = int(self._call("cuDeviceGetCount"))
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
    def max_shared_bytes(self) -> int:
        """The most shared memory one block can opt in to."""
        return self._attribute(_MAX_SHARED_BYTES_OPTIN)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's context current for the calling thread, and put back what was."""
        self._open()
        if int(self._call("cuCtxGetCurrent")) == int(self._context):
            yield
            return
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def pointer_device(self, pointer: int) -> int:
        """The ordinal of the device that owns the memory at `pointer`."""
        self._open()
        return int(self._call("cuPointerGetAttribute", self._pointer_attribute, pointer))

    def order(self, earlier: int, later: int) -> None:
        """Make stream `later` wait for what stream `earlier` holds so far."""
        event = self._call("cuEventCreate", _EVENT_DISABLE_TIMING)
        try:
            self._call("cuEventRecord", event, self._cuda.CUstream(earlier))
            self._call("cuStreamWaitEvent", self._cuda.CUstream(later), event, 0)
        finally:
            self._call("cuEventDestroy", event)

    # --- memory that kernels need besides their operands ---

    def stream_key(self, stream: int) -> tuple[int, int]:
        """What no other stream of this process ever has: its capture, or `NO_CAPTURE`, and what it is there.

        That is the handle in a capture, which does not survive a question for the identity. The context is current.
        """
        handle = self._cuda.CUstream(stream)
        status, capture, *_ = self._call("cuStreamGetCaptureInfo", handle)
        if int(status) == _CAPTURE_ACTIVE:
            return int(capture), stream
        return NO_CAPTURE, int(self._call("cuStreamGetId", handle))

    def allocate(self, size: int, zeroed: bool) -> int:
        """The address of `size` bytes of device memory, zero on return if `zeroed`; the context is current.

        The calling thread may be capturing a stream: nothing of this gets into that graph, or stands in its way.

        Raises:
            WorkspaceError: there is not so much memory.
        """
        cuda = self._cuda
        before = self._call("cuThreadExchangeStreamCaptureMode", cuda.CUstreamCaptureMode(_CAPTURE_RELAXED))
        try:
            error, pointer = cuda.cuMemAlloc(size)
            if int(error) == _OUT_OF_MEMORY:
                raise WorkspaceError(
                    f"device {self.device} has no {size} bytes left for a workspace, of which each stream and each "
                    "capture has its own; free memory, or call Library.forget_captures() where captured graphs are gone"
                )
            self._check("cuMemAlloc", error)
            if zeroed:
                try:
                    self._clear(pointer, size)
                except BaseException:
                    self._call("cuMemFree", pointer)
                    raise
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", before)
        return int(pointer)

    def _clear(self, pointer: Any, size: int) -> None:
        stream = self._call("cuStreamCreate", _STREAM_NON_BLOCKING)
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

    def load(self, cubin: bytes) -> Any:
        """Load a cubin; its bytes are kept until `unload`."""
        self._open()
        library = self._call("cuLibraryLoadData", cubin, None, None, 0, None, None, 0)
        self._binaries[int(library)] = cubin
        return library

    def unload(self, library: Any) -> None:
        """Unload what `load` gave; its kernels must not be running or launched again."""
        if os.getpid() != self._process:
            return  # in a forked child: they are the parent's
        self._call("cuLibraryUnload", library)
        self._binaries.pop(int(library), None)

    def kernel_count(self, library: Any) -> int:
        """How many kernels a loaded cubin holds."""
        return int(self._call("cuLibraryGetKernelCount", library))

    def kernel(self, library: Any, symbol: str) -> Any:
        """The kernel `symbol` of a loaded cubin."""
        return self._call("cuLibraryGetKernel", library, symbol.encode("ascii"))

    def parameter_sizes(self, kernel: Any) -> tuple[int, ...]:
        """The size in bytes of each kernel parameter, in order."""
        sizes = []
        for index in itertools.count():
            # Older drivers cannot count parameters; all of them call an index past the last an invalid value.
            error, _, size = self._cuda.cuKernelGetParamInfo(kernel, index)
            if int(error) == _INVALID_VALUE:
                break
            self._check("cuKernelGetParamInfo", error)
            sizes.append(int(size))
        return tuple(sizes)

    def set_attributes(self, kernel: Any) -> None:
        """Allow `kernel` all the shared memory and cluster sizes the device has, and bring it into the context.

        The last part is what makes a first launch under stream capture legal: nothing is left to load lazily.
        """
        cuda = self._cuda
        attribute = cuda.CUfunction_attribute
        static = int(self._call("cuKernelGetAttribute", attribute(_STATIC_SHARED_BYTES), kernel, self._device))
        allowed = self.max_shared_bytes - static
        self._call("cuKernelSetAttribute", attribute(_MAX_DYNAMIC_SHARED_BYTES), allowed, kernel, self._device)
        if self.compute_capability >= (9, 0):
            self._call("cuKernelSetAttribute", attribute(_NON_PORTABLE_CLUSTER_SIZE_ALLOWED), 1, kernel, self._device)
        self._call("cuKernelGetFunction", kernel)

    def max_active_clusters(
        self, kernel: Any, cluster: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int
    ) -> int:
        """How many clusters of `cluster` CTAs can be resident at once; 0 when not even one fits."""
        function = self._function(kernel)
        if cluster == (1, 1, 1) and self.compute_capability < (9, 0):
            threads = block[0] * block[1] * block[2]
            per_multiprocessor = self._call(
                "cuOccupancyMaxActiveBlocksPerMultiprocessor", function, threads, shared_bytes
            )
            return int(per_multiprocessor) * self.multiprocessors
        config = self._config(cluster, block, shared_bytes, ((program.CLUSTER_DIMENSION, cluster),))
        return int(self._call("cuOccupancyMaxActiveClusters", function, config))

    def prepare(self, kernel: Any, launch: program.Launch) -> PreparedLaunch:
        """Build the launch configuration, the parameter buffer and its pointers, once."""
        size = max(len(launch.parameters), 8)
        storage = (ctypes.c_uint64 * (-(-size // 8) + _PARAMETER_ALIGNMENT_BYTES // 8))()
        start = -ctypes.addressof(storage) % _PARAMETER_ALIGNMENT_BYTES
        base = ctypes.addressof(storage) + start
        ctypes.memmove(base, launch.parameters, len(launch.parameters))
        words = memoryview(storage).cast("B")[start:].cast("Q")
        pointers = (ctypes.c_void_p * max(len(launch.offsets), 1))(*(base + o for o in launch.offsets))
        config = self._config(launch.grid, launch.block, launch.shared_bytes, launch.attributes)
        stream_word = memoryview((ctypes.c_uint64 * 1).from_address(config.getPtr() + _CONFIG_STREAM_OFFSET_BYTES))
        stream_word = stream_word.cast("B").cast("Q")
        call = functools.partial(
            self._cuda.cuLaunchKernelEx, config, self._function(kernel), ctypes.addressof(pointers), 0
        )
        success = self._cuda.CUresult.CUDA_SUCCESS

        def run(stream: int, _keep: Any = (storage, pointers)) -> None:
            stream_word[0] = stream
            error = call()[0]
            if error is not success:
                self._retry(error, call, launch, stream)

        return PreparedLaunch(words, run)

    def _retry(self, error: Any, call: Callable[[], Any], launch: program.Launch, stream: int) -> None:
        """Launch again with the context current if a default stream was asked for where none was, else raise."""
        if int(error) == _INVALID_CONTEXT and stream <= LAST_DEFAULT_STREAM:
            with self.current():
                error = call()[0]
        shape = f"grid {launch.grid}, block {launch.block}, {launch.shared_bytes} bytes of shared memory"
        self._check("cuLaunchKernelEx", error, f" ({shape}, stream {stream:#x})")

    # --- below: how the driver is reached ---

    def _open(self) -> None:
        if self._context is not None:
            self._check_process()
            return
        with self._lock:
            if self._context is not None:
                return
            try:
                from cuda.bindings import driver as cuda
            except ImportError as error:
                raise DeviceError(f"cuda.bindings cannot be imported ({error}); run: pip install cuda-python") from None
            self._cuda, self._process = cuda, os.getpid()
            self._pointer_attribute = cuda.CUpointer_attribute(_POINTER_DEVICE_ORDINAL)
            try:
                cuda_init = cuda.cuInit(0)
            except Exception as error:  # cuda.bindings has its own exceptions for a missing driver
                raise DeviceError(f"no CUDA driver was found ({error}); install NVIDIA's driver") from None
            self._check("cuInit", cuda_init[0])
            current = self._call("cuCtxGetCurrent")
            ordinal = int(self._call("cuCtxGetDevice")) if int(current) else None
            if ordinal is not None and self._requested in (None, ordinal):
                self._device, self._context = self._call("cuDeviceGet", ordinal), current
                return
            self._device = self._call("cuDeviceGet", self._requested or 0)
            context = self._call("cuDevicePrimaryCtxRetain", self._device)
            if ordinal is None:
                self._call("cuCtxSetCurrent", context)
            self._context = context

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise DeviceError(
                f"the GPU was first used in process {self._process}, and this is a process forked from it, which CUDA "
                "does not allow; fork before the first use, or start processes by spawning them"
            )

    def _attribute(self, number: int) -> int:
        if number not in self._attributes:
            self._open()
            value = self._call("cuDeviceGetAttribute", self._cuda.CUdevice_attribute(number), self._device)
            self._attributes[number] = int(value)
        return self._attributes[number]

    def _function(self, kernel: Any) -> Any:
        """The kernel in the type that launch and occupancy calls take; it stays independent of any context."""
        return self._cuda.CUfunction(int(kernel))

    def _config(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        attributes: tuple[tuple[int, tuple[int, ...]], ...],
    ) -> Any:
        cuda = self._cuda
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = shared_bytes
        items = []
        for identity, words in attributes:
            value = cuda.CUlaunchAttributeValue()
            if identity in (program.CLUSTER_DIMENSION, program.PREFERRED_CLUSTER_DIMENSION):
                extent = value.clusterDim if identity == program.CLUSTER_DIMENSION else value.preferredClusterDim
                extent.x, extent.y, extent.z = words
            elif identity == program.COOPERATIVE:
                value.cooperative = words[0]
            elif identity == program.PROGRAMMATIC_STREAM_SERIALIZATION:
                value.programmaticStreamSerializationAllowed = words[0]
            else:
                raise DeviceError(f"launch attribute {identity} is not known to this runtime; update cute-aot")
            item = cuda.CUlaunchAttribute()
            item.id = cuda.CUlaunchAttributeID(identity)
            item.value = value
            items.append(item)
        config.attrs = items
        config.numAttrs = len(items)
        return config

    def _call(self, name: str, *arguments: Any) -> Any:
        result = getattr(self._cuda, name)(*arguments)
        self._check(name, result[0])
        return result[1] if len(result) == 2 else result[1:]

    def _check(self, name: str, error: Any, detail: str = "") -> None:
        if int(error) != _SUCCESS:
            self._fail(name, error, detail)

    def _fail(self, name: str, error: Any, detail: str) -> NoReturn:
        self._check_process()
        text = self._cuda.cuGetErrorString(error)[1]
        said = text.decode() if isinstance(text, bytes) else "the driver has no text for it"
        raise DeviceError(f"{name}{detail} failed: {getattr(error, 'name', error)} ({int(error)}), {said}")
