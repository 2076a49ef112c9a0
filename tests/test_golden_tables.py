"""The golden tables of operations: today's reader reads them, today's writer writes them, docs/records.md names their
fields."""

from __future__ import annotations

import copy
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from aot.verify import archive as verify
from runtime.container import canonical
from runtime.container.archive import Archive
from runtime.errors import RecordError
from runtime.program.operation import operation
from runtime.tables import table

from .golden import TARGET
from .golden_tables import GoldenTable

HERE = Path(__file__).parent
MODULES = [importlib.import_module(f"tests.{path.parent.name}.golden") for path in sorted(HERE.glob("*/golden.py"))]
TABLES: list[GoldenTable] = [found for module in MODULES for found in getattr(module, "TABLES", None) or [module.TABLE]]

each = pytest.mark.parametrize("of", TABLES, ids=lambda of: of.operation)


def stored(of: GoldenTable) -> bytes:
    return of.path.read_bytes().rstrip(b"\n")


@each
def test_reader_reads_the_golden_table(of: GoldenTable) -> None:
    with Archive.open(of.archive) as archive:
        assert [found for found in verify.verify(archive) if not found.ok or found.warning] == []
        found, targets = archive.table(of.operation), archive.functions.targets_by_name()
    assert canonical.dumps(found) == stored(of)
    read = [(e.signature, e.ranges, e.candidates) for e in table.read(found, operation(of.operation), targets)]
    wanted = [(signature, source.name) for signature, (source, _) in of.entries.items()]
    assert read == [(signature, ((None, name),), ((16, (name,)),)) for signature, name in wanted]


@each
def test_writer_writes_the_golden_table(of: GoldenTable) -> None:
    assert canonical.dumps(of.document()) == stored(of)


@each
def test_page_names_every_field_of_its_signatures(of: GoldenTable) -> None:
    page = (HERE.parent / "docs" / "records.md").read_text()
    (said,) = re.findall(rf"^\| `{of.operation}` \| ([^;|]*)", page, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", said)) == set(json.loads(stored(of))["entries"][0]["signature"])


@each
@pytest.mark.parametrize("place", [[], ["entries", 0], ["entries", 0, "signature"]])
def test_unknown_field_is_refused(of: GoldenTable, place: list[Any]) -> None:
    obj = inner = copy.deepcopy(of.document())
    for key in place:
        inner = inner[key]
    inner["unknown"] = 1
    with pytest.raises(RecordError, match="exactly the fields"):
        table.read(obj, operation(of.operation), {source.name: TARGET for source, _ in of.entries.values()})
