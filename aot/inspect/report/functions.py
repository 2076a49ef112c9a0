"""What an archive's functions take of an SM and of the file, one by one and by target and family.

Sizes are bytes, those of code and records before compression.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from runtime.container.archive import Archive
from runtime.program.record import Record

from ...pack import build_table
from ..digests import short_names
from ..functions import resources
from ..info import family_of
from ..variants import words


def functions(archive: Archive, used: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every function with what it is there for (`used`, as `aot.inspect.uses` says) and the most that a launch of it
    takes: threads and bytes of shared memory of a CTA, registers and spilled bytes (`local_bytes`) of a thread. What
    depends on the arguments is None.

    Raises:
        RecordError: a record is malformed.
    """
    short, providers = short_names(archive), build_table.read(archive).providers
    found = []
    for name, target in archive.functions.targets_by_name().items():
        record = archive.record(name)
        Record.from_json(record)  # refuses what is malformed
        entry, launches = archive.entry(name), resources(record)
        found.append(
            {
                "name": name,
                "digest": short[name],
                "target": target,
                "family": family_of(archive, name, providers),
                "words": words(name),
                "use": used[name],
                "bytes": sum(archive.blob_entry(blob).length for blob in (entry.record, entry.cubin)),
                **{what: _most(launch[what] for launch in launches) for what in _TAKEN},
            }
        )
    return found


_TAKEN = ("threads", "registers", "shared_bytes", "local_bytes")


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def by_family(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each target and family how many functions there are, their bytes, the least and the most that they take of an
    SM, and how many spill; the largest first."""
    of: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        of.setdefault((row["target"], row["family"]), []).append(row)
    found = [
        {
            "target": target,
            "family": family,
            "functions": len(members),
            "bytes": sum(row["bytes"] for row in members),
            **{what: _range(row[what] for row in members) for what in _TAKEN},
            "spilling": sum(bool(row["local_bytes"]) for row in members),
        }
        for (target, family), members in of.items()
    ]
    return sorted(found, key=lambda row: (row["target"], -row["bytes"], row["family"]))


def _range(values: Iterable[int | None]) -> list[int] | None:
    """The least and the most; None where none is known."""
    known = [value for value in values if value is not None]
    return [min(known), max(known)] if known else None
