"""What a persistent GEMM computes, as far as its code depends on it.

Knows nothing of tiles, and imports no compiler.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.gemm.signature import extra_operands
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.epilogue import Epilogue


@dataclass(frozen=True)
class Form:
    """What all variants for a signature share: words of `runtime.gemm.signature`."""

    a: str = "bf16"
    d: str = "bf16"
    scaling: str = "none"
    epilogue: str = "none"
    b_major: str = "k"
    scheduler_bytes: int = 0  # of shared memory, that a scheduler keeps
    masked: bool = False  # rows are by groups, and each group's A, D and scale_a is a batch of theirs
    gathered: bool = False  # indices on the device say which row of A each row of D is made of

    @property
    def gated(self) -> bool:
        """Whether two columns become one."""
        return Epilogue.of(self.epilogue).gated

    @property
    def grouped(self) -> bool:
        """Whether rows are by groups: what belongs to B has one more extent, and a CTA may have no tile."""
        return self.scheduler_bytes > 0

    @property
    def quantises(self) -> bool:
        """Whether D is in 8 bits, with scales that the epilogue makes."""
        return self.grouped and DTYPES[self.d].bits == 8

    @property
    def reads(self) -> bool:
        """Whether there are operands besides A and B."""
        return self.quantises or bool(extra_operands(self.d, self.scaling, self.epilogue, batched=False))

    @property
    def promotion_interval(self) -> int:
        """Stages of K after which f32 registers take over what the tensor core accumulated, or 0 for never.

        Its accumulator is short in fp8: two stages at most, one where each has scales of its own.
        """
        return 0 if DTYPES[self.a].bits > 8 else 1 if self.scaling == "block" else 2
