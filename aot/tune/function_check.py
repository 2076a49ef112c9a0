"""Checks one function of a spec: random inputs, poisoned outputs and surroundings, its reference in torch.

Needs torch; on the GPU for checks, on the CPU for tests of this file. Knows nothing of archives or processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runtime.errors import AotError, WorkspaceError
from runtime.numbers.dtypes import DTYPES

from ..providers.spec_file import Spec, theirs
from ..spec import Function, Number, Scalar, SpecError, Symbol, Tensor
from .measure import MAX_ELEMENT_ERROR

_POISON = 0xFF  # in every byte: NaN in each type of floats, -1 in integers
_GUARD_BYTES = 4096  # before and behind each tensor, a multiple of every alignment
_FEW = 64  # elements whose rounding may all be near half a unit in the last place
_PADDING = 3  # steps by which free strides are larger than what they step over, in every second case
Launch = Callable[..., Any]  # given what a caller gives, tensors and scalars


@dataclass(frozen=True)
class _Operand:
    """A tensor in memory that is poisoned around it; `before` is the memory as it was before the launch."""

    argument: Tensor
    memory: torch.Tensor
    tensor: torch.Tensor
    before: torch.Tensor


def check(spec: Spec, function: Function, number: int, launch: Launch, seed: int, device: str = "cuda") -> str | None:
    """What is wrong with a function at one of the extents of `Function.checked_at`, or None.

    Raises:
        SpecError: the reference fails, or returns something else than the outputs.
        WorkspaceError: there is no memory left.
    """
    extents = function.checked_at()[number]
    generator = torch.Generator(device=device).manual_seed(seed + number)
    operands = _operands(function, extents, padded=number % 2 == 1, generator=generator)
    by_name = {o.argument.name: o for o in operands}
    expected = _expected(spec, function, by_name)
    try:
        launch(*_given(function, by_name))
    except WorkspaceError:
        raise
    except AotError as failure:
        return f"{type(failure).__name__}: {failure}"
    if device == "cuda":
        torch.cuda.synchronize()
    for operand in operands:
        if operand.argument.role == "in":
            if not torch.equal(operand.memory, operand.before):
                return f"it writes to {operand.argument.name}, which is an input, or around it"
        elif wrong := _judge(operand, expected[operand.argument.name], function.tolerance):
            return wrong
    return None


def arguments(function: Function, extents: Mapping[str, int], generator: torch.Generator) -> list[Any]:
    """What a caller gives at these extents: packed random tensors, those that are written full of NaN, and scalars."""
    return _given(function, {o.argument.name: o for o in _operands(function, extents, False, generator)})


def _given(function: Function, operands: Mapping[str, _Operand]) -> list[Any]:
    taken = (a for a in function.arguments if isinstance(a, Tensor | Scalar))
    return [operands[a.name].tensor if isinstance(a, Tensor) else _number(a) for a in taken]


def _number(a: Scalar) -> float:
    return float(a.value) if a.dtype == "f32" else int(a.value)


def _operands(
    function: Function, extents: Mapping[str, int], padded: bool, generator: torch.Generator
) -> list[_Operand]:
    symbols, values = function.symbols(), dict(extents)

    def known(x: Number, reach: int) -> int:
        """What an extent or stride is; a stride that is free is past what it must reach."""
        if isinstance(x, int):
            return x
        name = x.name if isinstance(x, Symbol) else x
        if name not in values:
            step = symbols[name].divisibility
            values[name] = (-(-reach // step) + (_PADDING if padded else 0)) * step
        return values[name]

    found = []
    for t in function.tensors():
        shape = [known(x, 0) for x in t.shape]
        strides, reach = [0] * len(shape), 1
        described = t.all_strides()
        for i in sorted(range(len(shape)), key=lambda i: (not isinstance(described[i], int), -i)):
            strides[i] = known(described[i], reach)
            reach = max(reach, strides[i] * shape[i])
        found.append(_operand(t, tuple(shape), tuple(strides), values, generator))
    return found


def _operand(
    t: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], values: Mapping[str, int], generator: torch.Generator
) -> _Operand:
    dtype = getattr(torch, DTYPES[t.dtype].torch)
    span = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    whole = span * dtype.itemsize + 2 * _GUARD_BYTES
    memory = torch.full((-(-whole // 16) * 16,), _POISON, dtype=torch.uint8, device=generator.device)
    tensor = memory.view(dtype).as_strided(shape, strides, _GUARD_BYTES // dtype.itemsize)
    if t.role != "out":
        tensor.copy_(_random(t, dtype, shape, values, generator))
    return _Operand(t, memory, tensor, memory.clone())


def _random(
    t: Tensor, dtype: torch.dtype, shape: tuple[int, ...], values: Mapping[str, int], generator: torch.Generator
) -> torch.Tensor:
    device = generator.device
    if t.values is None:
        return torch.randn(shape, generator=generator, device=device).to(dtype)
    low, end = t.values
    high = values[end] if isinstance(end, str) else end
    if dtype.is_floating_point:
        return torch.rand(shape, generator=generator, device=device).mul_(high - low).add_(low).to(dtype)
    return torch.randint(int(low), int(high), shape, generator=generator, device=device).to(dtype)


def _expected(spec: Spec, function: Function, operands: Mapping[str, _Operand]) -> dict[str, torch.Tensor]:
    """What each output must be; the reference is given copies, which it may write to."""
    assert function.reference is not None
    given = [
        _number(a) if isinstance(a, Scalar) else operands[a.name].tensor.clone()
        for a in function.arguments
        if isinstance(a, Scalar) or (isinstance(a, Tensor) and a.role != "out")
    ]
    outputs = [t for t in function.tensors() if t.role != "in"]
    where = f"function {function.name!r}: reference"
    with theirs(where, spec):
        found = function.reference(*given)
    found = list(found) if isinstance(found, tuple | list) else [found]
    told = f"{spec.path}: {where}"
    if len(found) != len(outputs):
        raise SpecError(f"{told} returns {len(found)} tensors, the outputs are {', '.join(t.name for t in outputs)}")
    for t, one in zip(outputs, found, strict=True):
        shape = tuple(operands[t.name].tensor.shape)
        if not isinstance(one, torch.Tensor) or tuple(one.shape) != shape:
            raise SpecError(f"{told}: {t.name} must be a tensor of shape {shape}, found {_kind(one)}")
    return {t.name: one for t, one in zip(outputs, found, strict=True)}


def _kind(x: Any) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"{x!r:.60}"


def _judge(o: _Operand, expected: torch.Tensor, tolerance: float | None) -> str | None:
    """What is wrong with an output or around it, or None."""
    name, out, d = o.argument.name, o.tensor.clone(), DTYPES[o.argument.dtype]
    o.tensor.copy_(
        o.before.view(o.tensor.dtype).as_strided(o.tensor.shape, o.tensor.stride(), o.tensor.storage_offset())
    )
    if not torch.equal(o.memory, o.before):
        return f"it writes outside of {name}"
    if not out.dtype.is_floating_point:
        wrong = int((out != expected.to(out.dtype)).sum())
        return f"{wrong} of {out.numel()} elements of {name} are wrong" if wrong else None
    wide, found = expected.double(), out.double()
    if bool((torch.isnan(found) & ~torch.isnan(wide)).any()):
        return f"it leaves part of {name} unwritten, or writes NaN"
    if not torch.equal(torch.isfinite(found), torch.isfinite(wide)):
        return f"{name} is infinite where the reference is not, or the other way"
    wide, found = (torch.nan_to_num(x, posinf=0.0, neginf=0.0) for x in (wide, found))
    difference, norm = (found - wide), max(wide.norm().item(), 1e-30)
    error, rms = difference.norm().item() / norm, max(wide.square().mean().sqrt().item(), 1e-30)
    worst = (difference.abs() - wide.abs() * d.rounding).max().item() / rms
    limit = (d.tolerance or 2 * d.rounding) if tolerance is None else tolerance
    if out.numel() < _FEW and limit < 1:
        limit = max(limit, d.rounding * (1 + 1 / math.sqrt(out.numel())))
    if error > limit or worst > max(MAX_ELEMENT_ERROR, limit):
        return f"{name}: relative error {error:.2e} (limit {limit:.1e}), worst element {worst:.2f} rms"
    return None


def names_of(functions: Sequence[Function], target: str) -> dict[str, Function]:
    """The functions by their names in an archive."""
    return {f"{name}.{target}": f for f in functions for name in f.names().values()}
