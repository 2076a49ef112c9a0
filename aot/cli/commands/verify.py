"""`aot verify`: every check of an archive that needs no GPU, its signature's among them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.container.errors import FileUnreadable, NotAnArchive
from runtime.errors import AotError, ArchiveError, SignatureError

from ..arguments import ArchivePath, Json, examples
from ..inputs import open_archive
from ..streams import print_json, printable, say

if TYPE_CHECKING:
    from ...verify.archive import Finding

EXAMPLES = examples("aot verify model.aot", "aot verify model.aot --key keys")


def command(
    archive: ArchivePath,
    key: Annotated[
        Path | None,
        typer.Option(metavar="KEYS", help="A public key, or a folder of them with a policy: check the signature too."),
    ] = None,
    signature: Annotated[
        Path | None, typer.Option(metavar="SIG", help="Default: ARCHIVE with .sig behind its name.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check an archive: every digest, record, launch and table, and who signed it. Exit status 1 where a check
    fails."""
    from ...verify import archive as verify

    if signature is not None and key is None:
        raise AotError("--signature is for --key KEYS, which says whose signature counts")
    try:
        checks = _checks(archive) if key is None else _signed_checks(archive, key, signature)
    except (FileUnreadable, NotAnArchive):
        raise
    except ArchiveError as error:
        checks = [verify.Finding("header and index", False, str(error))]
    failed = [check for check in checks if not check.ok]
    if as_json:
        print_json({"ok": not failed, "checks": [check._asdict() for check in checks]})
    else:
        print_checks(verify.causes(checks), [check for check in checks if check.warning])
        if key is not None and not failed:
            say(f"{checks[0].subject}: {checks[0].detail}")
        found = f"{len(failed)} of {len(checks)} checks failed" if failed else f"{len(checks)} checks, all good"
        say(f"{archive}: {found}")
    if failed:
        raise typer.Exit(1)


def _checks(path: Path) -> list[Finding]:
    from ...verify import archive as verify

    with open_archive(path) as opened:
        return verify.verify(opened)


def _signed_checks(path: Path, key: Path, signature: Path | None) -> list[Finding]:
    """The same, the signature first; nothing else is looked at where that is not of this archive."""
    from runtime.signing.check import accepted, signature_path
    from runtime.signing.keys import read_keys

    from ...verify import archive as verify
    from ...verify import signature as signed

    trusted = read_keys(key)
    try:
        found = accepted(str(signature or signature_path(path)), trusted)
    except SignatureError as error:
        with open_archive(path):  # what is no archive is said first
            pass
        return [verify.Finding(signed.SUBJECT, False, str(error))]
    try:
        with open_archive(path, partial(signed.require_of, found)) as opened:
            return [signed.finding(found, opened, trusted), *verify.verify(opened)]
    except signed.NotSigned as error:
        with open_archive(path) as opened:
            return [signed.finding_of_another(found, opened, error)]


def print_checks(causes: Iterable[tuple[Finding, int]], warned: Iterable[Finding]) -> None:
    """What `aot verify` prints: each cause of failed checks, how many others it brought down, and each warning."""
    for check, others in causes:
        name = check.subject.rpartition(" ")[2]
        say(f"{check.subject}: {check.detail.removeprefix(f'function {name}: ')}")
        if others:
            print(f"  and {others} checks that need it" if others > 1 else "  and 1 check that needs it")
    for check in warned:
        print(printable(f"warning: {check.subject}: {check.warning}"))
