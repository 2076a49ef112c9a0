"""What an item of a manifest may say in place of fields of its operation's signatures: a mapping of names to integers.

People count a model's tokens and experts; signatures and M count what a kernel sees. A `Shorthand` turns the one into
the other. `Building.shorthand` says which an operation has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.errors import RecordError


class Shorthand:
    """The field `name` of an item. Its mapping has the integers `needed`, perhaps those of `optional`, all at least 1,
    and stands for the fields `replaces` of signatures, which an item then does not have."""

    name: str
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()
    replaces: tuple[str, ...]

    def fields(self, values: Mapping[str, int]) -> dict[str, Any]:
        """The fields of `replaces`.

        Raises:
            RecordError: the integers do not go together.
        """
        raise NotImplementedError

    def m(self, values: Mapping[str, int], tokens: int, fields: Mapping[str, Any]) -> int:
        """M where a forward pass of the model has so many tokens, of a signature with these fields."""
        raise NotImplementedError


class Experts(Shorthand):
    """`experts: {count, top_k, local}`: of `count` experts each token goes to `top_k`, and `local` of them, by default
    all, are on this rank. `groups` is the signature's field that says how many groups of rows there are."""

    name = "experts"
    needed = ("count", "top_k")
    optional = ("local",)

    def __init__(self, groups: str) -> None:
        self.replaces = (groups,)

    def fields(self, values: Mapping[str, int]) -> dict[str, Any]:
        """As many groups as there are experts here.

        Raises:
            RecordError: more experts are chosen, or are here, than there are.
        """
        for name in ("top_k", "local"):
            if values.get(name, 1) > values["count"]:
                raise RecordError(
                    f"{name} must be at most count, found {values[name]} of {values['count']}; check {name}"
                )
        return {self.replaces[0]: values.get("local", values["count"])}

    def m(self, values: Mapping[str, int], tokens: int, fields: Mapping[str, Any]) -> int:
        """The share of tokens x top_k rows that falls to the experts here where all are chosen alike, or to one expert
        where rows are masked, rounded up."""
        count = values["count"]
        experts = 1 if fields.get("rows") == "masked" else values.get("local", count)
        return -(-tokens * values["top_k"] * experts // count)
