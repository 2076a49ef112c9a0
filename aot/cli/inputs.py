"""What a command reads, refused by what it is: the wrong kind of file, or one that the command would write over.

Knows of a file its kind, and leaves what is in it to those who read it.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable
from pathlib import Path

from runtime.container.archive import Admit, Archive
from runtime.container.errors import NotAnArchive
from runtime.errors import AotError


class InputRefused(AotError):
    """A file that is there, and not what the command takes."""


def open_archive(path: Path, admit: Admit | None = None) -> Archive:
    """The archive at `path`, opened, if `admit` lets it.

    Raises:
        InputRefused: it is a manifest.
        ArchiveError: it is another file, or damaged.
    """
    try:
        return Archive.open(path, admit)
    except NotAnArchive:
        from ..problem.manifest import lists_gemms

        if lists_gemms(path):
            raise InputRefused(
                f"{path}: is a manifest, not an archive; `aot build {shlex.quote(str(path))} -o OUT` makes an archive "
                "of it"
            ) from None
        raise


def refuse_outputs(output: Path, inputs: Iterable[Path]) -> None:
    """Keep a command from writing over what it reads.

    Raises:
        InputRefused: the output is one of the inputs.
    """
    for path in inputs:
        with contextlib.suppress(OSError):
            if output.samefile(path):
                raise InputRefused(f"{output}: is an input too, which would be lost; name another output")
