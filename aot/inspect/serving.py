"""What of an archive serves a signature on a kind of GPU: the rules of `runtime.serve`, for one archive and no device.

Knows nothing of times, and nothing of how any of it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from runtime.container.archive import Archive
from runtime.device.gpus import Gpu
from runtime.gemm.universal import AnyEntry
from runtime.program.operation import operation
from runtime.tables.dispatch import Capability, Dispatch
from runtime.tables.table import Entry

from ..pack import forms
from .gpus import kinds_of, named, require_runs
from .kinds import capability, usual
from .precedence import Precedence


class Place(NamedTuple):
    """Where a signature is asked for: a compute capability and a kind of GPU. `assumed`: nobody named the kind, and no
    entry is for it."""

    capability: Capability
    gpu: Gpu
    assumed: bool


class Serving:
    """The tables of an archive, asked what serves."""

    def __init__(self, archive: Archive) -> None:
        """Raises RecordError where a table is malformed."""
        self.precedence, self._targets = Precedence(archive), archive.targets
        self._dispatch: dict[str, Dispatch] = {}

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Those of all operations' tables."""
        return self.precedence.entries

    def dispatch(self, name: str) -> Dispatch:
        """The table of an operation, empty where there is none."""
        if name not in self._dispatch:
            self._dispatch[name] = Dispatch(tuple(e for e in self.entries if e.signature.operation == name))
        return self._dispatch[name]

    def places(self, signature: Any, target: str | None = None, gpu: str | None = None) -> list[Place]:
        """Where to look: the kind of GPU that is named, if one is; else each that entries for the signature are for,
        and what is assumed (`aot.inspect.kinds`) for targets that have none. Of `target` alone, where one is named.

        Raises:
            UnknownGpu: `gpu` is no kind that is known.
            OtherTarget: it does not run `target`.
        """
        if gpu is not None:
            return [self._named(gpu, target)]
        found = self._of([e for e in self.entries if e.signature == signature], target)
        targets = [e.target for e in self.entries] or self._targets
        return found or [self._usual(c) for c in dict.fromkeys(map(capability, targets))]

    def everywhere(self, target: str | None = None, gpu: str | None = None) -> list[Place]:
        """Where to look for any signature: the kind of GPU that is named, if one is; else each that entries are for, of
        `target` alone where one is named; and one for each target that has entries for any kind, or forms.

        Raises:
            UnknownGpu: `gpu` is no kind that is known.
            OtherTarget: it does not run `target`.
        """
        return self._of(self.entries, target) if gpu is None else [self._named(gpu, target)]

    def _named(self, gpu: str, target: str | None) -> Place:
        kind = named(gpu, self.entries)
        if target is not None:
            require_runs(kind, target)
        return Place(kind.capability, kind.gpu, False)

    def _of(self, entries: Iterable[Entry], target: str | None) -> list[Place]:
        """Each kind of GPU that some entries are for; then one for each other capability of theirs, of forms, and of
        `target`, where there is one: then of that alone."""
        entries = [e for e in entries if target in (None, e.target)]
        found = [Place(kind.capability, kind.gpu, False) for kind in kinds_of(entries)]
        universal = self.precedence.universal
        of_forms = [form.target for _, form in universal.forms] if universal else []
        targets = [e.target for e in entries] + [t for t in of_forms if target in (None, t)]
        targets += [] if target is None else [target]
        known = {place.capability for place in found}
        return found + [self._usual(c) for c in dict.fromkeys(map(capability, targets)) if c not in known]

    def _usual(self, of: Capability) -> Place:
        """A kind that runs code for a capability: the first that entries are for, else what is assumed."""
        of_entries = [kind.gpu for kind in kinds_of(self.entries) if kind.capability == of]
        return Place(of, of_entries[0], False) if of_entries else Place(of, usual(of), True)

    def find(self, signature: Any, place: Place, m: int = 1) -> AnyEntry | None:
        """What serves `m` rows there; None if nothing does."""
        entry = self.dispatch(signature.operation).choose(signature, place.capability, place.gpu)
        universal = self.precedence.universal
        if entry is not None and (universal is None or not self._by_form(entry, m)):
            return entry
        if universal is None or operation(signature.operation).predictions != forms.TABLE:
            return entry
        return universal.entry(signature, place.capability, place.gpu) or entry

    def _by_form(self, entry: Entry, m: int) -> bool:
        begins, instead = self.precedence.predicted_from(entry), self.precedence.instead_of(entry)
        return (instead is not None and instead["form"] is not None) or (begins is not None and m >= begins)
