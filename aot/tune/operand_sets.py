"""What operand sets of operations have alike: fields in the order of a function's arguments, so many sets that using
them in turn finds L2 cold, and a first run of what torch does in a function's place.

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

_TIMES_L2 = 3  # as large as all sets together are at least

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
