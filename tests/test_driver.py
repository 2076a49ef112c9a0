"""The driver calls, on stand-ins for libcuda's functions: structures, error texts, contexts, fork."""

from __future__ import annotations

import ctypes
import struct
import sys
from typing import Any

import pytest

from runtime import DeviceError, WorkspaceError
from runtime.driver import Driver
from runtime.program import Launch


class StandInCuda:
    """`cuda.bindings.driver` with its types, and functions that answer without libcuda."""

    def __init__(self) -> None:
        from cuda.bindings import driver as real

        self.real: Any = real
        self.calls: list[tuple[Any, ...]] = []
        self.current = 0
        self.sizes = (128, 8, 24)
        self.launch_errors: list[int] = []
        self.launched: list[tuple[Any, ...]] = []
        self.answers = {
            "cuCtxGetDevice": 1,
            "cuDeviceGet": 0,
            "cuDevicePrimaryCtxRetain": 0xC0,
            "cuLibraryLoadData": real.CUlibrary(0x11B),
            "cuLibraryGetKernelCount": 1,
            "cuLibraryGetKernel": real.CUkernel(0x5E),
            "cuKernelGetAttribute": 1024,
            "cuOccupancyMaxActiveClusters": 66,
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": 2,
        }

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(self.real, name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            return self.real.CUresult(0), self.answers.get(name, 0)

        return call

    def cuGetErrorString(self, error: Any) -> tuple[Any, bytes]:
        return self.real.CUresult(0), b"a text"

    def cuCtxGetCurrent(self) -> tuple[Any, int]:
        return self.real.CUresult(0), self.current

    def cuCtxSetCurrent(self, context: int) -> tuple[Any]:
        self.current = context
        return (self.real.CUresult(0),)

    cuCtxPushCurrent = cuCtxSetCurrent

    def cuCtxPopCurrent(self) -> tuple[Any, int]:
        self.current = 0
        return self.real.CUresult(0), 0

    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> tuple[Any, int]:
        return self.real.CUresult(0), {75: 9, 76: 0, 16: 132, 97: 232_448}[int(attribute)]

    def cuKernelGetParamInfo(self, kernel: Any, index: int) -> tuple[Any, int, int]:
        if index < len(self.sizes):
            return self.real.CUresult(0), 0, self.sizes[index]
        return self.real.CUresult(1), 0, 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: int, extra: int) -> tuple[Any]:
        pointers = (ctypes.c_void_p * len(self.sizes)).from_address(parameters)
        values = tuple(ctypes.string_at(p or 0, s) for p, s in zip(pointers, self.sizes, strict=True))
        self.launched.append((int(function), int(config.hStream), config, values, self.current))
        return (self.real.CUresult(self.launch_errors.pop(0) if self.launch_errors else 0),)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandInCuda:
    import cuda.bindings

    stand_in = StandInCuda()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", stand_in)
    monkeypatch.setattr(cuda.bindings, "driver", stand_in, raising=False)
    return stand_in


LAUNCH = Launch(
    kernel=0,
    grid=(4, 2, 1),
    block=(384, 1, 1),
    shared_bytes=98_304,
    attributes=((2, (1,)), (4, (1, 2, 1)), (6, (1,)), (11, (2, 2, 1))),
    parameters=bytes(range(128)) + bytes(16) + bytes(range(24)) + bytes(8),
    offsets=(0, 128, 144),
    sizes=(128, 8, 24),
    slots=(),
)


def test_driver_retains_the_primary_context_where_there_is_none(cuda: StandInCuda) -> None:
    driver = Driver()
    assert cuda.calls == []
    assert driver.device == 0
    assert cuda.current == 0xC0
    assert driver.compute_capability == (9, 0)


def test_driver_takes_the_current_context_and_its_device(cuda: StandInCuda) -> None:
    cuda.current = 0xAA
    cuda.answers["cuDeviceGet"] = 1
    assert Driver().device == 1
    assert not any(call[0] == "cuDevicePrimaryCtxRetain" for call in cuda.calls)


