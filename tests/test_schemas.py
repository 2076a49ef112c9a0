"""Schemas of documents: other numbers are refused in one line, unknown fields where they would decide what runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aot.pack import build_table, tuning_table
from aot.pack.write import Package
from aot.tune import history
from runtime import Library
from runtime.container.archive import Archive
from runtime.errors import RecordError, UnsupportedSchema
from runtime.gemm.operation import GEMM
from runtime.gemm.universal import Universal
from runtime.program.record import Record
from runtime.serve.layers import open_archives
from runtime.tables import table

from . import golden
from .command_line import Run
from .recording_driver import RecordingDriver
from .row_scale.archives import OF
from .row_scale.operation import ROW_SCALE

OTHER = table.write([golden.ranked(OF, golden.NORM)])  # the table of an operation besides GEMM
DOCUMENTS = golden.documents() | {"row_scale": OTHER}
TARGETS = dict.fromkeys((golden.SMALL, golden.LARGE, golden.NORM), golden.TARGET)


class _OneTable:
    """Of an archive, what readers of tables for people look at."""

    path = "x.aot"

    def __init__(self, name: str, obj: Any) -> None:
        self.tables, self._obj = {name: 0}, obj

    def table(self, name: str) -> Any:
        return self._obj


def _of_archive(read: Callable[[Any], Any], name: str) -> Callable[[Any], Any]:
    return lambda obj: read(_OneTable(name, obj))


READERS: dict[str, Callable[[Any], Any]] = {
    "every": Record.from_json,
    "gemm": lambda obj: table.read(obj, GEMM, TARGETS),
    "row_scale": lambda obj: table.read(obj, ROW_SCALE, TARGETS),
    "universal": lambda obj: Universal.from_json(obj, TARGETS),
    "build": _of_archive(build_table.read, "build"),
    "tuning": _of_archive(tuning_table.read, "tuning"),
    "history": _of_archive(history.tunings, "history"),
}
SCHEMAS = dict.fromkeys(READERS, 1) | {"universal": 2}
SAID = (
    r"(record|table \w+|\w+ table): this version reads schema {}, found {}; build the archive again with this version$"
)


def document(name: str) -> Any:
    return copy.deepcopy(DOCUMENTS[name])


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("found", "said"), [(0, "0"), (3, "3"), (True, "True"), ("1", "'1'"), (1.0, "1.0"), (None, "None")]
)
def test_document_of_another_schema_is_refused_in_one_line(name: str, found: Any, said: str) -> None:
    with pytest.raises(UnsupportedSchema, match=SAID.format(SCHEMAS[name], f"schema {said}")) as refused:
        READERS[name](document(name) | {"schema": found})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", READERS)
def test_document_from_before_there_were_schemas_is_refused(name: str) -> None:
    obj = document(name)
    del obj["schema"]
    with pytest.raises(UnsupportedSchema, match=SAID.format(SCHEMAS[name], "none")):
        READERS[name](obj)


PLACES: dict[str, list[list[Any]]] = {
    "every": [
        [],
        ["arguments", 0],
        ["arguments", 1, "items", 0],
        ["symbols", "m"],
        ["kernels", 0],
        ["program"],
        ["program", "launches", 0],
        ["program", "launches", 0, "parameters", 0],
    ],
    "gemm": [[], ["gpus", 0], ["entries", 0], ["entries", 0, "signature"]],
    "row_scale": [[], ["entries", 0], ["entries", 0, "signature"]],
    "universal": [[], ["forms", 0], ["forms", 0, "form"], ["programs", 0]],
    "build": [[], ["models", 0], ["models", 0, "gemms", 0]],
    "tuning": [[], ["environments", 0]],
    "history": [[], ["tunings", 0], ["tunings", 0, "points", 0]],
}


def _with_unknown(name: str, place: list[Any]) -> Any:
    obj = inner = document(name)
    for key in place:
        inner = inner[key]
    inner["unknown"] = 1
    return obj


def _read_all(name: str, obj: Any) -> Any:
    found = READERS[name](obj)
    return [form.costs for _, form in found.forms] if name == "universal" else found


STRICT = [(name, place) for name in ("every", "gemm", "row_scale", "universal") for place in PLACES[name]]
LENIENT = [(name, place) for name in ("build", "tuning", "history") for place in PLACES[name]]


@pytest.mark.parametrize(("name", "place"), STRICT)
def test_unknown_field_of_what_decides_what_runs_is_refused(name: str, place: list[Any]) -> None:
    with pytest.raises(RecordError, match="exactly the fields"):
        _read_all(name, _with_unknown(name, place))


@pytest.mark.parametrize(("name", "place"), LENIENT)
def test_unknown_field_of_a_table_for_people_is_let_be(name: str, place: list[Any]) -> None:
    _read_all(name, _with_unknown(name, place))


def test_field_that_is_absent_from_the_gemm_table_is_null_or_empty() -> None:
    obj = document("gemm")
    _, written = obj["entries"]
    assert {"gpu", "invariant", "tuned_to", "torch_faster", "apart", "timings"}.isdisjoint(written)
    spelled: dict[str, Any] = {
        "gpu": None,
        "tuned_to": None,
        "invariant": None,
        "torch_faster": [],
        "apart": [],
        "timings": [],
    }
    assert table.read(obj | {"entries": [obj["entries"][0], written | spelled]}, GEMM, TARGETS) == table.read(
        obj, GEMM, TARGETS
    )
    assert (
        table.read(table.write([]), GEMM, TARGETS)
        == table.read({"schema": 1, "gpus": [], "entries": []}, GEMM, TARGETS)
        == ()
    )


@pytest.mark.parametrize("field", ["signature", "target", "state", "functions", "ranges"])
def test_field_that_an_entry_must_have_is_missed(field: str) -> None:
    obj = document("gemm")
    del obj["entries"][0][field]
    with pytest.raises(RecordError, match="gemm table entry 0: needs exactly the fields"):
        table.read(obj, GEMM, TARGETS)


def test_form_without_equal_bits_promises_none_and_no_gpu_checked_what_is_not_said() -> None:
    obj = document("universal")
    del obj["forms"][0]["checked_on"], obj["forms"][0]["equal_bits"]
    found = Universal.from_json(obj, TARGETS)
    ((_, form),) = found.forms
    assert [f.equal_bits for f in form.functions] == [0, 0]
    assert form.checked_on == ()


def test_build_table_may_say_nothing() -> None:
    found = build_table.read(_OneTable("build", {"schema": 1}))  # type: ignore[arg-type]
    assert (*found,) == ((), (), {}, None, {}, {}, (), (), None)


# --- an archive from before there were schemas ---


@pytest.fixture
def old(tmp_path: Path) -> Path:
    package = Package()
    with Archive.open(golden.ARCHIVE) as archive:
        for name in archive.functions:
            record = archive.record(name)
            del record["schema"]
            package.add_function(record, archive.cubin(name))
        for name in archive.tables:
            package.set_table(name, {k: v for k, v in archive.table(name).items() if k != "schema"})
    package.write(tmp_path / "old.aot")
    return tmp_path / "old.aot"


def test_command_line_says_of_an_old_archive_what_to_run(run: Run, old: Path) -> None:
    for command in ("ls", "verify"):
        result = run(command, old)
        assert result.status == {"ls": 2, "verify": 1}[command]
        assert "found none; build the archive again with this version" in result.out + result.err


def test_library_says_of_an_old_archive_what_to_run(old: Path) -> None:
    library = Library(open_archives([old]), RecordingDriver())
    with pytest.raises(UnsupportedSchema, match=r"old\.aot: gemm table: .*build the archive again with this version$"):
        library.entry(golden.PLAIN)
    with pytest.raises(UnsupportedSchema, match=r"old\.aot: record: .*build the archive again with this version$"):
        _ = library.functions["golden.double.sm_90a"].record
