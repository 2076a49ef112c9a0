"""What there is of operations, by their names: this package's, and that of others, found by entry points.

A place is `package.module:object`. Knows nothing of what stands there but which attributes it must have.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import AotError


def find(name: str, own: Mapping[str, str], group: str, needed: Sequence[str], error: type[AotError]) -> Any:
    """What stands where `own` says for the operation called `name`, or else the entry point of that name in `group`;
    None where neither has it.

    Raises:
        error: there are two such entry points, what one names cannot be imported, or it lacks an attribute `needed`.
    """
    places = [own[name]] if name in own else places_of(group).get(name, [])
    if not places:
        return None
    if len(places) > 1:
        raise error(f"operation {name}: {' and '.join(places)} are in the group {group}; uninstall all but one")
    (where,) = places
    module, _, attribute = where.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as cause:
        raise error(f"operation {name}: {where} cannot be imported ({cause}); install it again") from None
    if lacking := [word for word in needed if not hasattr(found, word)]:
        raise error(f"operation {name}: {where}, in the group {group}, lacks {', '.join(lacking)}; mend it")
    return found


def places_of(group: str) -> dict[str, list[str]]:
    """The places of entry points in `group`, by name; what finds them takes long to import, so it waits."""
    from importlib.metadata import entry_points

    found: dict[str, list[str]] = {}
    for point in entry_points(group=group):
        found.setdefault(point.name, []).append(point.value)
    return found
