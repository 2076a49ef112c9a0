"""Every file and section that the documentation and comments name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [
    p for folder in ("aot", "benchmarks", "manifests", "runtime", "scripts") for p in (ROOT / folder).rglob("*.*")
]
TEXTS = [*PAGES, *sorted(p for p in SOURCES if p.suffix in (".py", ".yaml", ".c", ".h"))]

NAMED = re.compile(
    r"\b(?:aot|benchmarks|docs|manifests|runtime|scripts|tests)/[\w./-]*\.(?:py|c|h|md|json|yaml|txt|xz)\b"
)
RESULT = re.compile(r"`(\w+\.(?:json|txt|json\.xz))`")  # as pages name results, without their folder
LINK = re.compile(r"\]\(([\w./-]*\w)?(?:#([\w-]+))?\)")
NO_RESULTS = {"config.json", "COMMIT"}  # files that others have


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(path: Path) -> None:
    missing = [name for name in NAMED.findall(path.read_text()) if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_results_that_pages_name_exist(path: Path) -> None:
    folders = (ROOT / "benchmarks" / "results", ROOT / "benchmarks")
    named = [name for name in RESULT.findall(path.read_text()) if name not in NO_RESULTS]
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for name, section in LINK.findall(path.read_text()):
        target = path.parent / name if name else path
        assert target.exists(), name
        if section:
            assert section in sections(target), f"{name}#{section}"


def sections(path: Path) -> set[str]:
    """The names by which links lead to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
