"""The functions of an archive that may serve a signature, and what is guessed of their times. Needs no GPU.

Functions are told by name: a provider says which of its variants compute a signature, and a function has the name of
its variant. One that no provider knows here may serve what an entry of the archive says it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

from runtime.program.operation import Signature
from runtime.program.record import Record
from runtime.tables.dispatch import Entry

from ..pack.compatibility import refusal
from ..search.legal import of_name, summation, unsuited
from ..search.operation import building
from ..search.provider import family_of
from ..search.variants import Variant
from .operation import tuning
from .roofline import expected_us


class _Estimated(NamedTuple):
    """Estimated microseconds for a signature: of all functions at an M, what corrects those of a function, and of a
    function at an M, corrected."""

    by_m: dict[int, list[float]]
    corrections: dict[str, Callable[[int], float]]
    corrected: dict[tuple[str, int], float]


class Pool:
    """Which functions of `target` can compute each signature, of those called `names`."""

    def __init__(self, target: str, names: Iterable[str], record: Callable[[str], Record], entries: Sequence[Entry]):
        self._target, self._names, self._record = target, set(names), cache(record)
        self._entries = [e for e in entries if e.target == target]
        self._variants: dict[Signature, dict[str, Variant]] = {}
        self._us: dict[Signature, _Estimated] = {}

    def suited(self, entry: Entry) -> list[str]:
        """The functions that can compute an entry's signature, by name: its own, and the archive's other ones."""
        own = {name for _, names in entry.candidates for name in names} or set(_served(entry))
        known, form = self._of(entry.signature), tuning(entry.signature).form
        alike = {
            name
            for other in self._entries
            if other.signature.operation == entry.signature.operation and form(other.signature) == form(entry.signature)
            for name in (*_served(other), *(n for _, names in other.candidates for n in names))
            if name not in self._known
        }
        fits = {n for n in known.keys() | alike if refusal(self._record(n), entry.signature) is None}
        return sorted((own & self._names) | (fits & self._names))

    def estimates(self, signature: Any) -> Callable[[str, int], float]:
        """What gives microseconds of a function at M: the estimate of its family, corrected by what was measured
        elsewhere, or a roofline where it has none."""
        found = {n: v for n, v in self._of(signature).items() if (f := family_of(v)) is not None and f.estimate_us}
        if not found:
            return lambda name, m: expected_us(signature, m)
        estimates, of = _estimates(signature.operation, tuple(found.values())), building(signature.operation)
        by_m, corrections, known = self._us.setdefault(signature, _Estimated({}, {}, {}))
        places = {name: i for i, name in enumerate(found)}

        def estimate_us(name: str, m: int) -> float:
            us = known.get((name, m))
            if us is None and name in places:
                if m not in by_m:
                    by_m[m] = estimates(signature, m)
                if name not in corrections:
                    corrections[name] = of.correction(found[name], signature)
                us = known[name, m] = by_m[m][places[name]] * corrections[name](m)
            return expected_us(signature, m) if us is None else us

        return estimate_us

    def variant(self, name: str) -> Variant | None:
        """What a function was compiled from, where a provider knows it."""
        return self._known.get(name)

    def relatives(self, name: str) -> list[Hashable]:
        """Its family. Tiles and clusters alike were tried as groups too, and did not help on recorded times."""
        variant = self.variant(name)
        return [(variant.provider, variant.family)] if variant else []

    def forget(self, signature: Signature) -> None:
        """Drop what is kept of a signature's estimates."""
        self._us.pop(signature, None)

    def summation(self, name: str, signature: Signature) -> str | None:
        """What `legal.summation` says of a function. One that no provider knows is taken to be like no other, if its
        CTAs do not meet in memory, where what it computes may depend on what runs."""
        if self._record(name).workspace_arguments:
            return None
        variant = self._of(signature).get(name)
        return name if variant is None else summation(variant, getattr(signature, "k", None))

    def _of(self, signature: Signature) -> Mapping[str, Variant]:
        if signature not in self._variants:
            named = self._named.items()
            self._variants[signature] = {name: v for name, v in named if unsuited(v, signature) is None}
        return self._variants[signature]

    @cached_property
    def _named(self) -> Mapping[str, Variant]:
        found = ((name, of_name(name)) for name in sorted(self._names))
        return {name: v for name, v in found if v is not None and v.target == self._target}

    @cached_property
    def _known(self) -> Mapping[str, Variant]:
        return {name: v for e in self._entries for name, v in self._of(e.signature).items()}


@lru_cache(16)  # signatures that differ in N and K alone mostly have the same variants
def _estimates(operation: str, variants: tuple[Variant, ...]) -> Callable[[Any, int], list[float]]:
    return building(operation).estimates(variants)


def _served(entry: Entry) -> list[str]:
    return [name for _, name in entry.ranges]
