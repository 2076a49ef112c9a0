"""Calls that a library refuses: pointers, streams, shapes and devices that no kernel is right for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime import ArgumentError, Library
from runtime.container.archive import Archive

from .recording_driver import (
    FakeTensor,
    FakeTorch,
    RecordingDriver,
    cubin,
    entry,
    gemm_record,
    signature,
    write_archive,
)
from .served_gemm import K, N, operands
from .served_gemm import archive_path as archive_path
from .served_gemm import driver as driver
from .served_gemm import library as library
from .served_gemm import ranked as ranked

# --- refusals ---


def test_misaligned_pointer_is_refused_on_every_call(library: Library, driver: RecordingDriver) -> None:
    a, b, out = operands(16)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="a must start at a multiple of 16 bytes"):
            library.gemm(FakeTensor((16, K), pointer=a.pointer + 8), b, out=out)
        library.gemm(a, b, out=out)
    assert len(driver.launches) == 2


@pytest.mark.parametrize("which", ["a", "b"])
def test_output_over_an_input_is_refused_on_every_call(library: Library, which: str) -> None:
    a, b, out = operands(16)
    shared = FakeTensor((16, N), pointer={"a": a, "b": b}[which].pointer + 512)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=f"out shares memory with {which}"):
            library.gemm(a, b, out=shared)
        library.gemm(a, b, out=out)


def test_columns_of_one_matrix_may_be_input_and_output(library: Library, driver: RecordingDriver) -> None:
    b = FakeTensor((N, K))
    pitch = K + N
    a = FakeTensor((16, K), strides=(pitch, 1))
    for shift, fits in ((K, True), (K - 8, False), (K, True)):
        out = FakeTensor((16, N), strides=(pitch, 1), pointer=a.pointer + 2 * shift)
        if fits:
            library.gemm(a, b, out=out)
        else:
            with pytest.raises(ArgumentError, match="shares memory"):
                library.gemm(a, b, out=out)
    assert len(driver.launches) == 2


@pytest.mark.parametrize("which", ["a", "b", "out"])
def test_tensor_without_memory_is_refused_on_every_call(library: Library, driver: RecordingDriver, which: str) -> None:
    for _ in range(2):
        tensors: dict[str, Any] = dict(zip(("a", "b", "out"), operands(16), strict=True))
        tensors[which].pointer = 0
        with pytest.raises(ArgumentError, match=rf"{which} of shape .* has no memory behind it"):
            library.gemm(**tensors)
        library.gemm(*operands(16)[:2], out=operands(16)[2])
    assert len(driver.launches) == 2


@pytest.mark.parametrize("stream", [-1, 1 << 64])
def test_stream_that_is_no_handle_is_refused_on_every_call(library: Library, stream: int) -> None:
    a, b, out = operands(16)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="a handle from 0 to"):
            library.gemm(a, b, out=out, stream=stream)
        library.gemm(a, b, out=out)


def test_rows_that_are_all_one_are_refused(library: Library) -> None:
    with pytest.raises(ArgumentError, match=r"a\.stride\[0\] is 0.*make it contiguous"):
        library.gemm(FakeTensor((16, K), strides=(0, 1)), FakeTensor((N, K)))


def test_output_that_names_elements_twice_is_refused(library: Library) -> None:
    a, b, _ = operands(16)
    with pytest.raises(ArgumentError, match="names elements twice"):
        library.gemm(a, b, out=FakeTensor((16, N), strides=(0, 1)))


def test_output_of_another_shape_is_refused(library: Library) -> None:
    a, b, _ = operands(16)
    with pytest.raises(ArgumentError, match=r"out must have shape \(16, 6144\).*found \(6144, 16\)"):
        library.gemm(a, b, out=FakeTensor((N, 16)))


def test_different_k_is_refused(library: Library) -> None:
    with pytest.raises(ArgumentError, match="same K"):
        library.gemm(FakeTensor((16, K)), FakeTensor((K, N)))


def test_tensor_on_the_cpu_is_refused_with_the_fix(library: Library) -> None:
    a, b, out = operands(16)
    a.device = SimpleNamespace(type="cpu", index=None)
    with pytest.raises(ArgumentError, match=r"a is on .*cpu.*\.cuda\(\)"):
        library.gemm(a, b, out=out)


def test_tensor_on_another_device_is_refused_with_the_fix(library: Library) -> None:
    a, b, out = operands(16)
    library.gemm(a, b, out=out)
    with pytest.raises(ArgumentError, match=r"b is on device 1, this library serves device 0.*device=1"):
        library.gemm(a, FakeTensor((N, K), device=1), out=out)


class Array:
    """Shows `__cuda_array_interface__` and nothing else."""

    def __init__(self, *shape: int, address: int = 1 << 40) -> None:
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": "<f2",
            "data": (address, False),
            "version": 3,
        }


def test_missing_output_for_no_torch_tensor_is_refused(library: Library) -> None:
    with pytest.raises(ArgumentError, match="out is needed"):
        library.gemm(Array(16, K), Array(N, K))


def test_tensors_that_show_only_a_protocol_are_served(tmp_path: Path, torch: FakeTorch) -> None:
    write_archive(
        tmp_path / "half.aot",
        [gemm_record("half", dtype="f16")],
        [entry(signature(N, K, dtype="f16"), [(None, "half")])],
    )
    driver = RecordingDriver(kernels={cubin("half"): {"kernel_half": (128, 8, 24)}})
    with Library(Archive.open(tmp_path / "half.aot"), driver) as library:
        a, b, out = Array(16, K), Array(N, K, address=2 << 40), Array(16, N, address=3 << 40)
        assert library.gemm(a, b, out=out) is out
    assert len(driver.launches) == 1
