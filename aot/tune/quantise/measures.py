"""Random operands of quantise, what it must make of them, how exactly, and what torch runs in its place.

Needs torch; on the GPU for measurements, on the CPU for tests of this file. Knows nothing of kernels or archives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from runtime.gemm.fallback import apply_activation
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.epilogue import Epilogue
from runtime.numbers.quantised import LEAST_AMAX, scale_shape
from runtime.numbers.scaling import SCALE_BLOCK
from runtime.quantise import Signature

from ..elements import TORCH_DTYPES, poisoned
from ..measure import Launch, tolerance
from ..operand_sets import FieldOperands, RandomOperands, baseline_of, rows_of_magnitudes
from ..operation import Measures

_ZERO_BLOCK = 3  # of each row that block of 128


@dataclass(frozen=True)
class OperandSet(FieldOperands):
    """One x, perhaps ends of groups, y and scales."""

    written = ("y", "scale")

    x: torch.Tensor
    ends: torch.Tensor | None
    y: torch.Tensor
    scale: torch.Tensor


class Weights(RandomOperands[Signature]):
    """Random operands of a signature; so many that using them in turn finds L2 cold."""

    def operands(self, m: int) -> list[OperandSet]:
        """Fresh rows, all of which are of a group where there are groups; poisoned outputs."""
        return [self._set(m) for _ in range(self.count)]

    def unusual(self, m: int) -> list[OperandSet]:
        """With groups, the same where two thirds of the rows are of one, and NaN is behind them."""
        o = self._set(m)
        if o.ends is None:
            return []
        end = m * 2 // 3
        o.x[end:] = float("nan")
        return [replace(o, ends=o.ends.clamp_max(end))]

    def _set(self, m: int) -> OperandSet:
        s, ends = self.signature, None
        if s.groups:
            ends = torch.randint(m + 1, (s.groups,), **self.random).sort().values.to(torch.int32)
            ends[-1] = m
        x = drawn((m, s.k), self.random)
        if s.activation != "none":
            x = torch.cat([x, drawn((m, s.k), self.random)], 1)
        return OperandSet(
            x.to(TORCH_DTYPES[s.x]),
            ends,
            poisoned((m, s.k), s.y, self.device),
            poisoned(scale_shape(s.scaling, m, s.k), "f32", self.device),
        )


def drawn(shape: tuple[int, int], random: Mapping[str, Any]) -> torch.Tensor:
    """Random rows of different magnitudes, f32, some of which is zero: a row, and a block of each."""
    (x,) = rows_of_magnitudes(shape, random)
    x[:, _ZERO_BLOCK * SCALE_BLOCK : (_ZERO_BLOCK + 1) * SCALE_BLOCK] = 0
    return x


def activated(x: torch.Tensor, activation: str) -> torch.Tensor:
    """x (M, K), or with an activation what its gates make of x (M, 2 K), in x's type."""
    if activation == "none":
        return x
    found: torch.Tensor = apply_activation(torch, Epilogue.of(activation), x.float()).to(x.dtype)
    return found


def quantised(x: torch.Tensor, y: str, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What x (M, K) is over its scales, in f32, before it is rounded to type `y`, and the scales: (M, K/128) or (M)."""
    rows, k = x.shape
    width = SCALE_BLOCK if scaling == "block" else k
    blocks = -(-k // width)
    wide = torch.nn.functional.pad(x.float(), (0, blocks * width - k)).view(rows, blocks, width)
    scale = wide.abs().amax(-1).clamp_min(LEAST_AMAX) / DTYPES[y].largest
    over = (wide / scale[..., None]).view(rows, blocks * width)[:, :k]
    return over, scale if scaling == "block" else scale[:, 0]


def error_behind(error: float, y: str) -> float:
    """The relative error, in the norm, that quantised rows may have where the numbers before had `error`.

    A number that is off by e falls on the other side of a step of size s with probability e/s, and is then off by s:
    e*s in the mean square. A step is at most one unit in the last place of the number. The scale, made of the largest
    number, may be off as well, so that is twice: the square root of 2 * unit * error.
    """
    return math.sqrt(2 * 2 * DTYPES[y].rounding * error)


class QuantiseMeasures(Measures):
    """See `aot.tune.operation.Measures`."""

    def weights(self, signature: Signature, m: int, l2_bytes: int, seed: int, device: str = "cuda") -> Weights:
        """Random operands."""
        return Weights(signature, m, l2_bytes, seed, device)

    def reference(self, signature: Signature, operands: OperandSet) -> Mapping[str, torch.Tensor]:
        """Both outputs, NaN in rows of no group."""
        o = operands
        y, scale = quantised(activated(o.x, signature.activation), signature.y, signature.scaling)
        end = len(o.x) if o.ends is None else int(o.ends[-1])
        y[end:], scale[end:] = float("nan"), float("nan")
        return {"y": y, "scale": scale}

    def max_error(self, signature: Signature, output: str) -> float:
        """The relative error that an output may have: its own rounding, with gates behind that of what they make."""
        if signature.activation == "none":
            return tolerance(signature.y if output == "y" else "f32")
        before = tolerance(signature.x)
        return before if output == "scale" else tolerance(signature.y) + error_behind(before, signature.y)

    def baseline(self, signature: Signature, example: OperandSet) -> tuple[str, Launch]:
        """One compiled kernel, which makes outputs of its own, of all rows."""
        torch._dynamo.reset()
        to = TORCH_DTYPES[signature.y]

        def narrow(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, scale = quantised(activated(x, signature.activation), signature.y, signature.scaling)
            return y.to(to), scale

        compiled = torch.compile(narrow, dynamic=True)
        gates = "" if signature.activation == "none" else f"{signature.activation}, "
        name = f"torch.compile'd {gates}amax, quotient and rounding"
        return baseline_of(signature, name, lambda o: compiled(o.x), example)
