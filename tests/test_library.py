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
from runtime import ArchiveError, ArgumentError, KernelMiss, Library
from runtime.container.archive import Archive
from runtime.gemm.signature import Signature
from runtime.serve.options import Options

from .recording_driver import (
    FakeTensor,
    FakeTorch,
    RecordingDriver,
    entry,
    operands_record,
    signature,
    write_archive,
)
from .served_gemm import RECORDS, K, N, operands
from .served_gemm import archive_path as archive_path
from .served_gemm import driver as driver
from .served_gemm import library as library
from .served_gemm import ranked as ranked

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
    assert library.identity != Library(Archive.open(archive_path), driver, Options(on_miss="torch")).identity
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
        Library(Archive.open(tmp_path / "model.aot"), driver, Options(require="tuned")).entry(wanted)


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


@pytest.mark.parametrize("order", [("int8", "int4"), ("int4", "int8")])
def test_two_elements_a_unit_are_no_byte_though_dlpack_says_so(
    tmp_path: Path, torch: FakeTorch, order: tuple[str, ...]
) -> None:
    n, k = 512, 1024  # units; int4 has two elements in each
    wanted = {
        name: signature(
            n, k * (2 if name.endswith("4") else 1), dtype=name.replace("nt", "").replace("ui", "u"), d="f32"
        )
        for name in order
    }
    records = [operands_record(name, of) for name, of in wanted.items()]
    kernels = write_archive(tmp_path / "both.aot", records, [entry(of, [(None, name)]) for name, of in wanted.items()])
    driver = RecordingDriver(kernels=kernels)
    library = Library(Archive.open(tmp_path / "both.aot"), driver)
    for name in (*order, *order, *order):
        library.gemm(FakeTensor((16, k), name), FakeTensor((n, k), name), out=FakeTensor((16, n), "float32"))
    assert [name in launch.symbol for launch, name in zip(driver.launches, order * 3, strict=True)] == [True] * 6
