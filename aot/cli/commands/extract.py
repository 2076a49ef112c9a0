"""`aot extract`: the code of one function, or what it takes of an SM."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from runtime.errors import AotError

from ..arguments import ArchivePath, Force, Json, examples
from ..inputs import open_archive, refuse_outputs
from ..layout import print_fields, print_wrapped
from ..streams import print_json, printable
from ..tables import extents

EXAMPLES = examples("aot extract model.aot 3988f6dc --cubin -o kernel.cubin", "aot extract model.aot 3988f6dc --sass")


def command(
    archive: ArchivePath,
    function: Annotated[str, typer.Argument(metavar="FUNCTION", help="Its name, or the beginning of its digest.")],
    cubin: Annotated[bool, typer.Option("--cubin", help="The cubin, as it is loaded.")] = False,
    sass: Annotated[bool, typer.Option("--sass", help="Its SASS, by nvdisasm.")] = False,
    resources: Annotated[bool, typer.Option("--resources", help="What each launch takes of an SM.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: print it.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Take the code of a function out of an archive. Its cubin, its SASS, or the registers and memory that it takes of
    an SM."""
    from ...inspect.functions import named
    from ...inspect.functions import resources as taken

    if cubin + sass + resources != 1:
        raise AotError("give one of --cubin, --sass and --resources")
    if as_json and not resources:
        raise AotError("--json is for --resources; a cubin and SASS are no JSON")
    if output is not None:
        refuse_outputs(output, [archive])
    with open_archive(archive) as opened:
        name = named(opened, function)
        if resources:
            return _print_resources(name, taken(opened.record(name)), as_json)
        data = opened.cubin(name)
    if sass:
        from ...inspect.sass import sass as disassembled

        data = disassembled(data).encode()
    _write(data, output, force, name)


def _print_resources(name: str, launches: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        return print_json({"function": name, "launches": launches})
    print_wrapped(printable(name))
    for launch in launches:
        print_fields(
            [
                ("threads", f"{extents([launch['threads']])} in a CTA"),
                ("registers", f"{launch['registers']} a thread"),
                ("shared", f"{extents([launch['shared_bytes']])} bytes of shared memory in a CTA"),
                ("spilled", f"{launch['local_bytes']} bytes of local memory a thread"),
            ]
        )


def _write(data: bytes, output: Path | None, force: bool, name: str) -> None:
    """To a file, or to standard output, which must be no terminal for what is no text."""
    from ...files import destination

    if output is None or str(output) == "-":
        if sys.stdout.isatty() and b"\0" in data:
            raise AotError(f"the cubin of {name} is no text; give -o FILE, or pipe it")
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        return
    path = destination(output)
    if path.exists() and not force:
        raise AotError(f"{output}: is there; name another output, or give --force to replace it")
    try:
        path.write_bytes(data)
    except OSError as error:
        raise AotError(f"{output}: cannot be written ({error.strerror}); name another output") from None
