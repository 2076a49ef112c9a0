"""Put the forms of one tuned archive in the place of those in another, as when a few of many were built and tuned anew.

    python scripts/replace_forms.py runtime/universal.aot better.aot -o universal.aot

Both must have been checked on the same kinds of GPU. What the first says of other forms, entries and builds stays, and
so do its times of forms that are not replaced. Needs no GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import report  # also puts the checkout on the path

from aot.pack.forms import TABLE, read
from aot.pack.write import Package
from aot.search.universal import form_of
from aot.tune import history
from aot.tune.times import signature_of
from runtime.container.archive import Archive
from runtime.errors import AotError
from runtime.gemm.universal import write


def replaced(base: Archive, better: Archive) -> Package:
    """The archive `base` with the forms of `better`.

    Raises:
        AotError: one has no forms, they were checked on other GPUs, or functions of one name have other code.
    """
    old, new = read(base), read(better)
    if old is None or new is None:
        raise AotError(f"{base.path if old is None else better.path}: has no forms; build it with --universal")
    if old.checked_on != new.checked_on:
        raise AotError(f"{better.path}: was checked on {dict(new.checked_on)}, {base.path} on {dict(old.checked_on)}")
    found = dict(old.forms) | dict(new.forms)
    kept = {f.name for key, form in old.forms if found[key] is form for f in form.functions}
    fresh = {f.name for _, form in new.forms for f in form.functions}
    for name in sorted(kept & fresh):
        if base.cubin(name) != better.cubin(name):
            raise AotError(f"{better.path}: {name} has other code than in {base.path}; build both with one compiler")
    package = Package()
    package.add_archive(base, sorted(kept))
    package.add_archive(better, sorted(fresh - kept))
    for name in base.tables:
        if name not in (TABLE, history.TABLE):
            package.set_table(name, base.table(name))
    package.set_table(TABLE, write([form.source() for form in found.values()], old.checked_on))
    timed = {form_of(form.signature(256, 512)) for _, form in new.forms}
    rows = [r for r in history.tunings(base) if form_of(signature_of(r["signature"])) not in timed]
    tunings = {"schema": history.SCHEMA, "tunings": rows + history.tunings(better)}
    package.set_table(history.TABLE, tunings, alone=True)
    return package


def main() -> int:
    """Replace and write."""
    parser = report.options_to_write(__doc__, "the archive to write")
    parser.add_argument("base", type=Path)
    parser.add_argument("better", type=Path)
    options = parser.parse_args()

    def work() -> None:
        with Archive.open(options.base) as base, Archive.open(options.better) as better:
            replaced(base, better).write(options.output)

    return report.ends(work)


if __name__ == "__main__":
    sys.exit(report.ends(main))
