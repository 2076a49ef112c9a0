"""What tuning must know of an operation to check and time its functions, and the operations of which it knows that.

A `Tuning` is found by the operation's name and imports no torch; its `measures` has what needs torch, and is asked for
in processes that measure. Others than this package's come by entry points in the group "cute_aot.tuning", each the name
of an operation and where its `Tuning` is (`package.module:object`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from runtime.program.entry_points import find
from runtime.program.operation import Signature

from .options import TuneError

if TYPE_CHECKING:
    import torch

GROUP = "cute_aot.tuning"
_OWN = {
    "gemm": "aot.tune.gemm.tuning:GEMM",
    "rmsnorm": "aot.tune.rmsnorm.tuning:RMSNORM",
    "grouped_gemm": "aot.tune.grouped_gemm.tuning:GROUPED_GEMM",
    "moe_permute": "aot.tune.moe_permute.tuning:MOE_PERMUTE",
    "moe_combine": "aot.tune.moe_combine.tuning:MOE_COMBINE",
    "quantise": "aot.tune.quantise.tuning:QUANTISE",
}
_NEEDED = ("work", "form", "torch_serves", "measures", "looks_between")


class Work(NamedTuple):
    """The least that a problem takes: floating-point operations, and bytes of device memory that are moved."""

    flops: int
    bytes: int


class OperandSet(Protocol):
    """What one launch works on."""

    def arguments(self) -> tuple[Any, ...]:
        """What a function takes before its stream, in order: tensors, then numbers."""
        ...

    def outputs(self) -> Mapping[str, torch.Tensor]:
        """Those of the tensors that are written, contiguous, by the names of their operands; one at least."""
        ...

    def writing(self, outputs: Mapping[str, torch.Tensor]) -> OperandSet:
        """The same with others in the place of all `outputs`, of their shapes."""
        ...


class Weights(Protocol):
    """Random operands of one signature, of which weights stay the same from one M to the next."""

    device: str

    def operands(self, m: int) -> Sequence[OperandSet]:
        """Fresh operands with outputs full of NaN for `m` rows: one set, or so many that using them in turn finds L2
        cold."""
        ...


def unusual(weights: Weights, m: int) -> Sequence[OperandSet]:
    """Fresh sets for `m` rows that a function must be right on too, and that nobody times: what the method `unusual` of
    `weights` gives for `m`, if they have one, and usually none."""
    found: Callable[[int], Sequence[OperandSet]] | None = getattr(weights, "unusual", None)
    return found(m) if found else ()


class Measures(Protocol):
    """What needs torch: operands, what is to be made of them, and what torch would run."""

    def weights(self, signature: Any, m: int, l2_bytes: int, seed: int, device: str = "cuda") -> Weights:
        """Operands of which, at `m` rows, all sets together are more than three times `l2_bytes`, but not more sets
        than `measure.MOST_LAUNCHES`."""
        ...

    def reference(self, signature: Any, operands: Any) -> Mapping[str, torch.Tensor]:
        """What each of the outputs must be before it is rounded, though after it saturates, in float32 or float64; NaN
        where it must be left as it is."""
        ...

    def max_error(self, signature: Any, output: str) -> float:
        """The relative error, in the norm, that an output may have.

        Raises:
            MeasureError: nobody has said it for its element type.
        """
        ...

    def baseline(self, signature: Any, example: Any) -> tuple[str, Callable[[Any], Any]]:
        """What torch runs for the signature on an operand set, the fastest that it has, and its name; it has run on
        `example`, and can be captured.

        Raises:
            MeasureError: torch runs nothing of the kind.
        """
        ...


class Tuning(Protocol):
    """What tuning knows of an operation; whether functions are looked at between the points that were measured too."""

    looks_between: bool = False

    def work(self, signature: Any, m: int) -> Work:
        """The least that takes at `m` rows."""
        ...

    def form(self, signature: Any) -> Hashable:
        """What signatures must have alike for functions of one to compute another whose records take its operands."""
        ...

    def torch_serves(self, signature: Any) -> bool:
        """Whether a library may leave calls to torch where the baseline is faster: not where it has no such call."""
        return False

    def measures(self) -> Measures:
        """What needs torch, which this imports."""
        ...


def tuning(signature: Signature) -> Tuning:
    """What tuning knows of the operation of `signature`.

    Raises:
        TuneError: nothing, what an entry point names is no `Tuning` or cannot be imported, or there are two.
    """
    found = _found(signature.operation)
    if found is None:
        raise TuneError(
            f"how functions of {signature.operation} are checked is not known here; install what has it in the entry "
            f"point group {GROUP}"
        )
    return found


def is_tuned(signature: Signature) -> bool:
    """Whether functions of the operation of `signature` can be checked and timed here; raises as `tuning` does."""
    return _found(signature.operation) is not None


@functools.cache
def _found(name: str) -> Tuning | None:
    found: Tuning | None = find(name, _OWN, GROUP, _NEEDED, TuneError)
    return found
