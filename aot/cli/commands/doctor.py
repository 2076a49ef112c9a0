"""`aot doctor`: what this machine has, what of it does not work, and what to do."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..arguments import Json, examples
from ..layout import print_fields, print_fitted
from ..streams import print_json
from ..tables import cleaned

EXAMPLES = examples("aot doctor", "aot doctor --archive model.aot")

Archives = Annotated[
    list[Path] | None,
    typer.Option("--archive", metavar="ARCHIVE", help="Also whether it serves the GPUs here. May be repeated."),
]


def command(archive: Archives = None, as_json: Json = False) -> None:
    """Say what this machine has: driver, GPUs, native code, compiler, torch, cache, archives, extras; and what to do.
    Exit status 1 where something that is there does not work."""
    from ...inspect.doctor import BROKEN, OK, examine

    found = [asdict(finding) for finding in examine(archive or ())]
    broken = [finding for finding in found if finding["state"] == BROKEN]
    if as_json:
        print_json({"ok": not broken, "findings": found})
    else:
        found = cleaned(found)
        print_fitted(["part", "state", "found"], [[row["part"], row["state"], row["found"]] for row in found])
        if todo := [row for row in found if row["state"] != OK]:
            print()
            print_fields([(row["part"], _remedy(row, row["state"] == BROKEN)) for row in todo])
    if broken:
        raise typer.Exit(1)


def _remedy(row: dict[str, Any], broken: bool) -> str:
    """What to do, after all that is wrong, which a line of the table may have no room for."""
    return f"{row['found']}; {row['remedy']}" if broken else str(row["remedy"])
