"""What the addresses of a call's tensors must be for a plan to be right for them: the one definition, as data.

A plan fixes all of a call but its addresses. `PointerChecks.of` says, when the plan is made, what these must be; every
call is held against that, by `fit` here or by `pointers_fit` of runtime/native/pointers.h, which is given the same
three tuples (tests/test_pointers.py holds the two equal). A call that does not fit goes the way of a first one, which
finds the words for what is wrong; or finds nothing wrong, since these checks are of whole spans, and columns of one
matrix may lie between each other's rows (`runtime.program.geometry.share_memory`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from operator import and_

from ..named_tuple import NamedTuple
from .geometry import span_bytes
from .record import TensorView


class PointerChecks(NamedTuple):
    """Of the tensors of a call, in its order: none is null, each is aligned, and none overlaps one that is written."""

    misaligned: tuple[int, ...]  # address bits that must be clear
    sizes: tuple[int, ...]  # bytes from the first element to the end of the last
    apart: tuple[tuple[int, int], ...]  # pairs of tensors whose bytes may not overlap

    @classmethod
    def of(cls, views: Sequence[TensorView], alignments: Iterable[int], written: Iterable[int]) -> PointerChecks:
        """Those for tensors like `views`, each of which must start at a multiple of its alignment in bytes, a power of
        two; `written` says by place which of them a launch writes."""
        return cls(
            tuple([alignment - 1 for alignment in alignments]),
            tuple([span_bytes(view) for view in views]),
            _apart(len(views), tuple(written)),
        )

    def ordered(self, order: Sequence[int]) -> PointerChecks:
        """These for the same tensors in another order, each once: `order` names them by their places here."""
        misaligned, sizes, apart = self
        place = {of: i for i, of in enumerate(order)}
        return PointerChecks(
            tuple([misaligned[of] for of in order]),
            tuple([sizes[of] for of in order]),
            tuple([(place[x], place[y]) for x, y in apart]),
        )

    def grown(self, more: int, steps: Sequence[int]) -> PointerChecks:
        """These for tensors with `more` rows; `steps` are the bytes from row to row of each, 0 where it has none."""
        misaligned, sizes, apart = self
        return PointerChecks(
            misaligned, tuple([size + more * step for size, step in zip(sizes, steps, strict=True)]), apart
        )

    def fit(self, pointers: Sequence[int]) -> bool:
        """Whether a call's tensors may be at these addresses."""
        misaligned, sizes, apart = self
        if apart is _LAST_OF_THREE:  # as of most GEMMs: the same, in half the time
            a, b, d = pointers
            mask_a, mask_b, mask_d = misaligned
            size_a, size_b, size_d = sizes
            return not (
                (a & mask_a | b & mask_b | d & mask_d)
                or not (a and b and d)
                or (d < a + size_a and a < d + size_d)
                or (d < b + size_b and b < d + size_d)
            )
        if 0 in pointers or any(map(and_, pointers, misaligned)):  # a loop over these takes twice as long
            return False
        for x, y in apart:
            begin, other = pointers[x], pointers[y]
            if begin < other + sizes[y] and other < begin + sizes[x]:
                return False
        return True


@cache
def _apart(count: int, written: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The pairs of so many tensors of which one is written, each once."""
    changed = dict.fromkeys(written)
    return tuple([(x, y) for x in changed for y in range(count) if y != x and not (y in changed and y < x)])


_LAST_OF_THREE = _apart(3, (2,))  # where three tensors are given and the last is written
