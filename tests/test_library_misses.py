"""Calls that an archive does not serve, entries that were never tuned, and what does not fit the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime import ArgumentError, DeviceError, KernelMiss, Library, RecordError
from runtime.container.archive import Archive
from runtime.serve.options import Options

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

# --- misses ---


def test_miss_names_the_nearest_entries_and_why_not(library: Library, driver: RecordingDriver) -> None:
    with pytest.raises(KernelMiss) as miss:
        library.gemm(FakeTensor((16, K)), FakeTensor((N - 8, K)))
    lines = str(miss.value).splitlines()
    assert lines[0] == "no kernel for bf16_bf16_bf16_f32_none_n6136_k4096 on compute capability 9.0"
    assert lines[2] == "  bf16_bf16_bf16_f32_none_n6144_k4096 for sm_90a: N is 6144, wanted 6136"
    assert "build the archive again" in lines[-1]
    assert driver.launches == []


def test_other_element_types_are_a_miss(library: Library) -> None:
    with pytest.raises(KernelMiss, match="A is bf16, wanted f16, B is bf16, wanted f16"):
        library.gemm(FakeTensor((16, K), "float16"), FakeTensor((N, K), "float16"))


def test_f8_inputs_give_bf16(library: Library) -> None:
    with pytest.raises(KernelMiss, match="no kernel for e4m3_e4m3_bf16_f32"):
        library.gemm(FakeTensor((16, K), "float8_e4m3fn"), FakeTensor((N, K), "float8_e4m3fn"))


def test_kernel_too_large_for_this_gpu_gives_way_to_the_next(library: Library, driver: RecordingDriver) -> None:
    driver.shared_bytes = 99 << 10
    library.gemm(*operands(16, 512, 512)[:2])
    assert driver.launches[0].symbol == "kernel_lean"


def test_a_kernel_may_have_all_that_cuda_leaves_of_shared_memory(library: Library, driver: RecordingDriver) -> None:
    """Cubins for Hopper count a KiB of CUDA's as static, as that of `huge` does."""
    driver.shared_bytes = 220_000
    library.gemm(*operands(16, 512, 512)[:2])
    assert driver.launches[0].symbol == "kernel_huge"


def test_miss_says_why_no_kernel_fits_this_gpu(library: Library, driver: RecordingDriver) -> None:
    driver.shared_bytes = 48 << 10
    with pytest.raises(KernelMiss) as miss:
        library.gemm(*operands(16, 512, 512)[:2])
    assert "huge: needs 220000 bytes of shared memory a block, this GPU has 49152" in str(miss.value)
    assert "lean: needs 60000" in str(miss.value)


def test_extents_that_the_program_cannot_serve_are_a_miss(library: Library, driver: RecordingDriver) -> None:
    library.gemm(*operands(999, 1024, 512)[:2])
    with pytest.raises(KernelMiss, match="bounded: division by zero"):
        library.gemm(*operands(1000, 1024, 512)[:2])


def test_cluster_that_cannot_be_resident_is_a_miss(library: Library, driver: RecordingDriver) -> None:
    driver.active_clusters = 0
    with pytest.raises(KernelMiss, match=r"a cluster of \(1, 2, 1\) blocks"):
        library.gemm(*operands(16)[:2])


def test_fallback_counts_misses_and_logs_each_signature_once(
    archive_path: Path, driver: RecordingDriver, torch: FakeTorch, caplog: pytest.LogCaptureFixture
) -> None:
    library = Library(Archive.open(archive_path), driver, Options(on_miss="torch"))
    for _ in range(3):
        library.gemm(*operands(16, 8, 8)[:2])
    assert torch.matmuls == 3
    assert library.misses == {"bf16_bf16_bf16_f32_none_n8_k8": 3}
    assert len(caplog.records) == 1


def test_fallback_does_not_take_what_torch_cannot_multiply(archive_path: Path, driver: RecordingDriver) -> None:
    library = Library(Archive.open(archive_path), driver, Options(on_miss="torch"))
    with pytest.raises(KernelMiss):
        library.gemm(FakeTensor((16, 8), "float8_e4m3fn"), FakeTensor((8, 8), "float8_e4m3fn"))


@pytest.fixture
def falling_back(archive_path: Path, driver: RecordingDriver) -> Library:
    return Library(Archive.open(archive_path), driver, Options(on_miss="torch"))


