"""What commands that make an archive of others say of it."""

from __future__ import annotations

from pathlib import Path

from runtime.container.archive import Archive

from .arguments import count
from .layout import print_wrapped
from .streams import print_json, printable


def print_written(path: Path, before: tuple[int, int], as_json: bool) -> None:
    """Say what is in the archive that was written, beside the functions and bytes that there were `before`."""
    from ..pack.tables import operation_entries

    with Archive.open(path) as archive:
        entries, functions, size = operation_entries(archive), len(archive.functions), archive.file_bytes
    if as_json:
        return print_json(
            {
                "archive": str(path),
                "entries": len(entries),
                "functions": functions,
                "bytes": size,
                "functions_before": before[0],
                "bytes_before": before[1],
            }
        )
    of = f"{functions} of {count(before[0], 'function')}, {size:,} of {before[1]:,} bytes"
    print_wrapped(f"{printable(str(path))}: {count(len(entries), 'entry', 'entries')}, {of}")
