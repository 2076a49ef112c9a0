"""One function of an archive on one device: its kernels loaded and checked, its plans, its launches.

Knows nothing of GEMMs or of the table that chooses among functions.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ..container.archive import Archive, FunctionEntry
from ..container.errors import ArchiveClosed
from ..device.driver import Driver
from ..device.launch import CLUSTER_DIMENSION, Evaluation, Launch
from ..device.prepared_launch import PreparedLaunch
from ..device.workspace import Need, Workspaces
from ..errors import DeviceError, ProgramError, RecordError
from ..program.record import (
    Argument,
    DeviceArgument,
    Record,
    SuppliedArgument,
    TensorArgument,
    TensorView,
    TupleArgument,
)
from ..program.slots import any_moved, require_inside
from ..tables.dispatch import serves
from .counters import Counters
from .operands import device_view, flatten, resolve_stream
from .plan import AnyPlan, LaunchPlan, WorkspacePlan, remember

# Cubins for Hopper and later count as static what CUDA keeps of a CTA's memory, which is beside what it may have: an
# H100's driver calls such a kernel's static memory 0, and lets it have all of the rest.
_RESERVED_BYTES = 1 << 10


class Unfit(Exception):
    """This device cannot run this function for this shape; another function may do."""


class Function:
    """One function of an archive, on the library's device; call it with the arguments its record describes.

    After a reload it goes on with the kernels of the archive that it is from, until `Library.drop_old`.
    """

    def __init__(
        self,
        archive: Archive,
        driver: Driver,
        lock: threading.RLock,
        entry: FunctionEntry,
        workspaces: Workspaces,
        counters: Counters,
    ) -> None:
        self.name, self.target = entry.name, entry.target
        self._archive, self._driver, self._lock, self._workspaces = archive, driver, lock, workspaces
        self._record: Record | None = None
        self._cubin: bytes | None = None  # between `read` and `load`
        self._module: Any = None
        self._kernels: tuple[Any, ...] = ()
        self._plans: OrderedDict[tuple[int, ...], AnyPlan] = OrderedDict()
        self._residency: dict[str, int] = {}
        self._last: Evaluation | None = None  # of the last plan, which fits; its numbers are mostly those of the next
        self._last_ready: tuple[PreparedLaunch, ...] = ()  # its launches, unless it was only tried
        self._active_clusters: dict[Any, int] = {}
        self._counters = counters
        self._counter: Any = None
        self._ready: weakref.WeakSet[Any] = weakref.WeakSet()  # launches that a plan, or a call under way, still holds
        self._retired = False
        self.damage = ""  # what is wrong with it in the file, where its library goes on without it
        self.loaded_bytes = 0  # of the cubin on the device

    def __repr__(self) -> str:
        state = "loaded" if self._kernels else "unloaded" if self._retired else "not loaded"
        return f"<Function {self.name} for {self.target}, {state}>"

    @property
    def record(self) -> Record:
        """What the archive says of this function."""
        if self._record is None:
            found = self._archive.record(self.name)
            try:
                self._record = Record.from_json(found)
            except RecordError as error:
                raise type(error)(f"{self._archive.path}: {error}") from None
        return self._record

    @property
    def counter(self) -> Any:
        """Counts the calls that launch this."""
        if self._counter is None:
            self._counter = self._counters.launches_of(self.name)
        return self._counter

    @property
    def loaded(self) -> bool:
        """Whether its kernels are on the device."""
        return bool(self._kernels)

    @property
    def busy(self) -> bool:
        """Whether a plan, or a call under way, may still launch its kernels; not whether they run on the device."""
        return len(self._ready) > 0

    def __call__(self, *arguments: Any, stream: Any = None) -> None:
        """Launch on `stream` (as `Library.gemm` takes it) with the record's arguments, less what the runtime supplies.

        A record does not say which tensors are written, so here the caller owes what `Library.gemm` checks: a tensor
        that is written is writable (read-only arrays are not refused), names no element twice, and shares memory with
        another argument only if the function was written for that. A call with nothing to compute is the caller's to
        skip.

        Raises:
            ArgumentError: an argument does not fit its description.
            ProgramError: these extents cannot be served, an extent of 0 never.
            DeviceError: the driver refused, or this GPU cannot run the function.
        """
        handle = resolve_stream(stream, flatten(arguments), self._driver)
        try:
            self.launch(self._view_all(self.record.arguments, arguments, handle), handle)
        except Unfit as reason:
            raise DeviceError(f"{self.name}: {reason}") from None

    def launch(self, views: Sequence[Any], stream: int) -> AnyPlan:
        """Launch on the stream of this handle with the record's arguments, tensors as views on this device; the plan
        by which it was.

        Raises:
            Unfit: this GPU cannot run the function for these extents; else as a call.
        """
        self.load()
        pointers, values = self.record.bind(views, self._placeholders())
        with self._driver.current():
            plan = self._plans.get(values)
            if plan is None:
                if _any_empty(views):  # kernels count on at least one element, of K as well
                    raise ProgramError(
                        f"{self.name}: a tensor with an extent of 0 cannot be launched on; the caller skips such a call"
                    )
                plan = self._keep_plan(values, views)
            plan.launch(pointers, stream)
        return plan

    def prepare(self, views: Sequence[Any]) -> None:
        """Plan for these arguments, if that was not done, so that `launch` need not; raises as `plan` does."""
        values = self.record.bind(views, self._placeholders()).values
        if values not in self._plans:
            self._keep_plan(values, views)

    def _keep_plan(self, values: tuple[int, ...], views: Sequence[Any]) -> AnyPlan:
        with self._lock:
            plan = self.plan(views)
            remember(self._plans, values, plan)
            self._counters.planned()
        return plan

    def read(self) -> None:
        """Read all that `load` needs out of the archive; no device is asked for anything.

        Raises:
            ArchiveError: the archive is damaged, or was closed.
            RecordError: the record is malformed.
        """
        if self._cubin is None and not self._kernels:
            cubin = self._archive.cubin(self.name)
            with self._lock:
                self._cubin = None if self._kernels else cubin
        self.record  # noqa: B018

    def forget(self) -> None:
        """Give back what `read` read, if nothing was loaded of it."""
        self._cubin = None

    def load(self) -> None:
        """Load the kernels onto the device and check them against the record, if that has not been done.

        Raises:
            DeviceError: the GPU cannot run them, the driver refuses them, or they are not what the record says.
            ArchiveClosed: the archive was closed, or replaced and dropped.
        """
        if self._kernels:
            return
        with self._lock:
            if self._kernels:
                return
            self._refuse_if_retired()
            capability = self._driver.compute_capability
            if not serves(self.target, capability):
                raise DeviceError(
                    f"{self._archive.path}: {self.name} is for {self.target}; this GPU has compute capability "
                    f"{capability[0]}.{capability[1]}"
                )
            began = time.perf_counter()
            cubin = self._cubin or self._archive.cubin(self.name)
            with self._driver.current():
                module = self._driver.load(cubin)
                try:
                    self._kernels = self._checked_kernels(module)
                except BaseException:
                    self._driver.unload(module)
                    raise
            self._cubin, self._module, self.loaded_bytes = None, module, len(cubin)
            self._counters.loaded(time.perf_counter() - began)

    def retire(self) -> None:
        """Forget the plans and make no more; calls under way still hold theirs, see `busy`."""
        with self._lock:
            self._retired = True
            self._plans.clear()
            self._last_ready = ()

    def _refuse_if_retired(self) -> None:
        if self._retired:
            raise ArchiveClosed(
                f"{self._archive.path}: {self.name} was unloaded, since its library was closed or its archive "
                "replaced; take it from Library.functions again"
            )

    def unload(self) -> None:
        """Give the kernels back, which no call may be about to launch."""
        with self._lock:
            self.retire()
            self._cubin = None
            if self._module is not None:
                self._driver.unload(self._module)  # where it fails they are still there, for another try
                self._module = None
            self._kernels, self.loaded_bytes = (), 0

    def plan(self, views: Sequence[Any]) -> AnyPlan:
        """Evaluate the launch program for these arguments; kernels must be loaded and the context current.

        Raises:
            ProgramError: the program cannot serve these extents.
            Unfit: this device cannot run the kernel for them.
        """
        return self._prepared(*self._settle(views))

    def check_fit(self, views: Sequence[Any]) -> tuple[Need, ...]:
        """The workspaces that a launch would take; raises what `plan` would, without making a plan."""
        *_, residency = self._settle(views)
        return self._needs(residency)

    def _settle(self, views: Sequence[Any]) -> tuple[tuple[Launch, ...], tuple[int, ...], dict[str, int]]:
        """The launches for these arguments, the program's values, and the device numbers that are among those."""
        self._refuse_if_retired()
        record = self.record
        residency = self._likely_residency()  # confirmed below
        for _ in range(3):
            values = record.bind(views, residency).values
            evaluation, found = self._evaluate(values)
            if found == residency:
                needs = self._needs(residency)
                if (reason := self._workspaces.beyond(needs)) is not None:
                    raise Unfit(reason)
                if any_moved(evaluation.launches):
                    require_inside(record, evaluation.launches, views, [need.bytes for need in needs])
                self._last, self._last_ready, self._residency = evaluation, (), residency
                return evaluation.launches, values, found
            residency = found
        raise ProgramError(f"{self.name}: its blocks depend on how many of them can be resident")

    def likely_needs(self) -> tuple[Need, ...]:
        """The workspaces that a launch takes: for the last shape that was planned or tried, else by a guess, which is
        too low only where more than one block fits a multiprocessor."""
        return self._needs(self._likely_residency())

    def _likely_residency(self) -> dict[str, int]:
        """The device numbers of the last shape, or those of one block on each multiprocessor."""
        if self._residency:
            return self._residency
        count = self._driver.multiprocessors
        return {a.name: max(count // a.cluster_size, 1) for a in self.record.device_arguments}

    def _needs(self, residency: dict[str, int]) -> tuple[Need, ...]:
        spaces = self.record.workspace_arguments
        if not spaces:
            return ()
        return tuple([Need(a.bytes * (1 if a.each is None else residency[a.each]), a.zeroed) for a in spaces])

    def plan_rows(self, like: AnyPlan, rows: int) -> AnyPlan | None:
        """A plan for what `like` is for, but with `rows` rows in all tensors that have as many as the first, and with
        the same strides. A tenth of the work of `plan`, or None where that has to be done. Does not ask the device."""
        self._refuse_if_retired()
        record, last = self.record, self._last
        values = record.with_rows(like.values, rows)
        if values is None or last is None:
            return None
        try:
            evaluation = record.program.evaluate(values, last)
        except ProgramError:
            return None
        told = self._residency
        if not evaluation.small or any_moved(evaluation.launches):  # by more than fewer rows have, perhaps
            return None
        for name, place in record.device_places:
            if values[place] != told.get(name):
                return None
        self._last = evaluation
        return self._prepared(evaluation.launches, values, told, self._last_ready)

    def _evaluate(self, values: tuple[int, ...]) -> tuple[Evaluation, dict[str, int]]:
        """The launches, which fit the device, and the device numbers that they ask for."""
        record = self.record
        evaluation = record.program.evaluate(values, self._last)
        for launch in evaluation.launches:
            static = record.kernels[launch.kernel].shared_bytes
            if self._driver.compute_capability >= (9, 0):
                static = max(0, static - _RESERVED_BYTES)
            needed = launch.shared_bytes + static
            if needed > self._driver.max_shared_bytes:
                raise Unfit(
                    f"needs {needed} bytes of shared memory a block, this GPU has {self._driver.max_shared_bytes}"
                )
        asked = record.device_arguments
        return evaluation, {a.name: self._max_active_clusters(a, evaluation.launches) for a in asked}

    def _prepared(
        self,
        launches: tuple[Launch, ...],
        values: tuple[int, ...],
        residency: dict[str, int],
        like: tuple[PreparedLaunch, ...] = (),
    ) -> AnyPlan:
        """The plan with these launches, for which that many clusters can be resident; for `like` see `LaunchPlan`."""
        record = self.record
        ready = [(self._kernels[launch.kernel], launch) for launch in launches]
        needs = self._needs(residency)
        plan = LaunchPlan(self._driver, ready, values, len(record.program.pointers), self.counter, like)
        self._last_ready = plan.direct
        self._ready.update(plan.direct)
        return WorkspacePlan(plan, self._workspaces, needs) if needs else plan

    def check(self, views: Sequence[Any]) -> None:
        """Raise ArgumentError if an argument does not fit the record."""
        self.record.bind(views, self._placeholders())

    def _placeholders(self) -> dict[str, int]:
        """Stand-ins for device numbers, which tell shapes apart no less than the real ones do."""
        return {a.name: 1 for a in self.record.device_arguments}

    def _max_active_clusters(self, argument: DeviceArgument, launches: tuple[Launch, ...]) -> int:
        """Asked of the first launch with clusters of the argument's size, or else of the first launch."""
        launch, cluster = launches[0], (argument.cluster_size, 1, 1)
        for candidate in launches:
            x, y, z = dict(candidate.attributes).get(CLUSTER_DIMENSION, (1, 1, 1))
            if x * y * z == argument.cluster_size:
                launch, cluster = candidate, (x, y, z)
                break
        question = (launch.kernel, cluster, launch.block, launch.shared_bytes)
        if question not in self._active_clusters:
            kernel = self._kernels[launch.kernel]
            self._active_clusters[question] = self._driver.max_active_clusters(kernel, *question[1:])
        count = self._active_clusters[question]
        if count < 1:
            raise Unfit(f"a cluster of {cluster} blocks with {launch.shared_bytes} bytes each does not fit this GPU")
        return count

    def _checked_kernels(self, module: Any) -> tuple[Any, ...]:
        record, driver = self.record, self._driver
        count = driver.kernel_count(module)
        if count != len(record.kernels):
            raise DeviceError(
                f"{self._archive.path}: {self.name}: the cubin holds {count} kernels, its record describes "
                f"{len(record.kernels)}; build the archive again"
            )
        kernels = []
        for number, described in enumerate(record.kernels):
            kernel = driver.kernel(module, described.symbol)
            found = driver.parameter_sizes(kernel)
            for launch in record.program.launches:
                if launch.kernel == number and launch.sizes != found:
                    raise DeviceError(
                        f"{self._archive.path}: {self.name}: kernel {described.symbol} takes parameters of {found} "
                        f"bytes, its launch program has {launch.sizes}; build the archive again"
                    )
            driver.set_attributes(kernel)
            kernels.append(kernel)
        return tuple(kernels)

    def _view_all(self, described: tuple[Argument, ...], given: Sequence[Any], stream: int) -> Sequence[Any]:
        """`given` with its tensors as views; what does not match is left for `Record.bind` to refuse."""
        wanted = [a for a in described if not isinstance(a, SuppliedArgument)]
        if not isinstance(given, Sequence) or len(given) != len(wanted):
            return given
        views: list[Any] = []
        for argument, value in zip(wanted, given, strict=True):
            if isinstance(argument, TensorArgument):
                value = device_view(value, argument.name, stream, self._driver)
            elif isinstance(argument, TupleArgument):
                value = self._view_all(argument.items, value, stream)
            views.append(value)
        return views


def _any_empty(views: Sequence[Any]) -> bool:
    """Whether a tensor among these, or in a tuple of them, has no elements."""
    return any(
        0 in v.shape if isinstance(v, TensorView) else isinstance(v, tuple | list) and _any_empty(v) for v in views
    )