def test_fallback_takes_layouts_that_kernels_do_not(
    falling_back: Library, driver: RecordingDriver, torch: FakeTorch
) -> None:
    key = "bf16_bf16_bf16_f32_none_n6144_k4096"
    a, b, out = operands(16)
    falling_back.gemm(a, b, out=out)
    columns = FakeTensor((16, K), strides=(1, 16))
    for x, y, z, reason in (
        (FakeTensor((16, K), pointer=a.pointer + 8), b, out, "address of a"),
        (FakeTensor((16, K), strides=(K + 1, 1)), b, out, "strides of a"),
        (FakeTensor((16, K), strides=(0, 1)), b, out, "strides of a"),
        (columns, b, out, "strides of a"),
        (a, FakeTensor((N, K), strides=(2, 2 * N)), out, "strides of b"),
        (a, b, FakeTensor((16, N), strides=(1, 16)), "strides of out"),
        (FakeTensor((2, 8, K), strides=(K, 4 * K, 1)), b, FakeTensor((2, 8, N)), "strides of a"),
    ):
        before = falling_back.misses.get(f"{key}, {reason}", 0)
        assert falling_back.gemm(x, y, out=z) is z
        assert falling_back.misses[f"{key}, {reason}"] == before + 1
    assert torch.matmuls == sum(falling_back.misses.values()) == 7
    assert len(driver.launches) == 1


def test_fallback_hides_no_wrong_call(falling_back: Library, torch: FakeTorch) -> None:
    a, b, out = operands(16)
    columns = FakeTensor((16, K), strides=(1, 16))
    for arguments, message in (
        ((a, FakeTensor((N, K + 8)), out), "same K"),
        ((columns, b, FakeTensor((8, N))), "out must have shape"),
        ((columns, b, FakeTensor((16, N), pointer=columns.pointer)), "out shares memory with a"),
        ((columns, b, FakeTensor((16, N), strides=(0, 1))), "names elements twice"),
        ((columns, FakeTensor((N, K), device=1), out), "b is on device 1"),
        ((columns, FakeTensor((N, K), pointer=0), out), "b of shape .* has no memory"),
    ):
        with pytest.raises(ArgumentError, match=message):
            falling_back.gemm(arguments[0], arguments[1], out=arguments[2])
    assert torch.matmuls == 0


# --- entries that were never tuned ---


def test_first_ranked_entry_is_logged_once(
    ranked: tuple[Path, RecordingDriver], caplog: pytest.LogCaptureFixture
) -> None:
    library = Library(Archive.open(ranked[0]), ranked[1])
    library.gemm(*operands(16)[:2])
    assert caplog.records == []
    for n in (512, 1024, 512):
        library.gemm(*operands(16, n, 512)[:2])
    (said,) = caplog.messages
    assert "bf16_bf16_bf16_f32_none_n512_k512 on sm_90a is ranked" in said
    assert "never run or checked on a GPU; run: aot tune" in said


def test_ranked_entries_are_a_miss_where_tuned_ones_are_required(
    ranked: tuple[Path, RecordingDriver], caplog: pytest.LogCaptureFixture
) -> None:
    library = Library(Archive.open(ranked[0]), ranked[1], Options(require="tuned"))
    library.gemm(*operands(16)[:2])
    with pytest.raises(KernelMiss, match=r"is ranked: .*run: aot tune .*require='tuned'"):
        library.gemm(*operands(16, 512, 512)[:2])
    assert library.preload() == ("small",)
    assert caplog.records == []


def test_requiring_anything_else_is_refused(archive_path: Path) -> None:
    with pytest.raises(ArgumentError, match="require must be one of"):
        runtime.load(archive_path, require="fast")


# --- devices and damage ---


def test_wrong_gpu_is_told_what_the_archive_has(library: Library, driver: RecordingDriver) -> None:
    driver.capability = (10, 0)
    with pytest.raises(DeviceError, match=r"has kernels for sm_90a; this GPU has compute capability 10\.0"):
        library.gemm(*operands(16)[:2])
    with pytest.raises(DeviceError, match="small is for sm_90a"):
        library.functions["small"].load()


def test_cubin_with_more_kernels_than_its_record_is_refused(library: Library, driver: RecordingDriver) -> None:
    driver.kernels[cubin("small")]["another"] = (8,)
    with pytest.raises(DeviceError, match="holds 2 kernels, its record describes 1"):
        library.gemm(*operands(16)[:2])
    assert driver.count("unload") == 1


