"""Plans in native code's table, which launches calls of torch's tensors like those that have one.

Knows nothing of whose calls they are, nor of the plans that Python keeps.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..device.driver import Driver
from ..native import native_table
from ..program.pointers import PointerChecks
from .plan import MAX_PLANS, AnyPlan

LEAST_TENSORS = 3  # that native code takes
Words = tuple[Any, ...]


class Kept(NamedTuple):
    """What native code takes of a plan: it, what the addresses of the function's tensors must be, in its order, and
    what counts its launches."""

    plan: AnyPlan
    checks: PointerChecks
    counter: Any


class NativePlans:
    """A table of one generation, made once torch's tensors were seen; without native code nothing is kept.

    `by_words` has, by what a call is but for its tensors, what launches it: the table's call, by which tag, and which
    of the call's tensors it takes, in the function's order. The caller of a method holds the lock.
    """

    def __init__(self, driver: Driver) -> None:
        self.by_words: dict[Words, tuple[Any, int, tuple[int, ...]]] = {}
        self._driver = driver
        self._table: Any = None  # `native_table`; False if there is none
        self._tags = 0  # that `keep` gave

    def held(self) -> int:
        """How many plans there are."""
        return self._table.count() if self._table else 0

    def is_full(self) -> bool:
        """Whether the table would forget all its plans for one more."""
        return self.held() >= MAX_PLANS

    def keep(
        self,
        words: Words,
        order: tuple[int, ...],
        tensors: tuple[Any, ...],
        kept: Kept,
        offsets: tuple[int, ...] | None = None,
    ) -> None:
        """Launch `kept` from now on for these words and tensors like these, at `offsets` in bytes, which are the call's
        in `order`. No tag is given twice: another thread may hold one of a call that was forgotten."""
        _, tag, known = self.by_words.get(words, (None, self._tags, order))
        if known != order or len(tensors) < LEAST_TENSORS:
            return
        launch = self.put(tag, tensors, kept, offsets=offsets)
        if launch is not None:
            self.by_words[words] = launch, tag, order
            self._tags = max(self._tags, tag + 1)

    def put(
        self,
        tag: int,
        tensors: tuple[Any, ...],
        kept: Kept,
        shape: tuple[int, ...] | None = None,
        dtype: Any = None,
        offsets: tuple[int, ...] | None = None,
    ) -> Any:
        """Launch `kept` from now on for `tag` and tensors like these, None for an output that is made of this shape and
        torch's dtype. The table's call, which takes tag, stream and tensors; None where it takes no such plan."""
        if not kept.plan.direct:
            return None
        if self._table is None:
            self._table = native_table(self._driver)
        if not self._table:
            return None
        made = None if shape is None else {"dtype": dtype}
        launches, device = kept.plan.direct, self._driver.device
        taken = self._table.put(tag, tensors, launches, kept.checks, device, shape, made, kept.counter, offsets)
        return self._table.call if taken else None

    def clear(self) -> None:
        """Forget all of them."""
        self.by_words.clear()
        if self._table:
            self._table.clear()
