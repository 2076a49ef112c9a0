"""The table `tuning` of an archive: the machines that it was tuned on. It is for people; no server reads it.

`docs/records.md` has its fields. Unknown ones are left as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.container.archive import Archive
from runtime.container.fields import require_schema
from runtime.tables.dispatch import Capability

from .fields import Test, is_count, is_text, is_text_or_none, is_texts_by_name, list_field, require

TABLE = "tuning"
HISTORY = "history"  # the table of what tuning saw, which `aot.tune.history` makes and reads
SCHEMA = 1  # raised when what a field means changes


def write(environments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The table of these machines, as `read` takes it; each is what `aot.tune.measure.environment` says, with
    `rejected`, the reasons for which functions serve nothing, by name, and the `tolerance` that was given. `candidates`
    is the digest of the archive whose functions were measured, or checked. `right` has the SHA-256 of the cubin of each
    function that was held against its reference and found right."""
    for i, row in enumerate(environments):
        require(row, _FIELDS, _OPTIONAL, f"table {TABLE}: environments[{i}]")
    return {"schema": SCHEMA, "environments": list(environments)}


def read(archive: Archive) -> list[dict[str, Any]]:
    """The machines, one after the other; none where there is no such table.

    Raises:
        RecordError: the table does not say.
        UnsupportedSchema: it is of another schema than `SCHEMA`.
    """
    if TABLE not in archive.tables:
        return []
    where = f"{archive.path}: table {TABLE}"
    obj = archive.table(TABLE)
    require_schema(obj, SCHEMA, where)
    rows = list_field(obj, "environments", where)
    for i, row in enumerate(rows):
        require(row, _FIELDS, _OPTIONAL, f"{where}: environments[{i}]")
    return rows


def checked_on(archive: Archive) -> dict[str, list[str]]:
    """The kinds of GPU on which functions were found right by their references, by function; as they are now."""
    found: dict[str, list[str]] = {}
    for row in read(archive):
        for name, cubin in row.get("right", {}).items():
            if name in archive.functions and archive.record(name)["cubin"] == cubin:
                found.setdefault(name, []).append(row["gpu"])
    return {name: list(dict.fromkeys(gpus)) for name, gpus in found.items()}


def capability(environment: dict[str, Any]) -> Capability:
    """The compute capability of the GPU of one of the machines."""
    major, minor = environment["compute_capability"].split(".")
    return int(major), int(minor)


def _is_capability(value: Any) -> bool:
    parts = value.split(".") if isinstance(value, str) else []
    return len(parts) == 2 and all(p.isascii() and p.isdigit() and len(p) < 4 for p in parts)


def _is_share(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1


_FIELDS: dict[str, Test] = {"gpu": is_text, "compute_capability": _is_capability}
_OPTIONAL: dict[str, Test] = {
    **dict.fromkeys(("gpu_id", "driver", "cuda_driver", "cuda", "torch", "cublas", "cute_aot"), is_text_or_none),
    **dict.fromkeys(("multiprocessors", "l2_bytes"), is_count),
    "rejected": is_texts_by_name,
    "right": is_texts_by_name,
    "tolerance": _is_share,
    "candidates": is_text,
}
