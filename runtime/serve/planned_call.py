"""Calls of operations that are like one before: launched by its plan, without asking the operation again.

What a call is, is a key of all that a plan depends on but pointers: the operation, words, and of each torch tensor
extents, strides, element type and device. Pointers are held against what the plan demands of them. Where `out` is not
given, what the first call made is made again. A call of other tensors than torch's, whose pointers do not fit, or that
writes to where it reads, as a plan does not say which of its tensors are one, goes the way of a first call, which finds
the words for what is wrong. GEMM has a path of its own (`runtime.serve.gemm`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..device.driver import Driver
from ..program.arguments import TensorArgument
from ..program.geometry import contiguous_strides
from ..program.operation import Asked
from ..program.outputs import on_stream
from ..program.pointers import PointerChecks
from ..program.record import TensorView
from ..program.streams import TorchStreams
from ..program.tensor import is_torch
from .function import Function
from .native_plans import Kept, NativePlans
from .plan import AnyPlan, remember

_WORDS = type(None), bool, int, float, str


class Call(NamedTuple):
    """What a call is but for its tensors, words in their places, and its tensors, in the order in which they were
    given."""

    form: tuple[Any, ...]
    tensors: list[Any]

    def key(self) -> tuple[Any, ...] | None:
        """What it is but for pointers; None of other tensors than torch's, or of sparse ones."""
        key: list[Any] = [self.form]
        try:
            for x in self.tensors:
                key += (x.shape, x.stride(), x.dtype, x.get_device())
        except (AttributeError, TypeError, RuntimeError):
            return None
        return tuple(key)


def call_of(operation: str, tensors: Sequence[Any], words: Mapping[str, Any]) -> Call:
    """A call: whatever is no word, and no tuple or list, is a tensor."""
    form: list[Any] = [operation, len(tensors)]
    found: list[Any] = []
    for x in tensors:
        _add(x, form, found)
    for name, x in words.items():
        form.append(name)
        _add(x, form, found)
    return Call(tuple(form), found)


def _add(x: Any, form: list[Any], found: list[Any]) -> None:
    kind = type(x)
    if kind in _WORDS:
        form += (kind, x)
    elif kind is tuple or kind is list:
        form.append(len(x))
        for each in x:
            _add(each, form, found)
    else:
        form.append(None)
        found.append(x)


class Seen(NamedTuple):
    """What an operation saw of a caller's tensor: its view, and whether it is written."""

    view: TensorView
    written: bool


class Made(NamedTuple):
    """What a call without `out` makes: tensors of these extents and element types, or the only one of them."""

    tensors: tuple[tuple[tuple[int, ...], Any], ...]
    alone: bool

    @classmethod
    def of(cls, result: Any) -> tuple[Made, list[Any]] | None:
        """What a call returned, and its tensors, if another can make such; None where it made something else."""
        alone = not isinstance(result, tuple)
        found = [result] if alone else list(result)
        if not found or not all(is_torch(x) and x.stride() == contiguous_strides(x.shape) for x in found):
            return None
        return cls(tuple([(tuple(x.shape), x.dtype) for x in found]), alone), found


class PlannedCall(NamedTuple):
    """A plan, and what the pointers of a call's tensors must be for it to be the right one."""

    plan: AnyPlan
    order: tuple[int, ...]  # which of the call's tensors, and then of those that are made, each pointer is of
    checks: PointerChecks  # of these tensors
    streams: TorchStreams
    counter: Any  # of the function's launches
    made: Made | None  # where the caller gives no `out`

    @classmethod
    def of(
        cls,
        call: Call,
        seen: Mapping[int, Seen],
        asked: Asked,
        out: Any,
        function: Function,
        plan: AnyPlan,
        devices: int,
    ) -> PlannedCall | None:
        """How calls like `call`, with this `out` or none, are launched that were asked for as `asked`; `seen` is by the
        tensor's id. None where pointers alone do not say which argument a tensor is, or do not fit, or results cannot
        be made again."""
        made, tensors = None, list(call.tensors)
        if out is None:
            found = Made.of(asked.result)
            if found is None:
                return None
            made, tensors = found[0], [*tensors, *found[1]]
        elif asked.result is not out:
            return None
        if len(seen) != len(tensors) or any(id(x) not in seen for x in tensors):
            return None
        views = [seen[id(x)] for x in tensors]
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
        return cls(plan, order, checks, TorchStreams.of(given[0].device, devices), function.counter, made)

    def kept(self) -> Kept | None:
        """What native code takes of it, of tensors in the order in which the function takes them; None if that takes
        one twice, or not at all, or some are made."""
        if self.made is not None or sorted(self.order) != list(range(len(self.checks.sizes))):
            return None
        return Kept(self.plan, self.checks.ordered(self.order), self.counter)

    def launch(self, call: Call, stream: Any, out: Any) -> Any:
        """Launch a call like the one that was planned, on `stream` as `Library.gemm` takes it, and return `out`, or
        what is made in its place; None if its pointers or that stream do not fit, and nothing is launched."""
        handle, tensors = self.streams.handle(stream), call.tensors
        if self.made is not None:
            like = tensors[0]
            if stream is None:
                made = [like.new_empty(shape, dtype=dtype) for shape, dtype in self.made.tensors]
            else:  # from that stream's memory
                with on_stream(handle, like):
                    made = [like.new_empty(shape, dtype=dtype) for shape, dtype in self.made.tensors]
            tensors, out = [*tensors, *made], made[0] if self.made.alone else tuple(made)
        pointers = [x.data_ptr() for x in tensors]
        if handle is None or not self.checks.fit(pointers):
            return None
        self.plan.launch(tuple([pointers[place] for place in self.order]), handle)
        return out


class PlannedCalls:
    """Those that one generation keeps, by `Call.key`; and those of them that native code launches, by `Call.form`."""

    def __init__(self, driver: Driver) -> None:
        self.planned: OrderedDict[tuple[Any, ...], PlannedCall] = OrderedDict()
        self.native = NativePlans(driver)

    def keep(self, call: Call, key: tuple[Any, ...], planned: PlannedCall) -> None:
        """Launch calls like this one by its plan from now on. The caller holds the lock."""
        if self.native.is_full():  # it would begin anew, and plans that are kept here would not come back
            self.clear()
        remember(self.planned, key, planned)
        kept = planned.kept()
        if kept is not None:
            tensors = tuple([call.tensors[place] for place in planned.order])
            self.native.keep(call.form, planned.order, tensors, kept)

    def clear(self) -> None:
        """Forget all of them."""
        self.planned.clear()
        self.native.clear()
