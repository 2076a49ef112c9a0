"""The golden table of grouped GEMM: today's reader reads it, its writer writes it, docs/records.md names its fields."""

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
from runtime.grouped_gemm import GROUPED_GEMM
from runtime.tables import table

from ..command_line import ROOT
from ..golden import TARGET
from . import golden
from .golden import EXPERTS

STORED = (golden.FOLDER / "grouped_gemm.json").read_bytes().rstrip(b"\n")


@pytest.fixture(scope="module")
def archive() -> Iterator[Archive]:
    with Archive.open(golden.ARCHIVE) as opened:
        yield opened


def test_reader_reads_the_golden_table(archive: Archive) -> None:
    assert [found for found in verify.verify(archive) if not found.ok or found.warning] == []
    assert canonical.dumps(archive.table("grouped_gemm")) == STORED
    plain, gated = table.read(archive.table("grouped_gemm"), GROUPED_GEMM, archive.functions.targets_by_name())
    assert (plain.signature, plain.ranges, plain.candidates) == (golden.PLAIN, ((None, EXPERTS),), ((16, (EXPERTS,)),))
    assert (gated.signature, gated.names) == (golden.GATED, (golden.GATED_EXPERTS,))


def test_writer_writes_the_golden_table() -> None:
    assert canonical.dumps(golden.document()) == STORED


def test_page_names_every_field_of_its_signatures() -> None:
    page = (ROOT / "docs" / "records.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| `signature`"))
    (said,) = re.findall(r"in `grouped_gemm`: ([^;|]*)", row)
    assert set(re.findall(r"`(\w+)`", said)) == set(json.loads(STORED)["entries"][0]["signature"])


@pytest.mark.parametrize("place", [[], ["entries", 0], ["entries", 0, "signature"]])
def test_unknown_field_is_refused(place: list[Any]) -> None:
    obj = inner = copy.deepcopy(golden.document())
    for key in place:
        inner = inner[key]
    inner["unknown"] = 1
    with pytest.raises(RecordError, match="exactly the fields"):
        table.read(obj, GROUPED_GEMM, {EXPERTS: TARGET, golden.GATED_EXPERTS: TARGET})
