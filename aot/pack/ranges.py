"""From the best function at each M to the ranges of a dispatch entry. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

_ANY_M = 1 << 62  # above all that bound a range


def ranges(best: Sequence[tuple[int, str]]) -> list[tuple[int | None, str]]:
    """The ranges of a gemm table entry, given the function chosen at each M, ascending.

    A function chosen at M serves every M' in (the M before, M]; the last serves every larger M' too. Neighbours with
    the same function become one range.
    """
    if not best or any(a >= b for (a, _), (b, _) in itertools.pairwise(best)):
        raise ValueError(f"M values must be ascending, and there must be one: {best!r}")
    merged: list[tuple[int | None, str]] = []
    for m, function in best:
        if merged and merged[-1][1] == function:
            merged.pop()
        merged.append((m, function))
    merged[-1] = None, merged[-1][1]
    return merged


def invariant(
    ranked: Sequence[tuple[int, Sequence[str]]], summation: Mapping[str, str]
) -> list[tuple[int | None, str]] | None:
    """The ranges to serve callers who want equal bits at every M; None where there are none.

    `summation` has the candidates that may serve them, those that give equal bits with the same word
    (`aot.search.legal.summation`). Of the words, the one whose candidates are ranked before those of others at most
    M values, then the one with most places among the candidates, then by name. Places stand in for times, which are not
    kept; tuning chooses by those. At each M the best candidate of that word is chosen, if it has any there.
    """
    words = [[summation[name] for name in names if name in summation] for _, names in ranked]
    firsts = Counter(of[0] for of in words if of)
    there = Counter(itertools.chain.from_iterable(words))
    if not there:
        return None
    best = min(there, key=lambda word: (-firsts[word], -there[word], word))
    alike = [(m, [name for name in names if summation.get(name) == best]) for m, names in ranked]
    return ranges([(m, names[0]) for m, names in alike if names])


def without(found: Sequence[tuple[int | None, str]], names: Collection[str]) -> list[tuple[int | None, str]] | None:
    """Ranges without some functions, whose M fall to the functions of the ranges that follow, and at the end to the one
    before; None where that leaves nothing."""
    left = [(m_max or _ANY_M, name) for m_max, name in found if name not in names]
    return ranges(left) if left else None
