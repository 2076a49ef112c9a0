"""What each function of an archive is there for: which of them serve, and which only wait to be tuned or called.

Knows nothing of how any of it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.container.archive import Archive
from runtime.gemm.universal import UniversalForm
from runtime.tables.table import Entry

from .precedence import Precedence

SERVES = "serves"  # some M of an entry that serves
EQUAL_BITS = "equal bits"  # only callers who want equal bits at every M
FORM = "form"  # some N and K, by prediction
CANDIDATE = "candidate"  # was ranked, or belongs to an entry that gives way: `aot tune` may choose it
BY_NAME = "by name"  # in no table: callers name it

USES = (SERVES, EQUAL_BITS, FORM, CANDIDATE, BY_NAME)


def uses(archive: Archive, precedence: Precedence) -> dict[str, str]:
    """The first of `USES` that is true of each function, by name, in the archive's order."""
    forms = [] if precedence.universal is None else [form for _, form in precedence.universal.forms]
    found = uses_in(precedence, precedence.entries, forms)
    return {name: found.get(name, BY_NAME) for name in archive.functions}


def uses_in(
    precedence: Precedence, entries: Iterable[Entry], forms: Iterable[UniversalForm], m: int | None = None
) -> dict[str, str]:
    """The same of the functions of some entries and forms, as far as these go; of one `m` only what may serve it."""
    of: dict[str, set[str]] = {use: set() for use in USES}
    for entry in entries:
        if m is None:
            of[CANDIDATE].update(entry.names)
        if precedence.instead_of(entry) is None:
            begins = precedence.predicted_from(entry)
            if m is None or begins is None or m < begins:
                of[SERVES].update(_serving(entry, m))
            of[EQUAL_BITS].update(() if entry.invariant is None else _serving(entry.only_invariant(), m))
    of[FORM].update(f.name for form in forms for f in form.functions)
    found: dict[str, str] = {}
    for use in USES[:-1]:
        found |= dict.fromkeys(of[use] - found.keys(), use)
    return found


def _serving(entry: Entry, m: int | None) -> list[str]:
    return [name for _, name in entry.ranges] if m is None else [entry.best(m)]
