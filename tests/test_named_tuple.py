"""runtime/named_tuple.py against `typing.NamedTuple`, which its tuples must be like."""

from __future__ import annotations

import copy
import typing

import pytest

from runtime import named_tuple


class Ours(named_tuple.NamedTuple):
    """What it says."""

    first: int
    second: str = "two"

    @property
    def both(self) -> str:
        return f"{self.first} {self.second}"

    @classmethod
    def of(cls, first: int) -> Ours:
        return cls(first)


class Theirs(typing.NamedTuple):
    """What it says."""

    first: int
    second: str = "two"


def test_a_named_tuple_is_what_typing_makes_of_the_same() -> None:
    one, other = Ours(1), Theirs(1)
    assert tuple(one) == tuple(other) == (1, "two")
    assert repr(one).removeprefix("Ours") == repr(other).removeprefix("Theirs")
    assert (Ours._fields, Ours._field_defaults) == (Theirs._fields, Theirs._field_defaults)
    assert (Ours.__doc__, Ours.__module__, Ours.__qualname__) == (Theirs.__doc__, __name__, "Ours")
    assert typing.get_type_hints(Ours) == typing.get_type_hints(Theirs) == {"first": int, "second": str}
    assert one.both == "1 two"
    assert Ours.of(3)._replace(second="x") == (3, "x")
    assert copy.deepcopy(one) == one
    assert not hasattr(one, "__dict__")


def test_fields_cannot_be_assigned_nor_left_out() -> None:
    with pytest.raises(AttributeError):
        Ours(1).first = 2  # type: ignore[misc]
    with pytest.raises(TypeError, match="first"):
        Ours()  # type: ignore[call-arg]
