"""What pages say, for tests that hold their figures to what these are of."""

from __future__ import annotations

from pathlib import Path

_KERNELS = Path(__file__).resolve().parent.parent / "docs" / "kernels"


def text(name: str) -> str:
    """A page of docs/kernels/, in one line."""
    return " ".join((_KERNELS / f"{name}.md").read_text().split())


def choosing() -> str:
    """The page on choosing."""
    return text("choosing")
