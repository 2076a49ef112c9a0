"""`on_slower="torch"`: torch's own call serves where it was measured to be faster, for next to nothing more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import runtime
from runtime import ArgumentError, KernelMiss, Library
from runtime.container.archive import Archive
from runtime.container.errors import ArchiveClosed
from runtime.gemm.fallback import torch_runs
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

N, K = 256, 512
PLAIN = signature(N, K)
BIAS = signature(N, K, epilogue="bias")
BATCHED = signature(N, K, batch=3)
FUSED = signature(N, K, epilogue="silu")
N_MAJOR = signature(N, K, b_major="n")
TENSOR, ROWS, BLOCKS = (signature(N, K, dtype="e4m3", d="bf16", scaling=s) for s in ("tensor", "row_column", "block"))
SCALED_BIAS = signature(N, K, dtype="e4m3", d="bf16", scaling="row_column", epilogue="bias")
EVERY = [PLAIN, BIAS, BATCHED, FUSED, N_MAJOR, TENSOR, ROWS, BLOCKS, SCALED_BIAS]
FASTER = [(3, 8), (100, None)]


@pytest.fixture
def driver(torch: FakeTorch) -> RecordingDriver:
    return RecordingDriver()


def opened(folder: Path, driver: RecordingDriver, state: str = "tuned", **options: Any) -> Library:
    """Each signature has a function, and torch is faster at `FASTER`."""
    records = [operands_record(f"f{i}", of) for i, of in enumerate(EVERY)]
    rows = [entry(of, [(None, f"f{i}")], torch_faster=FASTER, state=state) for i, of in enumerate(EVERY)]
    driver.kernels |= write_archive(folder / "model.aot", records, rows)
    options = {"on_slower": "torch"} | options
    return Library(Archive.open(folder / "model.aot"), driver, Options(**options))


@pytest.fixture
def library(tmp_path: Path, driver: RecordingDriver) -> Library:
    return opened(tmp_path, driver)


def fp8(*shape: int) -> FakeTensor:
    return FakeTensor(shape, "float8_e4m3fn")


def f32(*shape: int, strides: tuple[int, ...] | None = None) -> FakeTensor:
    return FakeTensor(shape, "float32", strides)


def no_slow_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a call took the slow path")

    monkeypatch.setattr(Library, "_first", refuse)


def test_torch_serves_where_it_was_faster_and_the_archive_elsewhere(
    library: Library, driver: RecordingDriver, torch: FakeTorch
) -> None:
    b = FakeTensor((N, K))
    for m in (1, 2, 3, 8, 9, 99, 100, 5000, 3, 9):
        found = library.gemm(FakeTensor((m, K)), b)
        assert (found.shape, found.dtype.name) == ((m, N), "bfloat16")
    assert [a.shape[0] for _, (a, _), _ in torch.products] == [3, 8, 100, 5000, 3]
    assert [x.parameters[-1][0] for x in driver.launches] == [1, 2, 9, 99, 9]
    stats = library.stats()
    assert (stats.given_to_torch, stats.launches, stats.misses, stats.fallbacks) == (5, 5, 0, 0)
    assert json.loads(json.dumps(stats.to_json()))["given_to_torch"] == 5
    assert 'cute_aot_given_to_torch_total{library="x"} 5\n' in library.prometheus("x")


@pytest.mark.parametrize("options", [{"on_slower": "never"}, {"state": "ranked"}])
def test_archive_serves_all_unless_told_otherwise(
    tmp_path: Path, driver: RecordingDriver, torch: FakeTorch, options: dict[str, Any]
) -> None:
    """What was ranked has no times; should it name any, they are as good as those of what was tuned."""
    library = opened(tmp_path, driver, **options)
    library.gemm(FakeTensor((5, K)), FakeTensor((N, K)))
    assert len(torch.products) == (options.get("on_slower") != "never")
    assert len(driver.launches) == (options.get("on_slower") == "never")


def test_repeated_calls_cost_a_look_up(library: Library, torch: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    bias, b = FakeTensor((N,)), FakeTensor((N, K))

    mores: list[dict[str, Any]] = [{}, {"bias": bias}]

    def all_calls() -> None:
        for a, out in ((FakeTensor((5, K)), None), (FakeTensor((5, K)), FakeTensor((5, N)))):
            for more in mores:
                found = library.gemm(a, b, out=out, **more)
                assert out is None or found is out

    all_calls()
    no_slow_path(monkeypatch)
    for _ in range(3):
        all_calls()
    assert [name for name, _, _ in torch.products] == ["mm", "addmm"] * 8
    assert library.stats().given_to_torch == 16


def test_calls_are_those_that_were_measured(library: Library, torch: FakeTorch, driver: RecordingDriver) -> None:
    b, bias = FakeTensor((N, K)), FakeTensor((N,))
    a, out = FakeTensor((4, K)), FakeTensor((4, N))
    library.gemm(a, b, out=out)
    name, (given_a, given_b), more = torch.products[-1]
    assert (name, given_a, given_b.shape, given_b.stride(), more) == ("mm", a, (K, N), (1, K), {"out": out})
    library.gemm(a, b, bias=bias, out=out)
    name, (given_bias, given_a, given_b), more = torch.products[-1]
    assert (name, given_bias, given_a, given_b.pointer, more) == ("addmm", bias, a, b.pointer, {"out": out})
    batches = FakeTensor((3, 4, K)), FakeTensor((3, N, K))
    assert library.gemm(*batches).shape == (3, 4, N)
    assert torch.products[-1][0] == "bmm"
    major = FakeTensor((N, K), strides=(1, N))
    library.gemm(a, major, out=out)
    assert torch.products[-1][1][1].stride() == (N, 1)
    assert not driver.launches


@pytest.mark.parametrize(
    ("scales", "taken", "fast"),
    [
        ((f32(1), f32(1, 1)), ((), ()), True),
        ((f32(4), f32(N)), ((4, 1), (1, N)), False),
        ((f32(4, 1), f32(1, N)), ((4, 1), (1, N)), False),
        ((f32(4, 4, strides=(1, 4)), f32(2, 4)), ((4, 4), (4, 2)), False),
    ],
)
def test_scaled_products_are_asked_for_as_torch_takes_them(
    library: Library, torch: FakeTorch, scales: tuple[FakeTensor, FakeTensor], taken: Any, fast: bool
) -> None:
    a, b = fp8(4, K), fp8(N, K)
    for _ in range(2):
        found = library.gemm(a, b, scale_a=scales[0], scale_b=scales[1])
        assert (found.shape, found.dtype.name) == ((4, N), "bfloat16")
    name, (given_a, given_b, *given_scales), more = torch.products[-1]
    assert (name, given_a, given_b.stride()) == ("_scaled_mm", a, (1, K))
    assert tuple(x.shape for x in given_scales) == taken
    assert [x.pointer for x in given_scales] == [x.pointer for x in scales]
    assert (more["use_fast_accum"], more["out_dtype"], more.get("bias")) == (fast, torch.bfloat16, None)
    assert library.stats().given_to_torch == 2


def test_bias_of_a_scaled_product_goes_along(library: Library, torch: FakeTorch) -> None:
    bias = FakeTensor((N,))
    library.gemm(fp8(4, K), fp8(N, K), scale_a=f32(4), scale_b=f32(N), bias=bias)
    assert torch.products[-1][2]["bias"] is bias


@pytest.mark.parametrize(
    ("m", "of_a", "of_b"),
    [(4, (4, 1), (4, 1)), (5, (1, 5), (4, 1)), (5, (1, 8), (4, 1)), (4, (1, 8), (4, 1)), (4, (1, 4), (8, 1))],
)
def test_factors_of_blocks_that_lie_otherwise_are_for_the_archive(
    library: Library, torch: FakeTorch, driver: RecordingDriver, m: int, of_a: Any, of_b: Any
) -> None:
    library.gemm(fp8(m, K), fp8(N, K), scale_a=f32(m, 4, strides=of_a), scale_b=f32(2, 4, strides=of_b))
    assert (len(torch.products), len(driver.launches)) == (0, 1)


def test_rows_of_more_dimensions_become_a_matrix_and_back(library: Library, torch: FakeTorch) -> None:
    b = FakeTensor((N, K))
    for _ in range(2):
        a, out = FakeTensor((2, 3, K)), FakeTensor((2, 3, N))
        assert library.gemm(a, b).shape == (2, 3, N)
        assert library.gemm(a, b, out=out) is out
        name, (given, _), more = torch.products[-1]
        assert (name, given.shape, given.pointer) == ("mm", (6, K), a.pointer)
        assert (more["out"].shape, more["out"].pointer) == ((6, N), out.pointer)


def test_stream_of_the_call_is_torchs_current_one(library: Library, torch: FakeTorch) -> None:
    a, b, out = FakeTensor((4, K)), FakeTensor((N, K)), FakeTensor((4, N))
    for _ in range(2):
        torch.entered.clear()
        library.gemm(a, b, out=out, stream=0x51)
        assert ("external", 0x51) in torch.entered
        torch.entered.clear()
        assert library.gemm(a, b, stream=0x51).shape == (4, N)
        assert ("external", 0x51) in torch.entered
    torch.entered.clear()
    library.gemm(a, b)
    library.gemm(a, b)
    assert not torch.entered[3:]
    assert len(torch.products) == 6


@pytest.mark.parametrize("what", ["grad", "autocasts"])
def test_no_gradient_is_recorded_and_nothing_is_cast(library: Library, torch: FakeTorch, what: str) -> None:
    setattr(torch, what, True)
    for _ in range(2):
        torch.entered.clear()
        library.gemm(FakeTensor((4, K)), FakeTensor((N, K)))
        assert "no_grad" in torch.entered
        assert ("autocast", "cuda", False) in torch.entered
    setattr(torch, what, False)
    torch.entered.clear()
    library.gemm(FakeTensor((4, K)), FakeTensor((N, K)))
    assert not torch.entered


def test_what_torch_refuses_the_archive_computes_and_torch_is_not_asked_again(
    library: Library,
    torch: FakeTorch,
    driver: RecordingDriver,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.refuses = "mm"
    for m in (4, 5):
        library.gemm(FakeTensor((m, K)), FakeTensor((N, K)))
    said = [message for message in caplog.messages if "does not take this here" in message]
    assert said == [
        "bf16_bf16_bf16_f32_none_n256_k512: torch was faster and does not take this here: mm is not for this GPU"
    ]
    torch.refuses = ""
    no_slow_path(monkeypatch)
    library.gemm(FakeTensor((4, K)), FakeTensor((N, K)))
    assert (len(driver.launches), len(torch.products), library.stats().given_to_torch) == (3, 0, 0)


def test_numbers_of_rows_that_are_torchs_are_not_planned_from_others(
    library: Library, torch: FakeTorch, driver: RecordingDriver
) -> None:
    b = FakeTensor((N, K))
    for m in (20, 21, 8, 22, 7, 200):
        library.gemm(FakeTensor((m, K)), b)
    assert [a.shape[0] for _, (a, _), _ in torch.products] == [8, 7, 200]
    assert len(driver.launches) == 3


def rows_scaled(m: int) -> dict[str, Any]:
    return {"a": fp8(m, K), "b": fp8(N, K), "scale_a": f32(m, 1), "scale_b": f32(1, N), "dtype": "bf16"}


def plain(m: int) -> dict[str, Any]:
    return {"a": FakeTensor((m, K)), "b": FakeTensor((N, K))}


@pytest.mark.parametrize(
    "call",
    [
        plain,
        rows_scaled,
        lambda m: plain(m) | {"bias": FakeTensor((N,))},
        lambda m: plain(m) | {"out": FakeTensor((m, N))},
        lambda m: plain(m) | {"out": FakeTensor((m, N)), "stream": 0x51},
        lambda m: plain(m) | {"dtype": "bf16"},
    ],
)
def test_other_rows_that_are_torchs_cost_little_more_than_known_ones(
    library: Library, torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, call: Any
) -> None:
    """Whether torch or a kernel served the first such call; and those that come again are looked up."""
    for m in (20, 8):
        library.gemm(**call(m))
    no_slow_path(monkeypatch)
    for m in (7, 200, 21, 7, 5000):
        given = call(m)
        found = library.gemm(**given)
        assert found.shape == (m, N)
        assert found is given.get("out", found)
    assert library.stats().given_to_torch == len(torch.products) == 5
    assert [next(x.shape[0] for x in xs if x.shape[-1] == K) for _, xs, _ in torch.products] == [8, 7, 200, 7, 5000]
    monkeypatch.setattr(Library, "_grow", lambda *_: pytest.fail("it was not looked up"))
    library.gemm(**call(5000))


def test_other_rows_that_torch_refuses_are_the_archives(
    library: Library, torch: FakeTorch, driver: RecordingDriver
) -> None:
    library.gemm(**plain(8))
    torch.refuses = "mm"
    assert library.gemm(**plain(7)).shape == (7, N)
    torch.refuses = ""
    library.gemm(**plain(7))
    assert (len(torch.products), len(driver.launches)) == (1, 2)


def test_other_rows_of_tensors_that_share_memory_are_refused(library: Library, torch: FakeTorch) -> None:
    """Where the memory of the first call's rows would not be shared."""
    a, b, rows = FakeTensor((200, K)), FakeTensor((N, K)), 4
    library.gemm(FakeTensor((rows, K)), b, out=FakeTensor((rows, N), pointer=a.pointer + 2 * rows * K))
    beyond = FakeTensor((200, N), pointer=a.pointer + 2 * rows * K)
    with pytest.raises(ArgumentError, match="out shares memory with a"):
        library.gemm(a, b, out=beyond)
    assert len(torch.products) == 1


