"""Plans that others are grown from, for calls that are alike but for their rows: what a server meets again and again.

Knows plans and torch's calls, and nothing of the calls that they are for.
"""

from __future__ import annotations

from ...gemm.fallback import TorchCall
from ...gemm.universal import AnyEntry
from ...named_tuple import NamedTuple
from .plan import GemmPlan


class Known(NamedTuple):
    """A plan for a call with `rows` rows; `steps` are the bytes from row to row of each operand, 0."""

    gemm: GemmPlan
    rows: int
    steps: tuple[int, ...]


class KnownOfTorch(NamedTuple):
    """The same of a call that torch serves."""

    call: TorchCall
    rows: int
    steps: tuple[int, ...]

    def with_rows(self, rows: int) -> TorchCall:
        """The call for `rows` rows."""
        return self.call.with_rows(rows - self.rows, self.steps)


class RowPlans:
    """The plans of calls that are alike but for their number of rows, one for each function, and torch's where it
    serves some of them."""

    def __init__(self, entry: AnyEntry) -> None:
        self.entry = entry
        self.of_torch: KnownOfTorch | None = None
        self._known: dict[str, Known] = {}

    def find(self, rows: int) -> Known | None:
        """What is known of the function that is best for `rows` rows."""
        return self._known.get(self.entry.best(rows))

    def keep(self, known: Known) -> None:
        """Remember this, if there is nothing for its function."""
        self._known.setdefault(known.gemm.function.name, known)
