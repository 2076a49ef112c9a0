"""Whether functions that a table says give equal bits do so, as far as it is known what they were compiled from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runtime.errors import RecordError

from ..search.legal import summation
from ..search.variants import Variant


def require_equal_bits(
    numbers: Mapping[str, int], variant: Callable[[str], Variant | None], k: int | None = None
) -> None:
    """Hold functions of the same number, but 0, against `aot.search.legal.summation`; `variant` says what is known
    of one.

    Raises:
        RecordError: a row's bits may depend on M with one of them, or two of them may give others.
    """
    seen: dict[int, tuple[str, str]] = {}  # of a number, a function and its word
    for name, number in sorted(numbers.items()):
        known = variant(name) if number else None
        if known is None:
            continue
        word = summation(known, k)
        if word is None:
            raise RecordError(
                f"function {name} is to give equal bits at every M, but how it adds up along K may depend on M; build "
                "the archive again"
            )
        other, wanted = seen.setdefault(number, (name, word))
        if word != wanted:
            raise RecordError(
                f"functions {other} and {name} are to give equal bits, but they add up along K in different ways, "
                f"{wanted} and {word}; build the archive again"
            )
