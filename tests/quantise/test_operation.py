"""quantise as an operation, and moe_permute where it quantises: signatures, keys, calls, and what is refused."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from aot.search.legal import unsuited
from aot.search.operation import building
from runtime import ArgumentError, KernelMiss, Library, RecordError
from runtime.container.archive import Archive
from runtime.moe.permute import Signature as Permute
from runtime.program.operation import operation
from runtime.quantise import QUANTISE, Signature

from ..moe.test_operation import i32, tensors_of
from ..recording_driver import FakeTensor, FakeTorch, RecordingDriver, entry, tensors_record, write_archive

BLOCKS, ROWS = Signature("bf16", "e4m3", 768, "block"), Signature("bf16", "e4m3", 768, "row_column", 8)
GATED = Signature("bf16", "e4m3", 768, "block", activation="swiglu")
OTHER = Signature("f16", "e4m3", 64, "row_column", activation="swiglu")
PERMUTE = Permute("bf16", 8, 4, 256, scaling="block")
SIGNATURES: list[Any] = [
    BLOCKS,
    ROWS,
    GATED,
    OTHER,
    PERMUTE,
    Permute("f16", 8, 4, 256, 64, "row_column"),
]


def narrow(*shape: int) -> FakeTensor:
    return FakeTensor(shape, dtype="float8_e4m3fn")


def f32(*shape: int) -> FakeTensor:
    return FakeTensor(shape, dtype="float32")


@pytest.fixture
def driver(tmp_path: Path, torch: FakeTorch) -> RecordingDriver:
    kernels: dict[bytes, Any] = {}
    for name, signatures in (("quantise", [BLOCKS, ROWS, GATED]), ("moe_permute", [PERMUTE])):
        records = [tensors_record(f"{name}{i}", *tensors_of(s)) for i, s in enumerate(signatures)]
        rows = [entry(s.to_json(), [(None, f"{name}{i}")]) for i, s in enumerate(signatures)]
        kernels |= write_archive(tmp_path / f"{name}.aot", records, rows, name)
    return RecordingDriver(kernels=kernels)


@pytest.fixture
def library(tmp_path: Path, driver: RecordingDriver) -> Library:
    return Library([Archive.open(tmp_path / f"{name}.aot") for name in ("quantise", "moe_permute")], driver)


def addresses(driver: RecordingDriver, count: int) -> list[int]:
    return [struct.unpack_from("<Q", p)[0] for p in driver.launches[-1].parameters[:count]]


def test_a_second_call_is_launched_without_asking_again(
    library: Library, driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both operations, with `out` and without."""
    x, ids = FakeTensor((9, 768)), i32(9, 4)
    tokens = FakeTensor((9, 256))

    def given() -> list[tuple[Any, list[Any], int]]:
        y, scale = narrow(9, 768), f32(9, 6)
        out = narrow(36, 256), i32(8), i32(9, 4), f32(36, 2)
        return [
            (lambda: library.call("quantise", x, scaling="block", out=(y, scale)), [x, y, scale], 0),
            (lambda: library.call("quantise", x, scaling="block"), [x], 2),
            (
                lambda: library.call("moe_permute", tokens, ids, experts=8, scaling="block", out=out),
                [tokens, ids, *out],
                0,
            ),
            (lambda: library.call("moe_permute", tokens, ids, experts=8, scaling="block"), [tokens, ids], 4),
        ]

    for call, *_ in given():
        call()

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was asked")

    for of in (QUANTISE, operation("moe_permute")):
        monkeypatch.setattr(type(of), "ask", refuse)
    for call, tensors, made in given():
        found = call()
        tensors += [*found] if made else []
        assert addresses(driver, len(tensors)) == [t.data_ptr() for t in tensors]


@pytest.mark.parametrize("s", SIGNATURES, ids=lambda s: s.key())
def test_signatures_are_read_as_they_are_written(s: Any) -> None:
    assert operation(s.operation).read(s.to_json()) == s
    assert operation(s.operation).of_key(s.key()) == s


def test_a_permutation_that_copies_is_written_as_before_there_were_others() -> None:
    assert set(Permute("bf16", 8, 4, 256).to_json()) == {"x", "experts", "top_k", "k", "global_experts"}
    assert "scaling" in PERMUTE.to_json()


@pytest.mark.parametrize(
    "change",
    [{"scaling": "none"}, {"scaling": "tensor"}, {"k": 0}, {"groups": -1}, {"y": "e9m9"}, {"activation": "silu"}],
)
def test_malformed_signatures_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match="signature field"):
        QUANTISE.read(BLOCKS.to_json() | change)


def test_rows_of_any_dimensions_are_quantised_with_a_scale_for_each_128(
    library: Library, driver: RecordingDriver
) -> None:
    x = FakeTensor((3, 2, 768))
    y, scale = library.call("quantise", x, scaling="block")
    assert (y.shape, scale.shape) == ((3, 2, 768), (6, 6))
    assert driver.launches[-1].symbol == "kernel_quantise0"
    assert addresses(driver, 3) == [t.data_ptr() for t in (x, y, scale)]


def test_rows_with_gates_give_half_as_many_columns(library: Library, driver: RecordingDriver) -> None:
    x = FakeTensor((3, 2, 1536))
    for out in (None, (narrow(3, 2, 768), f32(6, 6))):
        y, scale = library.call("quantise", x, scaling="block", activation="swiglu", out=out)
        assert (y.shape, scale.shape) == ((3, 2, 768), (6, 6))
        assert driver.launches[-1].symbol == "kernel_quantise2"
        assert addresses(driver, 3) == [t.data_ptr() for t in (x, y, scale)]


