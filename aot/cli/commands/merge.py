"""`aot merge`: two archives in one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..arguments import Force, Json, Output, examples
from ..inputs import open_archive, refuse_outputs
from ..output import require_replaceable
from ..repacked import print_written

EXAMPLES = examples("aot merge h100.aot h200.aot -o both.aot")


def command(
    one: Annotated[Path, typer.Argument(metavar="A", help="An .aot file.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="Another, whose entries stand where both have one.")],
    output: Output,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write what A and B hold into one archive. Of an entry for the same signature, target and kind of GPU, that of B
    stands, and so does its form of the same words and target."""
    from ...repack import beside, contents, merged, write

    refuse_outputs(output, [one, other])
    require_replaceable(output, force, keep_tuned=True)
    with open_archive(one) as first, open_archive(other) as second:
        new = contents(second)
        stays = beside(contents(first), new)
        write(output, [(first, stays), (second, new)], merged(stays, new))
        before = len(first.functions) + len(second.functions), first.file_bytes + second.file_bytes
    print_written(output, before, as_json)
