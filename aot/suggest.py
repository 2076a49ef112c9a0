"""What a message says of a word that is not known: the known one that was likely meant, and all of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(found: str, known: Iterable[str]) -> str:
    """The tail of a message about an unknown word: the nearest known one, if near, and all known ones.

    Whether letters are capitals does not count.
    """
    known = tuple(known)
    spelled = {word.lower(): word for word in known}
    near = difflib.get_close_matches(found.lower(), spelled, n=1)
    hint = f"did you mean {spelled[near[0]]!r}? " if near else ""
    return f"{hint}known: {', '.join(known)}"
