"""What operand sets of operations have alike: fields in the order of a function's arguments, so many sets that using
them in turn finds L2 cold, random rows of different magnitudes, how wide references are computed, and a first run of
what torch does in a function's place.

Needs torch. Knows nothing of any operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Generic, TypeVar

import torch

from runtime.program.operation import Signature

from .measure import MOST_LAUNCHES, Launch, MeasureError
from .operation import tuning

CLAMPED_SIZE = 4.0  # of A's numbers where sums are clamped, so that one in twelve is
_TIMES_L2 = 3  # as large as all sets together are at least
_FLOAT64_ELEMENTS = 10 << 20  # up to so many a reference is computed in float64: 80 MiB for a copy, and milliseconds
# Of rows, in powers of ten: from where eps of a norm decides a result (10^-3) to where it does not matter.
_MAGNITUDES = -3.0, 1.0
_ZERO_ROW = 5  # as servers pad with

Self = TypeVar("Self", bound="FieldOperands")
S = TypeVar("S", bound=Signature)


@dataclass(frozen=True)
class FieldOperands:
    """An operand set whose fields are what a function takes, in order; None where it takes none. See
    `aot.tune.operation.OperandSet`."""

    written: ClassVar[tuple[str, ...]]  # the fields that a function writes

    def arguments(self) -> tuple[Any, ...]:
        """What a function takes, in order."""
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(value for value in values if value is not None)

    def outputs(self) -> Mapping[str, torch.Tensor]:
        """What is written."""
        return {name: getattr(self, name) for name in self.written}

    def writing(self: Self, outputs: Mapping[str, torch.Tensor]) -> Self:
        """The same with other outputs."""
        return replace(self, **{name: outputs[name] for name in self.written})


class RandomOperands(Generic[S]):
    """Where random operands of a signature on `device` come from: all sets together, `count` of them, are larger than
    three times L2 at `m` rows, but they are no more than a graph launches."""

    def __init__(self, signature: S, m: int, l2_bytes: int, seed: int, device: str = "cuda") -> None:
        self.signature, self.device = signature, device
        self.generator = torch.Generator(device=device).manual_seed(seed)
        enough = math.ceil(_TIMES_L2 * l2_bytes / tuning(signature).work(signature, m).bytes)
        self.count = min(max(1, enough), MOST_LAUNCHES)

    @property
    def random(self) -> dict[str, Any]:
        """How torch's functions are told where to draw from."""
        return {"device": self.device, "generator": self.generator}


def rows_of_magnitudes(shape: tuple[int, int], random: Mapping[str, Any], count: int = 1) -> list[torch.Tensor]:
    """`count` tensors of random rows of different magnitudes, f32; a row is as large in each, and row 5, if there is
    one, is zero. `random` says where to draw from."""
    low, high = _MAGNITUDES
    powers = torch.rand((shape[0], 1), **random).mul_(high - low).add_(low)
    found = [torch.randn(shape, **random) * 10**powers for _ in range(count)]
    for x in found:
        x[_ZERO_ROW : _ZERO_ROW + 1] = 0
    return found


def reference_dtype(elements: int) -> torch.dtype:
    """What a reference of so many elements is computed in: float64 where that is cheap, else float32."""
    return torch.float64 if elements <= _FLOAT64_ELEMENTS else torch.float32


def baseline_of(signature: Signature, name: str, launch: Launch, example: Any) -> tuple[str, Launch]:
    """What torch runs, as `aot.tune.operation.Measures.baseline` gives it, after it ran on `example`.

    Raises:
        MeasureError: torch cannot run it.
    """
    try:
        launch(example)
    except (RuntimeError, ValueError, TypeError) as error:
        raise MeasureError(f"torch cannot compute {signature.key()}: {str(error).splitlines()[0]}") from None
    return name, launch
