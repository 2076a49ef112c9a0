"""What happens to a sum of products before it is stored, and the words for it: activations, gates, bias and the like.

A table that GEMMs of every kind ask. Knows nothing of kernels or operations.
"""

from __future__ import annotations

import itertools

from ..named_tuple import NamedTuple
from .dtypes import DTYPES

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
# Two columns into one: act(gate) * up, with silu, erf gelu or tanh gelu.
GATES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
# GPT-OSS's: gate * sigmoid(CLAMPED_ALPHA * gate) * (up + 1), where gate is at most CLAMPED_LIMIT, and up between it and
# its negative (`GptOssExperts` of transformers).
CLAMPED = "swiglu_clamped"
CLAMPED_ALPHA, CLAMPED_LIMIT = 1.702, 7.0
GATED = (*GATES, CLAMPED)
_INTERLEAVED = "_interleaved"


class Epilogue(NamedTuple):
    """What happens to a sum before it is D: `(act(sum + bias) + residual) * scale_d`, each part only where it is named.

    `activation` is one of `ACTIVATIONS`, or of `GATED`: then D has half as many columns as B has rows, column i from
    `act(gate_i) * up_i`, where gate_i and up_i are of rows i and N/2 + i of B, or 2i and 2i + 1 if `interleaved`; of
    `CLAMPED` from what stands there.
    """

    activation: str = "none"
    interleaved: bool = False
    bias: bool = False
    residual: bool = False
    scale: bool = False

    @property
    def gated(self) -> bool:
        """Whether two columns become one."""
        return self.activation in GATED

    @property
    def activation_word(self) -> str:
        """The activation alone, such as "none", "silu" or "swiglu_interleaved"."""
        return self.activation + (_INTERLEAVED if self.interleaved else "")

    def word(self) -> str:
        """One readable word, such as "none", "silu" or "bias+swiglu_interleaved+residual"."""
        parts = ["bias"] * self.bias + [self.activation_word] * (self.activation != "none")
        parts += ["residual"] * self.residual + ["scale"] * self.scale
        return "+".join(parts) or "none"

    @classmethod
    def of(cls, word: str) -> Epilogue:
        """What `word` says; only what `word()` writes is read.

        Raises:
            KeyError: it is none of `EPILOGUES`.
        """
        return EPILOGUES[word]


EPILOGUES: dict[str, Epilogue] = {
    e.word(): e
    for e in (
        Epilogue(activation, interleaved, *parts)
        for parts in itertools.product((False, True), repeat=3)
        for activation in (*ACTIVATIONS, *GATED)
        for interleaved in ((False, True) if activation in GATED else (False,))
    )
}


def extra_dtype(d: str) -> str:
    """The element type of bias and residual: that of D, or bf16 where D is of 8 bits."""
    return d if DTYPES[d].bits > 8 else "bf16"
