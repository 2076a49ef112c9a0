"""What tuning knows of grouped GEMM. Imports no torch, but where it is asked for what needs it."""

from __future__ import annotations

from collections.abc import Hashable

from runtime.grouped_gemm import Signature, active_groups
from runtime.numbers.dtypes import DTYPES

from ...search.grouped_gemm import rows_of
from ..operation import Measures, Tuning, Work
from .rows import rows_read


class GroupedTuning(Tuning):
    """See `aot.tune.operation.Tuning`."""

    def work(self, signature: Signature, m: int) -> Work:
        """A and the B of each group that has rows read once, D written once; scales and bias, which are small, left
        out."""
        s, rows = signature, rows_of(signature, m)
        a, b, d = (DTYPES[t] for t in (s.a, s.b, s.d))
        weights = round(active_groups(s.groups, rows) * s.n) * b.bytes_of(s.k)
        return Work(2 * rows * s.n * s.k, weights + rows_read(s, rows) * a.bytes_of(s.k) + rows * d.bytes_of(s.columns))

    def form(self, signature: Signature) -> Hashable:
        """All but extents."""
        s = signature
        return s.a, s.b, s.d, s.epilogue, s.scaling, s.rows, s.overlap

    def measures(self) -> Measures:
        """What needs torch."""
        from .measures import GroupedMeasures

        return GroupedMeasures()


GROUPED_GEMM = GroupedTuning()
