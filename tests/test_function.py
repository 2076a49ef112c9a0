"""Functions called by name, on a recording driver: what they take, and what is refused before anything is launched."""

from __future__ import annotations

import struct

import pytest

from runtime import ArgumentError, DeviceError, Library, ProgramError

from . import served_gemm as on_library
from .recording_driver import FakeTensor, RecordingDriver
from .served_gemm import K, N, operands

archive_path, driver, library = on_library.archive_path, on_library.driver, on_library.library  # fixtures


def test_function_takes_the_arguments_of_its_record(library: Library, driver: RecordingDriver) -> None:
    for _ in range(2):
        a, b, out = operands(100)
        library.functions["large"](a, b, out, stream=3)
    assert driver.count("prepare") == 1
    launched = driver.launches[1]
    assert [struct.unpack_from("<Q", p)[0] for p in launched.parameters] == [
        a.pointer,
        b.pointer,
        out.pointer,
    ]
    assert launched.stream == 3


def test_repr_says_what_a_function_is_and_whether_it_is_loaded(library: Library, driver: RecordingDriver) -> None:
    function = library.functions["large"]
    assert repr(function) == "<Function large for sm_90a, not loaded>"
    assert not driver.log
    function.load()
    assert repr(function) == "<Function large for sm_90a, loaded>"
    library.close()
    assert repr(function) == "<Function large for sm_90a, unloaded>"


def test_function_refuses_other_arguments(library: Library) -> None:
    a, b, out = operands(100)
    function = library.functions["large"]
    with pytest.raises(ArgumentError, match="takes 3 arguments"):
        function(a, b)
    with pytest.raises(ArgumentError, match="d must have element type bf16, found f32"):
        function(a, b, FakeTensor((100, N), "float32"))
    with pytest.raises(ArgumentError, match=r"d\.extent\[0\] must equal a\.extent\[0\]"):
        function(a, b, FakeTensor((99, N)))
    with pytest.raises(ArgumentError, match="a is on device 1"):
        function(FakeTensor((100, K), device=1), b, out)


def test_function_without_rows_says_that_the_caller_skips_the_call(library: Library) -> None:
    a, b, out = operands(0)
    with pytest.raises(ProgramError, match=r"large: .* extent of 0 cannot be launched on; the caller skips"):
        library.functions["large"](a, b, out)
    a, b, out = operands(1000, 1024, 512)
    with pytest.raises(ProgramError, match=r"^(?!.*skips)"):
        library.functions["bounded"](a, b, out)


def test_function_is_not_launched_on_a_k_of_0_though_its_grid_has_blocks(
    library: Library, driver: RecordingDriver
) -> None:
    a, b = (FakeTensor((rows, 0), strides=(K, 1)) for rows in (100, N))  # as slices of others have them
    with pytest.raises(ProgramError, match=r"large: .* extent of 0 cannot be launched on; the caller skips"):
        library.functions["large"](a, b, FakeTensor((100, N)))
    assert not driver.launches


def test_function_refuses_tensors_without_memory(library: Library) -> None:
    a, b, out = operands(100)
    out.pointer = 0
    with pytest.raises(ArgumentError, match=r"d of shape .* has no memory"):
        library.functions["large"](a, b, out)


def test_function_too_large_for_this_gpu_says_so(library: Library, driver: RecordingDriver) -> None:
    driver.shared_bytes = 48 << 10
    with pytest.raises(DeviceError, match="huge: needs 220000 bytes of shared memory"):
        library.functions["huge"](*operands(16))
