"""A planned GEMM: a launch, and what a call must be for it to be the right one.

Knows nothing of archives or of how it came about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...device.driver import LAST_DEFAULT_STREAM
from ...gemm.signature import Signature
from ...gemm.universal import AnyEntry
from ...named_tuple import NamedTuple
from ...program.record import TensorView
from ..function import AnyPlan, Function


class GemmPlan(NamedTuple):
    """A plan with what the fast path of `gemm` needs to prove that it fits the call at hand."""

    launch: Callable[[tuple[int, ...], int], None]
    device: int
    misaligned: int  # address bits that must be clear in the pointers of A, B and D
    a_bytes: int
    b_bytes: int
    d_bytes: int
    current_stream: Callable[[int], int] | None  # torch's, where the tensors are torch's
    current_device: Callable[[], int] | None  # torch's, where a default stream may belong to another device
    shape: tuple[int, ...]  # of `out`, as is the element type
    dtype: Any
    function: Function
    extras: tuple[tuple[int, int], ...]  # of each operand after D: such bits, and bytes
    entry: AnyEntry
    plan: AnyPlan

    def with_rows(self, plan: AnyPlan, more: int, steps: Sequence[int]) -> GemmPlan:
        """This for `more` rows; `steps` are the bytes from row to row of each operand, 0 where it has none."""
        extras = self.extras
        if extras:
            pairs = zip(extras, steps[3:], strict=True)
            extras = tuple([(mask, size + more * step) for (mask, size), step in pairs])
        # All fields in order: `_replace` takes three times as long.
        return GemmPlan(
            plan.launch,
            self.device,
            self.misaligned,
            self.a_bytes + more * steps[0],
            self.b_bytes + more * steps[1],
            self.d_bytes + more * steps[2],
            self.current_stream,
            self.current_device,
            (self.shape[0] + more, *self.shape[1:]),
            self.dtype,
            self.function,
            extras,
            self.entry,
            plan,
        )

    def fits(self, pa: int, pb: int, pd: int, handle: int) -> bool:
        """Whether A, B and D may be at these addresses, for a launch on the stream `handle`: aligned, none of them
        null, D apart from the others, and the stream not a default one of another device."""
        return not (
            (pa | pb | pd) & self.misaligned
            or not (pa and pb and pd)
            or (pd < pa + self.a_bytes and pa < pd + self.d_bytes)
            or (pd < pb + self.b_bytes and pb < pd + self.d_bytes)
            or (
                self.current_device is not None
                and handle <= LAST_DEFAULT_STREAM
                and self.current_device() != self.device
            )
        )

    def fitting(self, operands: Sequence[Any], pd: int) -> tuple[int, ...] | None:
        """The addresses of the operands after D, where D is at `pd`; None where one may not be where it is."""
        pointers = []
        end = pd + self.d_bytes
        for (misaligned, size), operand in zip(self.extras, operands, strict=True):
            pointer = operand.data_ptr()
            if (pd < pointer + size and pointer < end) or not pointer or pointer & misaligned:
                return None
            pointers.append(pointer)
        return tuple(pointers)


def gemm_key(of_torch: bool, signature: Signature, views: Sequence[TensorView]) -> tuple[Any, ...]:
    """What plans of `gemm` are kept under: all that they depend on but the pointers."""
    return (of_torch, signature.epilogue, signature.overlap, *(view[1:] for view in views))
