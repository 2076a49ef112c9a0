"""Named tuples that are made quickly: `typing.NamedTuple` compiles every annotation, which is 2 of 13 ms of an import.

A server imports this package before its first request; see docs/benchmarks.md for what the rest of that takes.
"""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:

    class _Maker(type):
        """Makes of a class statement what `typing.NamedTuple` does, with its annotations left as they are written."""

        def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
            if not bases:
                return super().__new__(cls, name, bases, body)
            fields = body["__annotations__"]
            defaults = [body.pop(field) for field in fields if field in body]
            made = namedtuple(name, fields, defaults=defaults, module=body["__module__"])
            for key, value in body.items():
                if key != "__module__":
                    setattr(made, key, value)
            return made

    class NamedTuple(metaclass=_Maker):
        """The base of named tuples: fields are annotations, those with a default last; methods may follow."""
