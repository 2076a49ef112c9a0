"""The library on a recording driver: what is launched, with which bytes, and what is refused."""

from __future__ import annotations

import struct
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import runtime
from runtime import ArchiveError, ArgumentError, DeviceError, KernelMiss, Library, RecordError
from runtime.container.archive import Archive
from runtime.gemm.signature import Signature

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

N, K = 6144, 4096
RECORDS = [
    gemm_record("small", tile_m=16),
    gemm_record("medium", tile_m=64),
    gemm_record("large", tile_m=128),
    gemm_record("batched", batched=True),
    gemm_record("huge", shared_bytes=220_000),
    gemm_record("lean", shared_bytes=60_000),
    gemm_record("bounded", max_m=999),
]
ENTRIES = [
    entry(signature(N, K), [(16, "small"), (128, "medium"), (None, "large")]),
    entry(signature(N, K, batch=3), [(None, "batched")]),
    entry(signature(512, 512), [(None, "huge")], candidates=[[16, ["huge", "lean"]]]),
    entry(signature(1024, 512), [(None, "bounded")]),
]


@pytest.fixture(scope="session")
def archive_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "model.aot"
    write_archive(path, RECORDS, ENTRIES)
    return path


@pytest.fixture
def driver(torch: FakeTorch) -> RecordingDriver:
    return RecordingDriver(kernels={cubin(r["name"]): {f"kernel_{r['name']}": (128, 8, 24)} for r in RECORDS})


@pytest.fixture
def library(archive_path: Path, driver: RecordingDriver) -> Library:
    return Library(Archive.open(archive_path), driver)


def operands(m: int, n: int = N, k: int = K) -> tuple[FakeTensor, FakeTensor, FakeTensor]:
    return FakeTensor((m, k)), FakeTensor((n, k)), FakeTensor((m, n))


# --- opening ---


def test_opening_touches_no_device(archive_path: Path) -> None:
    with runtime.load(archive_path) as library:
        assert set(library.functions) == {r["name"] for r in RECORDS}
    assert "cuda.bindings.driver" not in sys.modules or library._driver._cuda is None


def test_repr_says_what_a_library_is_without_a_driver(archive_path: Path) -> None:
    library = runtime.load(archive_path)
    of = f"<Library of {archive_path}: 7 functions for sm_90a, "
    assert repr(library) == f"{of}no device yet>"
    library.close()
    assert repr(library) == f"{of}closed>"
    with runtime.load([archive_path, archive_path], device=1) as layered:
        assert repr(layered) == f"<Library of {archive_path}, {archive_path}: 7 functions for sm_90a, cuda:1>"
        assert layered._driver._cuda is None


def test_repr_of_a_library_in_use_counts_its_signatures(library: Library, archive_path: Path) -> None:
    library.gemm(*operands(5)[:2])
    assert repr(library) == f"<Library of {archive_path}: 7 functions for sm_90a, 4 signatures, cuda:0>"


@pytest.mark.parametrize("path", [None, 5, []])
def test_opening_refuses_what_is_no_path(path: Any) -> None:
    with pytest.raises(ArgumentError, match=r"path (must|was)|no path"):
        runtime.load(path)


def test_opening_refuses_an_unknown_on_miss(archive_path: Path) -> None:
    with pytest.raises(ArgumentError, match="on_miss must be one of"):
        runtime.load(archive_path, on_miss="jit")


def test_unknown_function_is_named(library: Library) -> None:
    with pytest.raises(ArchiveError, match="no function 'nothing'"):
        library.functions["nothing"]


def test_closed_library_refuses_calls_it_served_before(library: Library, driver: RecordingDriver) -> None:
    a, b, out = operands(16)
    library.gemm(a, b, out=out)
    library.close()
    assert driver.count("unload") == 1
    with pytest.raises(ArchiveError, match="closed"):
        library.gemm(a, b, out=out)
    library.close()


def test_preload_loads_what_the_table_uses_and_leaves_nothing_to_load(
    library: Library, driver: RecordingDriver
) -> None:
    assert set(library.preload()) == {"small", "medium", "large", "batched", "huge", "bounded"}
    before = driver.count("load")
    a, b, out = operands(16)
    library.gemm(a, b, out=out)
    assert driver.count("load") == before == 6


