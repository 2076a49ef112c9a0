"""Random operands of a grouped GEMM, what it must make of them, how exactly, and what torch runs in its place.

Needs torch; on the GPU for measurements, on the CPU for tests of this file. Knows nothing of kernels or archives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from runtime.gemm.fallback import apply_activation
from runtime.gemm.signature import CLAMPED
from runtime.grouped_gemm import Signature
from runtime.program.operation import Operand, extents_at

from ..elements import TORCH_DTYPES, poisoned
from ..measure import MOST_LAUNCHES, Launch, MeasureError, tolerance
from ..operation import Measures
from .tuning import GROUPED_GEMM

_FLOAT64_ELEMENTS = 10 << 20  # up to so many a reference is computed in float64
# Routers do not load all experts alike: a row falls to a group with a probability that is log-normal, of this sigma.
# With 128 groups the busiest has about four times the mean.
SKEW = 0.5
CLAMPED_SIZE = 4.0  # of A's numbers where sums are clamped, so that one in twelve is


@dataclass(frozen=True)
class OperandSet:
    """One A, B, ends of groups and D of a grouped GEMM, and by name what follows them, in the order of
    `Signature.operands`."""

    a: torch.Tensor
    b: torch.Tensor
    ends: torch.Tensor
    d: torch.Tensor
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """What a function takes, in order."""
        return (self.a, self.b, self.ends, self.d, *self.extras.values())

    def outputs(self) -> Mapping[str, torch.Tensor]:
        """D."""
        return {"d": self.d}

    def writing(self, outputs: Mapping[str, torch.Tensor]) -> OperandSet:
        """The same with another D."""
        return replace(self, d=outputs["d"])


class Weights:
    """Random B of a signature, enough of them that using their operands in turn finds L2 cold."""

    def __init__(self, signature: Signature, m: int, l2_bytes: int, seed: int, device: str = "cuda") -> None:
        self.signature, self.device = signature, device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        count = min(max(1, math.ceil(3 * l2_bytes / GROUPED_GEMM.work(signature, m).bytes)), MOST_LAUNCHES)
        shape = (signature.groups, signature.n, signature.k)
        self.b = [self._normal(shape).mul_(signature.k**-0.5).to(TORCH_DTYPES[signature.b]) for _ in range(count)]

    def operands(self, m: int) -> list[OperandSet]:
        """Fresh random A and groups and poisoned D for `m` rows, one for each B. All rows are of a group, which is
        drawn with unequal chances (`SKEW`), so that some have none where rows are few."""
        return [self._set(m, b, self._drawn(m)) for b in self.b]

    def unusual(self, m: int) -> list[OperandSet]:
        """The same with groups that a check should see: one has all rows, and all but the last have one or none."""
        groups = self.signature.groups
        one = torch.zeros(groups, dtype=torch.int64, device=self.device)
        one[groups // 3] = m
        few = torch.zeros_like(one)
        few[: min(m, groups) - 1 : 2] = 1
        few[-1] += m - few.sum()
        return [self._set(m, self.b[0], counts) for counts in (one, few)]

    def _drawn(self, m: int) -> torch.Tensor:
        """How many rows each group has."""
        groups = self.signature.groups
        chances = self._normal((groups,)).mul_(SKEW).exp_()
        of_rows = torch.multinomial(chances, m, replacement=True, generator=self.generator)
        return torch.bincount(of_rows, minlength=groups)

    def _set(self, m: int, b: torch.Tensor, counts: torch.Tensor) -> OperandSet:
        s = self.signature
        size = CLAMPED_SIZE if s.parts.activation == CLAMPED else 1.0
        a = self._normal((m, s.k)).mul_(size).to(TORCH_DTYPES[s.a])
        extras = {operand.name: self._extra(operand, m) for operand in s.operands()[4:]}
        ends = counts.cumsum(0).to(torch.int32)
        return OperandSet(a, b, ends, poisoned((m, s.columns), s.d, self.device), extras)

    def _extra(self, operand: Operand, m: int) -> torch.Tensor:
        extents = extents_at(self.signature, m)
        return self._normal(tuple(extents[axis] for axis in operand.axes)).to(TORCH_DTYPES[operand.dtype])

    def _normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, device=self.device, generator=self.generator, dtype=torch.bfloat16)
        return values.float() if len(shape) == 1 else values


class GroupedMeasures(Measures):
    """See `aot.tune.operation.Measures`."""

    def weights(self, signature: Signature, m: int, l2_bytes: int, seed: int, device: str = "cuda") -> Weights:
        """Random weights, and with them all other operands."""
        return Weights(signature, m, l2_bytes, seed, device)

    def reference(self, signature: Signature, operands: OperandSet) -> Mapping[str, torch.Tensor]:
        """What D must be, in float64 where that is cheap, else in float32; group by group."""
        wide = torch.float64 if operands.b.numel() + operands.a.numel() <= _FLOAT64_ELEMENTS else torch.float32
        a = operands.a.to(wide)
        sums = a.new_zeros((a.shape[0], signature.n))
        begin = 0
        for group, end in enumerate(operands.ends.tolist()):
            sums[begin:end] = a[begin:end] @ operands.b[group].to(wide).t()
            if signature.parts.bias:
                sums[begin:end] += operands.extras["bias"][group]
            begin = end
        return {"d": apply_activation(torch, signature.parts, sums)}

    def max_error(self, signature: Signature, output: str) -> float:
        """The relative error that D may have: its own rounding and the order of sums, which are in f32."""
        return tolerance(signature.d)

    def baseline(self, signature: Signature, example: OperandSet) -> tuple[str, Launch]:
        """torch._grouped_mm, and where there is a bias or an activation what torch.compile makes of it."""
        dtype, parts = TORCH_DTYPES[signature.d], signature.parts

        def product(o: OperandSet) -> torch.Tensor:
            found: torch.Tensor = torch._grouped_mm(o.a, o.b.transpose(-2, -1), offs=o.ends, out_dtype=dtype)
            return found

        try:
            product(example)
        except (AttributeError, RuntimeError, ValueError, TypeError) as error:
            raise MeasureError(f"torch cannot compute {signature.key()}: {str(error).splitlines()[0]}") from None
        if signature.epilogue == "none":
            return "torch._grouped_mm", product
        torch._dynamo.reset()

        def epilogue(sums: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            values = sums.float()
            if bias is not None:
                rows = torch.arange(sums.shape[0], dtype=ends.dtype, device=ends.device)
                values = values + bias[torch.searchsorted(ends, rows, right=True).clamp_max(len(bias) - 1)]
            return apply_activation(torch, parts, values).to(dtype)

        compiled = torch.compile(epilogue, dynamic=True)

        def finished(o: OperandSet) -> torch.Tensor:
            found: torch.Tensor = compiled(product(o), o.ends, o.extras.get("bias"))
            return found

        finished(example)
        return f"torch._grouped_mm, torch.compile'd {parts.word()}", finished
