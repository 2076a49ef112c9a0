"""Which function gives generated code the call that it makes in the place of an operator.

Knows neither operators, which enter themselves, nor Inductor, whose lowerings follow from it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Direct(NamedTuple):
    """A function of a module, as those of `direct`, and what it takes after the library's number besides what the
    operator is given."""

    module: str
    function: str
    arguments: tuple[Any, ...] = ()


DIRECT: dict[Any, Direct] = {}  # by operators, which return one new tensor
