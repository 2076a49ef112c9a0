"""moe_permute and moe_combine as operations: signatures and keys, what a call of one is, which operands it refuses."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aot.providers.builders import moe, quantise, rmsnorm
from aot.search.legal import unsuited
from aot.search.operation import building
from aot.search.provider import provider
from runtime import ArgumentError, KernelMiss, Library, RecordError
from runtime.container.archive import Archive
from runtime.moe.combine import MOE_COMBINE
from runtime.moe.combine import Signature as Combine
from runtime.moe.permute import MOE_PERMUTE
from runtime.moe.permute import Signature as Permute
from runtime.program.operation import operation

from ..legal_samples import legal_values
from ..recording_driver import FakeTensor, FakeTorch, RecordingDriver, cubin, entry, tensors_record, write_archive

PERMUTE = Permute("bf16", 8, 4, 128)
MAPPED = replace(PERMUTE, global_experts=32)
COMBINE = Combine("bf16", "bf16", 4, 128)
WEIGHED = replace(MAPPED, weights="f32")
ALONE = replace(COMBINE, weights="none")
SIGNATURES = [
    *(PERMUTE, MAPPED, WEIGHED, replace(WEIGHED, scaling="block"), replace(PERMUTE, x="e4m3")),
    *(COMBINE, ALONE, replace(COMBINE, y="f16")),
]


def tensors_of(signature: Any) -> Any:
    """The symbols and arguments of this project's kernel for a signature."""
    (variant, *_) = building(signature.operation).variants("sm_90a", signature)
    builders = {
        "moe_permute": moe.moe_permute,
        "moe_combine": moe.moe_combine,
        "quantise": quantise.quantise,
        "rmsnorm": rmsnorm.rmsnorm,
    }
    pytest.importorskip("cutlass", reason="the DSL is not installed")
    built = builders[signature.operation](variant)
    return built.symbols, built.tree[:-1]


@pytest.fixture
def driver(tmp_path: Path, torch: FakeTorch) -> RecordingDriver:
    kernels: dict[bytes, Any] = {}
    wanted: dict[str, list[Any]] = {"moe_permute": [PERMUTE, MAPPED, WEIGHED], "moe_combine": [COMBINE, ALONE]}
    for name, of in wanted.items():
        records = [tensors_record(f"{name}{i}", *tensors_of(s)) for i, s in enumerate(of)]
        rows = [entry(s.to_json(), [(None, f"{name}{i}")]) for i, s in enumerate(of)]
        kernels |= write_archive(tmp_path / f"{name}.aot", records, rows, name)
    assert cubin("moe_combine0") in kernels
    return RecordingDriver(kernels=kernels)


@pytest.fixture
def library(tmp_path: Path, driver: RecordingDriver) -> Library:
    return Library([Archive.open(tmp_path / f"moe_{name}.aot") for name in ("permute", "combine")], driver)


def i32(*shape: int, **more: Any) -> FakeTensor:
    return FakeTensor(shape, dtype="int32", **more)


def f32(*shape: int) -> FakeTensor:
    return FakeTensor(shape, dtype="float32")


@pytest.mark.parametrize("s", SIGNATURES, ids=lambda s: s.key())
def test_signatures_are_read_as_they_are_written(s: Any) -> None:
    assert operation(s.operation).read(s.to_json()) == s
    assert operation(s.operation).of_key(s.key()) == s


@pytest.mark.parametrize("s", [PERMUTE, COMBINE], ids=lambda s: s.key())
@pytest.mark.parametrize("change", [{"top_k": 0}, {"top_k": "8"}, {"more": 1}, {"x": "bf17", "rows": "bf17"}])
def test_malformed_signatures_are_refused(s: Any, change: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match=s.operation + "|signature field"):
        operation(s.operation).read(s.to_json() | change)


@pytest.mark.parametrize("key", ["", "bf16_moe_permute_e8of0_top4_k128", "bf16_moe_permute_e08_top4_k128", "bf16_x"])
def test_another_word_is_no_key(key: str) -> None:
    assert MOE_PERMUTE.of_key(key) is MOE_COMBINE.of_key(key) is None


