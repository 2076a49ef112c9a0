"""Random operands of an RMSNorm, what it must make of them, how exactly, and what torch runs in its place.

Needs torch; on the GPU for measurements, on the CPU for tests of this file. Knows nothing of kernels or archives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from runtime.numbers.quantised import scale_shape
from runtime.rmsnorm import Signature

from ..elements import TORCH_DTYPES, poisoned
from ..measure import Launch, tolerance
from ..operand_sets import FieldOperands, RandomOperands, baseline_of, reference_dtype, rows_of_magnitudes
from ..operation import Measures
from ..quantise.measures import error_behind, quantised

_EPS = 1e-5  # another than the usual one, which a function might have for its own


@dataclass(frozen=True)
class OperandSet(FieldOperands):
    """One x, weight and y of an RMSNorm, perhaps scales, perhaps a residual and a sum, and its eps."""

    x: torch.Tensor
    residual: torch.Tensor | None
    weight: torch.Tensor
    y: torch.Tensor
    scale: torch.Tensor | None
    sum: torch.Tensor | None
    eps: float

    @property
    def written(self) -> tuple[str, ...]:  # type: ignore[override]
        """The fields that a function writes."""
        return tuple(name for name in ("y", "scale", "sum") if getattr(self, name) is not None)


class Weights(RandomOperands[Signature]):
    """Random weights of a signature, enough of them that using their operands in turn finds L2 cold."""

    def __init__(self, signature: Signature, m: int, l2_bytes: int, seed: int, device: str = "cuda") -> None:
        super().__init__(signature, m, l2_bytes, seed, device)
        drawn = (torch.randn((signature.n,), **self.random) for _ in range(self.count))
        self.weights = [weight.to(TORCH_DTYPES[signature.weight]) for weight in drawn]

    def operands(self, m: int) -> list[OperandSet]:
        """Fresh random x and residual (M, N) and poisoned y and sum (M, N), one for each weight. Row 5, if there is
        one, is zero."""
        s = self.signature

        def made(weight: torch.Tensor) -> OperandSet:
            x, residual = (t.to(TORCH_DTYPES[s.x]) for t in rows_of_magnitudes((m, s.n), self.random, 2))
            y, scale, total = poisoned((m, s.n), s.y, self.device), None, None
            if s.scaling != "none":
                scale = poisoned(scale_shape(s.scaling, m, s.n), "f32", self.device)
            if s.residual == "none":
                return OperandSet(x, None, weight, y, scale, total, _EPS)
            total = poisoned((m, s.n), s.residual, self.device)
            return OperandSet(x, residual.to(TORCH_DTYPES[s.residual]), weight, y, scale, total, _EPS)

        return [made(weight) for weight in self.weights]


class RmsNormMeasures(Measures):
    """See `aot.tune.operation.Measures`."""

    def weights(self, signature: Signature, m: int, l2_bytes: int, seed: int, device: str = "cuda") -> Weights:
        """Random weights, and with them all other operands."""
        return Weights(signature, m, l2_bytes, seed, device)

    def reference(self, signature: Signature, operands: OperandSet) -> Mapping[str, torch.Tensor]:
        """What y must be, and the sum, in float64 where that is cheap, else in float32."""
        wide = reference_dtype(operands.x.numel())
        x, weight, more = operands.x.to(wide), operands.weight.to(wide), dict[str, torch.Tensor]()
        if operands.residual is not None:
            more["sum"] = x = x + operands.residual.to(wide)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + operands.eps) * weight
        if signature.scaling != "none":
            y, more["scale"] = quantised(y.to(operands.x.dtype), signature.y, signature.scaling)
        return {"y": y, **more}

    def max_error(self, signature: Signature, output: str) -> float:
        """The relative error that an output may have: its own rounding and the order of sums, which are in f32; of y
        also that of the sum. Of y with scales it is what quantising makes of the error of numbers of x's type."""
        of_sum = 0.0 if signature.residual == "none" else tolerance(signature.residual)
        if output == "sum":
            return of_sum
        if signature.scaling == "none":
            return tolerance(signature.y) + of_sum
        before = tolerance(signature.x) + of_sum
        return before if output == "scale" else tolerance(signature.y) + error_behind(before, signature.y)

    def baseline(self, signature: Signature, example: OperandSet) -> tuple[str, Launch]:
        """torch.nn.functional.rms_norm, which makes a y of its own; one of another type is converted, and a residual
        added before. With scales all is compiled to one kernel."""
        if signature.scaling != "none":
            return _compiled(signature, example)
        name, dtype = "torch.nn.functional.rms_norm", TORCH_DTYPES[signature.y]

        def normalise(o: OperandSet) -> torch.Tensor:
            x = o.x if o.residual is None else o.x + o.residual
            return torch.nn.functional.rms_norm(x, o.weight.shape, o.weight, o.eps)

        if signature.residual != "none":
            name = f"an addition, {name}"
        if signature.x == signature.weight == signature.y:
            return baseline_of(signature, name, normalise, example)
        return baseline_of(signature, f"{name}, to {signature.y}", lambda o: normalise(o).to(dtype), example)


def _compiled(signature: Signature, example: OperandSet) -> tuple[str, Launch]:
    """What torch.compile makes of an addition, if there is a residual, a norm, and quantising."""
    torch._dynamo.reset()
    to = TORCH_DTYPES[signature.y]

    def normalise(
        x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, ...]:
        total = x if residual is None else x + residual
        norm = torch.nn.functional.rms_norm(total, weight.shape, weight, eps)
        y, scale = quantised(norm, signature.y, signature.scaling)
        return (y.to(to), scale) if residual is None else (y.to(to), scale, total)

    compiled = torch.compile(normalise, dynamic=True)
    name = "torch.compile'd rms_norm, amax, quotient and rounding"
    return baseline_of(signature, name, lambda o: compiled(o.x, o.residual, o.weight, o.eps), example)
