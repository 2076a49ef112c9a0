"""What a server was seen to run, as counts by M: which M stand for many, and which have most of the time. Pure.

Times are not known where this is asked, so a step counts as one of `FLAT` rows up to there, where reading weights takes
the time, and above as what multiplies: that is about where a GEMM in 16 bits becomes bound by the tensor cores of an
H100 (989 TFLOP/s, 3.35 TB/s: 295 rows) and of an H200 (4.8 TB/s: 206).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

FLAT = 256  # rows
_STEPS_PER_OCTAVE = 4  # M that are nearer to each other than that are one
_ENOUGH = 0.99  # of the time


def shares(counts: Mapping[int, int]) -> dict[int, float]:
    """The share of the time that each M has; `counts` are positive."""
    times = {m: count * max(m, FLAT) for m, count in counts.items()}
    whole = math.fsum(times.values())
    return {m: time / whole for m, time in times.items()}


def gathered(counts: Mapping[int, int]) -> dict[int, int]:
    """The same counts by fewer M, ascending: those within about a fifth of each other count for the one of most time,
    but the smallest and the largest M of all stay."""
    of_time, ends = shares(counts), (min(counts), max(counts))
    groups: dict[tuple[int, bool, bool], list[int]] = {}
    for m in sorted(counts):
        groups.setdefault((round(_STEPS_PER_OCTAVE * math.log2(m)), m == ends[0], m == ends[1]), []).append(m)
    found = {max(ms, key=lambda m: (of_time[m], m)): sum(counts[m] for m in ms) for ms in groups.values()}
    return dict(sorted(found.items()))


def tokens(counts: Mapping[int, int], most: int) -> tuple[int, ...]:
    """The M values to tune for, ascending: the smallest and the largest of `gathered`, and of the others those of most
    time, until they have nearly all of it together, or are so many."""
    few = gathered(counts)
    of_time = shares(few)
    chosen = {min(few), max(few)}
    for m in sorted(few, key=lambda m: (-of_time[m], m)):
        if len(chosen) >= most or math.fsum(of_time[c] for c in chosen) >= _ENOUGH:
            break
        chosen.add(m)
    return tuple(sorted(chosen))


def weight(counts: Mapping[int, int], m: int, octaves: float) -> float:
    """How much more the time near `m` is than if all of so many octaves of M had as much of it: one half of that, and
    one half as if they had. 1 where nothing was counted."""
    if not counts:
        return 1.0
    near = math.fsum(share for at, share in shares(counts).items() if abs(math.log2(at / m)) <= 0.5)  # of one octave
    return 0.5 + 0.5 * near * octaves
