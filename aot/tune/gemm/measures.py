"""What tuning needs torch for, of GEMM: `operands` and `baseline` as `aot.tune.operation.Measures` asks for them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from runtime.gemm.signature import Signature

from ..measure import Launch
from ..operation import Measures
from .baseline import baseline
from .operands import OperandSet, Weights, max_error, reference


class GemmMeasures(Measures):
    """See `aot.tune.operation.Measures`."""

    def weights(self, signature: Signature, m: int, l2_bytes: int, seed: int, device: str = "cuda") -> Weights:
        """Random B matrices, and with them all other operands."""
        return Weights(signature, m, l2_bytes, seed, device)

    def reference(self, signature: Signature, operands: OperandSet) -> Mapping[str, torch.Tensor]:
        """What D must be."""
        return {"d": reference(signature, operands)}

    def max_error(self, signature: Signature, output: str) -> float:
        """The relative error that D may have."""
        return max_error(signature)

    def baseline(self, signature: Signature, example: OperandSet) -> tuple[str, Launch]:
        """What torch runs."""
        return baseline(signature, example)
