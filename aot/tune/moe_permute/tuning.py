"""What tuning knows of moe_permute. Imports no torch, but where it is asked for what needs it."""

from __future__ import annotations

from collections.abc import Hashable

from runtime.moe.permute import Signature
from runtime.numbers.dtypes import DTYPES

from ..operation import Measures, Tuning, Work

_INTEGER_BYTES = 4


class PermuteTuning(Tuning):
    """See `aot.tune.operation.Tuning`."""

    def work(self, signature: Signature, m: int) -> Work:
        """x and ids read once, rows, positions and ends written once."""
        s = signature
        row, integers = DTYPES[s.x].bytes_of(s.k), 2 * m * s.top_k + s.experts + s.global_experts
        return Work(0, m * (1 + s.top_k) * row + _INTEGER_BYTES * integers)

    def form(self, signature: Signature) -> Hashable:
        """All but extents."""
        return signature.x, bool(signature.global_experts)

    def measures(self) -> Measures:
        """What needs torch."""
        from .measures import PermuteMeasures

        return PermuteMeasures()


MOE_PERMUTE = PermuteTuning()
