"""`aot sign`: a statement on an archive, signed, in a file beside it."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from runtime.errors import AotError
from runtime.signing.check import signature_path
from runtime.signing.statement import MAX_VERSION

from ..arguments import ArchivePath, examples
from ..inputs import open_archive, refuse_outputs
from ..streams import say

EXAMPLES = examples("aot sign model.aot --key release.key --version 7 --expires 2027-06-30")


def command(
    archive: ArchivePath,
    key: Annotated[list[Path], typer.Option(metavar="FILE", help="A private Ed25519 key in PEM. May be repeated.")],
    name: Annotated[
        str | None, typer.Option(metavar="N", help="What policies call it. Default: as the file, without .aot.")
    ] = None,
    version: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_VERSION, help="Higher than those before. Default: seconds since 1970."),
    ] = None,
    expires: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%SZ"], help="In UTC. Default: never."),
    ] = None,
    ran: Annotated[
        list[str] | None,
        typer.Option("--command", metavar="LINE", help="A command that made it, for provenance. May be repeated."),
    ] = None,
    builder: Annotated[
        str | None, typer.Option(metavar="URI", help="Who ran these, for provenance. Default: not known.")
    ] = None,
    built_here: Annotated[
        bool, typer.Option("--built-here", help="Say, in provenance, what the compiler installed here consists of.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="SIG", help="Default: ARCHIVE with .sig behind its name.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace SIG.")] = False,
) -> None:
    """Sign an archive, so that servers can tell who made it: docs/security.md says how."""
    from ...sign.keys import read_signer
    from ...sign.provenance import UNKNOWN_BUILDER, provenance
    from ...sign.sign import Naming, release_of, signed, write
    from ...sign.tools import installed_contents

    path = output or Path(signature_path(archive))
    refuse_outputs(path, [archive, *key])
    if path.exists() and not force:
        raise AotError(f"{path}: is there; name another output, or give --force to replace it")
    signers = [read_signer(each) for each in key]
    now = datetime.now(timezone.utc).replace(microsecond=0)
    until = None if expires is None else expires.replace(tzinfo=timezone.utc)
    by = builder or UNKNOWN_BUILDER
    naming = Naming(name or archive.stem, version or int(now.timestamp()), now, until)
    with open_archive(archive) as opened:
        contents = installed_contents(opened) if built_here else {}
        release = release_of(opened, naming, provenance(opened, ran or (), by, contents))
    write(path, signed(release, signers))
    ends = "" if until is None else f", until {until:%Y-%m-%d %H:%M:%S} UTC"
    say(f"{path}: {release.name} version {release.version}{ends}")
    for signer in signers:
        say(f"signed by {signer.public_key.keyid}")
