"""Plans for calls whose operands lie in the memory of fewer tensors: by native code alone, which adds the offsets.

Knows nothing of the calls that they are for (`runtime.serve.packed_calls`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..device.driver import Driver
from ..native import native_table
from .plan import MAX_PLANS
from .planned_call import LEAST_TENSORS, Kept

Words = tuple[Any, ...]


class PackedPlans:
    """Those of one generation. `by_words` has, by what a call is but for its tensors, the call of native code's table,
    by which tag, and which tensor holds each operand, in the function's order. No tag is given twice: another thread
    may hold one of a call that was forgotten."""

    def __init__(self, driver: Driver) -> None:
        self.by_words: dict[Words, tuple[Any, int, tuple[int, ...]]] = {}
        self._driver = driver
        self._table: Any = None  # `native_table`, once torch's tensors were seen; False if there is none
        self._tags = 0  # that were given

    def keep(
        self, words: Words, places: tuple[int, ...], held: Sequence[Any], tensors: Sequence[Any], kept: Kept
    ) -> None:
        """Launch `kept` from now on for tensors like `held`, in which the function's `tensors` lie; `places` says in
        which each does. The caller holds the lock."""
        holders = tuple([held[place] for place in places])
        offsets = tuple([x.data_ptr() - of.data_ptr() for x, of in zip(tensors, holders, strict=True)])
        if min(offsets) < 0 or len(holders) < LEAST_TENSORS or not kept.plan.direct:
            return
        if self._table is None:
            self._table = native_table(self._driver)
        if not self._table:
            return
        if self._table.count() >= MAX_PLANS:
            self.clear()
        _, tag, known = self.by_words.get(words, (None, self._tags, places))
        launches, device = kept.plan.direct, self._driver.device
        if known == places and self._table.put(
            tag, holders, launches, kept.checks, device, None, None, kept.counter, offsets
        ):
            self.by_words[words] = self._table.call, tag, places
            self._tags = max(self._tags, tag + 1)

    def clear(self) -> None:
        """Forget all of them."""
        self.by_words.clear()
        if self._table:
            self._table.clear()
