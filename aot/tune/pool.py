"""The functions of an archive that may serve a signature, and what is guessed of their times. Needs no GPU.

Functions are told by name: a provider says which of its variants compute a signature, and a function has the name of
its variant. One that no provider knows here may serve what an entry of the archive says it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache, cached_property

from runtime.dispatch import Entry, gemm_mismatch
from runtime.record import Record
from runtime.signature import Signature

from ..providers import PROVIDERS, provider
from ..roofline import expected_us
from ..variants import Variant, family_of


class Pool:
    """Which functions of `target` can compute each signature, of those called `names`."""

    def __init__(self, target: str, names: Iterable[str], record: Callable[[str], Record], entries: Sequence[Entry]):
        self._target, self._names, self._record = target, set(names), cache(record)
        self._entries = [e for e in entries if e.target == target]
        self._variants: dict[Signature, dict[str, Variant]] = {}
        self._us: dict[Signature, dict[tuple[str, int], float]] = {}

    def suited(self, entry: Entry) -> list[str]:
        """The functions that can compute an entry's signature, by name: its own, and the archive's other ones."""
        own = {name for _, names in entry.candidates for name in names} or set(_served(entry))
        known = self._of(entry.signature)
        alike = {
            name
            for other in self._entries
            if _form(other.signature) == _form(entry.signature)
            for name in (*_served(other), *(n for _, names in other.candidates for n in names))
            if name not in self._known
        }
        fits = {n for n in known.keys() | alike if gemm_mismatch(entry.signature, self._record(n)) is None}
        return sorted((own & self._names) | (fits & self._names))

    def estimates(self, signature: Signature) -> Callable[[str, int], float]:
        """What gives microseconds of a function at M: the estimate of its family, or a roofline where it has none."""
        variants = self._of(signature)
        known = self._us.setdefault(signature, {})

        def estimate_us(name: str, m: int) -> float:
            if (name, m) not in known:
                variant = variants.get(name)
                family = family_of(variant) if variant else None
                if variant and family and family.estimate_us:
                    known[name, m] = family.estimate_us(variant, signature, m)
                else:
                    known[name, m] = expected_us(signature, m)
            return known[name, m]

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

    def uses_workspace(self, name: str) -> bool:
        """Whether a function's CTAs meet in memory, so that what it computes may depend on what runs."""
        return bool(self._record(name).workspace_arguments)

    def _of(self, signature: Signature) -> Mapping[str, Variant]:
        if signature not in self._variants:
            legal = (v for p in PROVIDERS for v in provider(p).variants(self._target, signature))
            self._variants[signature] = {name: v for v in legal if (name := v.name()) in self._names}
        return self._variants[signature]

    @cached_property
    def _known(self) -> Mapping[str, Variant]:
        return {name: v for e in self._entries for name, v in self._of(e.signature).items()}


def _served(entry: Entry) -> list[str]:
    return [name for _, name in entry.ranges]


def _form(signature: Signature) -> tuple[object, ...]:
    s = signature
    return s.a, s.b, s.d, s.accumulator, s.epilogue, s.scaling, s.b_major, s.batch > 1, s.overlap
