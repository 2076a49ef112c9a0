"""Load and plan before the first call, so that calls open no file, import nothing and load no kernel.

Knows nothing of the calls that follow.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..device.driver import Driver
from ..device.workspace import Need, Workspaces
from ..errors import ArgumentError, KernelMiss, ProgramError, RecordError
from ..gemm.call import EXTRAS
from ..gemm.universal import PREDICTED, AnyEntry, ExtendedEntry, PredictedEntry
from ..limits import PRELOAD_ALLOWANCE_STEPS, PRELOAD_STEPS_OF_A_BYTE, PRELOAD_STEPS_OF_A_TOKEN, STEPS_OF_A_CALL
from ..numbers.dtypes import DTYPES
from ..program.operation import contiguous
from .entries import Entries, best_first
from .function import Function, Unfit
from .gemm.keys import shape_key
from .gemm.plans import Plans, Preloaded
from .layers import Layers
from .options import Options
from .plan import MAX_PLANS

_log = logging.getLogger(__name__)


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


class Preloader:
    """`Library.preload` for one generation of files."""

    def __init__(
        self,
        layers: Layers,
        entries: Callable[[], list[Entries]],
        plans: Plans,
        driver: Driver,
        lock: threading.RLock,
        options: Options,
        workspaces: Workspaces,
    ) -> None:
        self._layers, self._plans, self._driver, self._lock = layers, plans, driver, lock
        self._all = entries
        self._options, self._workspaces = options, workspaces

    def preload(self, asked: Preloaded, as_many_as_fit: bool = False) -> tuple[str, ...]:
        """See `Library.preload`. With `as_many_as_fit` M values that would be too many are left out, as are signatures
        that there are no more."""
        there = [entry for each in self._all() for entry in each.served()]
        entries = self._asked_for(asked, there, as_many_as_fit)
        asked = asked._replace(tokens=self._tokens(asked, [*there, *entries], as_many_as_fit))
        for entry in entries:
            self._entries(entry).accept(entry)
        loaded, needed = self._load(entries, asked)
        with self._promise(asked):
            self._plan(entries, asked.tokens)
            with self._driver.current():
                self._workspaces.reserve(needed)
        return loaded

    def _tokens(self, asked: Preloaded, entries: Sequence[AnyEntry], as_many_as_fit: bool) -> tuple[int, ...]:
        """The M values that are asked for: all, or as many as there are plans kept for, with what was preloaded before.
        `entries` are those that there are.

        Raises:
            ArgumentError: they are too many, and it is not `as_many_as_fit` that are wanted.
        """
        before = self._plans.preloaded
        in_all = asked.besides(before)
        keys = {entry.signature.key() for entry in entries}
        if before is not None and before.only is not None:
            keys |= before.only  # of which what was predicted is not among `entries`
        signatures = len(keys if in_all.only is None else keys & in_all.only)
        # There is a plan for tensors of torch, and one for others.
        most = MAX_PLANS // max(signatures * (2 if sys.modules.get("torch") else 1), 1)
        if len(in_all.tokens) <= most:
            return asked.tokens
        if not as_many_as_fit:
            raise ArgumentError(
                f"{len(in_all.tokens)} M values for {signatures} signatures are more plans than the {MAX_PLANS} that "
                f"are kept; give fewer, {most} in all"
            )
        what = "%s: of %d M values that were preloaded only the first %d are planned for, as more plans are not kept"
        _log.warning(what, self._layers.path, len(in_all.tokens), most)
        return tuple([m for m in asked.tokens if m in in_all.tokens[:most]])

    def _load(self, entries: Sequence[AnyEntry], asked: Preloaded) -> tuple[tuple[str, ...], set[tuple[Need, ...]]]:
        """Load what serves `entries` at M values that tell what fits and at those that are asked for, and where all
        signatures are, every function of a form; their names, and the workspaces of launches."""
        loaded: dict[str, None] = {}
        needed: set[tuple[Need, ...]] = set()
        tried = [_tried(entry) for entry in entries]
        cases = [(entry, m) for entry, ms in zip(entries, tried, strict=True) for m in sorted({*ms, *asked.tokens})]
        # What is predicted was named by the caller, and by no archive.
        named = sum(_is_predicted(entry, m) for entry, ms in zip(entries, tried, strict=True) for m in ms)
        try:
            # All that needs no context comes first: another thread may be creating it, which takes 0.2 s and more.
            for entry, m in cases:
                next(self._candidates(entry, m), None)
            of_forms = self._of_forms() if asked.only is None else []
            trials = _Trials(sum(a.file_bytes for a in self._layers.archives), named + len(entries) * len(asked.tokens))
            with self._driver.current():  # waits, if it must, while nobody waits for the lock
                for entry, m in cases:
                    loaded |= dict.fromkeys(self._load_for(entry, m, trials, needed))
                for function in of_forms:
                    function.load()
                    loaded[function.name] = None
                    needed.add(function.likely_needs())
        finally:
            for archive in self._layers.archives:
                archive.forget_blocks()
            for function in self._layers.made():
                function.forget()
        return tuple(loaded), needed

    def _of_forms(self) -> list[Function]:
        """Every function that a universal table may choose, read out of its archive."""
        return [f for each in self._all() for f in each.universal_functions() if each.readable(f)]

    @contextlib.contextmanager
    def _promise(self, asked: Preloaded) -> Iterator[None]:
        """Load no more for calls of what is asked for, unless what follows fails."""
        with self._lock:
            before = self._plans.preloaded
            self._plans.preloaded = asked.besides(before)
        try:
            yield
        except BaseException:
            with self._lock:
                self._plans.preloaded = before
            raise

    def _plan(self, entries: Sequence[AnyEntry], tokens: Sequence[int]) -> None:
        """Plan for `tokens` rows of each of `entries`: GEMMs of torch's tensors, if it is imported, and of others."""
        if not tokens:
            return
        torch = _imported_torch()
        kinds = [None] if torch is None else [None, torch]
        for entry, m in itertools.product(entries, tokens):
            if entry.signature.operation != self._plans.of.name:
                self._prepare_call(entry, m)
                continue
            for kind in kinds:
                self._prepare(entry, m, kind)

    def _entries(self, entry: AnyEntry) -> Entries:
        """Those that `entry` is one of."""
        return self._by_operation[entry.signature.operation]

    @functools.cached_property
    def _by_operation(self) -> dict[str, Entries]:
        return {each.of.name: each for each in self._all()}

    def _asked_for(self, asked: Preloaded, there: Sequence[AnyEntry], those_there_are: bool) -> list[AnyEntry]:
        """Those of the entries `there` that are asked for, and what is predicted for others.

        Raises:
            KernelMiss: one is not there, and it is not `those_there_are` that are wanted.
        """
        entries = [entry for entry in there if asked.covers(entry.signature)]
        if asked.only is not None:  # else functions of forms are loaded, all of them
            entries = [self._entries(entry).extended(entry) for entry in entries]
        named = {entry.signature.key() for entry in entries}
        for key in sorted((asked.only or frozenset()) - named):
            for each in self._all():
                signature = each.of.of_key(key)
                entry = None if signature is None else each.find(signature)
                if entry is not None and each.allows(entry):
                    entries.append(entry)
        if missing := sorted((asked.only or frozenset()) - {entry.signature.key() for entry in entries}):
            what = f"{self._layers.path} cannot preload {', '.join(missing)}: it has no such entry for this GPU"
            what += f" that is {self._options.require}" if self._options.require else ""
            what += " with a function for equal bits at every M" if self._options.batch_invariant else ""
            if not those_there_are:
                raise KernelMiss(f"{what}; `aot ls` lists what it has", "no entry")
            _log.warning("%s, as it had before", what)
        return entries

    def _load_for(self, entry: AnyEntry, m: int, trials: _Trials, needed: set[tuple[Need, ...]]) -> Iterator[str]:
        """Load the best function for `m` rows, and those after it until one can run; the context is current.
        The workspaces of that one are added to `needed`."""
        views = self._entries(entry).of.arguments(entry.signature, m, self._driver.device)
        for function in self._candidates(entry, m):
            function.load()
            yield function.name
            trials.count(function)
            with self._lock:
                try:
                    needed.add(function.check_fit(views))
                    return
                except (Unfit, ProgramError):
                    continue
                except ArgumentError:  # it takes other strides than these: the call will show
                    needed.add(function.likely_needs())
                    return

    def _candidates(self, entry: AnyEntry, m: int) -> Iterator[Function]:
        """What may serve `m` rows, best first, read out of its archive; each found out when it is asked for."""
        entries = self._entries(entry)
        for name in best_first(entry, m):
            if entries.readable(entries.of_file(entry, name)):
                yield entries.function(entry, name)

    def _prepare(self, entry: AnyEntry, m: int, torch: Any) -> None:
        """Plan for `m` rows, of contiguous tensors; what no kernel can do is left for the call to tell."""
        signature = entry.signature
        views = contiguous(signature, m, self._driver.device)
        by_name = dict(zip([operand.name for operand in signature.operands()], views, strict=True))
        seen = [by_name[name] for name in ("a", "b", "d", *EXTRAS) if name in by_name]
        key = shape_key(torch is not None, signature, seen)
        dtype = None if torch is None else getattr(torch, DTYPES[signature.d].torch, None)
        with self._lock, self._driver.current():
            try:
                self._plans.plan(key, signature, views, by_name["d"].shape, dtype)
            except (KernelMiss, ArgumentError) as reason:
                _log.warning("%s at M = %d is not prepared: %s", signature.key(), m, reason)

    def _prepare_call(self, entry: AnyEntry, m: int) -> None:
        """The same for an operation that is called by its name, with the numbers that are usual for it."""
        each = self._entries(entry)
        views = each.of.arguments(entry.signature, m, self._driver.device)
        with self._driver.current():
            for name in best_first(entry, m):
                try:
                    return each.function(entry, name).prepare(views)
                except each.passed_over:
                    continue
                except ArgumentError as reason:
                    return _log.warning("%s at M = %d is not prepared: %s", entry.signature.key(), m, reason)


def _imported_torch() -> Any:
    """torch if it is imported, else None. Where another thread is importing it not everything is there: this waits."""
    if sys.modules.get("torch") is None:  # an import that is ruled out is a None there
        return None
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


def _is_predicted(entry: AnyEntry, m: int) -> bool:
    """Whether what serves `m` rows is predicted."""
    return (entry.at(m) if isinstance(entry, ExtendedEntry) else entry).state == PREDICTED


def _tried(entry: AnyEntry) -> set[int]:
    """M values at which `preload` sees what fits: for each function the least that it serves, and the last that ends
    a range of it, or of a function that serves all larger M the least of those; of what is predicted, the first of
    likely ones at which it is best. Of an extended entry, as far as each of the two serves."""
    if isinstance(entry, ExtendedEntry):
        later: dict[str, int] = {}
        for m in entry.predicted.likely():
            if m > entry.last:
                later.setdefault(entry.best(m), m)
        return {min(m, entry.last) for m in _tried(entry.tuned)} | set(later.values())
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
