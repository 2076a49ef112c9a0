"""A planned GEMM: a launch, and what a call must be for it to be the right one.

Knows nothing of archives or of how it came about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...gemm.universal import AnyEntry
from ...named_tuple import NamedTuple
from ...program.pointers import PointerChecks
from ...program.streams import TorchStreams
from ..function import Function
from ..plan import AnyPlan

OUT = 2  # the place of D among operands


class GemmPlan(NamedTuple):
    """A plan with what the fast path of `gemm` needs to prove that it fits the call at hand."""

    launch: Callable[[tuple[int, ...], int], None]
    checks: PointerChecks  # of A, B, D and the operands after it, as kernels take them
    streams: TorchStreams | None  # where the tensors are torch's
    shape: tuple[int, ...]  # of `out`, as is the element type
    dtype: Any
    function: Function
    entry: AnyEntry
    plan: AnyPlan

    def with_rows(self, plan: AnyPlan, more: int, steps: Sequence[int]) -> GemmPlan:
        """This for `more` rows; `steps` are the bytes from row to row of each operand, 0 where it has none."""
        # All fields in order: `_replace` takes three times as long.
        return GemmPlan(
            plan.launch,
            self.checks.grown(more, steps),
            self.streams,
            (self.shape[0] + more, *self.shape[1:]),
            self.dtype,
            self.function,
            self.entry,
            plan,
        )
