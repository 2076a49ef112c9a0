"""Calls by the tensors that hold their operands: launched again as they were launched first, at the same offsets."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from runtime import Library
from runtime.container.archive import Archive
from runtime.errors import KernelMiss
from runtime.serve import native_plans

from .recording_driver import FakeTensor, FakeTorch, RecordingDriver, entry, operands_record, signature, write_archive
from .rmsnorm.archives import write_added

N, K = 4096, 512
GEMM, NORM = ("gemm", "row_column"), ("rmsnorm", 1e-5)
Held = tuple[FakeTensor, ...]


@pytest.fixture
def library(tmp_path: Path, torch: FakeTorch) -> Library:
    """A library with a norm of a sum, and a GEMM of scaled rows."""
    of = signature(N, K, dtype="e4m3", d="bf16", scaling="row_column")
    driver = write_added(tmp_path / "norms.aot")
    record = operands_record("scaled", of)
    kernels = write_archive(tmp_path / "gemms.aot", [record], [entry(of, [(None, "scaled")])])
    archives = [Archive.open(tmp_path / f"{name}.aot") for name in ("norms", "gemms")]
    return Library(archives, RecordingDriver(kernels=driver.kernels | kernels))


def norm_of(m: int = 9) -> Held:
    """x, residual, weight, and the norm and the sum as one."""
    return FakeTensor((m, N)), FakeTensor((m, N)), FakeTensor((N,)), FakeTensor((2, m, N))


def call_norm(library: Library, held: Held, words: tuple[Any, ...] = NORM) -> None:
    x, residual, weight, both = held
    m, n = x.shape
    out = FakeTensor((m, n), pointer=both.pointer), FakeTensor((m, n), pointer=both.pointer + 2 * m * n)
    more = {"residual": residual, "out": out, "eps": words[1]}
    library.call_packed(words, held, (0, 2, 1, 3, 3), "rmsnorm", x, weight, **more)


def gemm_of(m: int = 9) -> Held:
    """Packed rows, b, its scales, and D."""
    return FakeTensor((m, K)), FakeTensor((N, K), "float8_e4m3fn"), FakeTensor((N,), "float32"), FakeTensor((m, N))


def call_gemm(library: Library, held: Held) -> None:
    rows, b, scale_b, out = held
    m, k = rows.shape
    a = FakeTensor((m, k), "float8_e4m3fn", pointer=rows.pointer)
    scale_a = FakeTensor((m,), "float32", pointer=rows.pointer + m * k)
    places = 0, 1, 3, 0, 2
    library.call_packed(GEMM, held, places, "gemm", a, b, out=out, scale_a=scale_a, scale_b=scale_b)


def pointers(library: Library) -> list[int]:
    """What the last launch was given."""
    driver: Any = library._driver
    return [struct.unpack_from("<Q", p)[0] for p in driver.launches[-1].parameters[:5]]


def launches(library: Library) -> int:
    driver: Any = library._driver
    return len(driver.launches)


@pytest.fixture
def natively(library: Library) -> None:
    """Skips without native code, which alone launches again."""
    call_norm(library, norm_of())
    if not library._now.packed.held():
        pytest.skip("native code alone launches such calls again")


@pytest.mark.usefixtures("natively")
def test_a_norm_and_a_sum_are_written_to_one_tensor(library: Library) -> None:
    before = library.stats().launches
    for _ in range(2):
        x, residual, weight, both = held = norm_of()
        assert library.launch_packed(NORM, *held)
        total = both.pointer + 2 * 9 * N
        assert pointers(library) == [x.pointer, residual.pointer, weight.pointer, both.pointer, total]
    assert library.stats().launches == before + 2


@pytest.mark.usefixtures("natively")
@pytest.mark.parametrize("m", [1, 9, 777])
def test_packed_rows_hold_elements_and_scales(library: Library, m: int) -> None:
    call_gemm(library, gemm_of(m))
    for _ in range(2):
        rows, b, scale_b, out = held = gemm_of(m)
        assert library.launch_packed(GEMM, *held)
        assert pointers(library) == [rows.pointer, b.pointer, out.pointer, rows.pointer + m * K, scale_b.pointer]


@pytest.mark.usefixtures("natively")
def test_a_launch_is_on_torchs_current_stream(library: Library, torch: FakeTorch) -> None:
    driver: Any = library._driver
    for stream in (7, 9):
        torch.stream = stream
        assert library.launch_packed(NORM, *norm_of())
        assert driver.launches[-1].stream == stream


@pytest.mark.usefixtures("natively")
def test_a_shape_takes_one_place_of_the_table_however_often_it_is_called(library: Library) -> None:
    for _ in range(3):
        call_norm(library, norm_of())
    assert library._now.packed.held() == 1


def test_nothing_is_launched_again_that_was_not_called(library: Library) -> None:
    held = norm_of()
    assert not library.launch_packed(NORM, *held)
    call_norm(library, held)
    others = norm_of(10), (*norm_of()[:3], FakeTensor((2, 9, N), "float16")), (FakeTensor((9, N), strides=(N + 8, 1)),)
    before = launches(library)
    assert not any(library.launch_packed(NORM, *(*other, *norm_of()[len(other) :])) for other in others)
    assert not library.launch_packed(("rmsnorm", 1e-6), *norm_of())
    assert launches(library) == before


@pytest.mark.usefixtures("natively")
def test_what_does_not_fit_a_plan_is_left_to_a_first_call(library: Library) -> None:
    x, residual, weight, both = norm_of()
    before = launches(library)
    askew = FakeTensor((9, N), pointer=x.pointer + 2)
    assert not library.launch_packed(NORM, askew, residual, weight, both)
    over = FakeTensor((2, 9, N), pointer=residual.pointer - 2 * 9 * N - 2 * N)  # whose second half is over it in part
    assert not library.launch_packed(NORM, x, residual, weight, over)
    assert launches(library) == before


@pytest.mark.usefixtures("natively")
def test_a_tensor_before_the_one_that_should_hold_it_is_not_launched_again(library: Library) -> None:
    held, words = norm_of(), ("rmsnorm", 1e-3)
    x, residual, weight, both = held
    out = FakeTensor((9, N), pointer=both.pointer - 2 * 9 * N), FakeTensor((9, N), pointer=both.pointer)
    more = {"residual": residual, "out": out, "eps": words[1]}
    library.call_packed(words, held, (0, 2, 1, 3, 3), "rmsnorm", x, weight, **more)
    assert not library.launch_packed(words, *held)


@pytest.mark.usefixtures("natively")
def test_a_tensor_that_lost_its_memory_is_not_launched_again_whatever_lies_behind_its_beginning(
    library: Library,
) -> None:
    def rows_behind(m: int, pointer: int | None = None) -> Held:
        return FakeTensor((2, m, N), pointer=pointer), FakeTensor((m, N)), FakeTensor((N,)), FakeTensor((2, m, N))

    both, residual, weight, out = held = rows_behind(9)
    x = FakeTensor((9, N), pointer=both.pointer + 2 * 9 * N)
    results = FakeTensor((9, N), pointer=out.pointer), FakeTensor((9, N), pointer=out.pointer + 2 * 9 * N)
    more = {"residual": residual, "out": results, "eps": 1e-3}
    library.call_packed(("behind",), held, (0, 2, 1, 3, 3), "rmsnorm", x, weight, **more)
    assert library.launch_packed(("behind",), *rows_behind(9))
    assert not library.launch_packed(("behind",), *rows_behind(9, 0))


@pytest.mark.usefixtures("natively")
def test_a_reload_and_a_full_table_forget_them(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_added(tmp_path / "others.aot")
    library.reload([tmp_path / "norms.aot", tmp_path / "gemms.aot", tmp_path / "others.aot"])
    assert not library.launch_packed(NORM, *norm_of())
    call_norm(library, norm_of())
    assert library.launch_packed(NORM, *norm_of())
    monkeypatch.setattr(native_plans, "MAX_PLANS", 2)
    for m in (3, 4, 5):
        call_norm(library, norm_of(m))
    assert not library.launch_packed(NORM, *norm_of())
    assert library.launch_packed(NORM, *norm_of(5))
    library.close()
    assert not library.launch_packed(NORM, *norm_of(5))


def test_a_call_that_the_library_refuses_is_refused(library: Library) -> None:
    held = FakeTensor((9, 8)), FakeTensor((9, 8)), FakeTensor((8,)), FakeTensor((2, 9, 8))
    with pytest.raises(KernelMiss, match="no kernel for"):
        call_norm(library, held)
    assert not library.launch_packed(NORM, *held)