def addresses(driver: RecordingDriver) -> list[int]:
    return [struct.unpack_from("<Q", p)[0] for p in driver.launches[-1].parameters[:-1]]


def test_a_permutation_is_launched_with_operands_in_order(library: Library, driver: RecordingDriver) -> None:
    x, ids = FakeTensor((9, 128)), i32(9, 4)
    rows, ends, positions = library.call("moe_permute", x, ids, experts=8)
    assert [t.shape for t in (rows, ends, positions)] == [(36, 128), (8,), (9, 4)]
    assert driver.launches[-1].symbol == "kernel_moe_permute0"
    assert addresses(driver) == [t.data_ptr() for t in (x, ids, rows, ends, positions)]
    assert driver.launches[-1].parameters[-1] == struct.pack("<i", 9)


def test_an_expert_map_is_one_of_its_operands(library: Library, driver: RecordingDriver) -> None:
    x, ids, of_map, out = FakeTensor((9, 128)), i32(9, 4), i32(32), (FakeTensor((9, 4, 128)), i32(8), i32(9, 4))
    assert library.call("moe_permute", x, ids, experts=8, expert_map=of_map, out=out) == out
    assert driver.launches[-1].symbol == "kernel_moe_permute1"
    assert addresses(driver) == [t.data_ptr() for t in (x, ids, of_map, *out)]


def test_weights_are_operands_of_one_of_both(library: Library, driver: RecordingDriver) -> None:
    x, ids, of_map, weights = FakeTensor((9, 128)), i32(9, 4), i32(32), f32(9, 4)
    out = library.call("moe_permute", x, ids, experts=8, expert_map=of_map, weights=weights)
    assert driver.launches[-1].symbol == "kernel_moe_permute2"
    assert addresses(driver) == [t.data_ptr() for t in (x, ids, of_map, weights, *out)]
    y = library.call("moe_combine", out[0], out[2])
    assert driver.launches[-1].symbol == "kernel_moe_combine1"
    assert addresses(driver) == [t.data_ptr() for t in (out[0], out[2], y)]


def test_tables_written_before_there_were_weights_on_the_input_mean_what_they_meant() -> None:
    assert "weights" not in PERMUTE.to_json() | COMBINE.to_json()
    assert MOE_PERMUTE.read(PERMUTE.to_json()).weights == "none"
    assert MOE_COMBINE.read(COMBINE.to_json()).weights == "f32"


def test_the_stride_of_one_token_does_not_matter(library: Library, driver: RecordingDriver) -> None:
    """torch calls such tensors contiguous."""
    apart = i32(1, 4, strides=(64, 1))
    library.call("moe_permute", FakeTensor((1, 128), strides=(4096, 1)), apart, experts=8)
    weights = FakeTensor((1, 4), dtype="float32", strides=(8, 1))
    library.call("moe_combine", FakeTensor((4, 128)), apart, weights)
    assert len(driver.launches) == 2


def test_rows_are_combined_into_a_row_for_each_token(library: Library, driver: RecordingDriver) -> None:
    given = FakeTensor((9, 4, 128)), i32(9, 4), f32(9, 4)
    y = library.call("moe_combine", *given)
    assert y.shape == (9, 128)
    assert addresses(driver) == [t.data_ptr() for t in (*given, y)]


def test_what_no_entry_serves_names_the_nearest(library: Library) -> None:
    with pytest.raises(KernelMiss, match="experts is 8, wanted 16"):
        library.call("moe_permute", FakeTensor((9, 128)), i32(9, 4), experts=16)
    with pytest.raises(KernelMiss, match="top_k is 4, wanted 2"):
        library.call("moe_combine", FakeTensor((18, 128)), i32(9, 2), f32(9, 2))


