"""Calls of operations that are like one before: launched by its plan, without asking the operation again.

What a call is, is a key of all that a plan depends on but pointers: the operation, words, and of each torch tensor
extents, strides, element type and device. Pointers are held against what the plan demands of them. A call without
`out`, of other tensors than torch's, or whose pointers do not fit, goes the way of a first one, which finds the words
for what is wrong. GEMM has a path of its own (`runtime.serve.gemm`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..device.driver import LAST_DEFAULT_STREAM
from ..program.arguments import TensorArgument
from ..program.operation import Asked
from ..program.record import TensorView
from ..program.tensor import LAST_STREAM, span_bytes, stream_handle, torch_current_device, torch_current_stream
from .function import AnyPlan, Function

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
    masks: tuple[int, ...]  # address bits that must be clear, of each tensor
    sizes: tuple[int, ...]  # bytes that each tensor spans
    written: tuple[int, ...]  # which tensors are, each of which must be apart from all others
    device: int
    current_stream: Any  # torch's
    current_device: Any  # torch's, where a default stream may belong to another device

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
        masks = dict(zip(order, (a.alignment - 1 for a in described), strict=True))
        found = cls(
            plan,
            order,
            tuple([masks.get(place, 0) for place in range(len(views))]),
            tuple([span_bytes(of.view) for of in views]),
            tuple([place for place, of in enumerate(views) if of.written]),
            given[0].device,
            torch_current_stream(),
            torch_current_device() if devices > 1 else None,
        )
        return found if found.fits([of.view.pointer for of in views], LAST_DEFAULT_STREAM + 1) else None

    def launch(self, call: Call, stream: Any) -> bool:
        """Launch a call like the one that was planned, on `stream` as `Library.gemm` takes it; whether its pointers
        fit, without which nothing is launched."""
        if stream is None:
            handle = self.current_stream(self.device)
        else:
            handle = stream if type(stream) is int and 0 <= stream <= LAST_STREAM else stream_handle(stream)
        pointers = [x.data_ptr() for x in call.tensors]
        if not self.fits(pointers, handle):
            return False
        self.plan.launch(tuple([pointers[place] for place in self.order]), handle)
        return True

    def fits(self, pointers: Sequence[int], handle: int) -> bool:
        """Whether a call's tensors may be at these addresses, for a launch on the stream `handle`."""
        for pointer, mask in zip(pointers, self.masks, strict=True):
            if not pointer or pointer & mask:
                return False
        sizes = self.sizes
        for place in self.written:
            begin = pointers[place]
            end = begin + sizes[place]
            for other, pointer in enumerate(pointers):
                if begin < pointer + sizes[other] and pointer < end and other != place:
                    return False
        return self.current_device is None or handle > LAST_DEFAULT_STREAM or bool(self.current_device() == self.device)
