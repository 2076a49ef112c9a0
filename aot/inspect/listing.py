"""What an archive serves, as plain data: behind `aot ls`. Times are microseconds, sizes bytes."""

from __future__ import annotations

from typing import Any

from runtime.container.archive import RECORDS, TABLES, Archive

from ..pack import build_table, forms, tuning_table
from ..pack.precedence import Precedence
from .digests import short_names
from .entries import gpu, measured, names_of, ranges


def listing(archive: Archive) -> dict[str, Any]:
    """Every entry of operations' tables with its ranges, every form of the universal table (`aot.pack.forms.listing`),
    the functions outside both, sizes in total, where it was tuned; and short names of all functions.

    `names` are what manifests call an entry. `gpu` is the kind of GPU that it was tuned on, None where it is for any of
    its target. `measured` counts the M values that an entry was measured at, and `faster_with_torch` those of them
    where torch was faster by more than the tolerance; `totals` has both of all entries. `instead` is what an entry
    gives way to, if it serves nothing (`aot.pack.precedence`).
    A range's `us` and `ratio` (baseline time / its own; above 1 is faster) are those at the largest M it was measured
    at, None where it was not; `measured` counts such M.
    """
    names = names_of(archive)
    entries: list[dict[str, Any]] = []
    used: set[str] = set()
    precedence = Precedence(archive)
    for entry in precedence.entries:
        used |= set(entry.names)
        key = entry.signature.key()
        entries.append(
            {
                "signature": key,
                "operation": entry.signature.operation,
                "names": names.get(key, []),
                "target": entry.target,
                "gpu": gpu(entry),
                "state": entry.state,
                "instead": precedence.instead_of(entry),
                "ranges": ranges(entry),
                **measured(entry),
                "candidates": sum(len(ranked) for _, ranked in entry.candidates),
            }
        )
    universal = precedence.universal
    rows = forms.rows(archive, universal)
    used.update(f.name for row in rows for f in row.form.functions)
    checked = tuning_table.checked_on(archive)
    others = [
        {"name": e.name, "target": e.target, "checked_on": checked.get(e.name, [])}
        for e in archive.functions.values()
        if e.name not in used
    ]
    return {
        "entries": entries,
        "forms": forms.listing(rows, universal.checked_on if universal else {}),
        "functions": others,
        "short_names": short_names(archive),
        "totals": totals(archive)
        | {name: sum(entry[name] for entry in entries) for name in ("measured", "faster_with_torch")},
        "tools": dict(build_table.read(archive).tools),
        "tuning": tuning_table.read(archive),
    }


def totals(archive: Archive) -> dict[str, Any]:
    """How much the archive holds: functions, targets, and bytes by kind of blob."""
    sizes = archive.sizes()
    count = len(archive.functions)
    return {
        "functions": count,
        "targets": list(archive.targets),
        "cubins": sum(size.blobs for kind, size in sizes.items() if kind not in (RECORDS, TABLES)),
        "raw_bytes": sum(size.raw for size in sizes.values()),
        "file_bytes": archive.file_bytes,
        "bytes_per_function": round(archive.file_bytes / count) if count else None,
        "by_kind": {kind: size._asdict() for kind, size in sizes.items()},
    }
