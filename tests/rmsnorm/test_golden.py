"""The golden table of RMSNorm: today's reader reads it, today's writer writes it, docs/records.md names its fields."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from aot.verify import archive as verify
from runtime.container import canonical
from runtime.container.archive import Archive
from runtime.errors import RecordError
from runtime.rmsnorm import RMSNORM
from runtime.tables import table

from ..command_line import ROOT
from ..golden import NORM, TARGET
from . import golden

STORED = (golden.FOLDER / "rmsnorm.json").read_bytes().rstrip(b"\n")


@pytest.fixture(scope="module")
def archive() -> Iterator[Archive]:
    with Archive.open(golden.ARCHIVE) as opened:
        yield opened


def test_reader_reads_the_golden_table(archive: Archive) -> None:
    assert [found for found in verify.verify(archive) if not found.ok or found.warning] == []
    assert canonical.dumps(archive.table("rmsnorm")) == STORED
    (norm,) = table.read(archive.table("rmsnorm"), RMSNORM, archive.functions.targets_by_name())
    assert (norm.signature, norm.ranges, norm.candidates) == (golden.ROWS, ((None, NORM),), ((16, (NORM,)),))


def test_writer_writes_the_golden_table() -> None:
    assert canonical.dumps(golden.document()) == STORED


def test_page_names_every_field_of_its_signatures() -> None:
    page = (ROOT / "docs" / "records.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| `signature`"))
    (said,) = re.findall(r"in `rmsnorm`: ([^;|]*)", row)
    assert set(re.findall(r"`(\w+)`", said)) == set(json.loads(STORED)["entries"][0]["signature"])


@pytest.mark.parametrize("place", [[], ["entries", 0], ["entries", 0, "signature"]])
def test_unknown_field_is_refused(place: list[Any]) -> None:
    obj = inner = copy.deepcopy(golden.document())
    for key in place:
        inner = inner[key]
    inner["unknown"] = 1
    with pytest.raises(RecordError, match="exactly the fields"):
        table.read(obj, RMSNORM, {NORM: TARGET})
