"""What native code does where Python would have to be very quick to see it: entries that are freed, odd launches,
kernels of which the driver tells nothing."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from runtime import native
from runtime.device.libcuda import FUNCTIONS

from .native_stand_in import exchange_capsule, write
from .recording_driver import FakeTensor

pytestmark = pytest.mark.skipif(native._native is None, reason="runtime._native was not built")
ALL = (1 << 64) - 1
CHECKS = ((15,) * 3, (64, 128, 64), ((2, 0), (2, 1)))
SLOTS = [(0, 0, 0, ALL), (8, 1, 0, ALL), (16, 2, 0, ALL)]


class Calls(list[int]):
    """A cuLaunchKernelEx that writes down which functions it was given."""

    def __init__(self) -> None:
        super().__init__()
        self._entry = ctypes.CFUNCTYPE(ctypes.c_int, *FUNCTIONS["cuLaunchKernelEx"][1])(self._called)

    def _called(self, _config: int, function: int, _parameters: int, _extra: int) -> int:
        self.append(function)
        return 0

    def launch(self, function: int, slots: Any = SLOTS, pointers: int = 3, size: int = 32) -> Any:
        address = ctypes.cast(self._entry, ctypes.c_void_p).value or 0
        parts: Any = (address, function, (1,) * 7, [], bytes(size), [0], slots, pointers, lambda *_: None)
        return native._native.Launch(*parts)


@pytest.fixture
def table() -> Any:
    return native._native.Table(exchange_capsule(lambda device: 0), (FakeTensor,), FakeTensor.new_empty, 0, 0)


def putter(table: Any, tensors: tuple[FakeTensor, ...]) -> Callable[[Any], None]:
    counter = native._native.Counter()

    def put(launch: Any) -> None:
        assert table.put(0, tensors, (launch,), CHECKS, 0, None, None, counter)

    return put


@pytest.mark.parametrize("how", ["replaced", "cleared"])
def test_call_made_while_an_entry_is_freed_does_not_find_it(table: Any, how: str) -> None:
    calls, served = Calls(), []
    a, b, d = tensors = FakeTensor((4, 8)), FakeTensor((8, 8)), FakeTensor((4, 8))
    put, old = putter(table, tensors), calls.launch(111)
    put(old)
    watched = weakref.ref(old, lambda _: served.append(table.call(0, 5, a, b, d)))
    del old
    if how == "replaced":
        put(calls.launch(222))
        assert (served, calls) == ([d], [222])
    else:
        table.clear()
        assert (served, calls) == ([None], [])
        put(calls.launch(222))
    assert table.call(0, 5, a, b, d) is d
    assert calls[-1] == 222
    assert watched() is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": [(ALL - 3, 0, 0, ALL)]},
        {"slots": [(25, 0, 0, ALL)]},
        {"slots": [(0, 3, 0, ALL)]},
        {"slots": [(0, 0, 0, ALL)], "size": 4},
        {"pointers": 13},
        {"size": 5000},
    ],
)
def test_launches_that_there_is_no_room_for_are_left_to_python(wrong: dict[str, Any]) -> None:
    with pytest.raises(OverflowError):
        Calls().launch(1, **wrong)


def test_a_launch_takes_its_own_number_of_pointers() -> None:
    calls = Calls()
    ready = calls.launch(7)
    for wrong in ((1, 2), (1, 2, 3, 4), tuple(range(20))):
        with pytest.raises((ValueError, OverflowError)):
            ready.launch(wrong, 0)
    assert calls == []
    ready.launch((1, 2, 3), 0)
    assert calls == [7]


def test_a_launch_like_another_has_as_many_bytes_of_parameters() -> None:
    calls = Calls()
    ready = calls.launch(7)
    for wrong in (bytes(31), bytes(33), b""):
        with pytest.raises(ValueError, match="wrong number of bytes"):
            ready.again((1, 1, 1), wrong)
    other = ready.again((1, 1, 1), bytes(32))
    watched = weakref.ref(other)
    del ready
    other.launch((1, 2, 3), 0)
    assert calls == [7]
    del other
    assert watched() is None


class Parameters:
    """A cuKernelGetParamInfo of a kernel with parameters of these sizes; then it answers `end`."""

    def __init__(self, sizes: tuple[int, ...], end: int = 1) -> None:
        self.sizes, self.end, self.asked = sizes, end, 0
        self._entry = ctypes.CFUNCTYPE(ctypes.c_int, *FUNCTIONS["cuKernelGetParamInfo"][1])(self._answer)

    def _answer(self, kernel: int, index: int, offset: int, size: int) -> int:
        assert (kernel, index) == (0x5E, self.asked)
        self.asked += 1
        if index >= len(self.sizes):
            return self.end
        write(size, ctypes.c_size_t(self.sizes[index]))
        return 0

    def read(self) -> Any:
        return native._native.parameter_sizes(ctypes.cast(self._entry, ctypes.c_void_p).value or 0, 0x5E)


@pytest.mark.parametrize("sizes", [(), (8,), (128, 8, 24), (ALL, 0, 1), (4,) * 255])
def test_sizes_of_parameters_are_the_drivers(sizes: tuple[int, ...]) -> None:
    driver = Parameters(sizes)
    assert driver.read() == sizes
    assert driver.asked == len(sizes) + 1


@pytest.mark.parametrize(("sizes", "end"), [((), 700), ((128, 8), 3), ((4,) * 256, 1), ((4,) * 5000, 1)])
def test_parameters_that_the_driver_fails_at_or_that_are_too_many_are_left_to_python(
    sizes: tuple[int, ...], end: int
) -> None:
    driver = Parameters(sizes, end)
    assert driver.read() is None
    assert driver.asked <= 256
