"""Random operands of a grouped GEMM, what it must make of them, how exactly, and what torch runs in its place.

Needs torch; on the GPU for measurements, on the CPU for tests of this file. Knows nothing of kernels or archives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from runtime.gemm.fallback import apply_activation
from runtime.grouped_gemm import Signature, group_operands
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.epilogue import CLAMPED
from runtime.numbers.scaling import SCALE_BLOCK
from runtime.program.operation import Operand, extents_at

from ...search.grouped_gemm import rows_of
from ..elements import TORCH_DTYPES, poisoned
from ..gemm.baseline import COPIES_BYTES
from ..gemm.operands import MAX_ERROR_FP8_PROMOTED
from ..gemm.prepared_weights import dequantised, prepared, put_zero_points, random_weight, scale_size
from ..measure import Launch, MeasureError, tolerance
from ..operand_sets import CLAMPED_SIZE, FieldOperands, RandomOperands, reference_dtype
from ..operation import Measures
from ..quantise.measures import quantised
from .rows import ROOM, SKEW, rows_read

_NAMES = {  # of what torch multiplies 16-bit operands by
    "contiguous": "torch._grouped_mm",
    "masked": "torch.bmm",
    "gathered": "index_select, torch._grouped_mm",
}


@dataclass(frozen=True)
class OperandSet(FieldOperands):
    """One A, B, ends of groups, or counts of masked rows, and D of a grouped GEMM, and by name what follows them, in
    the order of `Signature.operands`, of which scale_d is written too; and where rows are gathered the indices of A's
    rows."""

    written = ("d",)

    a: torch.Tensor
    b: torch.Tensor
    ends: torch.Tensor
    d: torch.Tensor
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)
    indices: torch.Tensor | None = None

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """What a function takes, in order."""
        indices = [] if self.indices is None else [self.indices]
        return (self.a, self.b, *indices, self.ends, self.d, *self.extras.values())

    def outputs(self) -> Mapping[str, torch.Tensor]:
        """D, and its scales if it has any."""
        return {"d": self.d, **{name: of for name, of in self.extras.items() if name == "scale_d"}}

    def writing(self, outputs: Mapping[str, torch.Tensor]) -> OperandSet:
        """The same with other outputs."""
        scales = {name: of for name, of in outputs.items() if name != "d"}
        return replace(self, d=outputs["d"], extras={**self.extras, **scales})

    def rows(self) -> torch.Tensor:
        """The row of A that each row of D is made of, (M, K); of masked ones all that there is room for, (groups,
        rows, K)."""
        return self.a if self.indices is None else self.a.index_select(0, self.indices)


class Weights(RandomOperands[Signature]):
    """Random B of a signature, enough of them that using their operands in turn finds L2 cold."""

    def __init__(self, signature: Signature, m: int, l2_bytes: int, seed: int, device: str = "cuda") -> None:
        super().__init__(signature, m, l2_bytes, seed, device)
        self.b = [self._b() for _ in range(self.count)]

    def operands(self, m: int) -> list[OperandSet]:
        """Fresh random A and groups and poisoned D for `m` rows, one for each B. All rows are of a group, which is
        drawn with unequal chances (`SKEW`), and for every other B with equal ones, so that some have none where rows
        are few. Of masked rows groups have `m` on average, and room for `ROOM` times as many."""
        return [self._set(m, b, self._drawn(m, SKEW if i % 2 == 0 else 0.0)) for i, b in enumerate(self.b)]

    def _b(self) -> torch.Tensor:
        s = self.signature
        if prepared(s.scaling):
            return random_weight(s.groups * s.n, s.k, s.b, self.generator).unflatten(0, (s.groups, s.n))
        # Narrow values use their type's range: nothing underflows to a constant.
        size = 1.0 if DTYPES[s.b].narrow else s.k**-0.5
        return self._normal((s.groups, s.n, s.k)).mul_(size).to(TORCH_DTYPES[s.b])

    def unusual(self, m: int) -> list[OperandSet]:
        """The same with groups that a check should see: one has all rows; all but the last have one or none; and all
        end before the last rows, whose A is NaN. Of masked rows one group is full, and also the last beside groups of
        one or none."""
        groups, masked = self.signature.groups, self.signature.rows == "masked"
        one = torch.zeros(groups, dtype=torch.int64, device=self.device)
        one[groups // 3] = ROOM * m if masked else m
        few = torch.zeros_like(one)
        few[: (groups if masked else min(m, groups)) - 1 : 2] = 1
        few[-1] = ROOM * m if masked else few[-1] + m - few.sum()
        found = [self._set(m, self.b[0], counts) for counts in (one, few)]
        return found if masked else [*found, self._short(m)]

    def _short(self, m: int) -> OperandSet:
        """Groups of about two thirds of the rows."""
        rows = m - -(-m // 3)
        counts = self._drawn(rows, SKEW) if rows else torch.zeros(self.signature.groups, dtype=torch.int64)
        found = self._set(m, self.b[0], counts.to(self.device))
        if found.indices is None:
            found.a[rows:] = math.nan
        return found

    def _drawn(self, m: int, skew: float) -> torch.Tensor:
        """How many rows each group has, of chances that are log-normal of sigma `skew`."""
        groups = self.signature.groups
        chances = self._normal((groups,)).mul_(skew).exp_()
        rows = rows_of(self.signature, m)
        of_rows = torch.multinomial(chances, rows, replacement=True, generator=self.generator)
        counts = torch.bincount(of_rows, minlength=groups)
        return counts.clamp_max(ROOM * m) if self.signature.rows == "masked" else counts

    def _set(self, m: int, b: torch.Tensor, counts: torch.Tensor) -> OperandSet:
        s, masked = self.signature, self.signature.rows == "masked"
        size = CLAMPED_SIZE if s.parts.activation == CLAMPED else 1.0
        groups, rows = ((s.groups,), ROOM * m) if masked else ((), m)
        tokens, indices = rows_read(s, rows), None
        a = self._normal((*groups, tokens, s.k)).mul_(size).to(TORCH_DTYPES[s.a])
        behind = group_operands(s.d, s.scaling, s.epilogue, masked)
        extras = {operand.name: self._extra(operand, rows) for operand in behind}
        ends = (counts if masked else counts.cumsum(0)).to(torch.int32)
        d = poisoned((*groups, rows, s.columns), s.d, self.device)
        if s.rows == "gathered":
            drawn = torch.randint(tokens, (m,), **self.random)
            indices = drawn.to(torch.int32)
        return OperandSet(a, b, ends, d, extras, indices)

    def _extra(self, operand: Operand, m: int) -> torch.Tensor:
        """A bias of the order of sums; poison, where it is written; or scales that differ from each other by factors of
        about e, so that none can
        stand for another, those of blocks of A column after column, as quantising kernels write them."""
        extents = extents_at(self.signature, m)
        shape = tuple(extents[axis] for axis in operand.axes)
        if operand.name == "scale_d":
            return poisoned(shape, operand.dtype, self.device)
        if operand.layout == "free":
            return self._scales((*shape[:-2], shape[-1], shape[-2])).transpose(-1, -2)
        if operand.name.startswith("scale"):
            share = self.signature.k**-0.5 * scale_size(self.signature.scaling) if operand.name == "scale_b" else 1.0
            found = self._scales(shape).mul_(share).to(TORCH_DTYPES[operand.dtype])
            of_b = operand.name == "scale_b"
            return put_zero_points(self.signature.scaling, found, self.generator) if of_b else found
        return self._normal(shape).to(TORCH_DTYPES[operand.dtype])

    def _scales(self, shape: tuple[int, ...]) -> torch.Tensor:
        return self._normal(shape).float().mul_(0.5).exp_()

    def _normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, **self.random, dtype=torch.bfloat16)
        return values.float() if len(shape) == 1 else values


class GroupedMeasures(Measures):
    """See `aot.tune.operation.Measures`."""

    def weights(self, signature: Signature, m: int, l2_bytes: int, seed: int, device: str = "cuda") -> Weights:
        """Random weights, and with them all other operands."""
        return Weights(signature, m, l2_bytes, seed, device)

    def reference(self, signature: Signature, operands: OperandSet) -> Mapping[str, torch.Tensor]:
        """What D must be, in float64 where that is cheap, else in float32; group by group, NaN in rows of none."""
        rows, extras = operands.rows(), operands.extras
        wide = reference_dtype(operands.b.numel() + rows.numel())
        a = scaled(rows, extras.get("scale_a"), wide).flatten(0, -2)
        sums = a.new_full((a.shape[0], signature.n), math.nan)
        for group, (begin, end) in enumerate(_rows_of_groups(signature, operands)):
            sums[begin:end] = a[begin:end] @ _weight(signature, operands, group, wide).t()
            if signature.parts.bias:
                sums[begin:end] += extras["bias"][group]
        values = apply_activation(torch, signature.parts, sums)
        if signature.quantises:
            d, scale = quantised(values, signature.d, "block")
            return {"d": d, "scale_d": scale}
        return {"d": values.view(*rows.shape[:-1], -1)}

    def max_error(self, signature: Signature, output: str) -> float:
        """The relative error that D may have: its own rounding and the order of sums, which are in f32; of products of
        8 bits as of a GEMM with such scales, which scales of D may have too. The reference rounds weights of 4 bits
        to bf16, as kernels do."""
        if output == "d" and signature.quantises:
            return tolerance(signature.d)
        return MAX_ERROR_FP8_PROMOTED if DTYPES[signature.a].narrow else tolerance(signature.d)

    def baseline(self, signature: Signature, example: OperandSet) -> tuple[str, Launch]:
        """torch._grouped_mm, after an index_select where rows are gathered, or _scaled_grouped_mm of scales of rows, or
        of masked rows torch.bmm, which multiplies all that there is room for; of operands that torch multiplies in no
        one call, what torch.compile makes 16-bit numbers of first; of weights in 4 bits their 16-bit numbers, which are
        made before. Where there is a bias or an activation, then what torch.compile makes of it."""
        dtype, parts = _wide(signature), signature.parts
        torch._dynamo.reset()
        reasons = []
        for name, product in _products(signature):
            try:
                product(example)
                break
            except (AttributeError, RuntimeError, ValueError, TypeError) as error:
                reasons.append(f"{name}: {str(error).splitlines()[0]}")
        else:
            raise MeasureError(f"torch cannot compute {signature.key()}: {'; '.join(reasons)}")
        if signature.epilogue == "none" and not signature.quantises:
            return name, product

        def epilogue(sums: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None) -> Any:
            values = sums.float()
            if bias is not None and sums.dim() == 3:
                values = values + bias[:, None]
            elif bias is not None:
                rows = torch.arange(sums.shape[0], dtype=ends.dtype, device=ends.device)
                values = values + bias[torch.searchsorted(ends, rows, right=True).clamp_max(len(bias) - 1)]
            values = apply_activation(torch, parts, values)
            if not signature.quantises:
                return values.to(dtype)
            d, scale = quantised(values, signature.d, "block")
            return d.to(TORCH_DTYPES[signature.d]), scale

        compiled = torch.compile(epilogue, dynamic=True)

        def finished(o: OperandSet) -> Any:
            return compiled(product(o), o.ends, o.extras.get("bias"))

        finished(example)
        word = f"{parts.word()}, quantised" if signature.quantises else parts.word()
        return f"{name}, torch.compile'd {word}", finished


def _rows_of_groups(signature: Signature, operands: OperandSet) -> list[tuple[int, int]]:
    """The first row of each group, and that behind its last, of A with all groups' rows in one dimension."""
    split = operands.ends.tolist()
    if signature.rows == "masked":
        room = operands.a.shape[1]
        return [(room * group, room * group + min(max(count, 0), room)) for group, count in enumerate(split)]
    return list(zip([0, *split], split, strict=False))


