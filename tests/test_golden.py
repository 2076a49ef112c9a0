"""Golden files: today's reader reads them, today's writer writes the same bytes, docs/records.md names all in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aot.pack import build_table, forms, timings, tuning_table
from aot.tune import history
from aot.verify import archive as verify
from runtime.container import canonical
from runtime.container.archive import Archive
from runtime.device.launch import ATTRIBUTE_WORDS
from runtime.gemm.operation import GEMM
from runtime.gemm.universal import INPUTS, Universal
from runtime.numbers.dtypes import DTYPES
from runtime.program import arithmetic, costs
from runtime.program.arguments import DEVICE_PROPERTIES, SCALAR_DTYPES
from runtime.tables.dispatch import Dispatch

from . import golden
from .golden_programs import evaluated_costs, evaluated_launches

PAGE = (Path(__file__).parents[1] / "docs" / "records.md").read_text()
TABLES = ("build", "gemm", "history", "tuning", "universal")
FUNCTIONS = tuple(source.name for source, _ in golden.records())


@pytest.fixture(scope="module")
def archive() -> Iterator[Archive]:
    with Archive.open(golden.ARCHIVE) as opened:
        yield opened


def stored(name: str) -> bytes:
    return (golden.FOLDER / f"{name}.json").read_bytes().rstrip(b"\n")


def loaded(name: str) -> Any:
    return json.loads(stored(name))


# --- reading ---


def test_reader_reads_each_golden_document(archive: Archive) -> None:
    assert [found for found in verify.verify(archive) if not found.ok or found.warning] == []
    targets = archive.functions.targets_by_name()
    tuned, ranked = Dispatch.from_json(archive.table("gemm"), GEMM, targets).entries
    assert tuned.signature == ranked.signature == golden.PLAIN
    assert (tuned.gpu, ranked.gpu, ranked.invariant, ranked.torch_faster) == (golden.H200, None, None, ())
    assert tuned.ranges == ((64, golden.SMALL), (None, golden.LARGE))
    assert tuned.invariant_ranges == ((None, golden.LARGE),)
    assert ranked.candidates == ((16, (golden.LARGE,)),)
    assert [(row["m"], row["us"], row["ratio"]) for row in timings.read(tuned)] == [(16, 5.125, 1.268), (64, 6.0, 1.0)]
    universal = Universal.from_json(archive.table("universal"), targets)
    ((_, form),) = universal.forms
    assert [(f.name, f.equal_bits) for f in form.functions] == [(golden.SMALL, 0), (golden.LARGE, 1)]
    (model,) = build_table.read(archive).models
    assert model.problems == [build_table.Problem("up", golden.PLAIN.key(), 32)]
    (machine,) = tuning_table.read(archive)
    assert machine["tolerance"] == 0.01
    (seen,) = history.tunings(archive)
    assert history.measured(seen["names"], seen["points"][0]).times[0][1].us == 5.12


def test_golden_archive_holds_the_golden_documents(archive: Archive) -> None:
    for name in FUNCTIONS:
        assert canonical.dumps(archive.record(name)) == stored(name.split(".")[1])
    assert tuple(archive.tables) == TABLES
    for name in TABLES:
        assert canonical.dumps(archive.table(name)) == stored(name)


@pytest.mark.parametrize("in_python", [False, True])
def test_golden_programs_evaluate_to_what_they_did(in_python: bool) -> None:
    assert json.loads(json.dumps(evaluated_launches(in_python))) == loaded("launches")
    for now, then in zip(evaluated_costs(in_python), loaded("costs"), strict=True):
        assert now["inputs"] == then["inputs"]
        assert now["results"] == pytest.approx(then["results"], rel=1e-14)  # libms may differ in the last bit


def test_golden_program_has_every_operation() -> None:
    nodes = loaded("every")["program"]["nodes"]
    inside = [node for loop in nodes if loop[0] == "loop" for part in (loop[5], loop[7]) for node in part]
    assert {node[0] for node in [*nodes, *inside]} == arithmetic.OPERATIONS
    flags = {flag for node in nodes if len(node) == 5 and type(node[4]) is list for flag in node[4]}
    assert flags == set(arithmetic.FLAGS)
    (program,) = loaded("universal")["programs"]
    assert set(program["operations"].split()) == set(costs.OPERATIONS)


# --- writing ---


@pytest.mark.parametrize("name", [*(name.split(".")[1] for name in FUNCTIONS), *TABLES])
def test_writer_writes_the_golden_document(name: str) -> None:
    assert canonical.dumps(golden.documents()[name]) == stored(name)


def test_writer_writes_the_golden_archive(tmp_path: Path, archive: Archive) -> None:
    """But for how zstd compresses, which is its version's matter."""
    golden.package().write(tmp_path / "again.aot")
    with Archive.open(tmp_path / "again.aot") as again:
        shape = [(block.kind, block.raw_length, block.blobs) for block in archive.blocks]
        assert [(block.kind, block.raw_length, block.blobs) for block in again.blocks] == shape
        assert dict(again.functions) == dict(archive.functions)
        for name in FUNCTIONS:
            assert again.cubin(name) == archive.cubin(name)
            assert again.record(name) == archive.record(name)
        assert {name: again.table(name) for name in TABLES} == {name: archive.table(name) for name in TABLES}


# --- the page ---


def _fields(obj: Any) -> Iterator[str]:
    if isinstance(obj, dict):
        for name, value in obj.items():
            yield name
            yield from _fields(value)
    elif isinstance(obj, list):
        for value in obj:
            yield from _fields(value)


NAMES = {"symbols", "checked_on", "ranking", "tools", "providers", "rejected"}  # fields whose keys are names of things


def _without_names(obj: Any) -> Any:
    if isinstance(obj, dict):
        found = {
            name: list(value.values()) if name in NAMES and isinstance(value, dict) else value
            for name, value in obj.items()
        }
        return {name: _without_names(value) for name, value in found.items()}
    return [_without_names(value) for value in obj] if isinstance(obj, list) else obj


def named(word: str) -> bool:
    """Whether the page has `word` as code, alone or among others."""
    return re.search(rf"`[^`\n]*(?<![\w.]){re.escape(word)}(?!\w)[^`\n]*`", PAGE) is not None


@pytest.mark.parametrize("name", [*(name.split(".")[1] for name in FUNCTIONS), *TABLES])
def test_page_names_every_field_of_the_golden_documents(name: str) -> None:
    assert sorted({field for field in _fields(_without_names(loaded(name))) if not named(field)}) == []


def test_page_names_every_word_that_a_document_may_have() -> None:
    kinds = {"tensor", "scalar", "device", "workspace", "stream", "none", "tuple", "raw", "tma"}
    words = {*arithmetic.OPERATIONS, *arithmetic.FLAGS, *costs.OPERATIONS, *INPUTS, *kinds, *DTYPES}
    words |= {*SCALAR_DTYPES, *DEVICE_PROPERTIES, *map(str, ATTRIBUTE_WORDS), "tuned", "ranked", *forms.WORDS}
    assert sorted(word for word in words if not named(word)) == []


def test_example_of_the_page_is_golden() -> None:
    (example,) = re.findall(r"^```json\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert json.loads(example) == loaded("double")["program"]
