"""Which entry of a library's tables serves a signature on this GPU, if its options accept that.

Tables of several layers are one; where they have nothing, universal tables predict. Knows nothing of plans or
of the tensors of a call.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from ..container.errors import DAMAGE
from ..device.driver import Driver
from ..errors import KernelMiss, ProgramError, RecordError
from ..gemm.universal import PREDICTED, AnyEntry, ExtendedEntry, PredictedEntry, Universal, trusted_to
from ..program.operation import Asked, Operation, Signature
from ..program.record import TensorArgument
from ..tables.dispatch import Dispatch, Entry, record_mismatch, workspaces_of
from .function import Function, Unfit
from .layers import Layer, Layers
from .options import Options
from .plan import MAX_PLANS, AnyPlan, remember

_log = logging.getLogger(__name__)
_UNKNOWN: Any = object()


class Entries:
    """What the tables of a library's layers have of one operation for this GPU. Any thread may call its methods."""

    def __init__(self, of: Operation, layers: Layers, driver: Driver, lock: threading.RLock, options: Options) -> None:
        self.of = of
        self._layers, self._driver, self._lock = layers, driver, lock
        self._options = options
        self.tuned_for: tuple[str, ...] = ()  # kinds of GPU, in words, of the entries that serve this one
        self._dispatch: Dispatch | None = None
        self._universals: list[tuple[Layer, Any]] = []  # read with `_dispatch`, the last layer's first
        self._predicted: OrderedDict[Signature, AnyEntry | None] = OrderedDict()  # by them
        self._owners: dict[tuple[Signature, str], Layer] = {}  # of entries, where there are several layers
        self._extended: dict[Signature, AnyEntry] = {}  # tuned entries, with what is predicted at larger M
        # What keeps a function from serving, so that another of its entry does.
        self._damage: tuple[type[Exception], ...] = DAMAGE if options.on_damage == "torch" else ()
        self.passed_over: tuple[type[Exception], ...] = (Unfit, ProgramError, *self._damage)
        # Signatures, each with the tensors of functions that can compute it, or the name of one that takes more.
        self._matched: set[tuple[Signature, tuple[TensorArgument, ...] | str]] = set()
        self._warned = False

    @property
    def signatures(self) -> int | None:
        """How many signatures the table has; None while nobody has asked for it."""
        return None if self._dispatch is None else len({entry.signature for entry in self._dispatch.entries})

    @property
    def forms(self) -> int:
        """How many forms are served at any N and K; 0 while nobody has asked for the tables."""
        return sum(len(universal) for _, universal in self._universals)

    @property
    def used(self) -> bool:
        """Whether the table was asked for, for which the device must be there."""
        return self._dispatch is not None

    @property
    def gpu(self) -> str | None:
        """The kind of GPU that this is, in words; None while nobody has asked for the table."""
        return None if self._dispatch is None else self._driver.gpu.words()

    def entry(self, signature: Signature) -> AnyEntry:
        """What serves `signature` on this GPU, if the options accept that; nothing is loaded.

        The table's entry, unless it was never tuned and functions that were checked are predicted; where there is none,
        what is predicted.

        Raises:
            KernelMiss: nothing; the message names the nearest entries.
            DeviceError: the archives have nothing for this GPU.
        """
        entry = self.lookup(signature)
        self._refuse(entry)
        return entry

    def lookup(self, signature: Signature) -> AnyEntry:
        """What serves `signature`, whatever the options say of it; raises as `entry` does."""
        found = self.find(signature)
        if found is None:
            capability = self._driver.compute_capability
            reasons = [universal.reason(signature, capability) for _, universal in self._universals]
            raise KernelMiss(self.table().explain(signature, capability, reasons[:1]))
        return found

    def find(self, signature: Signature) -> AnyEntry | None:
        """What `lookup` finds, or None."""
        driver = self._driver
        for wanted in (signature, *self.of.relying_on_less(signature)):
            found = self.table().choose(wanted, driver.compute_capability, driver.gpu)
            if found is not None:
                return self.extended(self.instead(found))
        return self._predict(signature)

    def instead(self, entry: Entry) -> AnyEntry:
        """An entry of the table, or, where it was never tuned, what is predicted by functions that were checked."""
        return entry if entry.state == "tuned" else self._predict_checked(entry.signature) or entry

    def extended(self, entry: AnyEntry) -> AnyEntry:
        """The same with what is predicted by functions that were checked, at larger M than it can be trusted to."""
        if not isinstance(entry, Entry) or (last := trusted_to(entry)) is None:
            return entry
        if self._options.require is not None or self._options.batch_invariant:
            return entry
        found = self._extended.get(entry.signature)
        if found is None:
            predicted = self._predict_checked(entry.signature)
            extends = predicted is not None and predicted.target == entry.target
            found = ExtendedEntry(entry, predicted, last) if predicted is not None and extends else entry
            self._extended[entry.signature] = found  # of one kind of GPU, so of one entry
        return found

    def _predict_checked(self, signature: Signature) -> PredictedEntry | None:
        """What is predicted for a signature, if the functions were checked."""
        predicted = self._predict(signature)
        return predicted if isinstance(predicted, PredictedEntry) and self.checked_on(predicted) else None

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
                found = (
                    predicted.only_invariant() if self._options.batch_invariant and predicted.invariant else predicted
                )
                break
        with self._lock:
            remember(self._predicted, signature, found)
        return found

    def accept(self, entry: AnyEntry) -> None:
        """Refuse an entry that the options do not allow, or warn of the first whose kernels have run nowhere."""
        self._refuse(entry)
        if entry.state != "tuned" and not self.checked_on(entry):
            with self._lock:
                if not self._warned:
                    self._warned = True
                    _log.warning("%s (said once for this archive)", self._never_tuned(entry))

    def checked_on(self, entry: AnyEntry) -> tuple[str, ...]:
        """The kinds of GPU on which the functions of a predicted entry were checked."""
        return entry.checked_on if isinstance(entry, PredictedEntry) else ()

    def _refuse(self, entry: AnyEntry) -> None:
        refusal = self._refusal(entry)
        if refusal is not None:
            raise refusal

    def _refusal(self, entry: AnyEntry) -> KernelMiss | None:
        """Why the library's options do not accept an entry, or None."""
        if self._options.require not in (None, entry.state):
            what = f"{self._never_tuned(entry)} (this library was loaded with require={self._options.require!r})"
            return KernelMiss(what, "not tuned")
        if self._options.batch_invariant and entry.invariant is None:
            return KernelMiss(
                f"{self._where(entry)} has no function that serves every M with equal bits, which this library was "
                "loaded to use (batch_invariant=True); build and tune the archive again, or load it without",
                "not batch-invariant",
            )
        return None

    def allows(self, entry: AnyEntry) -> bool:
        """Whether the library's options accept an entry."""
        return self._refusal(entry) is None

    def served(self) -> list[AnyEntry]:
        """For each signature of the table what serves it on this GPU, if the options accept that; not extended."""
        rows = self.table().entries_for(self._driver.compute_capability, self._driver.gpu)
        return [entry for entry in map(self.instead, rows) if self.allows(entry)]

    def _where(self, entry: AnyEntry) -> str:
        return f"{self.layer(entry).archive.path}: {entry.signature.key()} on {entry.target}"

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

    def layer(self, entry: AnyEntry) -> Layer:
        """The layer that `entry` is from, whose functions it names."""
        if len(self._layers.all) == 1:
            return self._layers.all[0]
        if entry.state == PREDICTED:  # of any N and K, too many to be kept
            capability = self._driver.compute_capability
            owners = (layer for layer, of in self._universals if of.form(entry.signature, capability) is not None)
            return next(owners, self._layers.all[0])
        return self._owners.get((entry.signature, entry.target), self._layers.all[0])

    def of_file(self, entry: AnyEntry, name: str) -> Function:
        """The function `name`, which `entry` names, as it is in the file, whatever its record says."""
        return self._owner(entry, name).function(name)

    def _owner(self, entry: AnyEntry, name: str) -> Layer:
        """The layer that a function of `entry` is from: the entry's, or that of what was predicted besides."""
        layer = self.layer(entry)
        if len(self._layers.all) == 1 or name in layer.archive.functions:
            return layer
        return next((other for other, _ in self._universals if name in other.archive.functions), layer)

    def function(self, entry: AnyEntry, name: str) -> Function:
        """The function `name`, which `entry` names, if its record can be what the entry says.

        Raises:
            Unfit: it was found damaged before, and the library goes on without it.
        """
        layer = self._owner(entry, name)
        function = layer.function(name)
        if function.damage:
            raise Unfit(function.damage)
        match = entry.signature, function.record.tensors or name
        if match not in self._matched:
            mismatch = record_mismatch(entry.signature, function.record)
            if mismatch is not None:
                raise RecordError(
                    f"{layer.archive.path}: the {self.of.name} table has {name} for {entry.signature.key()}, but it "
                    f"{mismatch}; build the archive again"
                )
            if len(self._matched) >= MAX_PLANS:  # a universal table has signatures without end
                self._matched.clear()
            self._matched.add(match)
        if self._options.batch_invariant and (shared := workspaces_of(function.record)):
            raise RecordError(
                f"{layer.archive.path}: the {self.of.name} table has {name} to give {entry.signature.key()} equal bits "
                f"at every M, but it takes the workspace {shared[0]}, so CTAs share tiles; build the archive again"
            )
        return function

    def pass_over(self, entry: AnyEntry, name: str, error: Exception) -> str:
        """Note that a function of `entry` does not serve, for an error of `passed_over`; a line that says so."""
        if isinstance(error, DAMAGE):
            self._note_damage(self.of_file(entry, name), error)
        return f"  {name}: {error}"

    def readable(self, function: Function) -> bool:
        """Read all that loading a function needs; False where it is damaged and the library goes on without it.

        Raises:
            ArchiveError, RecordError: as `Function.read`.
        """
        if function.damage:
            return False
        try:
            function.read()
        except self._damage as error:
            self._note_damage(function, error)
            return False
        return True

    def _note_damage(self, function: Function, error: Exception) -> None:
        with self._lock:
            first = not self._layers.damaged()
            function.damage = str(error)
        if first:
            what = "%s serves nothing any more, as it is damaged in the file; put a good copy in its place, and reload"
            _log.warning(f"{what} (said once; `Library.stats` names all): %s", function.name, error)

    def miss(self, entry: AnyEntry, m: int, reasons: Sequence[str]) -> KernelMiss:
        """That none of the functions of `entry` serves `m` rows, with a line for each."""
        key = entry.signature.key()
        word = "damaged" if any(self.of_file(entry, name).damage for name in entry.functions(m)) else "no kernel runs"
        return KernelMiss("\n".join([f"no kernel for {key} at M = {m} can run on this GPU:", *reasons]), word)

    def launch(self, asked: Asked, stream: int) -> tuple[Function, AnyPlan]:
        """Launch the function that serves what is asked for; runners-up serve where the best cannot run. Which did, and
        by which plan.

        Raises:
            KernelMiss: none does, or none can run on this GPU.
        """
        entry = self.lookup(asked.signature)
        self.accept(entry)
        reasons = []
        for name in best_first(entry, asked.m):
            try:
                function = self.function(entry, name)
                return function, function.launch(asked.arguments, stream)
            except self.passed_over as error:
                reasons.append(self.pass_over(entry, name, error))
        raise self.miss(entry, asked.m, reasons)

    def table(self) -> Dispatch:
        """The tables of all layers as one, read when first asked for.

        Raises:
            DeviceError: the archives have nothing for this GPU.
            RecordError: a table is malformed.
        """
        if self._dispatch is None:
            self._layers.check_device()
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
                self._layers.path,
                len(others),
                len(tuned),
                " and ".join(sorted(set(others))),
                here.words(),
            )

    def _read_tables(self) -> Dispatch:
        """The tables as one: entries for the signature and target of an earlier layer's take the place of all of
        those, whatever kind of GPU they are for."""
        entries: dict[tuple[Signature, str], list[Entry]] = {}
        for layer in self._layers.all:
            if self.of.name not in layer.archive.tables and len(self._layers.all) > 1:
                continue
            try:
                targets = layer.archive.functions.targets_by_name()
                table = Dispatch.from_json(layer.archive.table(self.of.name), self.of, targets)
            except RecordError as error:
                raise type(error)(f"{layer.archive.path}: {error}") from None
            found: dict[tuple[Signature, str], list[Entry]] = {}
            for entry in table.entries:
                found.setdefault((entry.signature, entry.target), []).append(entry)
            entries |= found
            if len(self._layers.all) > 1:
                self._owners |= dict.fromkeys(found, layer)
        every = tuple(itertools.chain.from_iterable(entries.values()))
        if self._options.batch_invariant:
            every = tuple(entry if entry.invariant is None else entry.only_invariant() for entry in every)
        return Dispatch(every)

    def _read_universals(self) -> list[tuple[Layer, Any]]:
        """The universal tables, that of the last layer first."""
        found = []
        for layer in reversed(self._layers.all):
            name = self.of.predictions
            if name is not None and name in layer.archive.tables:
                try:
                    targets = layer.archive.functions.targets_by_name()
                    found.append((layer, Universal.from_json(layer.archive.table(name), targets)))
                except RecordError as error:
                    raise type(error)(f"{layer.archive.path}: {error}") from None
        return found

    def universal_functions(self) -> list[Function]:
        """Every function that a universal table may choose on this GPU, if `require` accepts what it chooses."""
        if self._options.require not in (None, PREDICTED):
            return []
        return [
            layer.function(name)
            for layer, universal in self._universals
            for name in universal.functions(self._driver.compute_capability)
        ]

    def check(self) -> None:
        """Read all tables, whatever was read before.

        Raises:
            RecordError: one is malformed.
        """
        self._read_tables()
        for _, universal in self._read_universals():
            for _, form in universal.forms:
                form.costs  # noqa: B018


def best_first(entry: AnyEntry, m: int) -> Iterator[str]:
    """What `entry` has for `m` rows; what follows the best, which mostly nobody asks for, is found out then."""
    yield entry.best(m)
    yield from entry.functions(m)[1:]
