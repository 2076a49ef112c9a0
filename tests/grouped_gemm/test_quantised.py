"""Grouped GEMM that writes e4m3 with scales, as an operation: what a call of it is, and which operands it refuses."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import pytest

from aot.search.legal import unsuited
from aot.search.operation import building
from runtime import ArgumentError, Library, RecordError
from runtime.grouped_gemm import GROUPED_GEMM

from ..recording_driver import FakeTensor, RecordingDriver
from . import test_operation
from .test_operation import QUANTISED

driver, library = test_operation.driver, test_operation.library  # fixtures


def narrow_call() -> tuple[tuple[FakeTensor, ...], dict[str, Any]]:
    """What a call of `QUANTISED` is given, and by keyword."""
    n, k = QUANTISED.n, QUANTISED.k
    a, b = FakeTensor((9, k), dtype="float8_e4m3fn"), FakeTensor((8, n, k), dtype="float8_e4m3fn")
    scales = {"scale_a": FakeTensor((9, -(-k // 128)), dtype="float32")}
    scales["scale_b"] = FakeTensor((8, n // 128, -(-k // 128)), dtype="float32")
    out = FakeTensor((9, n // 2), dtype="float8_e4m3fn")
    scale_d = FakeTensor((9, n // 256), dtype="float32")
    words = {"epilogue": "swiglu", "out": out, "scale_d": scale_d, **scales}
    return (a, b, FakeTensor((8,), dtype="int32")), words


def test_scales_of_what_is_made_are_its_last_operand(library: Library, driver: RecordingDriver) -> None:
    given, words = narrow_call()
    assert library.grouped_gemm(*given, **words) is words["out"]
    launched = [struct.unpack_from("<Q", p)[0] for p in driver.launches[-1].parameters[:7]]
    named = (words[name] for name in ("out", "scale_a", "scale_b", "scale_d"))
    assert launched == [t.data_ptr() for t in (*given, *named)]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"scale_d": None}, "come together, .* found out in e4m3, no scale_d"),
        ({"out": FakeTensor((9, 256))}, "found out in bf16, a scale_d"),
        ({"scale_d": FakeTensor((9, 1), dtype="float32")}, r"scale_d must be f32 of shape \(9, 2\)"),
        ({"masked": True}, "masked|takes a"),
    ],
)
def test_what_does_not_go_with_scales_of_what_is_made_is_refused(
    library: Library, change: dict[str, Any], match: str
) -> None:
    given, words = narrow_call()
    with pytest.raises(ArgumentError, match=match):
        library.grouped_gemm(*given, **words | change)


def test_what_is_made_in_8_bits_needs_scales_of_blocks_and_rows_by_groups() -> None:
    for change in ({"scaling": "row_column"}, {"rows": "masked"}, {"rows": "gathered"}):
        with pytest.raises(RecordError, match="'d': e4m3 is for scaling block and contiguous rows"):
            GROUPED_GEMM.read(QUANTISED.to_json() | change)


def test_kernels_that_quantise_have_128_columns_of_d_in_a_tile_and_no_others() -> None:
    every = building("grouped_gemm").variants("sm_90a", dataclasses.replace(QUANTISED, overlap="launch"))
    assert {(v.options["tile_m"], v.options["tile_n"]) for v in every} == {(64, 256)}
    plain = dataclasses.replace(QUANTISED, epilogue="none", n=384)
    assert {v.options["tile_n"] for v in building("grouped_gemm").variants("sm_90a", plain)} == {128}
    assert "whole blocks of 128" in str(unsuited(every[0], dataclasses.replace(QUANTISED, n=640)))
