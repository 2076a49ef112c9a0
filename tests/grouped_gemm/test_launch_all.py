"""scripts/launch_all.py gives a grouped GEMM groups that end where its rows do, and leaves out what no table has."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from aot.problem import manifest
from aot.providers.grouped_arguments import grouped_tensors
from aot.search.variants import Variant
from runtime.gemm.signature import Signature as Gemm
from runtime.grouped_gemm import Signature
from runtime.program.record import Record

from ..command_line import ROOT
from ..recording_driver import entry, operands_record, tensors_record, write_archive

pytest.importorskip("torch")
sys.path.insert(0, str(ROOT / "scripts"))

import launch_all

OF = Signature("bf16", "bf16", "bf16", 8, 64, 128)
VARIANT = Variant("test", "test", "sm_90a", (), ("bf16",) * 3, operation="grouped_gemm")
SOURCE = tensors_record("grouped", *grouped_tensors(VARIANT))


def test_functions_are_launched_for_the_signatures_that_tables_have_them_for(tmp_path: Path) -> None:
    write_archive(tmp_path / "x.aot", [SOURCE], [entry(OF.to_json(), [(None, "grouped")])], "grouped_gemm")
    assert launch_all.others(tmp_path / "x.aot") == {"grouped": [OF]}


def test_groups_end_where_rows_do() -> None:
    sets = list(launch_all.given(Record.from_json(SOURCE), [OF], 77, launch_all.EXTENTS, "cpu"))
    assert len(sets) > 1, "those that are seldom drawn too"
    for a, b, ends, d in sets:
        assert (a.shape, b.shape, d.shape) == ((77, 128), (8, 64, 128), (77, 64))
        assert ends.tolist() == sorted(ends.tolist())
        assert ends[-1] in (77, 51), "or in one set before the last rows"


def test_a_gemm_with_prepared_weights_gets_those_of_its_signature(tmp_path: Path) -> None:
    """Whose extents depend on each other in ways that a record does not say."""
    plain = Gemm("bf16", "bf16", "bf16", "f32", "none", 128, 256)
    of = dataclasses.replace(plain, b="e2m1", scaling="mxfp4_weight")
    source = operands_record("w4", of.to_json()), operands_record("plain", plain.to_json())
    entries = [entry(of.to_json(), [(None, "w4")]), entry(plain.to_json(), [(None, "plain")])]
    write_archive(tmp_path / "x.aot", list(source), entries)
    assert launch_all.others(tmp_path / "x.aot") == {"w4": [of]}
    ((a, b, d, scale),) = launch_all.given(Record.from_json(source[0]), [of], 77, launch_all.EXTENTS, "cpu")
    assert (a.shape, b.shape, d.shape, scale.shape) == ((77, 256), (128, 128), (77, 128), (4, 256))


def test_a_function_that_no_table_has_is_left_out() -> None:
    assert list(launch_all.given(Record.from_json(SOURCE), [], 77, launch_all.EXTENTS, "cpu")) == []


def test_weights_of_less_than_a_byte_that_no_table_has_are_left_out() -> None:
    plain = operands_record("plain", Gemm("bf16", "bf16", "bf16", "f32", "none", 128, 256).to_json())
    of_bytes = Record.from_json(plain)
    plain["arguments"][1]["dtype"] = "u4"
    of_less = Record.from_json(plain)
    sets = [list(launch_all.given(record, [], 77, launch_all.EXTENTS, "cpu")) for record in (of_bytes, of_less)]
    assert list(map(len, sets)) == [1, 0]


def test_coverage_has_every_form_of_its_kernels() -> None:
    asked = manifest.loads((ROOT / "tests" / "data" / "coverage.yaml").read_text())
    signatures = [use.signature for use in asked.uses if use.signature.operation == OF.operation]
    assert {s.a for s in signatures} == {"bf16", "f16"}
    assert {s.parts.gated for s in signatures} == {True, False}
