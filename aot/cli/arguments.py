"""Arguments and options that several commands take, and words that several print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..search.targets import TARGETS
from ..search.targets import target as target_named

ArchivePath = Annotated[Path, typer.Argument(metavar="ARCHIVE", help="An .aot file.")]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="The .aot file to write.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[
    bool, typer.Option("--force", help="Replace OUT also where it is no archive, or has what was tuned or checked.")
]
SpecPath = Annotated[
    Path | None,
    typer.Option(metavar="SPEC", help="A Python file that describes your own functions; docs/functions.md has one."),
]
Targets = Annotated[
    list[str] | None, typer.Option("--target", metavar="T", help=f"May be repeated: {', '.join(TARGETS)}.")
]
Layers = Annotated[
    list[str] | None,
    typer.Option("--gemm", metavar="NAME", help="A layer's name or signature, perhaps with stars. May be repeated."),
]
States = Annotated[
    list[str] | None, typer.Option("--state", metavar="S", help="tuned, ranked or predicted. May be repeated.")
]


def _known(name: str | None) -> str | None:
    """A target's name, if it is one; raises as `aot.search.targets.target` does."""
    if name is not None:
        target_named(name)
    return name


OneTarget = Annotated[
    str | None,
    typer.Option(
        "--target", metavar="T", callback=_known, help=f"One of {', '.join(TARGETS)}. Default: what the archive has."
    ),
]
OneGpu = Annotated[
    str | None, typer.Option("--gpu", metavar="GPU", help="A kind of GPU, such as H200. Default: what was tuned on.")
]


def examples(*lines: str) -> str:
    """The end of a help text; \\b keeps its lines as they are."""
    return "\n".join(("\b", "Examples:" if len(lines) > 1 else "Example:", *(f"  {line}" for line in lines)))


def tokens_of(words: str) -> list[int]:
    """The M values of an option such as "1,16,1024"; raises typer.BadParameter where it is none."""
    try:
        return [int(part) for part in words.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{words!r} is no list of integers such as 1,16,1024", param_hint="--tokens") from None


def one_m(given: Sequence[int] | None) -> int | None:
    """The M of an option that is there once at most; of two the last would count, unsaid."""
    if given and len(given) > 1:
        raise typer.BadParameter(f"--m is there twice, {given[0]} and {given[1]}; ask for one M at a time")
    return given[0] if given else None


def count(number: int, one: str, more: str = "") -> str:
    """A number of things in words: "1 kernel", "3 processes"."""
    return f"{number} {one if number == 1 else more or one + 's'}"
