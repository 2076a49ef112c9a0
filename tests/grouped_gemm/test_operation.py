"""Grouped GEMM as an operation: its signatures and keys, what a call of it is, and which operands it refuses."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import pytest

from aot.providers.grouped_arguments import grouped_tensors
from aot.search.legal import unsuited
from aot.search.operation import building
from aot.search.unserved import why_none
from aot.search.variants import Variant
from runtime import ArgumentError, KernelMiss, Library, RecordError
from runtime.container.archive import Archive
from runtime.grouped_gemm import GROUPED_GEMM, Signature
from runtime.program.operation import names, operation

from ..legal_samples import legal_values
from ..recording_driver import FakeTensor, FakeTorch, RecordingDriver, entry, tensors_record, write_archive

PLAIN = Signature("bf16", "bf16", "bf16", 8, 256, 128)
SWIGLU = dataclasses.replace(PLAIN, epilogue="swiglu")
BIASED = dataclasses.replace(PLAIN, epilogue="bias+swiglu_clamped_interleaved")
ROW_WISE = dataclasses.replace(PLAIN, a="e4m3", b="e4m3", scaling="row_column")
BLOCKS = dataclasses.replace(ROW_WISE, n=320, k=272, scaling="block", epilogue="bias")
QUANTISED = dataclasses.replace(ROW_WISE, d="e4m3", n=512, scaling="block", epilogue="swiglu")
GATHERED = dataclasses.replace(PLAIN, epilogue="bias", rows="gathered")
MASKED = dataclasses.replace(PLAIN, rows="masked")
WIDE = dataclasses.replace(PLAIN, n=512)
MASKED_BLOCKS = dataclasses.replace(BLOCKS, rows="masked")
SIGNATURES = [
    MASKED,
    MASKED_BLOCKS,
    PLAIN,
    GATHERED,
    dataclasses.replace(SWIGLU, rows="gathered", overlap="launch"),
    SWIGLU,
    BIASED,
    ROW_WISE,
    QUANTISED,
    dataclasses.replace(BLOCKS, overlap="launch"),
    dataclasses.replace(SWIGLU, epilogue="geglu_tanh_interleaved", overlap="launch"),
]


def _variant(s: Signature) -> Variant:
    elements = (s.a, s.b, s.d)
    return Variant(
        "test", "test", "sm_90a", (), elements, operation="grouped_gemm", epilogue=s.epilogue, scaling=s.scaling
    )


@pytest.fixture
def driver(tmp_path: Path, torch: FakeTorch) -> RecordingDriver:
    served = {"none": PLAIN, "swiglu": SWIGLU, "biased": BIASED, "row_wise": ROW_WISE, "blocks": BLOCKS}
    served["quantised"] = QUANTISED
    served |= {"gathered": GATHERED, "few": MASKED, "many": MASKED, "masked_blocks": MASKED_BLOCKS}
    served |= {"few_in_all": WIDE, "many_in_all": WIDE}
    ranges = {"few": [(32, "few"), (None, "many")], "few_in_all": [(32, "few_in_all"), (None, "many_in_all")]}
    of = {name: s for name, s in served.items() if not name.startswith("many")}
    rows = [entry(s.to_json(), ranges.get(name, [(None, name)])) for name, s in of.items()]
    records = [tensors_record(name, *grouped_tensors(_variant(s), s.rows)) for name, s in served.items()]
    return RecordingDriver(kernels=write_archive(tmp_path / "experts.aot", records, rows, "grouped_gemm"))


@pytest.fixture
def library(tmp_path: Path, driver: RecordingDriver) -> Library:
    return Library(Archive.open(tmp_path / "experts.aot"), driver)


def tensors(m: int = 9, groups: int = 8, n: int = 256, k: int = 128) -> tuple[FakeTensor, FakeTensor, FakeTensor]:
    return FakeTensor((m, k)), FakeTensor((groups, n, k)), FakeTensor((groups,), dtype="int32")


def test_it_is_one_of_the_operations() -> None:
    assert operation("grouped_gemm") is GROUPED_GEMM
    assert "grouped_gemm" in names()


@pytest.mark.parametrize("s", SIGNATURES, ids=lambda s: s.key())
def test_signatures_are_read_as_they_are_written(s: Signature) -> None:
    assert GROUPED_GEMM.read(s.to_json()) == s
    assert GROUPED_GEMM.of_key(s.key()) == s


@pytest.mark.parametrize(
    "change",
    [
        {"groups": 0},
        {"n": "8"},
        {"a": "bf17"},
        {"epilogue": "residual"},
        {"overlap": "all"},
        {"x": 1},
        {"scaling": "block"},
    ],
)
def test_malformed_signatures_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match=r"grouped_gemm|signature field"):
        GROUPED_GEMM.read(PLAIN.to_json() | change)


def test_rows_that_are_contiguous_are_written_as_before_there_were_others() -> None:
    assert set(PLAIN.to_json()) == {"a", "b", "d", "groups", "n", "k", "epilogue", "overlap", "scaling"}
    assert PLAIN.key() == "bf16_bf16_bf16_grouped_none_g8_n256_k128"
    assert GATHERED.key() == "bf16_bf16_bf16_grouped_bias_g8_n256_k128_gathered"
    assert "rows is contiguous, wanted gathered" in GROUPED_GEMM.differences(PLAIN, GATHERED)
    with pytest.raises(RecordError, match="'rows' must be one of contiguous, masked, gathered"):
        GROUPED_GEMM.read(PLAIN.to_json() | {"rows": "both"})


def test_call_launches_its_kernel_with_operands_in_order(library: Library, driver: RecordingDriver) -> None:
    a, b, ends = tensors()
    out = FakeTensor((9, 256))
    assert library.call("grouped_gemm", a, b, ends, out=out) is out
    launch = driver.launches[-1]
    assert launch.symbol == "kernel_none"
    assert [struct.unpack_from("<Q", p)[0] for p in launch.parameters[:4]] == [t.data_ptr() for t in (a, b, ends, out)]


def test_a_gated_call_makes_half_the_columns(library: Library, driver: RecordingDriver) -> None:
    found = library.call("grouped_gemm", *tensors(), epilogue="swiglu")
    assert found.shape == (9, 128)
    assert driver.launches[-1].symbol == "kernel_swiglu"


def test_a_bias_is_the_operand_behind_the_output(library: Library, driver: RecordingDriver) -> None:
    bias, out = FakeTensor((8, 256)), FakeTensor((9, 128))
    library.call("grouped_gemm", *tensors(), out=out, bias=bias, epilogue="swiglu_clamped_interleaved")
    launch = driver.launches[-1]
    assert launch.symbol == "kernel_biased"
    assert [struct.unpack_from("<Q", p)[0] for p in launch.parameters[3:5]] == [out.data_ptr(), bias.data_ptr()]


def scaled(s: Signature, m: int = 9) -> dict[str, FakeTensor]:
    """A, B, ends and scales of such a signature."""
    a, b, ends = tensors(m, s.groups, s.n, s.k)
    blocks = -(-s.n // 128), -(-s.k // 128)
    of_a, of_b = ((m,), (s.groups, s.n)) if s.scaling == "row_column" else ((m, blocks[1]), (s.groups, *blocks))
    narrow = {"a": FakeTensor(a.shape, dtype="float8_e4m3fn"), "b": FakeTensor(b.shape, dtype="float8_e4m3fn")}
    scales = {"scale_a": FakeTensor(of_a, dtype="float32"), "scale_b": FakeTensor(of_b, dtype="float32")}
    return narrow | {"ends": ends} | scales


def test_scales_of_rows_give_bf16_of_8_bits(library: Library, driver: RecordingDriver) -> None:
    given = scaled(ROW_WISE)
    found = library.call("grouped_gemm", *(given.pop(name) for name in ("a", "b", "ends")), **given)
    assert (found.shape, str(found.dtype)) == ((9, 256), "torch.bfloat16")
    launch = driver.launches[-1]
    assert launch.symbol == "kernel_row_wise"
    pointers = [struct.unpack_from("<Q", p)[0] for p in launch.parameters[4:6]]
    assert pointers == [given["scale_a"].data_ptr(), given["scale_b"].data_ptr()]


def test_scales_of_blocks_cover_n_and_k_that_fill_none_and_may_lie_column_after_column(
    library: Library, driver: RecordingDriver
) -> None:
    given = scaled(BLOCKS) | {"bias": FakeTensor((8, 320)), "out": FakeTensor((9, 320))}
    given["scale_a"] = FakeTensor((9, 3), "float32", (1, 12))
    library.call("grouped_gemm", *(given.pop(name) for name in ("a", "b", "ends")), **given)
    launch = driver.launches[-1]
    assert launch.symbol == "kernel_blocks"
    pointers = [struct.unpack_from("<Q", p)[0] for p in launch.parameters[4:7]]
    assert pointers == [given[name].data_ptr() for name in ("scale_a", "scale_b", "bias")]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"scale_a": None}, "come together"),
        ({"scale_a": FakeTensor((8,), dtype="float32")}, r"scale_a must be f32 of shape \(9,\)"),
        ({"scale_a": FakeTensor((9,))}, "found bf16"),
        ({"scale_b": FakeTensor((8,), dtype="float32")}, r"scale_b must be \(groups, N\)"),
        (
            {"scale_b": FakeTensor((8, 2, 2), dtype="float32")},
            r"scale_b must be f32 of shape \(8, 2, 1\)|scale_a must be",
        ),
        ({"a": FakeTensor((9, 128))}, "row_column is for A and B in e4m3"),
    ],
)
def test_call_refuses_scales_that_do_not_go_together(library: Library, change: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = scaled(ROW_WISE) | {"out": FakeTensor((9, 256))} | change
    with pytest.raises(ArgumentError, match=match):
        library.call("grouped_gemm", *(given.pop(name) for name in ("a", "b", "ends")), **given)


@pytest.mark.parametrize("rows", [3, 9, 500])
def test_a_gathered_call_has_as_many_rows_as_indices(library: Library, driver: RecordingDriver, rows: int) -> None:
    a, b, ends = tensors(m=rows)
    indices, bias = FakeTensor((9,), dtype="int32"), FakeTensor((8, 256))
    found = library.call("grouped_gemm", a, b, ends, indices=indices, bias=bias)
    assert found.shape == (9, 256)
    launch = driver.launches[-1]
    assert launch.symbol == "kernel_gathered"
    operands = a, b, indices, ends, found, bias
    assert [struct.unpack_from("<Q", p)[0] for p in launch.parameters[:6]] == [t.data_ptr() for t in operands]
    assert struct.unpack_from("<I", launch.parameters[6])[0] == 9, "M is that of D"


def test_where_nothing_relies_on_an_overlap_what_relies_on_less_serves(
    library: Library, driver: RecordingDriver
) -> None:
    library.call("grouped_gemm", *tensors(), overlap="serial")
    library.call("grouped_gemm", *tensors(), overlap="weights")
    first, second = (launch.symbol for launch in driver.launches)
    assert first == second
    assert library.entry(dataclasses.replace(PLAIN, overlap="weights")) == library.entry(PLAIN)
    with pytest.raises(KernelMiss):
        library.call("grouped_gemm", *tensors(k=136), overlap="weights")


def test_a_gathered_call_of_no_rows_launches_nothing(library: Library, driver: RecordingDriver) -> None:
    a, b, ends = tensors(m=0)
    indices = FakeTensor((0,), dtype="int32")
    assert library.call("grouped_gemm", a, b, ends, indices=indices, bias=FakeTensor((8, 256))).shape == (0, 256)
    assert not driver.launches


def test_preload_loads_what_gathers_rows(library: Library, driver: RecordingDriver) -> None:
    library.preload([9], only=[GATHERED.key()])
    a, b, ends = tensors()
    indices = FakeTensor((9,), dtype="int32")
    library.call("grouped_gemm", a, b, ends, indices=indices, bias=FakeTensor((8, 256)))
    assert driver.launches[-1].symbol == "kernel_gathered"


def test_masked_rows_have_counts_and_are_served_by_how_many_are_expected(
    library: Library, driver: RecordingDriver
) -> None:
    a, (_, b, counts) = FakeTensor((8, 512, 128)), tensors()
    found = library.call("grouped_gemm", a, b, counts, masked=True)
    assert found.shape == (8, 512, 256)
    assert driver.launches[-1].symbol == "kernel_many"
    library.call("grouped_gemm", a, b, counts, masked=True, out=found, expected_rows=32)
    launch = driver.launches[-1]
    assert launch.symbol == "kernel_few"
    pointers = [struct.unpack_from("<Q", p)[0] for p in launch.parameters[:4]]
    assert pointers == [t.data_ptr() for t in (a, b, counts, found)]
    assert struct.unpack("<I", launch.parameters[4]) == (512,), "what is expected is not what there is room for"


def test_rows_of_all_groups_are_served_by_how_many_are_expected(library: Library, driver: RecordingDriver) -> None:
    a, b, ends = tensors(512, n=WIDE.n)
    found = library.call("grouped_gemm", a, b, ends)
    assert driver.launches[-1].symbol == "kernel_many_in_all"
    for expected, symbol in ((32, "few"), (33, "many"), (1 << 20, "many"), (32, "few")):
        library.call("grouped_gemm", a, b, ends, out=found, expected_rows=expected)
        assert driver.launches[-1].symbol == f"kernel_{symbol}_in_all"
        assert struct.unpack("<I", driver.launches[-1].parameters[4]) == (512,), "all rows there are"


def test_rows_that_are_expected_are_no_less_than_none(library: Library) -> None:
    a, b, ends = tensors()
    indices = FakeTensor((9,), dtype="int32")
    for more in ({}, {"indices": indices, "bias": FakeTensor((8, 256))}):
        with pytest.raises(ArgumentError, match="expected_rows must be 0 or more, found -1"):
            library.call("grouped_gemm", a, b, ends, expected_rows=-1, **more)
        library.call("grouped_gemm", a, b, ends, expected_rows=4, **more)


def test_scales_of_masked_rows_are_by_group(library: Library, driver: RecordingDriver) -> None:
    given = scaled(BLOCKS) | {"bias": FakeTensor((8, 320)), "out": FakeTensor((8, 9, 320))}
    a, b, counts = FakeTensor((8, 9, 272), "float8_e4m3fn"), given.pop("b"), given.pop("ends")
    with pytest.raises(ArgumentError, match=r"scale_a must be f32 of shape \(8, 9, 3\)"):
        library.call("grouped_gemm", a, b, counts, masked=True, **{n: t for n, t in given.items() if n != "a"})
    given["scale_a"] = FakeTensor((8, 9, 3), "float32", (64, 1, 12))
    library.call("grouped_gemm", a, b, counts, masked=True, **{n: t for n, t in given.items() if n != "a"})
    assert driver.launches[-1].symbol == "kernel_masked_blocks"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"a": FakeTensor((9, 128))}, r"takes a \(groups, rows, K\) and b"),
        ({"a": FakeTensor((7, 9, 128))}, r"takes a \(groups, rows, K\) and b"),
        ({"counts": FakeTensor((9,), dtype="int32")}, "counts of type i32, one for each of 8 groups"),
        ({"indices": FakeTensor((9,), dtype="int32")}, "masked rows are not gathered"),
        ({"expected_rows": -1}, "0 or more"),
        ({"out": FakeTensor((72, 256))}, r"out must have the shape \(8, 9, 256\)"),
    ],
)
def test_call_refuses_masked_rows_that_do_not_go_together(library: Library, change: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = {"a": FakeTensor((8, 9, 128)), "counts": FakeTensor((8,), dtype="int32")}
    given |= {"out": FakeTensor((8, 9, 256)), "masked": True, **change}
    with pytest.raises(ArgumentError, match=match):
        library.call("grouped_gemm", given.pop("a"), FakeTensor((8, 256, 128)), given.pop("counts"), **given)


def test_what_no_entry_serves_names_the_nearest(library: Library) -> None:
    with pytest.raises(KernelMiss, match="groups is 8, wanted 16"):
        library.call("grouped_gemm", *tensors(groups=16))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"b": FakeTensor((256, 128))}, r"takes a \(..., K\) and b \(groups, N, K\)"),
        ({"a": FakeTensor((9, 64))}, r"takes a \(..., K\) and b"),
        ({"ends": FakeTensor((7,), dtype="int32")}, "one for each of 8 groups"),
        ({"ends": FakeTensor((8,), dtype="int64")}, "ends of type i32"),
        ({"out": FakeTensor((9, 128))}, r"out must have the shape \(9, 256\)"),
        ({"epilogue": "bias"}, "no epilogue 'bias'"),
        ({"overlap": "all"}, "overlap must be one of"),
        ({"indices": FakeTensor((9,), dtype="int64")}, "indices of type i32"),
        ({"indices": FakeTensor((9, 1), dtype="int32")}, "one for each row of out; found i32"),
        ({"indices": FakeTensor((8,), dtype="int32")}, r"out must have the shape \(8, 256\)"),
        ({"indices": FakeTensor((9,), dtype="int32"), "a": FakeTensor((0, 128))}, "choose rows of a, which has none"),
        ({"bias": FakeTensor((256,))}, r"bias must be bf16 of shape \(8, 256\), found bf16 of \(256,\)"),
        ({"bias": FakeTensor((8, 256), dtype="float32")}, "found f32"),
    ],
)
def test_call_refuses_what_does_not_go_together(library: Library, change: dict[str, Any], match: str) -> None:
    given: dict[str, Any] = dict(zip(("a", "b", "ends"), tensors(), strict=True)) | {"out": FakeTensor((9, 256))}
    given |= change
    with pytest.raises(ArgumentError, match=match):
        library.call("grouped_gemm", given.pop("a"), given.pop("b"), given.pop("ends"), **given)


def test_call_refuses_an_output_that_is_an_input(library: Library) -> None:
    *_, ends = tensors()
    square = FakeTensor((9, 128))
    with pytest.raises(ArgumentError, match="shares memory with another operand"):
        library.call("grouped_gemm", square, FakeTensor((8, 128, 128)), ends, out=square)


def test_call_refuses_an_output_that_is_a_bias(library: Library) -> None:
    out = FakeTensor((8, 256))
    with pytest.raises(ArgumentError, match="out shares memory with bias"):
        library.call("grouped_gemm", *tensors(8), out=out, bias=out)


def test_variants_are_those_of_its_form_and_rely_on_no_more_overlap_than_is_promised() -> None:
    of = building("grouped_gemm")
    serial, launch = (of.variants("sm_90a", dataclasses.replace(PLAIN, overlap=word)) for word in ("serial", "launch"))
    assert {v.options["overlap"] for v in serial} == {"serial"}
    assert {v.options["overlap"] for v in launch} == {"serial", "launch"}
    assert {v.options["swap"] for v in serial} == {False, True}
    assert {v.family for v in of.variants("sm_90a", MASKED)} == {"sm90_masked"}
    assert unsuited(serial[0], MASKED) == "sm90_grouped: rows are contiguous, not masked"
    assert of.variants("sm_100a", MASKED) == []
    assert {v.family for v in serial} == {"sm90_grouped"}
    assert {v.family for v in of.variants("sm_90a", GATHERED)} == {"sm90_gathered"}
    assert why_none("sm_100a", dataclasses.replace(PLAIN, rows="gathered")) == (
        "none for sm_100a has gathered rows; sm_90a can"
    )
    assert "rows are contiguous, not gathered" in str(unsuited(serial[0], dataclasses.replace(PLAIN, rows="gathered")))
    assert {v.family for v in of.variants("sm_100a", PLAIN)} == {"sm100_grouped"}
    assert of.variants("sm_100a", SWIGLU) == []
    assert {v.options["swap"] for v in of.variants("sm_90a", ROW_WISE)} == {False, True}
    assert {v.options["swap"] for v in of.variants("sm_90a", BLOCKS)} == {False}, "nor are scales of blocks"
    halves = dataclasses.replace(BLOCKS, epilogue="swiglu")
    assert of.variants("sm_90a", halves) == [], "a block holds gates and what they gate"
    assert of.variants("sm_90a", dataclasses.replace(halves, n=512)) != []
    unscaled = dataclasses.replace(ROW_WISE, scaling="none")
    assert of.variants("sm_90a", unscaled) == []
    assert {v.family for v in of.variants("sm_100a", unscaled)} == {"sm100_grouped"}
    assert "has room for 512 groups" in str(unsuited(serial[0], dataclasses.replace(PLAIN, groups=513)))
    assert "not a multiple of 8" in str(unsuited(serial[0], dataclasses.replace(PLAIN, k=100)))


def test_few_rows_get_small_tiles_and_many_large_ones() -> None:
    s = Signature("bf16", "bf16", "bf16", 128, 2048, 768)
    found = building("grouped_gemm").shortlist({s: [8, 65_536]}, "sm_90a", 4)
    (_, few), (_, many) = found.by_signature[s]
    assert {v.options["tile_m"] for v in few} <= {8, 16, 32}
    assert {v.options["tile_m"] for v in many} <= {128, 192, 256}
    assert len(few) == len(many) == 4


def test_a_shortlist_has_no_tile_twice_that_differs_in_overlap() -> None:
    s = Signature("e4m3", "e4m3", "bf16", 8, 6144, 4096, scaling="block", rows="masked", overlap="launch")
    ((_, found),) = building("grouped_gemm").shortlist({s: [1024]}, "sm_90a", 6).by_signature[s]
    assert {v.options["overlap"] for v in found} == {"launch"}
    extents = "tile_m", "tile_n", "cluster_n", "share_b"
    assert len({tuple(v.options[name] for name in extents) for v in found}) == 6


def test_pairs_of_tiles_share_rows_of_b_and_nothing_else() -> None:
    name = "own.sm90_grouped.e4m3_e4m3_bf16_f32.block_scaled.tile128x192.cluster_n1.serial.cooperative.share_b.sm_90a"
    assert legal_values(name, "cluster_n") == {1}
    assert legal_values(name, "tile_m") == {64, 128}


def test_clusters_of_a_grouped_gemm_may_be_any_that_are_portable() -> None:
    name = "own.sm90_grouped.bf16_bf16_bf16_f32.tile192x128.cluster_n1.serial.cooperative.sm_90a"
    assert legal_values(name, "cluster_n") == {*range(1, 9)}
