"""Estimated times of many variants at once, as cost programs: to rank them, to choose among them, to put in an archive.

Knows variants and their families; nothing of archives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from runtime.gemm.universal import INPUTS
from runtime.limits import MAX_COST_NODES, MAX_COST_RESULTS
from runtime.program.costs import CostProgram, CostSource

from .costs import Extents, Machine, Number, Tape, exp, log, maximum, minimum
from .h200 import H200
from .provider import family_of
from .variants import Variant

OWN_ESTIMATES = "the families' own estimates"  # of an order of variants, as archives say


class _Extents(NamedTuple):
    """A signature's extents, as estimates ask for them."""

    n: Any
    k: Any
    batch: Any


# M values at which corrections are known: an octave apart, or two where kernels are for few rows.
CORRECTED_M = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
Correction: TypeAlias = tuple[float, ...]  # the logarithm of measured over estimated time at each of `CORRECTED_M`


def shares(m: Number) -> list[Any]:
    """By how much each of `CORRECTED_M` counts at `m` rows: linear interpolation in log M, constant beyond the last."""
    x = log(minimum(m, CORRECTED_M[-1])) / math.log(2)
    places = [math.log2(at) for at in CORRECTED_M]
    found = []
    for before, place, after in zip([-1.0, *places], places, [*places[1:], math.inf], strict=False):
        rising = (x - before) / (place - before)
        falling = 1.0 if math.isinf(after) else (after - x) / (after - place)
        found.append(maximum(minimum(rising, falling), 0))
    return found


def program(
    variants: Sequence[Variant],
    corrections: Mapping[Variant, Correction] = MappingProxyType({}),
) -> CostSource:
    """The cost program over `INPUTS` that gives the microseconds of each of `variants`, in order.

    Estimates are multiplied by what `corrections` has of a variant.

    Raises:
        ValueError: one is of a family that has no estimate.
    """
    tape = Tape(INPUTS)
    m, n, k, batch, multiprocessors, memory_gbps = tape.symbols()
    of, machine, counts = _Extents(n, k, batch), Machine(multiprocessors, memory_gbps), shares(m)
    results = []
    for variant in variants:
        family = family_of(variant)
        if family is None or family.estimate_us is None:
            raise ValueError(f"{variant.name()}: its family has no estimate of times")
        us = family.estimate_us(variant, of, m, machine)
        if variant in corrections:
            known = ((count, x) for count, x in zip(counts, corrections[variant], strict=True) if x)
            us = us * exp(sum(count * x for count, x in known))
        results.append(us)
    return tape.program(results)


class Estimates:
    """The estimates of some variants, whose families must have them."""

    def __init__(
        self,
        variants: Sequence[Variant],
        corrections: Mapping[Variant, Correction] = MappingProxyType({}),
    ) -> None:
        """The parameters are those of `program`."""
        most = MAX_COST_RESULTS
        parts = [variants[i : i + most] for i in range(0, len(variants), most)]
        self._programs = [
            CostProgram.from_json(source.to_json(), len(INPUTS), "estimates")
            for part in parts
            for source in _small_enough(part, corrections)
        ]

    def us(self, of: Extents, m: int, machine: Machine = H200) -> list[float]:
        """The microseconds of each variant for `m` rows."""
        values: tuple[Any, ...] = (m, of.n, of.k, of.batch, *machine)
        return list(itertools.chain.from_iterable(p.evaluate(values) for p in self._programs))


def _small_enough(variants: Sequence[Variant], corrections: Mapping[Variant, Correction]) -> list[CostSource]:
    """Their program, or where it is too large those of both halves."""
    source = program(variants, corrections)
    if len(variants) == 1 or len(source.constants) + len(source.operations) <= MAX_COST_NODES:
        return [source]
    half = len(variants) // 2
    return [*_small_enough(variants[:half], corrections), *_small_enough(variants[half:], corrections)]
