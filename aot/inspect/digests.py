"""What people call functions for short: the beginning of a digest, as git calls commits.

A function's digest is the SHA-256 of its record, which holds that of its cubin: functions of one digest in two archives
are the same code with the same launch program.
"""

from __future__ import annotations

import re

from runtime.container.archive import Archive
from runtime.errors import AotError

SHORTEST = 4  # hexadecimal digits that `function_named` takes
_USUAL = 8  # that are printed, where they are enough to tell functions apart
_DIGITS = re.compile(r"[0-9a-f]+")


class AmbiguousDigest(AotError):
    """Several functions' digests begin so."""


def digests(archive: Archive) -> dict[str, str]:
    """The digest of each function, by name, in hexadecimal."""
    return archive.record_digests()


def short_names(archive: Archive) -> dict[str, str]:
    """The beginnings of functions' digests, by name, all as long as tells different ones apart."""
    whole = digests(archive)
    different, length = set(whole.values()), _USUAL
    while len({digest[:length] for digest in different}) < len(different):
        length += 1
    return {name: digest[:length] for name, digest in whole.items()}


def function_named(archive: Archive, word: str) -> str | None:
    """The name of the function that `word` is, or that the digest of begins so; None if there is none.

    Raises:
        AmbiguousDigest: there are several.
    """
    if word in archive.functions:
        return word
    if len(word) < SHORTEST or not _DIGITS.fullmatch(word):
        return None
    found = [name for name, digest in digests(archive).items() if digest.startswith(word)]
    if len(found) > 1:
        some = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        raise AmbiguousDigest(f"{archive.path}: {word!r} begins the digests of {some}; give more digits, or the name")
    return found[0] if found else None
