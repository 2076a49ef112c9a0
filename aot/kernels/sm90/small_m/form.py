"""What the GEMM for few tokens computes, as far as its code depends on it.

Knows nothing of tiles, and imports no compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.numbers.epilogue import Epilogue


@dataclass(frozen=True)
class Form:
    """Of all that decides the code, what is no choice: the bytes of an element of A and B, and words of a signature."""

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
    def gated(self) -> bool:
        """Whether two columns become one."""
        return self.parts.gated
