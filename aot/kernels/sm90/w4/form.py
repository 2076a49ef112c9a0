"""What the GEMM of 4-bit weights computes, as far as its code depends on it: the format of weights, and the epilogue.

Knows nothing of tiles, and imports no compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.numbers.epilogue import Epilogue
from runtime.numbers.weights import FORMATS, WeightFormat


@dataclass(frozen=True)
class Form:
    """Of all that decides the code, what is no choice: a word of `runtime.numbers.weights.FORMATS`, and that of the
    epilogue."""

    weights: str = "mxfp4_weight"
    epilogue: str = "none"

    @property
    def format(self) -> WeightFormat:
        """What the word of weights says."""
        return FORMATS[self.weights]

    @property
    def parts(self) -> Epilogue:
        """What the epilogue's word says."""
        return Epilogue.of(self.epilogue)