def test_driver_enters_its_own_context_where_another_devices_is_current(cuda: StandInCuda) -> None:
    cuda.current = 0xAA
    driver = Driver(0)
    with driver.current():
        assert cuda.current == 0xC0
    assert cuda.current != 0xC0


def test_driver_sets_the_attributes_of_a_kernel(cuda: StandInCuda) -> None:
    driver = Driver()
    kernel = driver.kernel(driver.load(b"cubin"), "name")
    assert driver.parameter_sizes(kernel) == (128, 8, 24)
    driver.set_attributes(kernel)
    attributes = {int(c[1]): c[2] for c in cuda.calls if c[0] == "cuKernelSetAttribute"}
    assert attributes == {8: 232_448 - 1024, 14: 1}
    assert cuda.calls[-1][0] == "cuKernelGetFunction"


def test_driver_asks_occupancy_for_the_cluster_of_the_launch(cuda: StandInCuda) -> None:
    driver = Driver()
    driver.load(b"cubin")
    assert driver.max_active_clusters(cuda.answers["cuLibraryGetKernel"], (1, 2, 1), (384, 1, 1), 98_304) == 66
    config = cuda.calls[-1][2]
    assert (config.gridDimY, config.blockDimX, config.sharedMemBytes, config.numAttrs) == (2, 384, 98_304, 1)
    assert config.attrs[0].value.clusterDim.y == 2


def test_prepared_launch_is_what_the_plan_says(cuda: StandInCuda) -> None:
    driver = Driver()
    driver.load(b"cubin")
    ready = driver.prepare(cuda.real.CUkernel(0x5E), LAUNCH)
    ready.words[0], ready.words[16] = 0x1234567890, 0x42
    ready.launch(0x77)
    function, stream, config, values, _ = cuda.launched[0]
    assert (function, stream) == (0x5E, 0x77)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == LAUNCH.grid
    assert (config.blockDimX, config.sharedMemBytes, config.numAttrs) == (384, 98_304, 4)
    assert [int(a.id) for a in config.attrs] == [2, 4, 6, 11]
    assert (config.attrs[1].value.clusterDim.y, config.attrs[3].value.preferredClusterDim.x) == (2, 2)
    assert config.attrs[0].value.cooperative == config.attrs[2].value.programmaticStreamSerializationAllowed == 1
    descriptor = struct.pack("<Q", 0x1234567890) + LAUNCH.parameters[8:128]
    assert values == (descriptor, struct.pack("<Q", 0x42), bytes(range(24)))


def test_prepared_parameters_are_aligned_for_descriptors(cuda: StandInCuda) -> None:
    driver = Driver()
    driver.load(b"cubin")
    for _ in range(5):
        words = driver.prepare(cuda.real.CUkernel(1), LAUNCH).words
        address = ctypes.addressof(ctypes.c_uint64.from_buffer(words.obj)) if words.obj else 0
        offset = len(memoryview(words.obj).cast("B")) - words.nbytes
        assert (address + offset) % 64 == 0


def test_failed_launch_names_the_call_the_error_and_the_shape(cuda: StandInCuda) -> None:
    driver = Driver()
    driver.load(b"cubin")
    cuda.launch_errors = [1]
    with pytest.raises(
        DeviceError, match=r"cuLaunchKernelEx \(grid \(4, 2, 1\).*CUDA_ERROR_INVALID_VALUE \(1\), a text"
    ):
        driver.prepare(cuda.real.CUkernel(1), LAUNCH).launch(5)


def test_default_stream_without_a_context_is_launched_in_the_devices(cuda: StandInCuda) -> None:
    driver = Driver()
    driver.load(b"cubin")
    ready = driver.prepare(cuda.real.CUkernel(1), LAUNCH)
    cuda.current, cuda.launch_errors = 0, [201]
    ready.launch(0)
    assert [x[-1] for x in cuda.launched] == [0, 0xC0]
    assert cuda.current == 0


