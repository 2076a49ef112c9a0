"""RMSNorm as an operation: its signatures and keys, what a call of it is, and which operands it refuses."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aot.search.legal import unsuited
from aot.search.provider import provider
from aot.search.targets import TARGETS
from aot.search.unserved import computing, variants, why_none
from runtime import ArgumentError, Library, RecordError
from runtime.container.archive import Archive
from runtime.gemm.signature import Signature as GemmSignature
from runtime.program.operation import names, operation
from runtime.rmsnorm import RMSNORM, Signature
from runtime.tables.dispatch import Dispatch

from ..legal_samples import legal_values
from ..moe.test_operation import tensors_of
from ..recording_driver import FakeTensor, FakeTorch, RecordingDriver, entry, tensors_record, write_archive
from .archives import ADDED, OF, SCALED, write, write_added


@pytest.fixture
def driver(tmp_path: Path, torch: FakeTorch) -> RecordingDriver:
    return write(tmp_path / "norms.aot")


@pytest.fixture
def library(tmp_path: Path, driver: RecordingDriver) -> Library:
    return Library(Archive.open(tmp_path / "norms.aot"), driver)


def tensors(m: int, n: int = 4096) -> tuple[FakeTensor, FakeTensor, FakeTensor]:
    return FakeTensor((m, n)), FakeTensor((n,)), FakeTensor((m, n))


def test_it_is_one_of_the_operations() -> None:
    assert operation("rmsnorm") is RMSNORM
    assert "rmsnorm" in names()


def test_call_launches_its_kernel_with_operands_and_eps(library: Library, driver: RecordingDriver) -> None:
    x, weight, y = tensors(9)
    assert library.call("rmsnorm", x, weight, out=y, eps=0.5) is y
    launch = driver.launches[-1]
    assert (launch.symbol, launch.grid[0]) == ("kernel_wide", 9)
    pointers = [struct.unpack_from("<Q", p)[0] for p in launch.parameters[:3]]
    assert pointers == [t.data_ptr() for t in (x, weight, y)]
    assert struct.unpack("<f", launch.parameters[3]) == (0.5,)


def test_call_without_eps_takes_the_usual_one_and_without_out_makes_one_like_x(
    library: Library, driver: RecordingDriver
) -> None:
    found = library.call("rmsnorm", FakeTensor((2, 3, 4096)), FakeTensor((4096,)))
    assert found.shape == (2, 3, 4096)
    assert driver.launches[-1].grid[0] == 6
    assert driver.launches[-1].parameters[3] == struct.pack("<f", 1e-6)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weight": FakeTensor((8,))}, r"rmsnorm takes x \(..., N\), weight \(N\)"),
        ({"out": FakeTensor((8, 4096))}, "rmsnorm takes x"),
        ({"out": None, "x": object()}, "x must be a torch tensor"),
    ],
)
def test_call_refuses_tensors_that_do_not_go_together(library: Library, change: dict[str, Any], match: str) -> None:
    x, weight, y = tensors(4)
    given = {"x": x, "weight": weight, "out": y} | change
    with pytest.raises(ArgumentError, match=match):
        library.call("rmsnorm", given["x"], given["weight"], out=given["out"])


def test_call_refuses_memory_that_is_partly_shared(library: Library, driver: RecordingDriver) -> None:
    x, weight, _ = tensors(4)
    library.call("rmsnorm", x, weight, out=x)
    shifted = FakeTensor((4, 4096), pointer=x.data_ptr() + 4096)
    with pytest.raises(ArgumentError, match="shares memory"):
        library.call("rmsnorm", x, weight, out=shifted)
    assert len(driver.launches) == 1


def test_one_row_is_written_where_it_is_read_whatever_its_stride(library: Library, driver: RecordingDriver) -> None:
    x, weight, _ = tensors(1)
    y = FakeTensor((1, 4096), strides=(8192, 1), pointer=x.data_ptr())
    assert library.call("rmsnorm", x, weight, out=y) is y
    assert len(driver.launches) == 1


def test_call_with_a_residual_gives_both_and_writes_the_sum_where_it_is_told(tmp_path: Path, torch: FakeTorch) -> None:
    driver = write_added(tmp_path / "added.aot")
    library = Library(Archive.open(tmp_path / "added.aot"), driver)
    x, weight, _ = tensors(4)
    residual = FakeTensor((4, 4096))
    found, total = library.call("rmsnorm", x, weight, residual=residual)
    assert (found.shape, total.shape) == (x.shape, x.shape)
    assert library.call("rmsnorm", x, weight, residual=residual, out=(x, residual)) == (x, residual)
    assert written(driver) == [t.data_ptr() for t in (x, residual, weight, x, residual)]
    for launch in range(3):  # the first is planned, others are launched by its plan
        y, total = FakeTensor((4, 4096)), FakeTensor((4, 4096))
        out = (y, total)
        assert library.call("rmsnorm", x, weight, residual=residual, out=out) is out
        assert written(driver) == [t.data_ptr() for t in (x, residual, weight, y, total)], launch
        assert library.stats().launches == len(driver.launches)
    made, of_sum = library.call("rmsnorm", x, weight, residual=residual)
    assert written(driver) == [t.data_ptr() for t in (x, residual, weight, made, of_sum)]
    library.close()


def written(driver: RecordingDriver) -> list[int]:
    """The pointers of the last launch."""
    return [struct.unpack_from("<Q", p)[0] for p in driver.launches[-1].parameters[:5]]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"residual": FakeTensor((5, 4096))}, "out, residual and sum like x"),
        ({"out": (FakeTensor((4, 4096)), FakeTensor((4, 64)))}, "out, residual and sum like x"),
        ({"out": FakeTensor((4, 4096))}, r"out of rmsnorm with a residual must be \(y, sum\)"),
        ({"out": (FakeTensor((4, 4096)), FakeTensor((4, 4096), "float16"))}, "sum must be of residual's type, bf16"),
        ({"out": [FakeTensor((4, 4096))] * 2}, "shares memory"),
    ],
)
def test_call_refuses_residuals_and_sums_that_do_not_fit(library: Library, change: dict[str, Any], match: str) -> None:
    x, weight, y = tensors(4)
    given: dict[str, Any] = {"residual": FakeTensor((4, 4096)), "out": (y, FakeTensor((4, 4096)))} | change
    with pytest.raises(ArgumentError, match=match):
        library.call("rmsnorm", x, weight, **given)


def test_call_with_a_scaling_gives_narrow_rows_and_their_scales(tmp_path: Path, torch: FakeTorch) -> None:
    """With a residual and without, with `out` and without, and again by the plan of the first call."""
    scaled = [replace(of, y="e4m3", scaling=word) for of in (OF, ADDED) for word in ("block", "row_column")]
    records = [tensors_record(f"f{i}", *tensors_of(s)) for i, s in enumerate(scaled)]
    rows = [entry(s.to_json(), [(None, f"f{i}")]) for i, s in enumerate(scaled)]
    driver = RecordingDriver(kernels=write_archive(tmp_path / "scaled.aot", records, rows, "rmsnorm"))
    library = Library(Archive.open(tmp_path / "scaled.aot"), driver)
    x, weight, _ = tensors(4)
    for i, s in enumerate(scaled):
        shape = (4, 32) if s.scaling == "block" else (4,)
        residual = None if s.residual == "none" else FakeTensor((4, 4096))
        found = library.call("rmsnorm", x, weight, residual=residual, scaling=s.scaling)
        sums = [] if residual is None else [(4, 4096)]
        assert [t.shape for t in found] == [(4, 4096), shape, *sums]
        assert [str(t.dtype) for t in found[:2]] == ["torch.float8_e4m3fn", "torch.float32"]
        for _ in range(2):
            out = (FakeTensor((4, 4096), "float8_e4m3fn"), FakeTensor(shape, "float32"), *map(FakeTensor, sums))
            assert library.call("rmsnorm", x, weight, residual=residual, scaling=s.scaling, out=out) is out
            given = [t for t in (x, residual, weight, *out) if t is not None]
            launch = driver.launches[-1]
            assert launch.symbol == f"kernel_f{i}"
            assert [struct.unpack_from("<Q", p)[0] for p in launch.parameters[: len(given)]] == [
                t.data_ptr() for t in given
            ]
    library.close()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"scaling": "tensor"}, "rmsnorm has scaling none, block, row_column; found 'tensor'"),
        ({"out": FakeTensor((4, 4096), "float8_e4m3fn")}, r"out of rmsnorm with a scaling must be \(y, scale\)"),
        ({"scale": FakeTensor((4, 31), "float32")}, r"scale must be f32 \(4, 32\); found f32 \(4, 31\)"),
        ({"scale": FakeTensor((4, 32))}, r"scale must be f32 \(4, 32\); found bf16 \(4, 32\)"),
        (
            {"y": FakeTensor((4, 4096), "float16")},
            "out of rmsnorm is in e4m3 with a scaling, and never else; found f16",
        ),
        ({"scaling": "none", "out": FakeTensor((4, 4096), "float8_e4m3fn")}, "and never else; found e4m3"),
    ],
)
def test_call_refuses_scales_that_do_not_fit(library: Library, change: dict[str, Any], match: str) -> None:
    x, weight, _ = tensors(4)
    given = {"y": FakeTensor((4, 4096), "float8_e4m3fn"), "scale": FakeTensor((4, 32), "float32")} | change
    out = change.get("out", (given["y"], given["scale"]))
    with pytest.raises(ArgumentError, match=match):
        library.call("rmsnorm", x, weight, scaling=change.get("scaling", "block"), out=out)


def test_key_of_a_signature_is_read_back_and_no_other_word() -> None:
    for of in (OF, ADDED, SCALED):
        assert RMSNORM.of_key(of.key()) == of
        assert RMSNORM.read(of.to_json()) == of
    assert ADDED.key() == "bf16_bf16_bf16_rmsnorm_n4096_residual_bf16"
    assert SCALED.key() == "bf16_bf16_e4m3_rmsnorm_n4096_residual_bf16_block"
    assert not {"residual", "scaling"} & set(OF.to_json()), "which earlier archives do not have"
    for word in (
        "bf16_bf16_bf16_rmsnorm_n0",
        "bf16_bf16_bf17_rmsnorm_n8",
        "bf16_bf16_bf16_rmsnorm_n08",
        f"{OF.key()}_residual_e4m3",
        f"{OF.key()}_block",
        "bf16_bf16_e4m3_rmsnorm_n4096",
    ):
        assert RMSNORM.of_key(word) is None


@pytest.mark.parametrize("change", [{"n": 0}, {"x": "bf17"}, {"more": 1}, {"residual": "e4m3"}, {"scaling": "block"}])
def test_malformed_signatures_are_refused_where_the_table_is_read(change: dict[str, Any]) -> None:
    row = entry(OF.to_json(), [(None, "f")])
    row["signature"] = row["signature"] | change
    row["gpu"] = None
    with pytest.raises(RecordError, match="signature"):
        Dispatch.from_json({"schema": 1, "entries": [row]}, RMSNORM)


def test_types_lie_further_apart_than_extents() -> None:
    wide, other = replace(OF, n=1 << 20), replace(OF, y="f16")
    assert RMSNORM.distance(OF, OF) == 0 < RMSNORM.distance(wide, OF) < RMSNORM.distance(other, OF)
    assert RMSNORM.differences(other, replace(OF, n=8)) == ["y is f16, wanted bf16", "N is 4096, wanted 8"]


# --- its kernels ---


def test_kernels_suit_signatures_of_their_operation_and_element_types() -> None:
    gemm = GemmSignature("bf16", "bf16", "bf16", "f32", "none", 4096, 4096)
    of_norms = [v for v in provider("own").functions("sm_90a") if v.operation == "rmsnorm"]
    suited = {v.d for v in of_norms if unsuited(v, OF) is None}
    assert (suited, {v.d for v in of_norms if v.scaling == "none"}) == ({"bf16"}, {"bf16", "f16"})
    assert {unsuited(v, gemm) for v in of_norms} == {"rmsnorm_row computes rmsnorm, not gemm"}
    of_gemms = provider("own").variants("sm_90a", gemm)
    assert all(str(unsuited(v, OF)).endswith(" computes gemm, not rmsnorm") for v in of_gemms)


def test_every_target_has_kernels_of_one_element_type_each() -> None:
    assert computing(Signature("f16", "f16", "f16", 64)) == list(TARGETS)
    mixed = Signature("bf16", "f16", "bf16", 64)
    assert variants("sm_90a", mixed) == []
    assert why_none("sm_90a", mixed).startswith("none for sm_90a has the element types bf16, f16")
    assert set(computing(SCALED)) == {t for t, of in TARGETS.items() if of.compute_capability >= (9, 0)}


def test_a_row_may_have_any_whole_warps_of_threads() -> None:
    assert legal_values("own.rmsnorm_row.bf16_bf16_bf16_f32.threads128.sm_90a", "threads") == {*range(32, 1025, 32)}