def test_entries_can_be_asked_for_without_loading_anything(
    library: Library, archive_path: Path, driver: RecordingDriver
) -> None:
    wanted = Signature.from_json(signature(N, K))
    assert library.entry(wanted).functions(17)[0] == "medium"
    with pytest.raises(KernelMiss, match="the nearest of"):
        library.entry(Signature.from_json(signature(N, K + 8)))
    assert driver.count("load") == 0
    assert library.device == "cuda:0"
    assert library.identity == Library(Archive.open(archive_path), driver).identity
    assert library.identity != Library(Archive.open(archive_path), driver, on_miss="torch").identity
    assert not library.closed
    library.close()
    assert library.closed
    with pytest.raises(ArchiveError, match="closed"):
        library.entry(wanted)


def test_entries_that_require_refuses_are_misses(tmp_path: Path, driver: RecordingDriver) -> None:
    write_archive(tmp_path / "model.aot", RECORDS[:1], [entry(signature(N, K), [(None, "small")], state="ranked")])
    wanted = Signature.from_json(signature(N, K))
    assert Library(Archive.open(tmp_path / "model.aot"), driver).entry(wanted).state == "ranked"
    with pytest.raises(KernelMiss, match="loaded with require='tuned'"):
        Library(Archive.open(tmp_path / "model.aot"), driver, require="tuned").entry(wanted)


# --- dispatch and parameter bytes ---


