"""What an archive serves, as plain data: behind `aot ls`. Times are microseconds, sizes bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.container.archive import RECORDS, TABLES, Archive
from runtime.gemm.universal import PREDICTED
from runtime.tables.table import Entry

from ..pack import build_table, forms, tuning_table
from ..pack.filter import Filter, by_names
from . import predictions
from .digests import short_names
from .entries import gpu, is_in, measured, models_of, names_of, ranges
from .precedence import Precedence
from .uses import BY_NAME, uses_in


def listing(archive: Archive, wanted: Filter = Filter(), m: int | None = None) -> dict[str, Any]:  # noqa: B008
    """Every entry of operations' tables with its ranges, every form of the universal table
    (`aot.inspect.predictions.listing`), the functions outside both, sizes in total, where it was tuned; and short names
    of all functions. Of entries, forms and functions those that are `wanted`; functions outside tables are of no layer
    and of no state.

    `names` are what manifests call an entry, `models` those that ask for it. `gpu` is the kind of GPU that it was tuned
    on, None where it is for any of its target. `measured` counts the M values that an entry was measured at, and
    `faster_with_torch` those of them where torch was faster by more than the tolerance; `totals` has both of all
    entries. `instead` is what an entry gives way to, if it serves nothing (`aot.inspect.precedence`). Where there is an
    `m`, entries have only the range that it is in. A range's `us` and `ratio` (baseline time / its own; above 1 is
    faster) are those at the largest M it was measured at, None where it was not; `measured` counts such M. `uses` says
    of each function what it is there for (`aot.inspect.uses`): of those that are wanted, for what is wanted, and with
    an `m` of those that may serve it.

    Raises:
        NothingLike: there is nothing that is wanted.
        RecordError: a table is malformed.
    """
    names, models, precedence = names_of(archive), models_of(archive), Precedence(archive)
    universal = precedence.universal
    rows = forms.rows(archive, universal)
    _require_known(archive, wanted, names, precedence.entries, rows)
    entries: list[dict[str, Any]] = []
    kept: list[Entry] = []
    used: set[str] = set()
    for entry in precedence.entries:
        used |= set(entry.names)
        key = entry.signature.key()
        if not wanted.takes(entry.target, entry.state, by_names(names, key)):
            continue
        kept.append(entry)
        entries.append(
            {
                "signature": key,
                "operation": entry.signature.operation,
                "names": names.get(key, []),
                "models": models.get(key, []),
                "target": entry.target,
                "gpu": gpu(entry),
                "state": entry.state,
                "instead": precedence.instead_of(entry),
                "ranges": [row for row in ranges(entry) if m is None or is_in(row, m)],
                **measured(entry),
                "candidates": sum(len(ranked) for _, ranked in entry.candidates),
            }
        )
    used.update(f.name for row in rows for f in row.form.functions)
    rows = [row for row in rows if wanted.takes(row.form.target, PREDICTED, [row.name])]
    checked, targets = tuning_table.checked_on(archive), archive.functions.targets_by_name()
    others = [
        {"name": name, "target": target, "checked_on": checked.get(name, [])}
        for name, target in targets.items()
        if name not in used and wanted.takes_functions(target)
    ]
    if any(wanted) and not (entries or rows or others):
        raise wanted.nothing(str(archive.path))
    found = uses_in(precedence, kept, [row.form for row in rows], m)
    found |= {} if m is not None else {str(row["name"]): BY_NAME for row in others}
    return {
        "entries": entries,
        "forms": predictions.listing(rows),
        "functions": sorted(others, key=lambda row: str(row["name"])),
        "uses": {name: found[name] for name in targets if name in found},
        "short_names": short_names(archive),
        "totals": totals(archive)
        | {what: sum(entry[what] for entry in entries) for what in ("measured", "faster_with_torch")},
        "tools": dict(build_table.read(archive).tools),
        "tuning": tuning_table.read(archive),
    }


def _require_known(
    archive: Archive,
    wanted: Filter,
    names: Mapping[str, Sequence[str]],
    entries: Sequence[Entry],
    rows: Sequence[forms.FormRow],
) -> None:
    """Refuse words of a filter that nothing of an archive passes."""
    keys, of_forms = {entry.signature.key() for entry in entries}, [row.name for row in rows]
    states = [*sorted({entry.state for entry in entries}), *([PREDICTED] if of_forms else [])]
    called = [name for key, of in names.items() if key in keys for name in of]
    wanted.require_known(str(archive.path), archive.targets, states, called, [*keys, *of_forms])


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