def test_cubin_without_the_symbol_is_refused(library: Library, driver: RecordingDriver) -> None:
    driver.kernels[cubin("small")] = {"another": (128, 8, 24)}
    with pytest.raises(DeviceError, match="CUDA_ERROR_NOT_FOUND"):
        library.gemm(*operands(16)[:2])


@pytest.mark.parametrize("sizes", [(128, 8), (128, 8, 24, 8), (128, 8, 32)])
def test_cubin_with_other_parameters_is_refused(
    library: Library, driver: RecordingDriver, sizes: tuple[int, ...]
) -> None:
    driver.kernels[cubin("small")]["kernel_small"] = sizes
    with pytest.raises(DeviceError, match="takes parameters of"):
        library.gemm(*operands(16)[:2])


@pytest.mark.parametrize("call", ["cuLibraryLoadData", "cuLaunchKernelEx"])
def test_driver_errors_are_reported(library: Library, driver: RecordingDriver, call: str) -> None:
    a, b, out = operands(16)
    driver.failing = call
    with pytest.raises(DeviceError, match=f"{call} failed"):
        library.gemm(a, b, out=out)
    driver.failing = ""
    library.gemm(a, b, out=out)
    driver.failing = "cuLaunchKernelEx"
    with pytest.raises(DeviceError, match="cuLaunchKernelEx failed"):
        library.gemm(a, b, out=out)
    driver.failing = ""
    library.gemm(a, b, out=out)
    assert len(driver.launches) == 2


def test_table_that_names_no_gemm_is_refused(tmp_path: Path, torch: FakeTorch) -> None:
    record = gemm_record("odd")
    record["arguments"].append({"kind": "scalar", "name": "alpha", "dtype": "f32"})
    kernels = write_archive(tmp_path / "x.aot", [record], [entry(signature(), [(None, "odd")])])
    library = Library(Archive.open(tmp_path / "x.aot"), RecordingDriver(kernels=kernels))
    with pytest.raises(RecordError, match=r"has odd for bf16_.*_n6144_k4096, but it does not take"):
        library.gemm(*operands(16)[:2])


def test_function_that_multiplies_by_b_untransposed_is_refused(tmp_path: Path, torch: FakeTorch) -> None:
    record = gemm_record("plain")
    record["arguments"][1]["shape"] = ["k", "n"]
    kernels = write_archive(tmp_path / "x.aot", [record], [entry(signature(K, K), [(None, "plain")])])
    library = Library(Archive.open(tmp_path / "x.aot"), RecordingDriver(kernels=kernels))
    for call in (lambda: library.gemm(*operands(16, K, K)[:2]), library.preload):
        with pytest.raises(RecordError, match=r"has plain for .*, but it takes B of shape \(k, n\), not \(N, K\)"):
            call()


@pytest.mark.parametrize(
    ("place", "argument"),
    [(-1, {"kind": "none", "name": "stream"}), (0, {"alignment": 16, "dtype": "f16"}), (1, {"shape": ["k", "n"]})],
)
def test_function_beside_one_that_fits_its_entry_is_held_against_it_too(
    tmp_path: Path, place: int, argument: dict[str, Any]
) -> None:
    good, bad = gemm_record("good"), gemm_record("bad")
    bad["arguments"][place] |= argument
    entries = [entry(signature(K, K), [(64, "good"), (None, "bad")])]
    kernels = write_archive(tmp_path / "x.aot", [good, bad], entries)
    library = Library(Archive.open(tmp_path / "x.aot"), RecordingDriver(kernels=kernels))
    with pytest.raises(RecordError, match=r"has bad for .*, but it "):
        library.preload()
    assert library._driver.count("load") == 0  # type: ignore[attr-defined]


def test_plans_that_native_code_forgot_are_put_back_as_they_are_called(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.serve.native_plans.MAX_PLANS", 4)
    b, plans = FakeTensor((N, K)), library._now.plans
    for m in (1, 2, 3, 4, 5, 1, 2):
        library.gemm(FakeTensor((m, K)), b, out=FakeTensor((m, N)))
    if plans.native.held():
        assert plans.native.held() == len(plans.by_call) == 3


def test_plans_are_bounded(library: Library, driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.serve.plan.MAX_PLANS", 8)
    b = FakeTensor((N, K))
    for m in (*range(1, 30), 1):
        library.gemm(FakeTensor((m, K)), b)
    assert len(library._now.plans.by_call) == 8
    assert len(driver.launches) == 30
    assert {plan.shape[0] for plan in library._now.plans.by_call.values()} <= {1, *range(22, 30)}, "the oldest go"