def test_other_rows_of_factors_of_blocks_are_looked_at_again(
    library: Library, torch: FakeTorch, driver: RecordingDriver
) -> None:
    """As torch takes them only column after column, for a multiple of 4 rows."""
    b, scale_b = fp8(N, K), f32(2, 4)
    for m in (8, 4):
        library.gemm(fp8(m, K), b, scale_a=f32(m, 4, strides=(1, 8)), scale_b=scale_b, dtype="bf16")
    assert [x[0].shape[0] for _, x, _ in torch.products] == [8]
    assert len(driver.launches) == 1


def test_preload_leaves_to_torch_what_is_torchs(library: Library, torch: FakeTorch, driver: RecordingDriver) -> None:
    library.preload(tokens=[5, 20])
    for m in (5, 20):
        library.gemm(FakeTensor((m, K)), FakeTensor((N, K)))
    assert (len(torch.products), len(driver.launches)) == (1, 1)


def test_tensors_that_share_memory_are_refused_at_every_call(library: Library, torch: FakeTorch) -> None:
    a, b, bias = FakeTensor((4, K)), FakeTensor((N, K)), FakeTensor((N,))
    library.gemm(a, b, out=FakeTensor((4, N)))
    library.gemm(a, b, out=FakeTensor((4, N)), bias=bias)
    before = len(torch.products)
    for out, of in ((FakeTensor((4, N), pointer=a.pointer), "a"), (FakeTensor((4, N), pointer=b.pointer + 64), "b")):
        with pytest.raises(ArgumentError, match=f"out shares memory with {of}"):
            library.gemm(a, b, out=out)
    with pytest.raises(ArgumentError, match="out shares memory with bias"):
        library.gemm(a, b, out=FakeTensor((4, N), pointer=bias.pointer), bias=bias)
    library.gemm(a, b)
    lost = FakeTensor((4, K), pointer=0)
    with pytest.raises(ArgumentError, match=r"a .*memory"):
        library.gemm(lost, b)
    assert len(torch.products) == before + 1


