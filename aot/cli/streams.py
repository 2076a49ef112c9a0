"""What the command line writes to standard output and standard error: lines that are safe on any terminal.

File names, arguments and what an archive holds may have any character: one that a terminal might obey, one that its
encoding lacks, a byte that is no text. Each of them is printed as an escape. Knows nothing of what the lines say.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any


def prepare() -> None:
    """Have both streams escape what their encoding lacks, in place of raising UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def printable(text: str) -> str:
    """`text` in one line, with escapes in place of control characters, ends of lines, and bytes that are no text."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def say(line: str) -> None:
    """Print a line on standard output."""
    print(printable(line))


def tell(line: str) -> None:
    """Print a line on standard error. Where that cannot be written, the work goes on without it."""
    with contextlib.suppress(OSError):
        print(printable(line), file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Print a warning on standard error."""
    tell(f"warning: {message}")


def print_json(obj: Any) -> None:
    """Print an object as indented JSON, in ASCII and with no control character."""
    print(json.dumps(obj, indent=2).replace("\x7f", "\\u007f"))
