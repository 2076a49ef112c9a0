"""Calls of operations that are like one before: launched by its plan, without asking the operation again.

What a call is, is a key of all that a plan depends on but pointers: the operation, words, and of each torch tensor
extents, strides, element type and device. Pointers are held against what the plan demands of them. A call without
`out`, of other tensors than torch's, or whose pointers do not fit, goes the way of a first one, which finds the words
for what is wrong. GEMM has a path of its own (`runtime.serve.gemm`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..program.arguments import TensorArgument
from ..program.operation import Asked
from ..program.pointers import PointerChecks
from ..program.record import TensorView
from ..program.streams import TorchStreams
from .function import Function
from .plan import AnyPlan

_WORDS = type(None), bool, int, float, str


class Call(NamedTuple):
    """What a call is but for its pointers, and its tensors, in the order in which they were given."""

    key: tuple[Any, ...]
    tensors: list[Any]


def call_of(operation: str, tensors: Sequence[Any], words: Mapping[str, Any]) -> Call | None:
    """A call of torch tensors that writes to tensors of the caller's; None of any other."""
    if words.get("out") is None:
        return None
    key: list[Any] = [operation]
    found: list[Any] = []
    try:
        for x in tensors:
            _add(x, key, found)
        for name, x in words.items():
            key.append(name)
            _add(x, key, found)
    except (AttributeError, TypeError, RuntimeError):  # not torch's, or not strided
        return None
    return Call(tuple(key), found)


def _add(x: Any, key: list[Any], found: list[Any]) -> None:
    kind = type(x)
    if kind in _WORDS:
        key.append((kind, x))
    elif kind is tuple or kind is list:
        key.append(len(x))
        for each in x:
            _add(each, key, found)
    else:
        key += (x.shape, x.stride(), x.dtype, x.get_device())
        found.append(x)


class Seen(NamedTuple):
    """What an operation saw of a caller's tensor: its view, and whether it is written."""

    view: TensorView
    written: bool


class PlannedCall(NamedTuple):
    """A plan, and what the pointers of a call's tensors must be for it to be the right one."""

    plan: AnyPlan
    order: tuple[int, ...]  # which of the call's tensors each pointer is of
    checks: PointerChecks  # of the call's tensors
    streams: TorchStreams

    @classmethod
    def of(
        cls, call: Call, seen: Mapping[int, Seen], asked: Asked, function: Function, plan: AnyPlan, devices: int
    ) -> PlannedCall | None:
        """How calls like `call` are launched that were asked for as `asked`; `seen` is by the tensor's id. None where
        pointers alone do not say which argument a tensor is, or do not fit."""
        if len(seen) != len(call.tensors) or any(id(x) not in seen for x in call.tensors):
            return None
        views = [seen[id(x)] for x in call.tensors]
        places = {of.view.pointer: place for place, of in enumerate(views)}
        described = [a for a in function.record.arguments if isinstance(a, TensorArgument)]
        given = [x for x in asked.arguments if isinstance(x, TensorView)]
        if len(places) != len(views) or len(given) != len(described) or any(x.pointer not in places for x in given):
            return None
        order = tuple([places[x.pointer] for x in given])
        alignments = dict(zip(order, (a.alignment for a in described), strict=True))
        checks = PointerChecks.of(
            [of.view for of in views],
            [alignments.get(place, 1) for place in range(len(views))],
            [place for place, of in enumerate(views) if of.written],
        )
        if not checks.fit([of.view.pointer for of in views]):
            return None
        return cls(plan, order, checks, TorchStreams.of(given[0].device, devices))

    def launch(self, call: Call, stream: Any) -> bool:
        """Launch a call like the one that was planned, on `stream` as `Library.gemm` takes it; whether its pointers
        and that stream fit, without which nothing is launched."""
        handle = self.streams.handle(stream)
        pointers = [x.data_ptr() for x in call.tensors]
        if handle is None or not self.checks.fit(pointers):
            return False
        self.plan.launch(tuple([pointers[place] for place in self.order]), handle)
        return True
