"""What a command may write over, asked before its work: never without `--force` what could not be made again."""

from __future__ import annotations

import itertools
from pathlib import Path

from runtime.container.archive import Archive
from runtime.errors import AotError

from ..files import destination

_STANDARD_OUTPUT = ("-", "/dev/stdout", "/dev/fd/1")


class OutputRefused(AotError):
    """The output is there, and replacing it would lose something."""


def require_replaceable(output: Path, force: bool, keep_tuned: bool = False) -> None:
    """Refuse to replace a file that is no archive, and with `keep_tuned` an archive that holds tuned entries, or forms
    whose functions were checked on a GPU.

    An empty file holds nothing to lose. `force` allows every file.

    Raises:
        OutputRefused: there is such a file.
        OutputError: nothing can be written there, whatever is forced.
    """
    if str(output) in _STANDARD_OUTPUT:
        raise OutputRefused(f"{output}: an archive is not written to standard output; name a file")
    found = destination(output)
    if force or not found.exists() or not found.stat().st_size:
        return
    try:
        held = _made_on_a_gpu(found)
    except AotError as error:
        reason = str(error).removeprefix(f"{found}: ").partition(";")[0]
        raise OutputRefused(
            f"{output}: is there and is no archive that can be read ({reason}); name another output, or give --force "
            "to replace it"
        ) from None
    if keep_tuned and held:
        raise OutputRefused(
            f"{output}: holds {' and '.join(held)}, which a build would replace; name another output, or give --force "
            "to lose them"
        )


def _made_on_a_gpu(path: Path) -> list[str]:
    """What of an archive needs a GPU to make again, in words."""
    from ..pack import forms, tables  # which take long to import

    found = []
    with Archive.open(path) as archive:
        archive.check_blocks()
        if tuned := sum(entry.state == "tuned" for entry in tables.operation_entries(archive)):
            found.append(f"{tuned} tuned {'entry' if tuned == 1 else 'entries'}")
        universal = forms.read(archive)
        checked = [] if universal is None else [form.checked_on for _, form in universal.forms if form.checked_on]
        if checked:
            names = dict.fromkeys(itertools.chain.from_iterable(checked))
            count = f"{len(checked)} {'form' if len(checked) == 1 else 'forms'}"
            found.append(f"{count} whose functions were checked on {', '.join(names)}")
    return found
