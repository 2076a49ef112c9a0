"""From the best function at each measured M to the ranges of a dispatch entry. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def ranges(best: Sequence[tuple[int, str]]) -> list[dict[str, Any]]:
    """The ranges of a gemm table entry, given the function chosen at each M, ascending.

    A function chosen at M serves every M' in (the M before, M]; the last serves every larger M' too. Neighbours with
    the same function become one range.
    """
    if not best or any(a >= b for (a, _), (b, _) in itertools.pairwise(best)):
        raise ValueError(f"M values must be ascending, and there must be one: {best!r}")
    merged: list[dict[str, Any]] = []
    for m, function in best:
        if merged and merged[-1]["function"] == function:
            merged[-1]["m_max"] = m
        else:
            merged.append({"m_max": m, "function": function})
    merged[-1]["m_max"] = None
    return merged
