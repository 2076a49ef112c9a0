"""The driver calls, on stand-ins for libcuda's functions: structures, error texts, contexts, fork."""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import Any

import pytest

from runtime import DeviceError, WorkspaceError
from runtime.device import driver as driver_module
from runtime.device import libcuda
from runtime.device.driver import Driver
from runtime.device.gpus import Gpu
from runtime.device.launch import Launch, Slot
from runtime.device.libcuda import FUNCTIONS

from .native_stand_in import read_config, write
from .stand_in_cuda import StandInCuda


@pytest.fixture(params=["native", "ctypes"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StandInCuda:
    stand_in = StandInCuda()
    monkeypatch.setattr(libcuda, "load", lambda: libcuda.Libcuda(stand_in))
    if request.param == "ctypes":
        monkeypatch.setattr(driver_module, "_native", None)
    elif driver_module._native is None:
        pytest.skip("runtime._native was not built")
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
    slots=(Slot(0, True, 0), Slot(128, False, 1, 2)),
)


def test_driver_retains_the_primary_context_where_there_is_none(cuda: StandInCuda) -> None:
    driver = Driver()
    assert cuda.calls == []
    assert driver.device == 0
    assert driver.compute_capability == (9, 0)
    assert driver.cuda_version == "12.8"
    assert not any(call[0] == "cuDevicePrimaryCtxRetain" for call in cuda.calls)  # it takes long, and others may do it
    for _ in range(2):
        with driver.current():
            assert cuda.current == 0xC0
    assert cuda.current == 0xC0
    assert [call[0] for call in cuda.calls].count("cuDevicePrimaryCtxRetain") == 1


def test_driver_says_which_kind_of_gpu_it_is_and_asks_once(cuda: StandInCuda) -> None:
    """3.201 GHz, two transfers a clock, 6,144 bits: 4,916.7 GB/s."""
    driver = Driver()
    assert cuda.calls == []
    assert driver.gpu == driver.gpu == Gpu("NVIDIA H200", 132, 4_917)
    assert [call[0] for call in cuda.calls].count("cuDeviceGetName") == 1
    assert not any(call[0] == "cuDevicePrimaryCtxRetain" for call in cuda.calls)


def test_driver_takes_the_current_context_and_its_device(cuda: StandInCuda) -> None:
    cuda.current = 0xAA
    cuda.answers["cuDeviceGet"] = ctypes.c_int(1), 0
    driver = Driver()
    assert (driver.known_device, cuda.calls) == (None, [])
    assert (driver.device, driver.known_device) == (1, 1)
    assert not any(call[0] == "cuDevicePrimaryCtxRetain" for call in cuda.calls)


def test_driver_enters_its_own_context_where_another_devices_is_current(cuda: StandInCuda) -> None:
    cuda.current = 0xAA
    driver = Driver(0)
    with driver.current():
        assert cuda.current == 0xC0
    assert cuda.current != 0xC0


def test_driver_waits_for_the_device_in_its_context(cuda: StandInCuda) -> None:
    driver = Driver()
    with driver.current():
        cuda.current = 0
    cuda.calls.clear()
    driver.synchronize()
    names = [name for name, *_ in cuda.calls]
    assert names == ["cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxSynchronize", "cuCtxPopCurrent"]
    cuda.errors["cuCtxSynchronize"] = 900
    with pytest.raises(DeviceError, match="cuCtxSynchronize failed"):
        driver.synchronize()


def test_streams_are_ordered_in_the_devices_context(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever context is current, or none: events belong to one."""
    contexts: list[tuple[str, int]] = []
    call = Driver._call

    def noted(driver: Driver, name: str, *arguments: Any) -> None:
        if name.startswith("cuEvent") or name == "cuStreamWaitEvent":
            contexts.append((name, cuda.current))
        call(driver, name, *arguments)

    monkeypatch.setattr(Driver, "_call", noted)
    for current in (0, 0xC1):
        cuda.current = current
        Driver(0).order(7, 5)
    in_turn = ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuEventDestroy"]
    assert contexts == [(name, 0xC0) for name in in_turn] * 2


def test_driver_sets_the_attributes_of_a_kernel(cuda: StandInCuda) -> None:
    driver = Driver()
    kernel = driver.kernel(driver.load(b"cubin"), "name")
    assert driver.parameter_sizes(kernel) == (128, 8, 24)
    driver.set_attributes(kernel)
    attributes = {c[1]: c[2:] for c in cuda.calls if c[0] == "cuKernelSetAttribute"}
    assert attributes == {8: (232_448 - 1024, 0x5E, 0), 14: (1, 0x5E, 0)}
    assert cuda.calls[-2][0] == "cuKernelGetFunction"


@pytest.mark.parametrize("count", [0, 1, 9, 255, 256, 300])
def test_parameters_are_asked_for_until_there_are_no_more(cuda: StandInCuda, count: int) -> None:
    driver = Driver()
    assert driver.device == 0
    cuda.sizes = tuple(range(count, 0, -1))
    assert driver.parameter_sizes(0x5E) == cuda.sizes
    asked = [call[1:3] for call in cuda.calls if call[0] == "cuKernelGetParamInfo"]
    assert asked[-count - 1 :] == [(0x5E, index) for index in range(count + 1)]


@pytest.mark.parametrize("after", [0, 2, 3])
def test_parameter_that_the_driver_fails_at_is_no_end(cuda: StandInCuda, after: int) -> None:
    driver = Driver()
    assert driver.device == 0
    cuda.size_errors[after] = 700
    with pytest.raises(DeviceError, match=r"cuKernelGetParamInfo failed: .* \(700\), a text"):
        driver.parameter_sizes(0x5E)


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_load_beside_captures(cuda: StandInCuda, fails: bool) -> None:
    driver = Driver()
    assert driver.device == 0
    cuda.calls.clear()
    if fails:
        cuda.errors["cuLibraryLoadData"] = 2
        with pytest.raises(DeviceError, match="cuLibraryLoadData"):
            driver.load(b"cubin")
    else:
        driver.kernel_count(driver.load(b"cubin"))
        driver.set_attributes(0x5E)
    depth, names = 0, [name for name, *_ in cuda.calls]
    for name in names:
        depth ^= name == "cuThreadExchangeStreamCaptureMode"
        assert depth == 1 or name not in ("cuLibraryLoadData", "cuKernelGetFunction"), names
    assert depth == 0


def test_kernel_that_the_driver_cannot_read_may_need_a_newer_one(cuda: StandInCuda) -> None:
    cuda.errors["cuLibraryLoadData"] = 200
    with pytest.raises(
        DeviceError, match=r"cuLibraryLoadData \(this driver supports CUDA 12.8; .* newer driver\) failed"
    ):
        Driver().load(b"cubin")


def test_driver_asks_occupancy_for_the_cluster_of_the_launch(cuda: StandInCuda) -> None:
    driver = Driver()
    driver.load(b"cubin")
    seen = []
    function = FUNCTIONS["cuOccupancyMaxActiveClusters"][1]

    def occupancy(out: int, kernel: int, config: int) -> int:
        seen.append((kernel, *read_config(config)))
        write(out, ctypes.c_int(66))
        return 0

    stand_in = ctypes.CFUNCTYPE(ctypes.c_int, *function)(occupancy)
    driver._cuda.cuOccupancyMaxActiveClusters = stand_in
    assert driver.max_active_clusters(0x5E, (1, 2, 1), (384, 1, 1), 98_304) == 66
    assert seen == [(0x5E, (1, 2, 1), (384, 1, 1), 98_304, 0, [(4, 1, 2, 1)])]


def test_prepared_launch_is_what_the_plan_says(cuda: StandInCuda) -> None:
    driver = Driver()
    driver.load(b"cubin")
    driver.prepare(0x5E, LAUNCH, 2).launch((0x1234567890, 0x40), 0x77)
    (found,) = cuda.launched
    assert (found.function, found.stream, found.aligned) == (0x5E, 0x77, True)
    assert (found.grid, found.block, found.shared_bytes) == (LAUNCH.grid, LAUNCH.block, 98_304)
    assert found.attributes == [(2, 1, 0, 0), (4, 1, 2, 1), (6, 1, 0, 0), (11, 2, 2, 1)]
    descriptor = struct.pack("<Q", 0x1234567890) + LAUNCH.parameters[8:128]
    assert found.values == (descriptor, struct.pack("<Q", 0x42), bytes(range(24)))


def test_a_launch_like_another_differs_in_its_grid_and_parameters(cuda: StandInCuda) -> None:
    driver = Driver()
    driver.load(b"cubin")
    other = LAUNCH._replace(grid=(7, 1, 3), parameters=bytes(reversed(LAUNCH.parameters)))
    like = driver.prepare(0x5E, LAUNCH, 2)
    for ready in (driver.prepare(0x5E, other, 2), driver.prepare(0x5E, other, 2, like), like):
        ready.launch((0x1234567890, 0x40), 0x77)
    anew, alike, before = cuda.launched
    assert alike == anew
    assert (anew.grid, before.grid) == (other.grid, LAUNCH.grid)
    assert anew.values != before.values
    cuda.launch_errors = [1]
    with pytest.raises(DeviceError, match=r"grid \(7, 1, 3\), block \(384, 1, 1\), 98304 bytes"):
        driver.prepare(0x5E, other, 2, like).launch((0, 0), 5)


def test_largest_addresses_and_negative_addends_wrap_as_they_should(cuda: StandInCuda) -> None:
    driver = Driver()
    driver.load(b"cubin")
    slots = (Slot(0, False, 0, -16), Slot(128, True, 1, 5))
    driver.prepare(0x5E, LAUNCH._replace(slots=slots), 2).launch((8, (1 << 64) - 1), (1 << 64) - 1)
    (found,) = cuda.launched
    assert found.stream == (1 << 64) - 1
    assert found.values[0][:8] == struct.pack("<q", -8)
    assert found.values[1] == struct.pack("<Q", (((1 << 64) + 4) & (1 << 64) - 1) & (((1 << 53) - 1) << 4))


def test_launch_larger_than_native_code_has_room_for(cuda: StandInCuda) -> None:
    driver = Driver()
    driver.load(b"cubin")
    large = bytes(range(256)) * 32
    cuda.sizes = (len(large),)
    launch = LAUNCH._replace(parameters=large, offsets=(0,), sizes=(len(large),), slots=(Slot(8, False, 0),))
    driver.prepare(0x5E, launch, 1).launch((7,), 5)
    assert cuda.launched[0].values == (large[:8] + struct.pack("<Q", 7) + large[16:],)


def test_threads_share_a_prepared_launch(cuda: StandInCuda) -> None:
    driver = Driver()
    driver.load(b"cubin")
    ready = driver.prepare(0x5E, LAUNCH, 2)

    def run(number: int) -> None:
        for _ in range(200):
            ready.launch((number << 32, number << 32), number)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cuda.launched) == 1000
    for found in cuda.launched:
        assert struct.unpack_from("<Q", found.values[0])[0] == found.stream << 32
        assert struct.unpack_from("<Q", found.values[1])[0] == (found.stream << 32) + 2


def test_failed_launch_names_the_call_the_error_and_the_shape(cuda: StandInCuda) -> None:
    driver = Driver()
    driver.load(b"cubin")
    cuda.launch_errors = [1]
    with pytest.raises(
        DeviceError, match=r"cuLaunchKernelEx \(grid \(4, 2, 1\).*CUDA_ERROR_INVALID_VALUE \(1\), a text"
    ):
        driver.prepare(1, LAUNCH, 2).launch((0, 0), 5)


def test_default_stream_without_a_context_is_launched_in_the_devices(cuda: StandInCuda) -> None:
    driver = Driver()
    with driver.current():
        driver.load(b"cubin")
    ready = driver.prepare(1, LAUNCH, 2)
    cuda.current, cuda.launch_errors = 0, [201]
    ready.launch((16, 32), 0)
    assert [x.context for x in cuda.launched] == [0, 0xC0]
    assert cuda.launched[0].values == cuda.launched[1].values
    assert cuda.current == 0


def test_an_invalid_context_is_not_tried_for_ever(cuda: StandInCuda) -> None:
    driver = Driver()
    driver.load(b"cubin")
    cuda.current, cuda.launch_errors = 0, [201] * 5
    with pytest.raises(DeviceError, match=r"cuLaunchKernelEx .*\(201\)"):
        driver.prepare(1, LAUNCH, 2).launch((16, 32), 0)
    assert len(cuda.launched) == 2


def test_machine_without_a_driver_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcuda, "LIBRARY", "libno-such-driver.so.1")
    with pytest.raises(DeviceError, match=r"no CUDA driver was found.*install NVIDIA's driver"):
        Driver().device  # noqa: B018


def test_driver_without_a_function_is_too_old() -> None:
    stand_in = StandInCuda()
    del stand_in.cuLibraryLoadData  # type: ignore[attr-defined]
    with pytest.raises(DeviceError, match="this NVIDIA driver has no cuLibraryLoadData"):
        libcuda.Libcuda(stand_in)


def test_stream_is_known_by_its_identity_and_its_capture(cuda: StandInCuda) -> None:
    driver = Driver()
    assert driver.device == 0
    answers = iter([(0, 99), (1, 99)])

    def capture_info(stream: int, status: int, capture: int, *rest: Any) -> int:
        assert rest == (None, None, None)
        found = next(answers)
        write(status, ctypes.c_int(found[0]))
        write(capture, ctypes.c_uint64(found[1]))
        return 0

    arguments = FUNCTIONS["cuStreamGetCaptureInfo"][1]
    driver._cuda.cuStreamGetCaptureInfo = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(capture_info)
    assert [driver.stream_key(0x77), driver.stream_key(0x77)] == [(-1, 17), (99, 0x77)]
    assert [name for name, *_ in cuda.calls].count("cuStreamGetId") == 1, "a question that ends a capture"


def test_memory_is_zeroed_on_a_stream_of_its_own_out_of_a_captures_way(cuda: StandInCuda) -> None:
    driver = Driver()
    assert driver.device == 0
    modes = []

    def exchange(mode: int) -> int:
        modes.append(ctypes.c_int.from_address(mode).value)
        write(mode, ctypes.c_int(0))
        return 0

    arguments = FUNCTIONS["cuThreadExchangeStreamCaptureMode"][1]
    driver._cuda.cuThreadExchangeStreamCaptureMode = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(exchange)
    cuda.calls.clear()
    assert driver.allocate(64, zeroed=True) == 0xA000
    assert modes == [2, 0], "relaxed, and what it was"
    assert [
        (name, *rest[1:]) if name in ("cuMemAlloc", "cuStreamCreate") else (name, *rest) for name, *rest in cuda.calls
    ] == [
        ("cuMemAlloc", 64),
        ("cuStreamCreate", 1),
        ("cuMemsetD8Async", 0xA000, 0, 64, 0x51),
        ("cuStreamSynchronize", 0x51),
        ("cuStreamDestroy", 0x51),
    ]
    cuda.calls.clear()
    driver.allocate(64, zeroed=False)
    assert [name for name, *_ in cuda.calls] == ["cuMemAlloc"]
    driver.free(0xA000)
    assert ("cuMemFree", 0xA000) in cuda.calls


def test_no_memory_for_a_workspace_says_whose_they_are_and_what_helps(cuda: StandInCuda) -> None:
    driver = Driver()
    assert driver.device == 0
    cuda.errors["cuMemAlloc"] = 2
    with pytest.raises(WorkspaceError, match=r"device 0 has no 64 bytes left for a workspace.*forget_captures"):
        driver.allocate(64, zeroed=True)
    assert cuda.calls[-1][0] == "cuThreadExchangeStreamCaptureMode"


def test_memory_that_cannot_be_cleared_is_given_back(cuda: StandInCuda) -> None:
    driver = Driver()
    assert driver.device == 0
    cuda.errors["cuStreamCreate"] = 999
    with pytest.raises(DeviceError, match="cuStreamCreate"):
        driver.allocate(64, zeroed=True)
    assert ("cuMemFree", 0xA000) in cuda.calls


def test_use_in_a_forked_child_is_refused(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    module = driver.load(b"cubin")
    ready = driver.prepare(1, LAUNCH, 2)
    monkeypatch.setattr("os.getpid", lambda: driver._process + 1)
    message = rf"first used in process {driver._process}, and this is a process forked from it"
    with pytest.raises(DeviceError, match=message):
        driver.device  # noqa: B018
    cuda.launch_errors = [3]
    with pytest.raises(DeviceError, match=message):
        ready.launch((0, 0), 5)
    driver.unload(module)  # the parent's to unload
    assert "cuLibraryUnload" not in {name for name, *_ in cuda.calls}


def test_driver_may_be_made_before_a_fork(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr("os.getpid", lambda: 7)
    assert driver.device == 0
    assert driver.device == 0
