"""`aot report`: an archive as one web page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from runtime.errors import AotError

from ...files import destination, file
from ..arguments import ArchivePath, Force, Json, examples
from ..inputs import open_archive, refuse_outputs
from ..output import OutputRefused
from ..streams import print_json
from ..tables import cleaned

EXAMPLES = examples("aot report model.aot -o report.html", "aot report model.aot --json")
_LOOKED_AT_BYTES = 4096  # of a page, which names there what made it


def command(
    archive: ArchivePath,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The HTML file to write.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write an archive as one web page. What it serves, how fast, and what is wrong with its tables; code is not read
    (`aot verify` does that), and the page needs no network. With --json print its data instead."""
    from ...inspect.report.data import report

    if (output is None) != as_json:
        raise AotError("give -o FILE for the page, or --json for its data")
    if output is None:
        with open_archive(archive) as opened:
            return print_json(report(opened))
    from ...report.page import GENERATOR, page  # which needs an extra

    refuse_outputs(output, [archive])
    path = destination(output)
    if not force:
        _require_replaceable(path, f'content="{GENERATOR}"'.encode())
    with open_archive(archive) as opened:
        data = page(cleaned(report(opened))).encode()
    try:
        with file(path.parent, f".{path.name}.", 0o666) as (written, stream):
            stream.write(data)
            stream.flush()
            os.replace(written, path)
    except OSError as error:
        raise AotError(f"{output}: cannot be written ({error.strerror}); name another output") from None


def _require_replaceable(path: Path, mark: bytes) -> None:
    """Refuse to replace a file that is neither empty nor a page of this command, which has `mark`."""
    if not path.exists():
        return
    try:
        with open(path, "rb") as opened:
            begins = opened.read(_LOOKED_AT_BYTES)
    except OSError as error:
        raise OutputRefused(
            f"{path}: cannot be read ({error.strerror}); name another output, or give --force"
        ) from None
    if begins and mark not in begins:
        raise OutputRefused(f"{path}: is there and is no report; name another output, or give --force to replace it")
