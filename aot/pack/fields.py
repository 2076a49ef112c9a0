"""Checks of what tables that people read say: fields have their types and ranges, and unknown ones are let be.

Knows nothing of any table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from runtime.container.archive import Archive
from runtime.errors import RecordError

Test = Callable[[Any], bool]


@contextlib.contextmanager
def naming(archive: Archive) -> Iterator[None]:
    """What is wrong with a table that is read inside is told with the file's name."""
    try:
        yield
    except RecordError as error:
        raise type(error)(f"{archive.path}: {error}") from None


def fail(where: str, what: str) -> NoReturn:
    """Raise `RecordError` naming the place, and what to do."""
    raise RecordError(f"{where}: {what}; build the archive again")


def require(obj: Any, fields: dict[str, Test], optional: dict[str, Test], where: str) -> None:
    """Check the types and ranges of fields, those of `optional` where they are there."""
    if not isinstance(obj, dict):
        fail(where, f"must be an object, found {obj!r:.100}")
    for name, test in (optional | fields).items():
        if name not in obj and name in fields:
            fail(where, f"has no {name!r}")
        if name in obj and not test(obj[name]):
            fail(where, f"{name!r} cannot be {_short(obj[name])}")


def list_field(obj: dict[str, Any], name: str, where: str) -> list[Any]:
    """The list that `obj` has as field `name`."""
    found = obj.get(name)
    if not isinstance(found, list):
        fail(where, f"{name!r} must be a list, found {_short(found)}")
    return found


def is_text(value: Any) -> bool:
    """Whether this is a word."""
    return isinstance(value, str) and value != ""


def is_text_or_none(value: Any) -> bool:
    """Whether this is a word or null."""
    return value is None or is_text(value)


def is_count(value: Any) -> bool:
    """Whether this is an integer from 0."""
    return type(value) is int and value >= 0


def is_list(value: Any) -> bool:
    """Whether this is a list."""
    return isinstance(value, list)


def is_texts_by_name(value: Any) -> bool:
    """Whether this is an object whose values are text, perhaps empty."""
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def is_rows_of_text(length: int) -> Test:
    """A test for a list of lists of so many words."""
    return lambda value: (
        is_list(value) and all(is_list(row) and len(row) == length and all(map(is_text, row)) for row in value)
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
