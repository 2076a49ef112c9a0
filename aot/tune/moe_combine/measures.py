"""Random operands of a moe_combine, what it must make of them, how exactly, and what torch runs in its place.

Needs torch; on the GPU for measurements, on the CPU for tests of this file. Knows nothing of kernels or archives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from runtime.moe.combine import Signature

from ..elements import TORCH_DTYPES, poisoned
from ..measure import Launch, tolerance
from ..operand_sets import FieldOperands, RandomOperands, baseline_of
from ..operation import Measures


@dataclass(frozen=True)
class OperandSet(FieldOperands):
    """One set of rows, positions, perhaps weights, and y."""

    written = ("y",)

    rows: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor | None
    y: torch.Tensor


class Weights(RandomOperands[Signature]):
    """Random operands of a signature; so many that using them in turn finds L2 cold."""

    def operands(self, m: int) -> list[OperandSet]:
        """Fresh rows, each in one place of `m` tokens, and weights that add up to 1; a poisoned y."""
        return [self._set(m) for _ in range(self.count)]

    def unusual(self, m: int) -> list[OperandSet]:
        """The same where a third of the places, at random, are of no row, and rows that nobody names are NaN."""
        o = self._set(m)
        none = torch.rand(o.positions.shape, **self.random) < 1 / 3
        o.rows[o.positions[none].long()] = float("nan")
        return [replace(o, positions=torch.where(none, -1, o.positions))]

    def _set(self, m: int) -> OperandSet:
        s = self.signature
        positions = torch.rand(m * s.top_k, **self.random).argsort().view(m, s.top_k).to(torch.int32)
        return OperandSet(
            torch.randn((m * s.top_k, s.n), **self.random).to(TORCH_DTYPES[s.rows]),
            positions,
            torch.randn((m, s.top_k), **self.random).softmax(-1) if s.weights != "none" else None,
            poisoned((m, s.n), s.y, self.device),
        )


class CombineMeasures(Measures):
    """See `aot.tune.operation.Measures`."""

    def weights(self, signature: Signature, m: int, l2_bytes: int, seed: int, device: str = "cuda") -> Weights:
        """Random operands."""
        return Weights(signature, m, l2_bytes, seed, device)

    def reference(self, signature: Signature, operands: OperandSet) -> Mapping[str, torch.Tensor]:
        """What y must be, in float32, slot by slot."""
        o = operands
        y = torch.zeros(o.y.shape, device=o.y.device)
        for slot in range(signature.top_k):
            places = o.positions[:, slot].long()
            there = (places >= 0) & (places < len(o.rows))
            terms = o.rows[places.clamp(0, len(o.rows) - 1)].float()
            if o.weights is not None:
                terms = terms * o.weights[:, slot, None]
            y += torch.where(there[:, None], terms, 0.0)
        return {"y": y}

    def max_error(self, signature: Signature, output: str) -> float:
        """The relative error that y may have: its own rounding; sums are in f32."""
        return tolerance(signature.y)

    def baseline(self, signature: Signature, example: OperandSet) -> tuple[str, Launch]:
        """A gather, a product where there are weights, and a sum, in one compiled kernel."""
        dtype = TORCH_DTYPES[signature.y]
        torch._dynamo.reset()

        def sums(rows: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
            each = rows[positions.long()].float()
            return (each if weights is None else each * weights[..., None]).sum(1).to(dtype)

        add = torch.compile(sums, dynamic=True)

        def combine(o: OperandSet) -> torch.Tensor:
            found: torch.Tensor = add(o.rows, o.positions, o.weights)
            return found

        return baseline_of(signature, "torch.compile'd gather, product and sum", combine, example)
