"""What a build cache holds and what may go, as plain data: behind `aot cache`. Sizes are bytes.

Knows of an entry its file alone: what it was compiled from is in the digest that names it.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from runtime.errors import AotError

_DAY_S = 24 * 3600.0
_FOLDER, _ENTRY = re.compile(r"[0-9a-f]{2}"), re.compile(r"[0-9a-f]{62}\.([a-z]+)")


class NoCache(AotError):
    """There is no folder, or it cannot be read."""


class Entry(NamedTuple):
    """An entry: its file, what kind it is, its bytes, and when it was written, in seconds since 1970."""

    path: Path
    kind: str
    bytes: int
    written_s: float


def entries(folder: Path) -> list[Entry]:
    """The entries of a cache, the oldest first; other files are let be.

    Raises:
        NoCache: the folder is not there or cannot be read.
    """
    try:
        folders = [entry.path for entry in os.scandir(folder) if _FOLDER.fullmatch(entry.name)]
        found = [entry for path in folders for entry in _entries(path)]
    except OSError as error:
        raise NoCache(
            f"{folder}: cannot be read as a build cache ({error.strerror}); name another with --cache"
        ) from None
    return sorted(found, key=lambda entry: (entry.written_s, entry.path))


def _entries(folder: str) -> Iterator[Entry]:
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        return
    for file in os.scandir(folder):
        match = _ENTRY.fullmatch(file.name)
        if match is not None and file.is_file(follow_symlinks=False):
            found = file.stat(follow_symlinks=False)
            yield Entry(Path(file.path), match[1], found.st_size, found.st_mtime)


def summary(folder: Path, found: list[Entry]) -> dict[str, Any]:
    """How many entries there are, and their bytes, by kind; and how many days ago the oldest and the newest were
    written, None of none."""
    kinds, sizes = Counter(entry.kind for entry in found), Counter[str]()
    for entry in found:
        sizes[entry.kind] += entry.bytes
    return {
        "folder": str(folder),
        "entries": len(found),
        "bytes": sum(sizes.values()),
        "kinds": {kind: {"entries": kinds[kind], "bytes": sizes[kind]} for kind in sorted(kinds)},
        "oldest_days": _days(found[0]) if found else None,
        "newest_days": _days(found[-1]) if found else None,
    }


def _days(entry: Entry) -> float:
    return round(max(0.0, time.time() - entry.written_s) / _DAY_S, 1)


def prune(found: list[Entry], older_than_days: float | None, most_bytes: int | None) -> list[Entry]:
    """Remove entries that were written so many days ago or earlier, then the oldest until no more than `most_bytes` are
    left; those that were removed. A build compiles again what it misses.

    Raises:
        NoCache: one cannot be removed.
    """
    now, left = time.time(), sum(entry.bytes for entry in found)
    gone = []
    for entry in found:
        too_old = older_than_days is not None and now - entry.written_s >= older_than_days * _DAY_S
        if too_old or (most_bytes is not None and left > most_bytes):
            try:
                entry.path.unlink(missing_ok=True)
            except OSError as error:
                raise NoCache(
                    f"{entry.path}: cannot be removed ({error.strerror}); check the folder's permissions"
                ) from None
            gone.append(entry)
            left -= entry.bytes
    return gone
