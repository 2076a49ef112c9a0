"""What tuning knows of moe_permute. Imports no torch, but where it is asked for what needs it."""

from __future__ import annotations

import math
from collections.abc import Hashable

from runtime.moe.permute import Signature
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.quantised import scale_shape

from ..operation import Measures, Tuning, Work

_NUMBER_BYTES = 4  # of an integer, a weight or a scale


class PermuteTuning(Tuning):
    """See `aot.tune.operation.Tuning`."""

    def work(self, signature: Signature, m: int) -> Work:
        """x, ids and weights read once, rows, positions, ends and scales written once."""
        s = signature
        numbers = 2 * m * s.top_k + s.experts + s.global_experts
        if s.weights != "none":
            numbers += m * s.top_k
        if s.scaling != "none":
            numbers += math.prod(scale_shape(s.scaling, m * s.top_k, s.k))
        of_x, of_rows = (DTYPES[t].bytes_of(s.k) for t in (s.x, s.rows))
        return Work(0, m * (of_x + s.top_k * of_rows) + _NUMBER_BYTES * numbers)

    def form(self, signature: Signature) -> Hashable:
        """All but extents."""
        return signature.x, bool(signature.global_experts), signature.scaling, signature.weights

    def measures(self) -> Measures:
        """What needs torch."""
        from .measures import PermuteMeasures

        return PermuteMeasures()


MOE_PERMUTE = PermuteTuning()
