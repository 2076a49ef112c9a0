"""Estimated times of many variants at once, as cost programs: to rank them, to choose among them, to put in an archive.

Knows variants and their families; nothing of archives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from runtime.costs import CostProgram
from runtime.limits import MAX_COST_RESULTS
from runtime.universal import INPUTS

from .costs import H200, Extents, Machine, Number, Tape, exp, log, maximum, minimum
from .variants import Variant, family_of


class _Extents(NamedTuple):
    """A signature's extents, as estimates ask for them."""

    n: Any
    k: Any
    batch: Any


class Correction(NamedTuple):
    """What measurements say of a function's estimate: the logarithm of measured over estimated time, as a line in the
    logarithm of M, from `LEAST_M` to `MOST_M`; beyond it is what it is there, and at `UNCORRECTED_M` and below 0."""

    at_middle: float = 0.0
    slope: float = 0.0

    def of(self, m: Number) -> Any:
        """The logarithm at `m` rows."""
        place = log(minimum(maximum(m, LEAST_M), MOST_M)) - MIDDLE
        share = log(minimum(maximum(m, UNCORRECTED_M), LEAST_M) / UNCORRECTED_M) / math.log(LEAST_M / UNCORRECTED_M)
        return (self.at_middle + place * self.slope) * share


UNCORRECTED_M, LEAST_M, MOST_M = 64, 128, 8192  # what has been measured of all variants begins at 128
MIDDLE = 6.5  # of logarithms of M


def program(
    variants: Sequence[Variant], corrections: Mapping[Variant, Correction] = MappingProxyType({})
) -> dict[str, Any]:
    """The cost program over `INPUTS` that gives the microseconds of each of `variants`, in order.

    Raises:
        ValueError: one is of a family that has no estimate.
    """
    tape = Tape(INPUTS)
    m, n, k, batch, multiprocessors, memory_gbps = tape.symbols()
    of, machine = _Extents(n, k, batch), Machine(multiprocessors, memory_gbps)
    results = []
    for variant in variants:
        family = family_of(variant)
        if family is None or family.estimate_us is None:
            raise ValueError(f"{variant.name()}: its family has no estimate of times")
        us = family.estimate_us(variant, of, m, machine)
        line = corrections.get(variant)
        results.append(us if line is None else us * exp(line.of(m)))
    return tape.to_json(results)


class Estimates:
    """The estimates of some variants, whose families must have them."""

    def __init__(
        self, variants: Sequence[Variant], corrections: Mapping[Variant, Correction] = MappingProxyType({})
    ) -> None:
        parts = [variants[i : i + MAX_COST_RESULTS] for i in range(0, len(variants), MAX_COST_RESULTS)]
        self._programs = [CostProgram.from_json(program(part, corrections), len(INPUTS), "estimates") for part in parts]

    def us(self, of: Extents, m: int, machine: Machine = H200) -> list[float]:
        """The microseconds of each variant for `m` rows."""
        values: tuple[Any, ...] = (m, of.n, of.k, of.batch, *machine)
        return list(itertools.chain.from_iterable(p.evaluate(values) for p in self._programs))
