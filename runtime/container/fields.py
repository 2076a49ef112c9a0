"""Checks to read records, launch programs and tables with: each field is what it must be, or the place is named."""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import RecordError, UnsupportedSchema

WIDTHS = (1, 8, 16, 32, 64)  # of a launch program's values, in bits


def require_schema(obj: Any, schema: int, kind: str) -> None:
    """Refuse `obj`, a document of this kind, where it is of another schema; what is no dictionary is not looked at.

    Raises:
        UnsupportedSchema: it says another number, or none, as documents did before there were schemas.
    """
    if isinstance(obj, dict) and ((found := obj.get("schema")) != schema or type(found) is not int):
        said = f"schema {found!r:.50}" if "schema" in obj else "none"
        raise UnsupportedSchema(
            f"{kind}: this version reads schema {schema}, found {said}; build the archive again with this version"
        )


def fail(where: str, what: str) -> NoReturn:
    """Raise `RecordError` naming the place."""
    raise RecordError(f"launch program: {where}: {what}")


def is_int(x: object, low: int, high: int) -> bool:
    """Whether `x` is an integer (and no boolean) from `low` to `high`."""
    return type(x) is int and low <= x <= high


def exact_fields(obj: Any, names: set[str], where: str) -> dict[str, Any]:
    """`obj`, a dictionary with exactly the keys `names`."""
    if not isinstance(obj, dict) or set(obj) != names:
        fail(where, f"needs exactly the fields {sorted(names)}, found {obj!r:.200}")
    return obj


def exact_list(obj: Any, where: str, length: int | None = None) -> list[Any]:
    """`obj`, a list, of `length` items if that is given."""
    if not isinstance(obj, list) or (length is not None and len(obj) != length):
        fail(where, f"must be a list{'' if length is None else f' of {length}'}, found {obj!r:.200}")
    return obj


def fail_table(where: str, what: str) -> NoReturn:
    """Raise `RecordError` naming the place in a table, and what to do."""
    raise RecordError(f"{where}: {what}; build the archive again")


def table_fields(obj: Any, names: frozenset[str], where: str, absent: frozenset[str] = frozenset()) -> dict[str, Any]:
    """`obj`, a part of a table: a dictionary with the keys `names`, of which those in `absent` may be absent."""
    if not isinstance(obj, dict) or (obj.keys() != names and not names - absent <= obj.keys() <= names):
        but = f" but for {sorted(absent)}, which may be absent," if absent else ""
        fail_table(where, f"needs exactly the fields {sorted(names)},{but} found {obj!r:.200}")
    return obj


def table_list(obj: Any, where: str) -> list[Any]:
    """`obj`, a part of a table that is a list."""
    if not isinstance(obj, list):
        fail_table(where, f"must be a list, found {obj!r:.200}")
    return obj
