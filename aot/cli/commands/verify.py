"""`aot verify`: every check of an archive that needs no GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from runtime.container.archive import FileUnreadable, NotAnArchive
from runtime.errors import ArchiveError

from ..arguments import ArchivePath, Json, examples
from ..inputs import open_archive
from ..streams import print_json, printable, say

if TYPE_CHECKING:
    from ...verify.archive import Finding

EXAMPLES = examples("aot verify model.aot")


def command(archive: ArchivePath, as_json: Json = False) -> None:
    """Check an archive: every digest, record, launch and table. Exit status 1 where a check fails."""
    from ...verify import archive as verify

    try:
        with open_archive(archive) as opened:
            checks = verify.verify(opened)
    except (FileUnreadable, NotAnArchive):
        raise
    except ArchiveError as error:
        checks = [verify.Finding("header and index", False, str(error))]
    failed = [check for check in checks if not check.ok]
    if as_json:
        print_json({"ok": not failed, "checks": [check._asdict() for check in checks]})
    else:
        print_checks(verify.causes(checks), [check for check in checks if check.warning])
        found = f"{len(failed)} of {len(checks)} checks failed" if failed else f"{len(checks)} checks, all good"
        say(f"{archive}: {found}")
    if failed:
        raise typer.Exit(1)


def print_checks(causes: Iterable[tuple[Finding, int]], warned: Iterable[Finding]) -> None:
    """What `aot verify` prints: each cause of failed checks, how many others it brought down, and each warning."""
    for check, others in causes:
        name = check.subject.rpartition(" ")[2]
        say(f"{check.subject}: {check.detail.removeprefix(f'function {name}: ')}")
        if others:
            print(f"  and {others} checks that need it" if others > 1 else "  and 1 check that needs it")
    for check in warned:
        print(printable(f"warning: {check.subject}: {check.warning}"))