def _weight(signature: Signature, operands: OperandSet, group: int, wide: torch.dtype) -> torch.Tensor:
    """A group's B (N, K) in `wide`, times its scales."""
    scales = operands.extras.get("scale_b")
    b, scale = operands.b[group], None if scales is None else scales[group]
    if scale is not None and prepared(signature.scaling):
        return dequantised(signature.scaling, b, scale).to(wide)
    return scaled(b, scale, wide)


def _wide(signature: Signature) -> torch.dtype:
    """The type of products: D's, or bf16 where that is made of them."""
    return torch.bfloat16 if signature.quantises else TORCH_DTYPES[signature.d]


def _products(signature: Signature) -> Iterator[tuple[str, Callable[[OperandSet], torch.Tensor]]]:
    """The ways in which torch may compute the scaled products of all groups, fastest first, by name."""
    dtype = _wide(signature)
    if signature.scaling == "none":
        yield _NAMES[signature.rows], lambda o: _product(o.rows(), o.b, o.ends, dtype)
        return
    if prepared(signature.scaling):
        yield _of_dequantised(signature)
        return
    if signature.scaling == "row_column":
        yield "torch._scaled_grouped_mm", lambda o: _scaled_grouped_mm(o, dtype)
    # Of 8 bits in 16, as a kernel of its own each: it reads all of B, and writes twice as much.
    widen = torch.compile(lambda x, scales: scaled(x, scales, torch.float32).to(dtype), dynamic=True)

    def widened(o: OperandSet) -> torch.Tensor:
        scale_a, scale_b = o.extras["scale_a"], o.extras["scale_b"]
        return _product(widen(o.rows(), scale_a), widen(o.b, scale_b), o.ends, dtype)

    yield f"dequantise, {_NAMES[signature.rows]}", widened


