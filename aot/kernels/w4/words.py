"""Steps in the memory of prepared weights, in words of 32 bits. Knows nothing of who loads them."""

from __future__ import annotations

from typing import Any

from cutlass import cute

_WORD_BITS = 32
_ACCESS_WORDS = 4  # 16 bytes, which TMA and cp.async take


def in_words(tensor: cute.Tensor, step: Any) -> Any:
    """A step of so many elements as one of words, which is whole accesses."""
    return cute.assume(step * tensor.element_type.width // _WORD_BITS, divby=_ACCESS_WORDS)
