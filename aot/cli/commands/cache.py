"""`aot cache`: what the build cache holds, and entries of it removed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from runtime.errors import AotError

from ..arguments import Json, count, examples
from ..layout import print_fields, print_wrapped
from ..streams import print_json, printable

INFO = examples("aot cache info", "aot cache info --cache build/cache")
PRUNE = examples("aot cache prune --older-than 30", "aot cache prune --most 2000")
_MB = 1_000_000

Folder = Annotated[
    str | None,
    typer.Option("--cache", metavar="DIR", help="Default: $XDG_CACHE_HOME or ~/.cache, cute-aot."),
]


def info(cache: Folder = None, as_json: Json = False) -> None:
    """Say where the build cache is and how much it holds."""
    from ...inspect.build_cache import entries, summary

    folder = _folder(cache)
    found = summary(folder, entries(folder) if folder.exists() or cache else [])
    if as_json:
        return print_json(found)
    said = [("folder", printable(found["folder"]) + ("" if folder.exists() else ", which is not there yet"))]
    said.append(("holds", f"{count(found['entries'], 'entry', 'entries')}, {found['bytes']:,} bytes"))
    said += [(f"  {k}", f"{of['entries']} of {of['bytes']:,} bytes") for k, of in found["kinds"].items()]
    if found["entries"]:
        said.append(("written", f"{found['oldest_days']:.0f} to {found['newest_days']:.0f} days ago"))
    print_fields(said)


def prune(
    cache: Folder = None,
    older_than: Annotated[
        float | None, typer.Option("--older-than", metavar="DAYS", min=0, help="Remove what was written earlier.")
    ] = None,
    most: Annotated[
        int | None, typer.Option("--most", metavar="MB", min=0, help="Then the oldest, until so much is left.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove entries of the build cache by age or size. A build compiles again what it misses; archives keep what they
    have."""
    from ...inspect.build_cache import entries
    from ...inspect.build_cache import prune as removed

    if older_than is None and most is None:
        raise AotError("nothing says what to remove; give --older-than DAYS or --most MB")
    folder = _folder(cache)
    found = entries(folder)
    gone = removed(found, older_than, None if most is None else most * _MB)
    left = sum(entry.bytes for entry in found) - sum(entry.bytes for entry in gone)
    if as_json:
        return print_json(
            {"folder": str(folder), "removed": len(gone), "entries": len(found) - len(gone), "bytes": left}
        )
    what = f"{len(gone)} of {count(len(found), 'entry', 'entries')} removed"
    print_wrapped(f"{printable(str(folder))}: {what}, {left:,} bytes left")


def _folder(cache: str | None) -> Path:
    from ...compile.cache import default_directory

    folder = default_directory() if cache is None else Path(cache)
    if folder is None or not str(folder):
        raise AotError("this user has no home directory to keep a cache in; name the folder with --cache")
    return folder