def _of_dequantised(signature: Signature) -> tuple[str, Callable[[OperandSet], torch.Tensor]]:
    """The 16-bit product of dequantised weights. The first call makes these, of its operands; calls take copies of them
    in turn, more than L2 holds, because what is captured afterwards must not dequantise."""
    dtype = _wide(signature)
    weights: list[torch.Tensor] = []
    turns = itertools.count()

    def run(o: OperandSet) -> torch.Tensor:
        if not weights:
            first = torch.stack([_weight(signature, o, group, dtype) for group in range(signature.groups)])
            weights.extend([first, *(first.clone() for _ in range(COPIES_BYTES // first.nbytes))])
        return _product(o.rows(), weights[next(turns) % len(weights)], o.ends, dtype)

    return f"{_NAMES[signature.rows]} of dequantised weights", run


def _product(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of masked rows, which A has a dimension more for, all that there is room for."""
    if a.dim() == 3:
        return torch.bmm(a, b.transpose(-2, -1))
    found: torch.Tensor = torch._grouped_mm(a, b.transpose(-2, -1), offs=ends, out_dtype=dtype)
    return found


def _scaled_grouped_mm(o: OperandSet, dtype: torch.dtype) -> torch.Tensor:
    """Its sums are promoted to f32, as ours are; of masked rows all that there is room for are multiplied."""
    ends = None if o.a.dim() == 3 else o.ends
    scales = o.extras["scale_a"], o.extras["scale_b"]
    found: torch.Tensor = torch._scaled_grouped_mm(
        o.rows(), o.b.transpose(-2, -1), *scales, offs=ends, out_dtype=dtype, use_fast_accum=False
    )
    return found


def scaled(x: torch.Tensor, scales: torch.Tensor | None, wide: torch.dtype) -> torch.Tensor:
    """`x` (..., rows, K) in `wide` times its scales, None or one for each row, (..., rows), or for each block of K:
    (..., rows or blocks of rows, blocks of K)."""
    if scales is None:
        return x.to(wide)
    if scales.dim() < x.dim():
        return x.to(wide) * scales[..., None]
    rows, k = (torch.arange(extent, device=x.device) for extent in x.shape[-2:])
    of_rows = rows if scales.shape[-2] == x.shape[-2] else rows // SCALE_BLOCK
    return x.to(wide) * scales[..., of_rows[:, None], (k // SCALE_BLOCK)[None, :]]
