"""What of an archive serves a signature on a kind of GPU: the rules of `runtime.serve`, for one archive and no device.

Knows nothing of times, and nothing of how any of it is shown.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from runtime.container.archive import Archive
from runtime.device.gpus import Gpu
from runtime.gemm.universal import AnyEntry
from runtime.program.operation import operation
from runtime.tables.dispatch import Capability, Dispatch
from runtime.tables.table import Entry

from ..pack import forms
from ..pack.kinds import usual
from ..pack.precedence import Precedence
from .gpus import kinds_of, named


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
        self.precedence = Precedence(archive)
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
        and what is assumed (`aot.pack.kinds`) for targets that have none. Of `target` alone, where one is named.

        Raises:
            UnknownGpu: `gpu` is no kind that is known.
        """
        if gpu is not None:
            kind = named(gpu, self.entries)
            return [Place(kind.capability, kind.gpu, False)]
        of = [e for e in self.entries if e.signature == signature and target in (None, e.target)]
        found = [Place(kind.capability, kind.gpu, False) for kind in kinds_of(of)]
        targets = dict.fromkeys(e.target for e in of if e.gpu is None)
        if self.precedence.universal is not None:
            forms_for = (form.target for _, form in self.precedence.universal.forms)
            targets |= dict.fromkeys(t for t in forms_for if target in (None, t))
        if target is not None:
            targets[target] = None
        known = {place.capability for place in found}
        more = [forms.capability(t) for t in targets]
        found += [self._usual(c) for c in dict.fromkeys(more) if c not in known]
        return found or [self._usual(forms.capability(t)) for t in self._targets()]

    def everywhere(self, target: str | None = None, gpu: str | None = None) -> list[Place]:
        """Where to look for any signature: the kind of GPU that is named, if one is; else each that entries are for, of
        `target` alone where one is named; and one for each target that has entries for any kind, or forms.

        Raises:
            UnknownGpu: `gpu` is no kind that is known.
        """
        if gpu is not None or target is not None:
            return self.places(None, target, gpu)
        found = [Place(kind.capability, kind.gpu, False) for kind in kinds_of(self.entries)]
        universal = self.precedence.universal
        of_forms = (form.target for _, form in universal.forms) if universal else ()
        targets = [*self._targets(), *of_forms]
        known = {place.capability for place in found}
        return found + [self._usual(c) for c in dict.fromkeys(map(forms.capability, targets)) if c not in known]

    def _targets(self) -> list[str]:
        return list(dict.fromkeys(e.target for e in self.entries))

    def _usual(self, capability: Capability) -> Place:
        """A kind that runs code for a capability: the first that entries are for, else what is assumed."""
        of_entries = [kind.gpu for kind in kinds_of(self.entries) if kind.capability == capability]
        return Place(capability, of_entries[0], False) if of_entries else Place(capability, usual(capability), True)

    def find(self, signature: Any, place: Place) -> AnyEntry | None:
        """What serves there; None if nothing does."""
        entry = self.dispatch(signature.operation).choose(signature, place.capability, place.gpu)
        universal = self.precedence.universal
        if entry is not None and (universal is None or not self._by_form(entry)):
            return entry
        if universal is None or operation(signature.operation).predictions != forms.TABLE:
            return entry
        return universal.entry(signature, place.capability, place.gpu) or entry

    def _by_form(self, entry: Entry) -> bool:
        instead = self.precedence.instead_of(entry)
        return instead is not None and instead["form"] is not None
