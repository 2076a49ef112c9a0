"""scripts/correct_universal.py: a universal table is written anew from the times in its archive."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import runtime
from aot.search import universal
from aot.tune import times
from runtime.container.archive import Archive
from runtime.errors import AotError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import correct_universal

OF_FORMS = "universal"


ROOT = Path(__file__).resolve().parent.parent


def corrected(archive: Archive, path: Path, gpus: Sequence[str] = ("h200", "h100")) -> Archive:
    besides = [at for gpu in gpus for at in times.load(ROOT / f"benchmarks/drawn_{gpu}.json.xz", "sm_90a")]
    correct_universal.corrected(archive, besides).write(path)
    return Archive.open(path)


@pytest.mark.long
def test_a_table_is_what_todays_estimates_and_the_archives_times_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = Archive.open(runtime.universal())
    once = corrected(archive, tmp_path / "once.aot")
    assert corrected(once, tmp_path / "again.aot").table(OF_FORMS) == once.table(OF_FORMS)
    assert once.table(OF_FORMS) == archive.table(OF_FORMS), "the package's is what the script makes today"
    assert corrected(archive, tmp_path / "of_one.aot", ["h200"]).table(OF_FORMS) != once.table(OF_FORMS)
    monkeypatch.setattr(universal, "_LIKELY_0", 1e9)
    other = corrected(archive, tmp_path / "other.aot").table(OF_FORMS)
    forms = archive.table(OF_FORMS)["forms"]
    assert [f["checked_on"] for f in other["forms"]] == [f["checked_on"] for f in forms]
    assert other != once.table(OF_FORMS)


def test_an_archive_without_times_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correct_universal, "TARGET", "sm_80")
    with pytest.raises(AotError, match="has no forms with times of sm_80; tune it first"):
        correct_universal.corrected(Archive.open(runtime.universal()))
