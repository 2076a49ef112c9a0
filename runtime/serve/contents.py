"""What a library serves between two reloads: its archives, their functions, the gemm table, and the plans made so far.

Several archives are layers: what a later one has takes the place of the same in those before it. Knows nothing of the
calls that ask for plans, nor of reloads.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import logging
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..container.archive import Archive, UnknownEntry
from ..device.driver import Driver
from ..device.workspace import Workspaces
from ..errors import ArgumentError, DeviceError, KernelMiss, ProgramError, RecordError
from ..gemm.call import EXTRAS, same_elements
from ..gemm.dispatch import Dispatch, Entry, gemm_mismatch, serves, workspaces_of
from ..gemm.fallback import TorchCall
from ..gemm.signature import Signature
from ..gemm.universal import PREDICTED, AnyEntry, PredictedEntry, Universal
from ..limits import PRELOAD_ALLOWANCE_STEPS, PRELOAD_STEPS_OF_A_BYTE, PRELOAD_STEPS_OF_A_TOKEN, STEPS_OF_A_CALL
from ..named_tuple import NamedTuple
from ..program.record import TensorArgument, TensorView
from ..program.tensor import TORCH_NAMES, contiguous_strides, span_bytes, torch_current_device, torch_current_stream
from .counters import Counters
from .function import MAX_PLANS, AnyPlan, Function, Unfit, remember
from .rows import Rows

_log = logging.getLogger(__name__)
_UNKNOWN: Any = object()
_NOWHERE = 1 << 40  # an aligned address for tensors that are planned for before they exist


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
    extras: tuple[tuple[int, int, bool], ...]  # of each operand after D: such bits, bytes, whether it may be D itself
    entry: AnyEntry
    plan: AnyPlan

    def with_rows(self, plan: AnyPlan, more: int, steps: Sequence[int]) -> GemmPlan:
        """This for `more` rows; `steps` are the bytes from row to row of each operand, 0 where it has none."""
        extras = self.extras
        if extras:
            pairs = zip(extras, steps[3:], strict=True)
            extras = tuple([(mask, size + more * step, may) for (mask, size, may), step in pairs])
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


class _Trials:
    """Counts what evaluating programs takes, to see what fits: a file may ask for more than a server has time for."""

    def __init__(self, file_bytes: int, asked: int) -> None:
        """`asked` is at how many M the caller wants something, of all signatures."""
        self._steps, self._most = 0, PRELOAD_ALLOWANCE_STEPS
        self._most += PRELOAD_STEPS_OF_A_BYTE * file_bytes + PRELOAD_STEPS_OF_A_TOKEN * asked

    def count(self, function: Function) -> None:
        """Count one evaluation.

        Raises:
            RecordError: it is one too many.
        """
        self._steps += STEPS_OF_A_CALL + function.record.program.steps
        if self._steps > self._most:
            raise RecordError(
                f"{function.name}: preloading would evaluate more than {self._most} steps of launch programs, which "
                "no archive of its size should need; name fewer signatures with only=, or build the archive again"
            )


class _Layer:
    """One archive, and those of its functions that were asked for: an archive may have thousands."""

    def __init__(self, archive: Archive, make: Callable[[Archive, str], Function], lock: threading.RLock) -> None:
        self.archive, self._make, self._lock = archive, make, lock
        self.made: dict[str, Function] = {}

    def function(self, name: str) -> Function:
        """The function `name` of this archive; the same object each time."""
        found = self.made.get(name)
        if found is None:
            with self._lock:  # so that `Contents.retire` finds it, or was before it
                found = self.made.get(name) or self.made.setdefault(name, self._make(self.archive, name))
        return found


class Functions(Mapping[str, Function]):
    """Functions by name, those of the last archive first; an unknown name is an `UnknownEntry`, which says what to run.

    Of functions with one name it has that of the last archive.
    """

    def __init__(self, layers: tuple[_Layer, ...]) -> None:
        self._last_first = layers[::-1]

    def __getitem__(self, name: str) -> Function:
        for layer in self._last_first:
            if name in layer.archive.functions:
                return layer.function(name)
        if len(self._last_first) == 1:
            self._last_first[0].archive.entry(name)
        paths = ", ".join(layer.archive.path for layer in self._last_first)
        raise UnknownEntry(f"{paths}: have no function {name!r} among their {len(self)}; `aot ls` lists them")

    def __contains__(self, name: object) -> bool:
        return any(name in layer.archive.functions for layer in self._last_first)

    def get(self, name: str, default: Any = None) -> Any:
        """The function `name`, or `default`."""
        return self[name] if name in self else default  # noqa: SIM401

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for layer in self._last_first for name in layer.archive.functions))

    def __len__(self) -> int:
        if len(self._last_first) == 1:
            return len(self._last_first[0].archive.functions)
        return sum(1 for _ in self)


class Contents:
    """Archives on one device, the base first. Methods may be called from any thread, unless they say otherwise."""

    def __init__(
        self,
        archives: Sequence[Archive],
        driver: Driver,
        workspaces: Workspaces,
        counters: Counters,
        lock: threading.RLock,
        require: str | None,
        batch_invariant: bool,
    ) -> None:
        self.archives = tuple(archives)
        self.plans: OrderedDict[Any, GemmPlan] = OrderedDict()  # changed by holders of the lock, as are
        self.rows: OrderedDict[Any, Rows] = OrderedDict()  # calls that are known but for their number of rows
        self.given: OrderedDict[Any, TorchCall] = (
            OrderedDict()
        )  # calls of torch tensors that torch serves, by the same keys as plans
        self.table: Any = None  # `native_table`, once torch's tensors were seen; False if there is none
        self.preloaded: Preloaded | None = None  # changed as plans are
        self._driver, self._counters, self._lock, self._require = driver, counters, lock, require
        self._batch_invariant = batch_invariant
        self.tuned_for: tuple[str, ...] = ()  # kinds of GPU, in words, of the entries that serve this one
        self._retired = False  # changed as plans are

        def make(archive: Archive, name: str) -> Function:
            function = Function(archive, driver, lock, archive.entry(name), workspaces, counters)
            if self._retired:
                function.retire()
            return function

        self._layers = tuple(_Layer(archive, make, lock) for archive in self.archives)
        self.functions = Functions(self._layers)
        self._dispatch: Dispatch | None = None
        self._universals: list[tuple[_Layer, Universal]] = []  # read with `_dispatch`, the last layer's first
        self._predicted: OrderedDict[Signature, AnyEntry | None] = OrderedDict()  # by them
        self._owners: dict[tuple[Signature, str], _Layer] = {}  # of gemm entries, where there are several layers
        # Signatures, each with the tensors of functions that can compute it.
        self._matched: set[tuple[Signature, tuple[TensorArgument, ...] | None]] = set()
        self._warned = False

    @property
    def path(self) -> str:
        """The archives' paths."""
        return ", ".join(archive.path for archive in self.archives)

    @property
    def digest(self) -> str:
        """The SHA-256 that names the archive, or of the names of several, in their order."""
        digests = [archive.digest for archive in self.archives]
        return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()

    @property
    def signatures(self) -> int | None:
        """How many signatures the gemm table has; None while nobody has asked for it."""
        return None if self._dispatch is None else len({entry.signature for entry in self._dispatch.entries})

    @property
    def forms(self) -> int:
        """How many forms are served at any N and K; 0 while nobody has asked for the tables."""
        return sum(len(universal) for _, universal in self._universals)

    @property
    def used(self) -> bool:
        """Whether the gemm table was asked for, for which the device must be there."""
        return self._dispatch is not None

    def made(self) -> list[Function]:
        """The functions that were asked for so far, of every layer."""
        return [function for layer in self._layers for function in list(layer.made.values())]

    # --- planning ---

    def plan(
        self, key: Any, signature: Signature, views: tuple[TensorView, ...], shape: tuple[int, ...], torch_dtype: Any
    ) -> GemmPlan:
        """The plan that is kept under `key`, made if it is not there; the caller holds the lock.

        `shape` is that of the caller's output, `torch_dtype` its element type where all tensors are torch's.

        Raises:
            KernelMiss: no kernel serves these views.
            DeviceError: the driver refused, or the archives have nothing for this GPU.
        """
        found = self.plans.get(key)
        if found is None:
            found = self._make_plan(signature, views, shape, torch_dtype)
            remember(self.plans, key, found)
            self._counters.planned()
        return found

    def _make_plan(
        self, signature: Signature, views: tuple[TensorView, ...], shape: tuple[int, ...], torch_dtype: Any
    ) -> GemmPlan:
        """Choose the function for this shape, load it and plan it; runners-up serve where the best cannot run."""
        driver = self._driver
        m = views[0].shape[-2]
        entry = self._lookup(signature)
        self._accept(entry)
        reasons = []
        d = views[2]
        closed = self.preloaded is not None and self.preloaded.covers(signature)
        for name in _best_first(entry, m):
            if closed and not self._layer(entry).function(name).loaded:
                reasons.append(f"  {name}: was not loaded by preload(), after which nothing more is; give it this M")
                continue
            function = self._function(entry, name)
            function.load()
            try:
                plan = function.plan(views)
            except (Unfit, ProgramError) as error:
                reasons.append(f"  {name}: {error}")
                continue
            masks = [a.alignment - 1 for a in function.record.arguments if isinstance(a, TensorArgument)]
            names = [operand.name for operand in signature.operands()]
            return GemmPlan(
                launch=plan.launch,
                entry=entry,
                plan=plan,
                function=function,
                device=driver.device,
                misaligned=max(masks[:3]),
                a_bytes=span_bytes(views[0]),
                b_bytes=span_bytes(views[1]),
                d_bytes=span_bytes(views[2]),
                shape=shape,
                dtype=torch_dtype,
                current_stream=torch_current_stream() if torch_dtype else None,
                current_device=torch_current_device() if torch_dtype and driver.device_count > 1 else None,
                extras=tuple(
                    (mask, span_bytes(view), name == "residual" and same_elements(view, d))
                    for name, mask, view in list(zip(names, masks, views, strict=True))[3:]
                ),
            )
        raise KernelMiss(
            "\n".join([f"no kernel for {signature.key()} at M = {m} can run on this GPU:", *reasons]), "no kernel runs"
        )

    def entry(self, signature: Signature) -> AnyEntry:
        """What serves `signature` on this GPU, if the options accept that; nothing is loaded.

        The gemm table's entry, unless it was never tuned and functions that were checked are predicted; where there is
        none, what a universal table predicts.

        Raises:
            KernelMiss: nothing; the message names the nearest entries.
            DeviceError: the archives have nothing for this GPU.
        """
        entry = self._lookup(signature)
        self._refuse(entry)
        return entry

    def _lookup(self, signature: Signature) -> AnyEntry:
        """What serves `signature`, whatever the options say of it; raises as `entry` does."""
        found = self._find(signature)
        if found is None:
            capability = self._driver.compute_capability
            reasons = [universal.reason(signature, capability) for _, universal in self._universals]
            raise KernelMiss(self._gemm_table().explain(signature, capability, reasons[:1]))
        return found

    def _find(self, signature: Signature) -> AnyEntry | None:
        """What `_lookup` finds, or None."""
        driver = self._driver
        found = self._gemm_table().choose(signature, driver.compute_capability, driver.gpu)
        return self._predict(signature) if found is None else self._instead(found)

    def _instead(self, entry: Entry) -> AnyEntry:
        """An entry of the table, or, where it was never tuned, what is predicted by functions that were checked."""
        if entry.state == "tuned":
            return entry
        predicted = self._predict(entry.signature)
        return predicted if predicted is not None and self.checked_on(predicted) else entry

    def _predict(self, signature: Signature) -> AnyEntry | None:
        """What the universal table of the last layer that can compute `signature` has for it."""
        if not self._universals:
            return None
        found: AnyEntry | None = self._predicted.get(signature, _UNKNOWN)  # once: another thread may push it out
        if found is not _UNKNOWN:
            return found
        found = None
        for _, universal in self._universals:
            predicted = universal.entry(signature, self._driver.compute_capability, self._driver.gpu)
            if predicted is not None:
                found = predicted.only_invariant() if self._batch_invariant and predicted.invariant else predicted
                break
        with self._lock:
            remember(self._predicted, signature, found)
        return found

    def _accept(self, entry: AnyEntry) -> None:
        """Refuse an entry that the options do not allow, or warn of the first whose kernels have run nowhere."""
        self._refuse(entry)
        if entry.state != "tuned" and not self.checked_on(entry):
            with self._lock:
                if not self._warned:
                    self._warned = True
                    _log.warning("%s (said once for this archive)", self._never_tuned(entry))

    def checked_on(self, entry: AnyEntry) -> tuple[str, ...]:
        """The kinds of GPU on which the functions of a predicted entry were checked."""
        if entry.state != PREDICTED:
            return ()
        layer = self._layer(entry)
        table = next((universal for owner, universal in self._universals if owner is layer), None)
        return () if table is None else table.checked_on.get(entry.target, ())

    def _refuse(self, entry: AnyEntry) -> None:
        if self._require not in (None, entry.state):
            what = f"{self._never_tuned(entry)} (this library was loaded with require={self._require!r})"
            raise KernelMiss(what, "not tuned")
        if self._batch_invariant and entry.invariant is None:
            raise KernelMiss(
                f"{self._where(entry)} has no function that serves every M with equal bits, which this library was "
                "loaded to use (batch_invariant=True); build and tune the archive again, or load it without",
                "not batch-invariant",
            )

    def _allows(self, entry: AnyEntry) -> bool:
        return self._require in (None, entry.state) and not (self._batch_invariant and entry.invariant is None)

    def _where(self, entry: AnyEntry) -> str:
        return f"{self._layer(entry).archive.path}: {entry.signature.key()} on {entry.target}"

    def _never_tuned(self, entry: AnyEntry) -> str:
        if checked_on := self.checked_on(entry):
            return (
                f"{self._where(entry)} is {entry.state}: its kernels were checked on {', '.join(checked_on)} and "
                "chosen by estimate, not by times; to tune it, build a manifest that names it with --base and run: aot "
                "tune"
            )
        return (
            f"{self._where(entry)} is {entry.state}: its kernels were chosen by estimate and were never run or checked "
            "on a GPU; run: aot tune"
        )

    def _layer(self, entry: AnyEntry) -> _Layer:
        """The layer that `entry` is from, whose functions it names."""
        if len(self._layers) == 1:
            return self._layers[0]
        if entry.state == PREDICTED:  # of any N and K, too many to be kept
            capability = self._driver.compute_capability
            owners = (layer for layer, of in self._universals if of.form(entry.signature, capability) is not None)
            return next(owners, self._layers[0])
        return self._owners.get((entry.signature, entry.target), self._layers[0])

    def _function(self, entry: AnyEntry, name: str) -> Function:
        """The function `name`, which `entry` names, if its record can be what the entry says."""
        layer = self._layer(entry)
        function = layer.function(name)
        match = entry.signature, function.record.tensors
        if match not in self._matched:
            mismatch = gemm_mismatch(entry.signature, function.record)
            if mismatch is not None:
                raise RecordError(
                    f"{layer.archive.path}: the gemm table has {name} for {entry.signature.key()}, but it {mismatch}; "
                    "build the archive again"
                )
            if len(self._matched) >= MAX_PLANS:  # a universal table has signatures without end
                self._matched.clear()
            self._matched.add(match)
        if self._batch_invariant and (shared := workspaces_of(function.record)):
            raise RecordError(
                f"{layer.archive.path}: the gemm table has {name} to give {entry.signature.key()} equal bits at every "
                f"M, but it takes the workspace {shared[0]}, so CTAs share tiles; build the archive again"
            )
        return function

    def _gemm_table(self) -> Dispatch:
        if self._dispatch is None:
            self.check_device()
            with self._lock:
                if self._dispatch is None:
                    found, self._universals = self._read_tables(), self._read_universals()
                    self._see_kinds(found)
                    self._dispatch = found
        return self._dispatch

    def _see_kinds(self, table: Dispatch) -> None:
        """Note which kinds of GPU the entries that serve were tuned on, and say so where it is not this one."""
        here = self._driver.gpu
        tuned = [e for e in table.entries_for(self._driver.compute_capability, here) if e.state == "tuned"]
        kinds = [entry.gpu for entry in tuned if entry.gpu is not None]
        self.tuned_for = tuple(sorted({kind.words() for kind in kinds}))
        others = [kind.words() for kind in kinds if not kind.same_kind(here)]
        if others:
            _log.warning(
                "%s: %d of %d signatures were tuned on %s, and this is %s: their kernels are right here, but others "
                "may be faster; run: aot tune",
                self.path,
                len(others),
                len(tuned),
                " and ".join(sorted(set(others))),
                here.words(),
            )

    @property
    def gpu(self) -> str | None:
        """The kind of GPU that this is, in words; None while nobody has asked for the gemm table."""
        return None if self._dispatch is None else self._driver.gpu.words()

    def check_device(self) -> None:
        """Raise DeviceError if no function is for this GPU."""
        capability = self._driver.compute_capability
        targets = sorted({target for archive in self.archives for target in archive.targets})
        if not any(serves(target, capability) for target in targets):
            raise DeviceError(
                f"{self.path} has kernels for {', '.join(targets) or 'no target'}; this GPU "
                f"has compute capability {capability[0]}.{capability[1]}; build the archive for it too"
            )

    def _read_tables(self) -> Dispatch:
        """The gemm tables as one: entries for the signature and target of an earlier layer's take the place of all of
        those, whatever kind of GPU they are for."""
        entries: dict[tuple[Signature, str], list[Entry]] = {}
        for layer in self._layers:
            if "gemm" not in layer.archive.tables and len(self._layers) > 1:
                continue
            try:
                table = Dispatch.from_json(layer.archive.table("gemm"), layer.archive.functions.targets_by_name())
            except RecordError as error:
                raise RecordError(f"{layer.archive.path}: {error}") from None
            found: dict[tuple[Signature, str], list[Entry]] = {}
            for entry in table.entries:
                found.setdefault((entry.signature, entry.target), []).append(entry)
            entries |= found
            if len(self._layers) > 1:
                self._owners |= dict.fromkeys(found, layer)
        every = tuple(itertools.chain.from_iterable(entries.values()))
        if self._batch_invariant:
            every = tuple(entry if entry.invariant is None else entry.only_invariant() for entry in every)
        return Dispatch(every)

    def _read_universals(self) -> list[tuple[_Layer, Universal]]:
        """The universal tables, that of the last layer first."""
        found = []
        for layer in reversed(self._layers):
            if "universal" in layer.archive.tables:
                try:
                    targets = layer.archive.functions.targets_by_name()
                    found.append((layer, Universal.from_json(layer.archive.table("universal"), targets)))
                except RecordError as error:
                    raise RecordError(f"{layer.archive.path}: {error}") from None
        return found

    # --- before the first call ---

    def check_files(self) -> None:
        """Read all of the files, and the gemm tables; it leaves the interpreter to other threads but for these.

        Raises:
            ArchiveError: something is damaged; the message names the file.
            RecordError: a gemm table is malformed.
        """
        for archive in self.archives:
            archive.check_blocks()
            if "tuning" in archive.tables:
                archive.table("tuning")
        self._read_tables()
        for _, universal in self._read_universals():
            for _, form in universal.forms:
                form.costs  # noqa: B018

    def preload(self, asked: Preloaded, as_many_as_fit: bool = False) -> tuple[str, ...]:
        """See `Library.preload`. With `as_many_as_fit` M values that would be too many are left out, as are signatures
        that there are no more."""
        rows = self._gemm_table().entries_for(self._driver.compute_capability, self._driver.gpu)
        there = tuple(entry for entry in map(self._instead, rows) if self._allows(entry))
        entries = self._asked_for(asked, there, as_many_as_fit)
        any_shape = self._universal_functions() if asked.only is None else []
        tokens: Sequence[int] = asked.tokens
        in_all = asked.besides(self.preloaded)
        keys = {entry.signature.key() for entry in (*there, *entries)}
        keys |= self.preloaded.only or set() if self.preloaded else set()  # what was predicted is not all `there`
        signatures = len(keys if in_all.only is None else keys & in_all.only)
        # A plan has a key of its own, one for tensors of torch, and one for torch's calls once there was one.
        most = MAX_PLANS // max(signatures * (3 if sys.modules.get("torch") else 1), 1)
        if len(in_all.tokens) > most and not as_many_as_fit:
            raise ArgumentError(
                f"{len(in_all.tokens)} M values for {signatures} signatures are more plans than the {MAX_PLANS} that "
                f"are kept; give fewer, {most} in all"
            )
        if len(in_all.tokens) > most:
            what = (
                "%s: of %d M values that were preloaded only the first %d are planned for, as more plans are not kept"
            )
            _log.warning(what, self.path, len(in_all.tokens), most)
            tokens = [m for m in tokens if m in in_all.tokens[:most]]
        loaded: dict[str, None] = {}
        for entry in entries:
            self._accept(entry)
        tried = [_tried(entry) for entry in entries]
        cases = [(entry, m) for entry, ms in zip(entries, tried, strict=True) for m in sorted({*ms, *tokens})]
        # What is predicted was named by the caller, and by no archive.
        named = sum(len(ms) for entry, ms in zip(entries, tried, strict=True) if entry.state == PREDICTED)
        try:
            # All that needs no context comes first: another thread may be creating it, which takes 0.2 s and more.
            best = [self._function(entry, entry.best(m)) for entry, m in cases]
            for function in (*best, *any_shape):
                function.read()
            trials = _Trials(sum(a.file_bytes for a in self.archives), named + len(entries) * len(tokens))
            with self._driver.current():  # waits, if it must, while nobody waits for the lock
                for (entry, m), function in zip(cases, best, strict=True):
                    loaded |= dict.fromkeys(self._load_for(entry, m, function, trials))
                for function in any_shape:
                    function.load()
                    loaded[function.name] = None
        finally:
            for archive in self.archives:
                archive.forget_blocks()
            for function in self.made():
                function.forget()
        with self._lock:
            before, self.preloaded = self.preloaded, asked._replace(tokens=tuple(tokens)).besides(self.preloaded)
        try:
            if tokens:
                torch = _imported_torch()
                kinds = [None] if torch is None else [None, torch]
                for entry, m, kind in itertools.product(entries, tokens, kinds):
                    self._prepare(entry, m, kind)
        except BaseException:  # nothing was promised
            with self._lock:
                self.preloaded = before
            raise
        return tuple(loaded)

    def _universal_functions(self) -> list[Function]:
        """Every function that a universal table may choose on this GPU, if `require` accepts what it chooses."""
        if self._require not in (None, PREDICTED):
            return []
        return [
            layer.function(name)
            for layer, universal in self._universals
            for name in universal.functions(self._driver.compute_capability)
        ]

    def _asked_for(self, asked: Preloaded, there: Sequence[AnyEntry], those_there_are: bool) -> list[AnyEntry]:
        """Those of the entries `there` that are asked for, and what is predicted for others.

        Raises:
            KernelMiss: one is not there, and it is not `those_there_are` that are wanted.
        """
        entries = [entry for entry in there if asked.covers(entry.signature)]
        named = {entry.signature.key() for entry in entries}
        others = (Signature.of_key(key) for key in sorted((asked.only or frozenset()) - named))
        found = (self._find(signature) for signature in others if signature is not None)
        entries += [entry for entry in found if entry is not None and self._allows(entry)]
        if missing := sorted((asked.only or frozenset()) - {entry.signature.key() for entry in entries}):
            what = f"{self.path} cannot preload {', '.join(missing)}: it has no such entry for this GPU"
            what += f" that is {self._require}" if self._require else ""
            what += " with a function for equal bits at every M" if self._batch_invariant else ""
            if not those_there_are:
                raise KernelMiss(f"{what}; `aot ls` lists what it has", "no entry")
            _log.warning("%s, as it had before", what)
        return entries

    def _load_for(self, entry: AnyEntry, m: int, best: Function, trials: _Trials) -> Iterator[str]:
        """Load `best`, the best function for `m` rows, and those after it until one can run; the context is current."""
        views = _views(entry.signature, m, self._driver.device)
        for function in itertools.chain([best], self._later(entry, m)):
            function.load()
            yield function.name
            trials.count(function)
            with self._lock:
                try:
                    function.check_fit(views)
                    return
                except (Unfit, ProgramError):
                    continue
                except ArgumentError:  # it takes other strides than these: the call will show
                    return

    def _later(self, entry: AnyEntry, m: int) -> Iterator[Function]:
        """What to try after the best function for `m` rows, found out when it is asked for."""
        for name in itertools.islice(_best_first(entry, m), 1, None):
            yield self._function(entry, name)

    def _prepare(self, entry: AnyEntry, m: int, torch: Any) -> None:
        """Plan for `m` rows, of contiguous tensors; what no kernel can do is left for the call to tell."""
        signature = entry.signature
        views = _views(signature, m, self._driver.device)
        by_name = dict(zip((operand.name for operand in signature.operands()), views, strict=True))
        seen = [by_name[name] for name in ("a", "b", "d", *EXTRAS) if name in by_name]
        key = gemm_key(torch is not None, signature, seen)
        dtype = None if torch is None else getattr(torch, TORCH_NAMES[signature.d], None)
        with self._lock, self._driver.current():
            try:
                self.plan(key, signature, views, by_name["d"].shape, dtype)
            except (KernelMiss, ArgumentError) as reason:
                _log.warning("%s at M = %d is not prepared: %s", signature.key(), m, reason)

    # --- the end ---

    def retire(self) -> bool:
        """Forget all plans and make no more; whether a call under way still holds one. The caller holds the lock.

        Functions that are first asked for later are retired too: nothing would wait for a call of theirs.
        """
        self._retired = True
        self.plans.clear()
        self.rows.clear()
        self.given.clear()
        if self.table:
            self.table.clear()
        functions = self.made()
        for function in functions:
            function.retire()
        return any(function.busy for function in functions)

    def close(self) -> None:
        """Unload the kernels, which no call or graph may use any more, and close the files.

        All of them; then what the driver said of the first that failed is raised, and another call tries those again.
        """
        failure: DeviceError | None = None
        try:
            with self._lock:
                self.retire()
            for function in self.made():
                try:
                    function.unload()
                except DeviceError as error:
                    failure = failure or error
        finally:
            for archive in self.archives:
                archive.close()
        if failure is not None:
            raise failure