@pytest.mark.parametrize(
    ("m", "name", "tile"),
    [
        (1, "small", 16),
        (16, "small", 16),
        (17, "medium", 64),
        (128, "medium", 64),
        (129, "large", 128),
        (5000, "large", 128),
    ],
)
def test_each_m_reaches_the_kernel_of_its_range(
    library: Library, driver: RecordingDriver, m: int, name: str, tile: int
) -> None:
    a, b, out = operands(m)
    assert library.gemm(a, b, out=out) is out
    (launched,) = driver.launches
    assert launched.symbol == f"kernel_{name}"
    assert launched.grid == (min(-(-m // tile), 66), 2, 1)
    assert launched.block == (384, 1, 1)
    assert launched.attributes == ((4, (1, 2, 1)),)


def test_parameters_hold_pointers_extents_strides_and_the_clusters_of_the_device(
    library: Library, driver: RecordingDriver
) -> None:
    a, b, out = operands(333)
    library.gemm(a, b, out=out, stream=77)
    (launched,) = driver.launches
    assert launched.stream == 77
    descriptor, pointer, rest = launched.parameters
    assert struct.unpack_from("<Q8xI", descriptor) == (a.pointer, 333)
    assert struct.unpack("<Q", pointer) == (b.pointer,)
    assert struct.unpack("<QIIQ", rest) == (out.pointer, 333, 66, K)
    assert ("max_active_clusters", "kernel_large", (1, 2, 1), (384, 1, 1), 98_304) in driver.log


def test_second_call_of_a_shape_only_writes_pointers_and_launches(library: Library, driver: RecordingDriver) -> None:
    library.gemm(*operands(16)[:2], out=FakeTensor((16, N)))
    driver.log.clear()
    a, b, out = operands(16)
    library.gemm(a, b, out=out)
    assert driver.log == []
    assert [struct.unpack_from("<Q", p)[0] for p in driver.launches[1].parameters] == [
        a.pointer,
        b.pointer,
        out.pointer,
    ]


def test_row_strides_reach_the_kernel(library: Library, driver: RecordingDriver) -> None:
    b = FakeTensor((N, K))
    for lda in (K, K + 8, K, 2 * K):
        library.gemm(FakeTensor((16, K), strides=(lda, 1)), b, out=FakeTensor((16, N)))
    assert [struct.unpack_from("<Q", x.parameters[2], 16)[0] for x in driver.launches] == [K, K + 8, K, 2 * K]
    assert driver.count("prepare") == 3


@pytest.mark.parametrize("which", ["a", "out"])
def test_transposed_matrix_is_refused(library: Library, which: str) -> None:
    tensors: dict[str, Any] = dict(zip(("a", "b", "out"), operands(16), strict=True))
    tensors[which]._strides = (1, tensors[which].shape[0])
    with pytest.raises(ArgumentError, match=f"{which} must be row-major, found strides"):
        library.gemm(**tensors)


def test_b_that_is_neither_major_is_refused(library: Library) -> None:
    a, b, out = operands(16)
    b._strides = (2, 2 * N)
    with pytest.raises(ArgumentError, match="b must be row-major, found strides"):
        library.gemm(a, b, out=out)


def test_transposed_b_is_another_signature(library: Library) -> None:
    a, b, out = operands(16)
    b._strides = (1, N)
    with pytest.raises(KernelMiss, match=r"no kernel for bf16_.*_n6144_k4096_n-major(.|\n)*major of B is k, wanted n"):
        library.gemm(a, b, out=out)


def test_leading_dimensions_of_a_become_rows(library: Library, driver: RecordingDriver) -> None:
    out = library.gemm(FakeTensor((4, 8, K)), FakeTensor((N, K)))
    assert out.shape == (4, 8, N)
    assert struct.unpack_from("<I", driver.launches[0].parameters[2], 8) == (32,)


def test_leading_dimensions_that_are_no_rows_are_refused(library: Library) -> None:
    a = FakeTensor((4, 8, K), strides=(K, 4 * K, 1))
    with pytest.raises(ArgumentError, match="make it contiguous"):
        library.gemm(a, FakeTensor((N, K)))


def test_vector_is_one_row(library: Library, driver: RecordingDriver) -> None:
    assert library.gemm(FakeTensor((K,)), FakeTensor((N, K))).shape == (N,)
    assert driver.launches[0].symbol == "kernel_small"


def test_batch_reaches_the_batched_kernel(library: Library, driver: RecordingDriver) -> None:
    out = library.gemm(FakeTensor((3, 20, K)), FakeTensor((3, N, K)))
    assert out.shape == (3, 20, N)
    assert driver.launches[0].symbol == "kernel_batched"


def test_batch_of_one_is_no_batch(library: Library, driver: RecordingDriver) -> None:
    assert library.gemm(FakeTensor((1, 20, K)), FakeTensor((1, N, K))).shape == (1, 20, N)
    assert driver.launches[0].symbol == "kernel_medium"


@pytest.mark.parametrize("shape", [(0, K), (2, 0, K)])
def test_no_rows_give_an_empty_result_and_no_launch(
    library: Library, driver: RecordingDriver, shape: tuple[int, ...]
) -> None:
    out = library.gemm(FakeTensor(shape, pointer=0), FakeTensor((N, K)))
    assert out.shape == (*shape[:-1], N)
    assert driver.launches == []


def test_result_is_allocated_once_a_call(library: Library, driver: RecordingDriver) -> None:
    a, b, _ = operands(16)
    results = [library.gemm(a, b) for _ in range(3)]
    assert [struct.unpack_from("<Q", x.parameters[2])[0] for x in driver.launches] == [r.pointer for r in results]
    assert len({r.pointer for r in results}) == 3
    assert driver.count("prepare") == 1


# --- streams and contexts ---


def test_stream_is_torchs_current_one_by_default(library: Library, driver: RecordingDriver, torch: FakeTorch) -> None:
    a, b, out = operands(16)
    for stream in (0, 5, 9):
        torch.stream = stream
        library.gemm(a, b, out=out)
    assert [x.stream for x in driver.launches] == [0, 5, 9]


@pytest.mark.parametrize("stream", [7, SimpleNamespace(cuda_stream=7), SimpleNamespace(__cuda_stream__=lambda: (0, 7))])
def test_stream_may_be_a_handle_or_an_object(library: Library, driver: RecordingDriver, stream: Any) -> None:
    a, b, out = operands(16)
    library.gemm(a, b, out=out, stream=stream)
    library.gemm(a, b, out=out, stream=stream)
    assert [x.stream for x in driver.launches] == [7, 7]


def test_result_for_an_explicit_stream_comes_from_its_pool(library: Library, torch: FakeTorch) -> None:
    a, b, _ = operands(16)
    for _ in range(2):
        library.gemm(a, b, stream=7)
    assert torch.entered == [("external", 7)] * 2


def test_default_stream_of_another_current_device_is_not_used(
    library: Library, driver: RecordingDriver, torch: FakeTorch
) -> None:
    driver.devices = 2
    a, b, out = operands(16)
    library.gemm(a, b, out=out)
    torch.device = 1
    driver.log.clear()
    library.gemm(a, b, out=out)
    assert driver.log[-2:] == [("push",), ("pop",)]
    torch.device = 0
    driver.log.clear()
    library.gemm(a, b, out=out)
    assert driver.log == []
    assert len(driver.launches) == 3


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


def test_miss_says_why_no_kernel_fits_this_gpu(library: Library, driver: RecordingDriver) -> None:
    driver.shared_bytes = 48 << 10
    with pytest.raises(KernelMiss) as miss:
        library.gemm(*operands(16, 512, 512)[:2])
    assert "huge: needs 221024 bytes of shared memory a block, this GPU has 49152" in str(miss.value)
    assert "lean: needs 61024" in str(miss.value)


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
    library = Library(Archive.open(archive_path), driver, on_miss="torch")
    for _ in range(3):
        library.gemm(*operands(16, 8, 8)[:2])
    assert torch.matmuls == 3
    assert library.misses == {"bf16_bf16_bf16_f32_none_n8_k8": 3}
    assert len(caplog.records) == 1


def test_fallback_does_not_take_what_torch_cannot_multiply(archive_path: Path, driver: RecordingDriver) -> None:
    library = Library(Archive.open(archive_path), driver, on_miss="torch")
    with pytest.raises(KernelMiss):
        library.gemm(FakeTensor((16, 8), "float8_e4m3fn"), FakeTensor((8, 8), "float8_e4m3fn"))


@pytest.fixture
def falling_back(archive_path: Path, driver: RecordingDriver) -> Library:
    return Library(Archive.open(archive_path), driver, on_miss="torch")


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


@pytest.fixture
def ranked(tmp_path: Path, torch: FakeTorch) -> tuple[Path, RecordingDriver]:
    entries = [
        entry(signature(N, K), [(None, "small")]),
        entry(signature(512, 512), [(None, "medium")], state="ranked"),
        entry(signature(1024, 512), [(None, "medium")], state="ranked"),
    ]
    kernels = write_archive(tmp_path / "ranked.aot", [gemm_record("small"), gemm_record("medium")], entries)
    return tmp_path / "ranked.aot", RecordingDriver(kernels=kernels)


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
    library = Library(Archive.open(ranked[0]), ranked[1], require="tuned")
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


def test_plans_are_bounded(library: Library, driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.serve.function.MAX_PLANS", 8)
    b = FakeTensor((N, K))
    for m in (*range(1, 30), 1):
        library.gemm(FakeTensor((m, K)), b)
    assert len(library._now_plans) == 8
    assert len(driver.launches) == 30
    assert {plan.shape[0] for plan in library._now_plans.values()} <= {1, *range(22, 30)}, "the oldest go"


# --- threads ---


def test_threads_on_one_shape_never_mix_pointers(library: Library, driver: RecordingDriver) -> None:
    threads, calls = 8, 300
    mine = [operands(16) for _ in range(threads)]
    library.gemm(*mine[0][:2], out=mine[0][2])
    driver.launches.clear()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        workers = [
            threading.Thread(target=lambda t=t: [library.gemm(t[0], t[1], out=t[2]) for _ in range(calls)])
            for t in mine
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    seen = Counter(tuple(struct.unpack_from("<Q", p)[0] for p in x.parameters) for x in driver.launches)
    assert seen == {tuple(t.pointer for t in ts): calls for ts in mine}
    assert driver.count("prepare") <= threads


def test_threads_on_a_new_shape_load_its_kernel_once(library: Library, driver: RecordingDriver) -> None:
    a, b, _ = operands(16)
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        library.gemm(a, b, out=FakeTensor((16, N)))

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert driver.count("load") == 1
    assert len(driver.launches) == 8
