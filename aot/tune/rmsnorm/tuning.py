"""What tuning knows of RMSNorm. Imports no torch, but where it is asked for what needs it."""

from __future__ import annotations

import math
from collections.abc import Hashable

from runtime.numbers.dtypes import DTYPES
from runtime.numbers.quantised import scale_shape
from runtime.rmsnorm import Signature

from ..operation import Measures, Tuning, Work

_FLOPS = 4  # of an element: it is squared and added up, and has two factors


class RmsNormTuning(Tuning):
    """See `aot.tune.operation.Tuning`."""

    def work(self, signature: Signature, m: int) -> Work:
        """Each operand read or written once."""
        rows = (o.dtype for o in signature.operands() if o.name not in ("weight", "scale"))
        of_row = sum(DTYPES[dtype].bytes_of(signature.n) for dtype in rows)
        of_rest = DTYPES[signature.weight].bytes_of(signature.n)
        if signature.scaling != "none":
            of_rest += DTYPES["f32"].bytes_of(math.prod(scale_shape(signature.scaling, m, signature.n)))
        return Work(_FLOPS * m * signature.n, m * of_row + of_rest)

    def form(self, signature: Signature) -> Hashable:
        """All but N."""
        return signature.x, signature.weight, signature.y, signature.residual, signature.scaling

    def measures(self) -> Measures:
        """What needs torch."""
        from .measures import RmsNormMeasures

        return RmsNormMeasures()


RMSNORM = RmsNormTuning()
