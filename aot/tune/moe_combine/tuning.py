"""What tuning knows of moe_combine. Imports no torch, but where it is asked for what needs it."""

from __future__ import annotations

from collections.abc import Hashable

from runtime.moe.combine import Signature
from runtime.numbers.dtypes import DTYPES

from ..operation import Measures, Tuning, Work

_NUMBER_BYTES = 4  # of a position, or a weight


class CombineTuning(Tuning):
    """See `aot.tune.operation.Tuning`."""

    def work(self, signature: Signature, m: int) -> Work:
        """Rows, positions and weights read once, y written once."""
        s = signature
        rows, y = s.top_k * DTYPES[s.rows].bytes_of(s.n), DTYPES[s.y].bytes_of(s.n)
        numbers = s.top_k * (1 if s.weights == "none" else 2)
        return Work(2 * m * s.top_k * s.n, m * (rows + y + _NUMBER_BYTES * numbers))

    def form(self, signature: Signature) -> Hashable:
        """All but extents."""
        return signature.rows, signature.y, signature.weights

    def measures(self) -> Measures:
        """What needs torch."""
        from .measures import CombineMeasures

        return CombineMeasures()


MOE_COMBINE = CombineTuning()