def test_gates_are_what_an_archive_without_them_was_not_built_for() -> None:
    assert GATED.key() == "bf16_e4m3_quantise_k768_block_swiglu"
    assert "activation" not in BLOCKS.to_json(), "which earlier archives do not have"
    kernels = building("quantise").variants("sm_90a", GATED)
    assert {v.epilogue for v in kernels} == {"swiglu"}
    assert {v.epilogue for v in building("quantise").variants("sm_90a", BLOCKS)} == {"none"}
    assert unsuited(kernels[0], BLOCKS) == "quantise: epilogue is swiglu, not none"
    assert GATED.extents() == {"K": 768, "2*K": 1536, "K/128": 6}


def test_ends_of_groups_and_outputs_may_be_given(library: Library, driver: RecordingDriver) -> None:
    x, ends, out = FakeTensor((6, 768)), i32(8), (narrow(6, 768), f32(6))
    assert library.call("quantise", x, ends, scaling="row_column", out=out) == out
    assert driver.launches[-1].symbol == "kernel_quantise1"
    assert addresses(driver, 4) == [t.data_ptr() for t in (x, ends, *out)]


def test_a_permutation_that_quantises_has_scales_behind_positions(library: Library, driver: RecordingDriver) -> None:
    x, ids = FakeTensor((9, 256)), i32(9, 4)
    found = library.call("moe_permute", x, ids, experts=8, scaling="block")
    assert [t.shape for t in found] == [(36, 256), (8,), (9, 4), (36, 2)]
    assert addresses(driver, 6) == [t.data_ptr() for t in (x, ids, *found)]


def test_what_no_entry_serves_names_the_nearest(library: Library) -> None:
    with pytest.raises(KernelMiss, match="groups is 8, wanted 0"):
        library.call("quantise", FakeTensor((6, 768)), scaling="row_column")
    with pytest.raises(KernelMiss, match="scaling is block, wanted none"):
        library.call("moe_permute", FakeTensor((9, 256)), i32(9, 4), experts=8)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"scaling": "tensor"}, "scaling block or row_column; found 'tensor'"),
        ({"ends": f32(8)}, "ends must be i32"),
        ({"out": narrow(6, 768)}, r"out of quantise must be \(y, scale\)"),
        ({"out": (narrow(5, 768), f32(6, 6))}, r"writes y \(6, 768\) and scale f32 \(6, 6\)"),
        ({"out": (narrow(6, 768), f32(6))}, r"scale f32 \(6, 6\); found .*f32 \(6,\)"),
        ({"out": (narrow(6, 768), FakeTensor((6, 6)))}, "found .*bf16"),
        ({"activation": "silu"}, "activation none or swiglu; found 'silu'"),
        ({"activation": "swiglu", "x": FakeTensor((6, 769))}, r"swiglu takes x \(M, 2 K\); found \(6, 769\)"),
        ({"activation": "swiglu", "out": (narrow(6, 768), f32(6, 6))}, r"x \(6, 768\) writes y \(6, 384\)"),
    ],
)
def test_a_call_refuses_what_does_not_go_together(library: Library, change: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {"scaling": "block"} | change
    with pytest.raises(ArgumentError, match=match):
        library.call("quantise", given.pop("x", FakeTensor((6, 768))), given.pop("ends", None), **given)


def test_outputs_that_share_memory_with_what_is_read_are_refused(library: Library) -> None:
    x = FakeTensor((6, 768))
    shared = FakeTensor((6, 768), dtype="float8_e4m3fn", pointer=x.data_ptr())
    with pytest.raises(ArgumentError, match="y names elements twice, or shares memory"):
        library.call("quantise", x, scaling="block", out=(shared, f32(6, 6)))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"scaling": "tensor"}, "scaling must be one of none, block, row_column"),
        ({"out": (narrow(36, 256), i32(8), i32(9, 4))}, r"must be \(rows, ends, positions, scale\)"),
        ({"out": (FakeTensor((36, 256)), i32(8), i32(9, 4), f32(36, 2))}, "rows must be e4m3, found bf16"),
        ({"out": (narrow(36, 256), i32(8), i32(9, 4), f32(36, 3))}, r"scale must have the shape \(36, 2\)"),
    ],
)
def test_a_permutation_refuses_what_does_not_go_together(library: Library, change: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {"scaling": "block"} | change
    with pytest.raises(ArgumentError, match=match):
        library.call("moe_permute", FakeTensor((9, 256)), i32(9, 4), experts=8, **given)


def test_kernels_are_for_hopper_and_newer_and_for_the_scaling_that_they_are_named_after() -> None:
    for s in SIGNATURES:
        assert building(s.operation).variants("sm_80", s) == []
        every = building(s.operation).variants("sm_90a", s)
        assert {v.scaling for v in every} == {s.scaling}
    (blocks, *_), (rows, *_) = (building("quantise").variants("sm_90a", s) for s in (BLOCKS, ROWS))
    assert unsuited(blocks, BLOCKS) is None
    assert "is of bf16, i32, e4m3, f32" in str(unsuited(rows, BLOCKS))
    copies = building("moe_permute").variants("sm_90a", Permute("bf16", 8, 4, 256))
    assert {v.scaling for v in copies} == {"none"}
