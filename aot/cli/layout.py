"""Fits what is printed into the width there is: that of the terminal, or where output is piped what COLUMNS says, or 80
columns."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence

PIPED = 80  # columns
_GAP = 2  # between columns
_LEAST = 16  # of a cell that is shortened


def width() -> int:
    """The columns there are."""
    fits = sys.stdout.isatty() or "COLUMNS" in os.environ
    return max(shutil.get_terminal_size((PIPED, 24)).columns, 40) if fits else PIPED


def shortened(text: str, most: int) -> str:
    """`text` in `most` characters, dots in place of its middle; of names the end says more than the beginning."""
    if len(text) <= most:
        return text
    head = (most - 3) // 3
    return f"{text[:head]}...{text[len(text) - (most - 3 - head) :]}"


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Print titles and what they are of, one below the other, in lines that fit."""
    rows = list(fields)
    indent = max((len(title) for title, _ in rows), default=0) + _GAP
    for title, text in rows:
        print_wrapped(text, first=title.ljust(indent), rest=" " * indent)


def print_wrapped(text: str, first: str = "", rest: str = "") -> None:
    """Print a paragraph in lines that fit; a word that is longer is cut, since a terminal would cut it too."""
    lines = textwrap.wrap(text, width(), initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
    print("\n".join(lines) if lines else first.rstrip())


def print_command(words: Sequence[str], first: str = "") -> None:
    """Print a shell's command to be pasted, each word quoted where it must be: in lines that fit, each but the last
    continued, and no word cut."""
    most, lines = width() - 2, [first]
    for word in map(shlex.quote, words):
        if lines[-1].strip() and len(lines[-1]) + len(word) + 1 > most:
            lines.append(f"{first} ")
        lines[-1] += f" {word}" if lines[-1].strip() or len(lines) > 1 else word
    print(" \\\n".join(lines))


def print_fitted(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    right: Iterable[int] = (),
    expendable: Sequence[int] = (),
) -> None:
    """Print columns two spaces apart that fit: without empty ones, then without those of `expendable`, the first of
    these first, as long as lines are too long, then with the widest shortened. Those numbered in `right` are aligned to
    the right."""
    most, to_right = width(), set(right)
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    widths = {i: max(len(row[i]) for row in [header, *rows]) for i in kept}

    def over() -> int:
        return sum(widths[i] + _GAP for i in kept) - _GAP - most

    for column in expendable:
        if over() > 0 and column in kept:
            kept.remove(column)
    while over() > 0:
        widest = max(kept, key=widths.__getitem__)
        if widths[widest] <= _LEAST:
            break
        widths[widest] = max(_LEAST, widths[widest] - over())
    for row in [header, *rows]:
        cells = [shortened(row[i], widths[i]) for i in kept]
        print(
            "  ".join(
                c.rjust(widths[i]) if i in to_right else c.ljust(widths[i]) for i, c in zip(kept, cells, strict=True)
            ).rstrip()
        )
