"""The plans of a library for GEMMs of one generation of its files: made once for each shape, kept, and looked up.

Knows nothing of the calls that ask for them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, ClassVar

from ...device.driver import Driver
from ...errors import KernelMiss, ProgramError
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
from ..function import Unfit, remember
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
        self.by_key: OrderedDict[Any, GemmPlan] = OrderedDict()
        self.by_rows: OrderedDict[Any, RowPlans] = OrderedDict()  # of calls that are known but for their number of rows
        self.torch_calls: OrderedDict[Any, TorchCall] = OrderedDict()  # what torch serves, by the same keys as plans
        self.native: Any = None  # `native_table`, once torch's tensors were seen; False if there is none
        self.preloaded: Preloaded | None = None

    def plan(
        self, key: Any, signature: Signature, views: tuple[TensorView, ...], shape: tuple[int, ...], torch_dtype: Any
    ) -> GemmPlan:
        """The plan that is kept under `key`, made if it is not there; the caller holds the lock.

        `shape` is that of the caller's output, `torch_dtype` its element type where all tensors are torch's.

        Raises:
            KernelMiss: no kernel serves these views.
            DeviceError: the driver refused, or the archives have nothing for this GPU.
        """
        found = self.by_key.get(key)
        if found is None:
            found = self._make_plan(signature, views, shape, torch_dtype)
            remember(self.by_key, key, found)
            self._counters.planned()
        return found

    def _make_plan(
        self, signature: Signature, views: tuple[TensorView, ...], shape: tuple[int, ...], torch_dtype: Any
    ) -> GemmPlan:
        """Choose the function for this shape, load it and plan it; runners-up serve where the best cannot run."""
        driver = self._driver
        m = views[0].shape[-2]
        entry = self._entries.lookup(signature)
        self._entries.accept(entry)
        reasons = []
        closed = self.preloaded is not None and self.preloaded.covers(signature)
        for name in best_first(entry, m):
            if closed and not self._entries.layer(entry).function(name).loaded:
                reasons.append(f"  {name}: was not loaded by preload(), after which nothing more is; give it this M")
                continue
            function = self._entries.function(entry, name)
            function.load()
            try:
                plan = function.plan(views)
            except (Unfit, ProgramError) as error:
                reasons.append(f"  {name}: {error}")
                continue
            alignments = [a.alignment for a in function.record.arguments if isinstance(a, TensorArgument)]
            return GemmPlan(
                launch=plan.launch,
                checks=PointerChecks.of(views, alignments, [OUT]),
                streams=TorchStreams.of(driver.device, driver.device_count) if torch_dtype else None,
                shape=shape,
                dtype=torch_dtype,
                function=function,
                entry=entry,
                plan=plan,
            )
        raise KernelMiss(
            "\n".join([f"no kernel for {signature.key()} at M = {m} can run on this GPU:", *reasons]), "no kernel runs"
        )

    def clear(self) -> None:
        """Forget them all."""
        self.by_key.clear()
        self.by_rows.clear()
        self.torch_calls.clear()
        if self.native:
            self.native.clear()
