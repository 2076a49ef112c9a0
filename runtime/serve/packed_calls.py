"""Calls whose operands lie in the memory of fewer tensors, as packed rows hold elements and behind them their scales:
launched again by the tensors that hold them.

A view of torch's takes the host as long as a launch does, so views of operands are made for a first call alone. Knows
of operations no more than their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..gemm.call import EXTRAS
from .gemm.calls import GemmCalls
from .gemm.keys import Call
from .gemm.plans import Plans
from .generation import Generation
from .native_plans import Kept, NativePlans, Words
from .operation_calls import OperationCalls
from .planned_call import Call as OfOperation
from .planned_call import call_of


class PackedCalls(GemmCalls, OperationCalls):
    """What a library is to those who call it by what holds its operands."""

    def launch_packed(self, words: Words, *held: Any) -> bool:
        """Launch on torch's current stream what `call_packed` did for these words, and tensors like these. False where
        nothing was launched: it did not, or native code leaves such a call to Python."""
        found = self._now.packed.by_words.get(words)
        if found is None:
            return False
        launch, tag, places = found
        return launch(tag, None, *[held[place] for place in places]) is not None

    def call_packed(
        self, words: Words, held: Sequence[Any], places: Sequence[int], operation: str, *tensors: Any, **more: Any
    ) -> None:
        """Call an operation, or "gemm", with `out`, and let `launch_packed(words, *held)` launch it from now on.

        `places` says of each tensor of the call, in the order in which they are given, "gemm"'s `out` behind b, in
        which of `held` it lies: at a place that the extents of these determine. `words` stand for all of the call that
        is no tensor: they are never the same for two calls that differ in that.

        Raises:
            KernelMiss, LayoutError, ArgumentError, DeviceError: as `call` and `gemm`.
        """
        now = self._now
        if operation == Plans.of.name:
            self.gemm(*tensors, **more)
            found = _of_gemm(now, *tensors, **more)
        else:
            self.call(operation, *tensors, **more)
            found = _of_operation(now, call_of(operation, tensors, more))
        if found is not None:
            kept, order, given = found
            with self._lock:
                if self._now is now and not self._closed:
                    _keep(now.packed, words, tuple([places[i] for i in order]), held, [given[i] for i in order], kept)


def _keep(
    packed: NativePlans,
    words: Words,
    places: tuple[int, ...],
    held: Sequence[Any],
    tensors: Sequence[Any],
    kept: Kept,
) -> None:
    """Launch `kept` from now on for tensors like `held`, in which the function's `tensors` lie, each at its place. The
    caller holds the lock."""
    holders = tuple([held[place] for place in places])
    offsets = tuple([x.data_ptr() - of.data_ptr() for x, of in zip(tensors, holders, strict=True)])
    if min(offsets) < 0:
        return
    if packed.is_full():
        packed.clear()
    packed.keep(words, places, holders, kept, offsets)


_Found = tuple[Kept, Sequence[int], Sequence[Any]]  # what is kept, the function's order of a call's tensors, and these


def _of_gemm(now: Generation, a: Any, b: Any, *, out: Any, **more: Any) -> _Found | None:
    """The plan that a call of `gemm` has; None where it has none, as where torch computes it."""
    extras = tuple([more.get(name) for name in EXTRAS])
    words = more.get("epilogue", "none"), more.get("overlap", "serial"), None
    plan = now.plans.by_call.get(Call(a, b, out, None, extras, *words, plain=False).key())
    if plan is None:
        return None
    given = [x for x in (a, b, out, *extras) if x is not None]
    return Kept(plan.plan, plan.checks, plan.function.counter), range(len(given)), given


def _of_operation(now: Generation, call: OfOperation) -> _Found | None:
    """The same of another operation."""
    planned = now.calls.planned.get(call.key() or ())
    kept = planned.kept() if planned is not None else None
    return (kept, planned.order, call.tensors) if planned is not None and kept is not None else None
