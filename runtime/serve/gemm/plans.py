"""The plans of a library for GEMMs of one generation of its files: made once for each shape, kept, and looked up.

Knows nothing of the calls that ask for them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, ClassVar

from ...device.driver import Driver
from ...gemm.fallback import TorchCall
from ...gemm.operation import GEMM
from ...gemm.signature import Signature
from ...named_tuple import NamedTuple
from ...program.operation import Operation
from ...program.pointers import PointerChecks
from ...program.record import TensorArgument, TensorView
from ...program.streams import TorchStreams
from ..counters import Counters
from ..entries import Entries, best_first
from ..native_plans import NativePlans
from ..plan import remember
from .keys import with_other_tensors
from .plan import OUT, GemmPlan
from .row_plans import RowPlans


class Preloaded(NamedTuple):
    """What `preload` is asked for: M values to plan for, and the keys of signatures, or None for all of them."""

    tokens: tuple[int, ...]
    only: frozenset[str] | None

    def covers(self, signature: Signature) -> bool:
        """Whether kernels for `signature` are among what is loaded."""
        return self.only is None or signature.key() in self.only

    def besides(self, before: Preloaded | None) -> Preloaded:
        """This and what was asked for before."""
        if before is None:
            return self
        only = None if self.only is None or before.only is None else self.only | before.only
        return Preloaded(tuple(sorted({*self.tokens, *before.tokens})), only)


class Plans:
    """What calls of `gemm` look up. The caller of a method holds the lock, as does who changes what is kept here."""

    of: ClassVar[Operation] = GEMM  # whose calls these are

    def __init__(self, entries: Entries, driver: Driver, counters: Counters) -> None:
        self._entries, self._driver, self._counters = entries, driver, counters
        self._by_shape: OrderedDict[Any, GemmPlan] = OrderedDict()  # the store, by `keys.shape_key`
        # Caches of it for calls of torch tensors, by `Call.key`, which also have plans that were grown for other rows.
        self.by_call: OrderedDict[Any, GemmPlan] = OrderedDict()
        self.native = NativePlans(driver)
        self.by_rows: OrderedDict[Any, RowPlans] = OrderedDict()  # what those are grown from, by `keys.rows_of`
        self.torch_calls: OrderedDict[Any, TorchCall] = OrderedDict()  # calls that torch serves, by `Call.key`
        self.preloaded: Preloaded | None = None

    def plan(
        self, key: Any, signature: Signature, views: tuple[TensorView, ...], shape: tuple[int, ...], torch_dtype: Any
    ) -> GemmPlan:
        """The plan that is kept under `key`, a `keys.shape_key`, made if it is not there: from that of the same call
        with others' tensors, if there is one.

        `shape` is that of the caller's output, `torch_dtype` its element type where all tensors are torch's.

        Raises:
            KernelMiss: no kernel serves these views.
            DeviceError: the driver refused, or the archives have nothing for this GPU.
        """
        found = self._by_shape.get(key)
        if found is None:
            same = self._by_shape.get(with_other_tensors(key))
            if same is None:
                found = self._make_plan(signature, views, shape, torch_dtype)
            else:
                found = same._replace(streams=self._streams(torch_dtype), dtype=torch_dtype)
            remember(self._by_shape, key, found)
            self._counters.planned()
        return found

    def of_shape(self, key: Any) -> GemmPlan | None:
        """The plan that is kept under `key`, if there is one. Needs no lock."""
        return self._by_shape.get(key)

    def held(self) -> int:
        """How many plans are kept, each once."""
        return len({id(plan) for kept in (self._by_shape, self.by_call) for plan in list(kept.values())})

    def _make_plan(
        self, signature: Signature, views: tuple[TensorView, ...], shape: tuple[int, ...], torch_dtype: Any
    ) -> GemmPlan:
        """Choose the function for this shape, load it and plan it; runners-up serve where the best cannot run."""
        m = views[0].shape[-2]
        entry = self._entries.lookup(signature)
        self._entries.accept(entry)
        reasons = []
        closed = self.preloaded is not None and self.preloaded.covers(signature)
        for name in best_first(entry, m):
            of_file = self._entries.of_file(entry, name)
            if closed and not (of_file.loaded or of_file.damage):
                reasons.append(f"  {name}: was not loaded by preload(), after which nothing more is; give it this M")
                continue
            try:
                function = self._entries.function(entry, name)
                function.load()
                plan = function.plan(views)
            except self._entries.passed_over as error:
                reasons.append(self._entries.pass_over(entry, name, error))
                continue
            alignments = [a.alignment for a in function.record.arguments if isinstance(a, TensorArgument)]
            return GemmPlan(
                launch=plan.launch,
                checks=PointerChecks.of(views, alignments, [OUT]),
                streams=self._streams(torch_dtype),
                shape=shape,
                dtype=torch_dtype,
                function=function,
                entry=entry,
                plan=plan,
            )
        raise self._entries.miss(entry, m, reasons)

    def _streams(self, torch_dtype: Any) -> TorchStreams | None:
        return TorchStreams.of(self._driver.device, self._driver.device_count) if torch_dtype else None

    def clear(self) -> None:
        """Forget them all."""
        self._by_shape.clear()
        self.by_call.clear()
        self.by_rows.clear()
        self.torch_calls.clear()
        self.native.clear()
