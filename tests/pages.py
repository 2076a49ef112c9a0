"""What pages say, for tests that hold their figures to what these are of."""

from __future__ import annotations

from pathlib import Path

_DOCS = Path(__file__).resolve().parent.parent / "docs"


def text(name: str) -> str:
    """A page of docs/ or docs/kernels/, in one line."""
    (path,) = _DOCS.rglob(f"{name}.md")
    return " ".join(path.read_text().split())


def choosing() -> str:
    """The page on choosing."""
    return text("choosing")
