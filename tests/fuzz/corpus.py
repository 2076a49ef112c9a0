"""Corpora of fuzzers: inputs in a zip of the tree, each named by its digest."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

MOST_BYTES = 150_000  # of a zip: a corpus is in the tree, and what is left out is soon found again
_INDEX_BYTES = 80  # of a zip for each member, written at its end
_DATE = (1980, 1, 1, 0, 0, 0)  # of members: equal corpora are equal files


def load(path: Path, folder: Path) -> int:
    """Unpack a corpus into `folder`, if there is one; how many inputs it has."""
    if not path.exists():
        return 0
    with zipfile.ZipFile(path) as packed:
        names = packed.namelist()
        for name in names:
            (folder / Path(name).name).write_bytes(packed.read(name))
    return len(names)


def inputs(path: Path) -> list[bytes]:
    """The inputs of a corpus."""
    with zipfile.ZipFile(path) as packed:
        return [packed.read(name) for name in packed.namelist()]


def save(folder: Path, path: Path) -> int:
    """Pack the inputs in `folder`, the smallest first, as far as there is room; how many."""
    found = sorted({file.read_bytes() for file in folder.iterdir()}, key=lambda data: (len(data), data))
    path.parent.mkdir(exist_ok=True)
    kept = 0
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for data in found:
            if path.stat().st_size + len(data) + _INDEX_BYTES * kept > MOST_BYTES:
                break
            name = zipfile.ZipInfo(hashlib.sha256(data).hexdigest()[:16], _DATE)
            packed.writestr(name, data, zipfile.ZIP_DEFLATED)
            kept += 1
    return kept
