"""Which version of this distribution runs, for archives and people to tell."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

UNKNOWN = "unknown"
_DISTRIBUTION = "cute-aot"
_PROJECT = Path(__file__).parent.parent / "pyproject.toml"  # of a source tree; an install has none there
_VERSION = re.compile(rf'^name = "{_DISTRIBUTION}"\nversion = "([^"]+)"$', re.MULTILINE)


def own_version() -> str:
    """The version of the code that runs: that of its source tree, installed or not, else that of the install; `UNKNOWN`
    where neither says."""
    with contextlib.suppress(OSError, ValueError):
        if found := _VERSION.search(_PROJECT.read_text(encoding="utf-8")):
            return found[1]
    from importlib import metadata  # which takes longer to import than all of this

    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return UNKNOWN