class Array:
    """Shows `__cuda_array_interface__` and nothing else."""

    def __init__(self, *shape: int) -> None:
        data = {"data": (FakeTensor(shape).pointer, False), "shape": shape, "typestr": "<f2", "version": 3}
        self.__cuda_array_interface__ = data


def test_tensors_of_other_frameworks_are_for_the_archive(
    tmp_path: Path, torch: FakeTorch, driver: RecordingDriver
) -> None:
    of = signature(N, K, dtype="f16")
    row = entry(of, [(None, "f")], torch_faster=[(1, None)])
    driver.kernels |= write_archive(tmp_path / "half.aot", [operands_record("f", of)], [row])
    library = Library(Archive.open(tmp_path / "half.aot"), driver, Options(on_slower="torch"))
    a, b = FakeTensor((4, K), "float16"), FakeTensor((N, K), "float16")
    library.gemm(a, b, out=Array(4, N))
    assert (len(torch.products), len(driver.launches)) == (0, 1)
    library.gemm(a, b)
    assert (len(torch.products), len(driver.launches)) == (1, 1)


def test_tensors_of_another_device_are_refused(library: Library, torch: FakeTorch) -> None:
    library.gemm(FakeTensor((4, K)), FakeTensor((N, K)))
    with pytest.raises(ArgumentError, match="on device 1"):
        library.gemm(FakeTensor((4, K), device=1), FakeTensor((N, K), device=1))
    assert len(torch.products) == 1


