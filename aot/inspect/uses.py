"""What each function of an archive is there for: which of them serve, and which only wait to be tuned or called.

Knows nothing of how any of it is shown.
"""

from __future__ import annotations

from runtime.container.archive import Archive

from ..pack.precedence import Precedence

SERVES = "serves"  # some M of an entry that serves
EQUAL_BITS = "equal bits"  # only callers who want equal bits at every M
FORM = "form"  # some N and K, by prediction
CANDIDATE = "candidate"  # was ranked, or belongs to an entry that gives way: `aot tune` may choose it
BY_NAME = "by name"  # in no table: callers name it

USES = (SERVES, EQUAL_BITS, FORM, CANDIDATE, BY_NAME)


def uses(archive: Archive, precedence: Precedence) -> dict[str, str]:
    """The first of `USES` that is true of each function, by name, in the archive's order."""
    found: dict[str, str] = {}
    of: dict[str, set[str]] = {use: set() for use in USES}
    for entry in precedence.entries:
        of[CANDIDATE].update(entry.names)
        if precedence.instead_of(entry) is None:
            of[SERVES].update(entry.names[place] for place in entry.chosen)
            of[EQUAL_BITS].update(name for _, name in entry.invariant_ranges or ())
    if precedence.universal is not None:
        of[FORM].update(f.name for _, form in precedence.universal.forms for f in form.functions)
    for use in USES[:-1]:
        found |= dict.fromkeys(of[use] - found.keys(), use)
    return {name: found.get(name, BY_NAME) for name in archive.functions}
