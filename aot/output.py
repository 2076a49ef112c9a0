"""What a command may write over, asked before its work: never without `--force` what could not be made again."""

from __future__ import annotations

from pathlib import Path

from runtime.archive import Archive
from runtime.dispatch import Dispatch
from runtime.errors import AotError

from .pack import destination

_STANDARD_OUTPUT = ("-", "/dev/stdout", "/dev/fd/1")


class OutputRefused(AotError):
    """The output is there, and replacing it would lose something."""


def require_replaceable(output: Path, force: bool, keep_tuned: bool = False) -> None:
    """Refuse to replace a file that is no archive, and with `keep_tuned` an archive that holds tuned entries.

    An empty file holds nothing to lose. `force` allows every file.

    Raises:
        OutputRefused: there is such a file.
        PackError: nothing can be written there, whatever is forced.
    """
    if str(output) in _STANDARD_OUTPUT:
        raise OutputRefused(f"{output}: an archive is not written to standard output; name a file")
    found = destination(output)
    if force or not found.exists() or not found.stat().st_size:
        return
    try:
        tuned = _tuned_entries(found)
    except AotError as error:
        reason = str(error).removeprefix(f"{found}: ").partition(";")[0]
        raise OutputRefused(
            f"{output}: is there and is no archive that can be read ({reason}); name another output, or give --force "
            "to replace it"
        ) from None
    if keep_tuned and tuned:
        entries = f"{tuned} tuned {'entry' if tuned == 1 else 'entries'}"
        raise OutputRefused(
            f"{output}: holds {entries}, which a build would replace; name another output, or give --force to lose them"
        )


def _tuned_entries(path: Path) -> int:
    with Archive.open(path) as archive:
        archive.check_blocks()
        if "gemm" not in archive.tables:
            return 0
        entries = Dispatch.from_json(archive.table("gemm"), archive.functions.targets_by_name()).entries
    return sum(entry.state == "tuned" for entry in entries)