def test_entries_that_are_refused_are_misses(tmp_path: Path, driver: RecordingDriver, torch: FakeTorch) -> None:
    library = opened(tmp_path, driver, state="ranked", require="tuned")
    with pytest.raises(KernelMiss, match="never run"):
        library.gemm(FakeTensor((4, K)), FakeTensor((N, K)))
    assert not torch.products


def test_reload_keeps_the_option_and_forgets_what_was_torchs(
    library: Library, torch: FakeTorch, driver: RecordingDriver, tmp_path: Path
) -> None:
    a, b = FakeTensor((4, K)), FakeTensor((N, K))
    library.gemm(a, b)
    rows = [entry(PLAIN, [(None, "f0")], torch_faster=[(20, 30)])]
    driver.kernels |= write_archive(tmp_path / "new.aot", [operands_record("f0", PLAIN)], rows)
    assert library.reload(tmp_path / "new.aot")
    library.gemm(a, b)
    library.gemm(FakeTensor((20, K)), b)
    assert [a.shape[0] for _, (a, _), _ in torch.products] == [4, 20]
    assert (len(driver.launches), library.stats().given_to_torch) == (1, 2)
    library.close()
    for m in (4, 20):
        with pytest.raises(ArchiveClosed):
            library.gemm(FakeTensor((m, K)), b)