def gemm_key(of_torch: bool, signature: Signature, views: Sequence[TensorView]) -> tuple[Any, ...]:
    """What plans of `gemm` are kept under: all that they depend on but the pointers."""
    return (of_torch, signature.epilogue, signature.overlap, *(view[1:] for view in views))


def open_archives(paths: Sequence[str | os.PathLike[str]]) -> list[Archive]:
    """Open them all, or none.

    Raises:
        ArchiveError: a file is not an archive that can be trusted.
    """
    archives: list[Archive] = []
    try:
        for path in paths:
            archives.append(Archive.open(path))
    except BaseException:
        for archive in archives:
            archive.close()
        raise
    return archives


def _imported_torch() -> Any:
    """torch if it is imported, else None. Where another thread is importing it not everything is there: this waits."""
    if sys.modules.get("torch") is None:  # an import that is ruled out is a None there
        return None
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


def _best_first(entry: AnyEntry, m: int) -> Iterator[str]:
    """What `entry` has for `m` rows; what follows the best, which mostly nobody asks for, is found out then."""
    yield entry.best(m)
    yield from entry.functions(m)[1:]


def _tried(entry: AnyEntry) -> set[int]:
    """M values at which `preload` sees what fits: for each function the least that it serves, and the last that ends
    a range of it, or of a function that serves all larger M the least of those; of what is predicted, the first of
    likely ones at which it is best."""
    if isinstance(entry, PredictedEntry):
        by_function: dict[str, int] = {}
        for m in entry.likely():
            by_function.setdefault(entry.best(m), m)
        return set(by_function.values())
    first, last = dict[int, int](), dict[int, int]()
    least = 1
    for bound, function in itertools.zip_longest(entry.bounds, entry.chosen):
        first.setdefault(function, least)
        last[function] = least if bound is None else bound
        least = last[function] + 1
    return {*first.values(), *last.values()}


def _views(signature: Signature, m: int, device: int) -> tuple[TensorView, ...]:
    """The operands of `signature` at `m` rows as a kernel takes them, contiguous, at made-up addresses."""
    extents = signature.extents() | {"M": m}
    views = []
    for number, operand in enumerate(signature.operands()):
        shape = tuple(extents[axis] for axis in operand.axes)
        strides = contiguous_strides(shape)
        if operand.name == "b" and signature.b_major == "n":
            strides = (*strides[:-2], 1, shape[-2])
        views.append(TensorView(_NOWHERE * (number + 1), operand.dtype, shape, strides, device))
    return tuple(views)
