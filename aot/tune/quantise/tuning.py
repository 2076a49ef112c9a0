"""What tuning knows of quantise. Imports no torch, but where it is asked for what needs it."""

from __future__ import annotations

import math
from collections.abc import Hashable

from runtime.numbers.dtypes import DTYPES
from runtime.numbers.quantised import scale_shape
from runtime.quantise import Signature

from ..operation import Measures, Tuning, Work


class QuantiseTuning(Tuning):
    """See `aot.tune.operation.Tuning`."""

    def work(self, signature: Signature, m: int) -> Work:
        """x read once, y and scales written once."""
        s = signature
        of_x = s.k if s.activation == "none" else 2 * s.k
        numbers = DTYPES[s.x].bytes_of(of_x) + DTYPES[s.y].bytes_of(s.k)
        return Work(0, m * numbers + DTYPES["f32"].bytes * math.prod(scale_shape(s.scaling, m, s.k)))

    def form(self, signature: Signature) -> Hashable:
        """All but extents."""
        return signature.x, signature.y, signature.scaling, bool(signature.groups), signature.activation

    def measures(self) -> Measures:
        """What needs torch."""
        from .measures import QuantiseMeasures

        return QuantiseMeasures()


QUANTISE = QuantiseTuning()