def test_a_reload_in_the_midst_of_a_call_keeps_nothing_that_was_torchs(
    library: Library, torch: FakeTorch, driver: RecordingDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.gemm(**plain(8))
    rows = [entry(PLAIN, [(None, "f0")])]
    driver.kernels |= write_archive(tmp_path / "new.aot", [operands_record("f0", PLAIN)], rows)
    real = Library._grow

    def grow(of: Library, *call: Any) -> Any:
        found = real(of, *call)
        monkeypatch.setattr(Library, "_grow", real)
        assert of.reload(tmp_path / "new.aot")
        return found

    monkeypatch.setattr(Library, "_grow", grow)
    for _ in range(3):
        library.gemm(**plain(7))
    assert (len(torch.products), len(driver.launches)) == (2, 2)


def test_option_is_checked_and_told(tmp_path: Path, driver: RecordingDriver) -> None:
    found = {opened(tmp_path, driver, on_slower=word).identity for word in ("never", "torch")}
    assert len(found) == 2
    with pytest.raises(ArgumentError, match=r"on_slower must be one of \('never', 'torch'\), found 'cublas'"):
        runtime.load(tmp_path / "model.aot", on_slower="cublas")
    with pytest.raises(ArgumentError, match="batch_invariant=True with on_slower='torch'"):
        runtime.load(tmp_path / "model.aot", on_slower="torch", batch_invariant=True)


@pytest.mark.parametrize(
    ("of", "answer"),
    [
        *((of, of is not FUSED) for of in EVERY),
        (signature(dtype="f16", epilogue="bias"), True),
        (signature(d="f32"), False),
        (signature(d="f16"), False),
        (signature(batch=2, epilogue="bias"), False),
        (signature(epilogue="bias+silu"), False),
        (signature(epilogue="residual"), False),
        (signature(epilogue="swiglu"), False),
        (signature(dtype="e4m3", d="bf16"), False),  # torch wants scales
        (signature(dtype="e4m3", d="f16", scaling="tensor"), True),
        (signature(dtype="e4m3", d="f32", scaling="tensor"), True),
        (signature(dtype="e4m3", d="f32", scaling="tensor", epilogue="bias"), False),
        (signature(dtype="e4m3", d="e4m3", scaling="tensor"), False),
        (signature(dtype="e4m3", d="bf16", scaling="tensor", b_major="n"), False),
        (signature(dtype="e4m3", d="bf16", scaling="tensor", batch=2), False),
        (signature(dtype="e4m3", d="bf16", scaling="block", epilogue="bias"), False),
    ],
)
def test_torch_has_one_call_for_what_its_baseline_is_one_call(of: dict[str, Any], answer: bool) -> None:
    assert torch_runs(Signature.from_json(of)) is answer


@pytest.mark.parametrize("epilogue", ["silu", "none"])
def test_what_takes_torch_several_calls_is_the_archives(
    library: Library, torch: FakeTorch, driver: RecordingDriver, epilogue: str
) -> None:
    library.gemm(FakeTensor((4, K)), FakeTensor((N, K)), epilogue=epilogue)
    assert len(torch.products) == (epilogue == "none")
    assert len(driver.launches) == (epilogue == "silu")
