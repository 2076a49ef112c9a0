"""What tuning knows of row-wise scaling. Nothing measures it, since tests tune with a simulated GPU."""

from __future__ import annotations

from collections.abc import Hashable

from aot.tune.operation import Measures, Tuning, Work
from runtime.numbers.dtypes import DTYPES

from .operation import Signature


class RowScaleTuning(Tuning):
    def work(self, signature: Signature, m: int) -> Work:
        x, weight, y = (DTYPES[t].bytes_of(signature.n) for t in (signature.x, signature.weight, signature.y))
        return Work(2 * m * signature.n, m * (x + y) + weight)

    def form(self, signature: Signature) -> Hashable:
        return signature.x, signature.weight, signature.y

    def torch_serves(self, signature: Signature) -> bool:
        return False

    def measures(self) -> Measures:
        raise AssertionError("a simulated GPU needs none")


ROW_SCALE = RowScaleTuning()