def test_machine_without_a_driver_is_a_device_error(cuda: StandInCuda) -> None:
    def missing(_flags: int) -> None:
        raise RuntimeError("libcuda.so.1 not found")

    cuda.cuInit = missing  # type: ignore[attr-defined]
    with pytest.raises(DeviceError, match="no CUDA driver was found"):
        Driver().device  # noqa: B018


def test_stream_is_known_by_its_identity_and_its_capture(cuda: StandInCuda) -> None:
    driver = Driver()
    assert driver.device == 0
    cuda.answers["cuStreamGetId"] = 17
    capturing = cuda.real.CUstreamCaptureStatus
    answers = iter([(capturing(0), 99, 0), (capturing(1), 99, 0)])
    cuda.cuStreamGetCaptureInfo = lambda stream: (cuda.real.CUresult(0), *next(answers))  # type: ignore[attr-defined]
    assert [driver.stream_key(0x77), driver.stream_key(0x77)] == [(-1, 17), (99, 0x77)]
    assert [name for name, *_ in cuda.calls].count("cuStreamGetId") == 1, "a question that ends a capture"


def test_memory_is_zeroed_on_a_stream_of_its_own_out_of_a_captures_way(cuda: StandInCuda) -> None:
    driver = Driver()
    assert driver.device == 0
    cuda.calls.clear()
    cuda.answers |= {"cuMemAlloc": 0xA000, "cuStreamCreate": 0x51, "cuThreadExchangeStreamCaptureMode": "before"}
    assert driver.allocate(64, zeroed=True) == 0xA000
    relaxed = cuda.real.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    assert cuda.calls == [
        ("cuThreadExchangeStreamCaptureMode", relaxed),
        ("cuMemAlloc", 64),
        ("cuStreamCreate", 1),
        ("cuMemsetD8Async", 0xA000, 0, 64, 0x51),
        ("cuStreamSynchronize", 0x51),
        ("cuStreamDestroy", 0x51),
        ("cuThreadExchangeStreamCaptureMode", "before"),
    ]
    cuda.calls.clear()
    driver.allocate(64, zeroed=False)
    assert [name for name, *_ in cuda.calls][1:-1] == ["cuMemAlloc"]
    driver.free(0xA000)
    assert cuda.calls[-1] == ("cuMemFree", 0xA000)


def test_no_memory_for_a_workspace_says_whose_they_are_and_what_helps(
    cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver()
    assert driver.device == 0
    monkeypatch.setattr(cuda, "cuMemAlloc", lambda size: (cuda.real.CUresult(2), None), raising=False)
    with pytest.raises(WorkspaceError, match=r"device 0 has no 64 bytes left for a workspace.*forget_captures"):
        driver.allocate(64, zeroed=True)
    assert cuda.calls[-1][0] == "cuThreadExchangeStreamCaptureMode"


def test_memory_that_cannot_be_cleared_is_given_back(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    assert driver.device == 0
    cuda.answers |= {"cuMemAlloc": 0xA000}
    monkeypatch.setattr(cuda, "cuStreamCreate", lambda flags: (cuda.real.CUresult(999), None), raising=False)
    with pytest.raises(DeviceError, match="cuStreamCreate"):
        driver.allocate(64, zeroed=True)
    assert ("cuMemFree", 0xA000) in cuda.calls


def test_use_in_a_forked_child_is_refused(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    module = driver.load(b"cubin")
    ready = driver.prepare(cuda.real.CUkernel(1), LAUNCH)
    monkeypatch.setattr("os.getpid", lambda: driver._process + 1)
    message = rf"first used in process {driver._process}, and this is a process forked from it"
    with pytest.raises(DeviceError, match=message):
        driver.device  # noqa: B018
    cuda.launch_errors = [3]
    with pytest.raises(DeviceError, match=message):
        ready.launch(5)
    driver.unload(module)  # the parent's to unload
    assert "cuLibraryUnload" not in {name for name, *_ in cuda.calls}


def test_driver_may_be_made_before_a_fork(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr("os.getpid", lambda: 7)
    assert driver.device == 0
    assert driver.device == 0