SHARED = i32(9, 4)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"ids": FakeTensor((9, 4), dtype="int64")}, "ids must be i32"),
        ({"ids": i32(8, 4)}, r"takes x \(T, K\) and ids \(T, top_k\)"),
        ({"ids": i32(9, 4, strides=(8, 1))}, "ids must be i32 and contiguous"),
        ({"ids": i32(9, 0)}, "top_k of 1 at least"),
        ({"experts": 0}, "experts must be a positive integer"),
        ({"weights": f32(9, 3)}, r"weights must have the shape of ids, \(9, 4\); found \(9, 3\)"),
        ({"weights": i32(9, 4)}, "weights must be f32"),
        ({"expert_map": i32(4, 8)}, "expert_map must say"),
        ({"expert_map": i32(0)}, "expert_map must say"),
        ({"out": (FakeTensor((36, 128)), i32(8))}, "out of moe_permute must be"),
        ({"out": (FakeTensor((35, 128)), i32(8), i32(9, 4))}, r"rows must have the shape \(36, 128\)"),
        ({"out": (FakeTensor((36, 128)), i32(7), i32(9, 4))}, r"ends must have the shape \(8,\)"),
        ({"ids": SHARED, "out": (FakeTensor((36, 128)), i32(8), SHARED)}, "shares memory with another"),
    ],
)
def test_a_permutation_refuses_what_does_not_go_together(library: Library, change: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {"x": FakeTensor((9, 128)), "ids": i32(9, 4), "experts": 8} | change
    with pytest.raises(ArgumentError, match=match):
        library.call("moe_permute", given.pop("x"), given.pop("ids"), **given)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"positions": f32(9, 4)}, "positions must be i32"),
        ({"weights": FakeTensor((9, 4))}, "weights must be f32"),
        ({"weights": f32(9, 3)}, "moe_combine takes rows"),
        ({"positions": i32(9, 0), "weights": f32(9, 0)}, "top_k at least 1"),
        ({"rows": FakeTensor((35, 128))}, "moe_combine takes rows"),
        ({"out": FakeTensor((9, 120))}, r"out must have the shape \(9, 128\)"),
    ],
)
def test_a_sum_refuses_what_does_not_go_together(library: Library, change: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {"rows": FakeTensor((36, 128)), "positions": i32(9, 4), "weights": f32(9, 4)} | change
    with pytest.raises(ArgumentError, match=match):
        library.call("moe_combine", given["rows"], given["positions"], given["weights"], out=given.get("out"))


def test_a_sum_into_its_rows_is_refused(library: Library) -> None:
    rows = FakeTensor((36, 128))
    with pytest.raises(ArgumentError, match="shares memory with another operand"):
        library.call("moe_combine", rows, i32(9, 4), f32(9, 4), out=FakeTensor((9, 128), pointer=rows.data_ptr()))


def test_kernels_say_what_they_have_room_for() -> None:
    (permute, *_), (combine, *_) = (building(s.operation).variants("sm_90a", s) for s in (PERMUTE, COMBINE))
    assert unsuited(permute, replace(PERMUTE, experts=512, top_k=32)) is None
    assert "room for 512 experts" in str(unsuited(permute, replace(PERMUTE, experts=513)))
    assert "room for 32 experts of each token" in str(unsuited(combine, replace(COMBINE, top_k=33)))
    assert {v.operation for v in provider("own").functions("sm_80")} >= {"moe_permute", "moe_combine"}


def test_few_assignments_are_ranked_in_one_launch_and_many_in_two() -> None:
    found = building("moe_permute").shortlist({PERMUTE: [1, 512, 513]}, "sm_90a", 1).by_signature[PERMUTE]
    assert [names[0].options["schedule"] for _, names in found] == ["one_launch", "one_launch", "two_launches"]


@pytest.mark.parametrize(("at_once", "threads", "values"), [(8, 128, {1, 2, 4, 8, 16, 32}), (4, 1024, {1, 2, 4})])
def test_as_many_rows_are_added_at_once_as_registers_hold(at_once: int, threads: int, values: set[int]) -> None:
    name = f"own.moe_combine.bf16_i32_f32_bf16_f32.at_once{at_once}.threads{threads}.sm_90a"
    assert legal_values(name, "at_once") == values
