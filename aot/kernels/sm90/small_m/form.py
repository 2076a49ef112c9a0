"""What the GEMM for few tokens computes, as far as its code depends on it.

Knows nothing of tiles, and imports no compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.numbers.epilogue import Epilogue
from runtime.numbers.scaling import SCALINGS


@dataclass(frozen=True)
class Form:
    """Of all that decides the code, what is no choice: the bytes of an element of A and B as they are multiplied, and
    words of a signature."""

    element_bytes: int = 2
    scaling: str = "none"
    b_major: str = "k"
    epilogue: str = "none"
    batched: bool = False

    @property
    def parts(self) -> Epilogue:
        """What the epilogue's word says."""
        return Epilogue.of(self.epilogue)

    @property
    def quantises(self) -> bool:
        """Whether A comes in 16 bits, and is multiplied in e4m3."""
        return SCALINGS[self.scaling].quantises

    @property
    def scaled_by_stage(self) -> bool:
        """Whether each stage has scales of its own for the tokens."""
        return self.scaling == "block" or self.quantises

    @property
    def scales_of_rows(self) -> bool:
        """Whether the epilogue scales each row of B."""
        scaling = SCALINGS[self.scaling]
        return (scaling.rows_b, scaling.k) == (1, None)

    @property
    def gated(self) -> bool:
        """Whether two columns become one."""
        return self.parts.gated
