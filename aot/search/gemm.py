"""GEMM as building knows it: its form, what extents its variants take, and which of them are worth compiling where."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from runtime import native
from runtime.gemm.signature import Signature
from runtime.program.record import Record

from . import boosted, packaged, rank
from .estimates import Estimates
from .form import VariantForm, no_whole_pieces, unpromised
from .m_values import points, waves
from .operation import Building, Shortlist
from .provider import provider, provider_names
from .targets import target as target_named
from .variants import Family, Variant

_WORDS = "accumulator", "epilogue", "scaling", "b_major"  # of variants and signatures alike
_ROOMY = 8192


class GemmBuilding(Building):
    """See `aot.search.operation.Building`."""

    section = "gemms"
    by_signature = True
    forms = True

    def form(self, s: Signature) -> VariantForm:
        """Element types, and all words; whether it is batched."""
        return VariantForm((s.a, s.b, s.d), s.batch > 1, s.scaling, s.b_major, s.epilogue, s.overlap, s.accumulator)

    def unlike(self, variant: Variant, signature: Signature) -> str | None:
        """By element types, by the words that both have, and by batches."""
        if len(variant.elements) != 3:
            return super().unlike(variant, signature)
        for name in ("a", "b", "d", *_WORDS):
            if getattr(variant, name) != getattr(signature, name):
                return f"{variant.family}: {name} is {getattr(variant, name)}, not {getattr(signature, name)}"
        if variant.batched != (signature.batch > 1):
            return "a batched signature needs a batched kernel, and no other does"
        return None

    def limit(self, variant: Variant, family: Family | None, signature: Signature) -> str | None:
        """Rows of A, B and D are loaded and stored in pieces, so K and N must fill whole pieces.

        Tiles and clusters that hang over the edge of D are no limit, unless the family's own says so: loads past it
        give zeros and stores past it are dropped. A choice called overlap may rely on no more than is promised.
        """
        access_bytes = family.access_bytes if family else Family.access_bytes
        if reason := unpromised(variant, signature.overlap) or _pieces(access_bytes, signature):
            return reason
        return family.limit(variant, signature) if family else None

    def roomy(self, signature: Signature) -> Signature:
        """With an N and a K that every family takes."""
        return replace(signature, n=_ROOMY, k=_ROOMY)

    def variants(self, target: str, signature: Signature) -> list[Variant]:
        """Those of all providers that are likely to be fast for it, in their order."""
        return [v for p in provider_names() for v in provider(p).variants(target, signature)]

    def shortlist(self, wanted: Mapping[Signature, Sequence[int]], target: str, limit: int) -> Shortlist:
        """The `limit` variants that rank best at each M. At those between where a choice may change
        (`m_values.points`), a quarter as many; where waves of tiles end (`m_values.waves`), the best. Where these are
        several, what the package's archive would choose comes last, unless it is there already."""
        suited = self._suited(wanted, target)
        every = frozenset[Variant]().union(*set(suited.values()))
        processors = target_named(target).multiprocessors
        limits = {s: _limits(s, ms, processors, limit) for s, ms in wanted.items()}
        most = {(s, m): count for s, by_m in limits.items() for m, count in by_m.items()}
        found = rank.shortlist(every, most, target, limit, most, suited)
        by_name = {variants: {v.name(): v for v in variants} for variants in set(suited.values())}
        listed: dict[Signature, tuple[tuple[int, tuple[Variant, ...]], ...]] = {}
        for s, by_m in limits.items():
            chosen = packaged.chosen(s, [m for m, count in by_m.items() if count > 1], target)
            more = {m: by_name[suited[s]].get(name) for m, name in chosen.items()}
            listed[s] = tuple((m, _with(found.candidates[s, m], more.get(m))) for m in sorted(by_m))
        return Shortlist(listed, found.source)

    def estimates(self, variants: Sequence[Variant]) -> Callable[[Signature, int], list[float]]:
        """By cost programs, as such estimates are made of operations that these record."""
        return Estimates(variants).us

    def correction(self, variant: Variant, signature: Signature) -> Callable[[int], float]:
        """By trees, where native code adds them up: in Python, tuning would take minutes a signature."""
        return (
            super().correction(variant, signature) if native.trees is None else boosted.correction(variant, signature)
        )

    def _suited(self, signatures: Iterable[Signature], target: str) -> dict[Signature, frozenset[Variant]]:
        """The variants of each signature; those that have the same ones, as most of a form have, share one set."""
        found: dict[Signature, list[Variant]] = {s: self.variants(target, s) for s in signatures}
        sets: dict[tuple[int, ...], frozenset[Variant]] = {}  # by their objects, which are many to compare
        for variants in found.values():
            alike = tuple(map(id, variants))
            if alike not in sets:
                sets[alike] = frozenset(variants)
        return {s: sets[tuple(map(id, variants))] for s, variants in found.items()}

    def refusal(self, record: Record, signature: Signature) -> str | None:
        """Nothing: which extents a function takes is a rule of its family, which enumeration has asked."""
        return None


def _with(variants: Sequence[Variant], last: Variant | None) -> tuple[Variant, ...]:
    return (*variants, last) if last is not None and last not in variants else tuple(variants)


@lru_cache(maxsize=1024)
def _pieces(access_bytes: int, signature: Signature) -> str | None:
    """Why rows of a signature's matrices are no whole pieces of so many bytes, or None: asked for each variant."""
    rows = ("n", signature.n, signature.b) if signature.b_major == "n" else ("n", signature.n, signature.d)
    columns = "columns of D", signature.columns, signature.d
    return no_whole_pieces(
        access_bytes, (rows, columns, ("k", signature.k, signature.a), ("k", signature.k, signature.b))
    )


def _limits(signature: Signature, tokens: Sequence[int], multiprocessors: int, limit: int) -> dict[int, int]:
    """How many candidates a signature has at each M that it is ranked for."""
    found = dict.fromkeys(waves(signature.n, multiprocessors, tokens), 1)
    found |= dict.fromkeys(points(tokens), max(1, limit // 4))
    return found | dict.fromkeys(tokens, limit)


GEMM = GemmBuilding("gemm")
