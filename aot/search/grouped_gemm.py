"""Grouped GEMM as building knows it: its form, what extents its variants take, which of them are worth compiling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from runtime.grouped_gemm import Signature

from .estimates import OWN_ESTIMATES
from .form import VariantForm, no_whole_pieces, unpromised
from .legal import legal_variants, overlaps_less
from .operation import Building, Shortlist
from .provider import family_of, provider_names
from .shorthand import Experts
from .variants import Family, Variant

_ROOMY, _ROOMY_GROUPS = 4096, 8


class GroupedBuilding(Building):
    """See `aot.search.operation.Building`. Variants have the element types of A, B and D."""

    by_signature = True
    shorthand = Experts("groups")

    def form(self, s: Signature) -> VariantForm:
        """Element types of A, B and D, and all words."""
        return VariantForm((s.a, s.b, s.d), scaling=s.scaling, epilogue=s.epilogue, overlap=s.overlap, rows=s.rows)

    def limit(self, variant: Variant, family: Family | None, signature: Signature) -> str | None:
        """Rows of A, B and D are loaded and stored in pieces, so K and columns of D must fill whole pieces. A choice
        called overlap may rely on no more than is promised. A family takes rows in one way."""
        if family and family.rows != signature.rows:
            return f"{variant.family}: rows are {family.rows}, not {signature.rows}"
        access_bytes = family.access_bytes if family else Family.access_bytes
        rows = ("columns of D", signature.columns, signature.d), ("k", signature.k, signature.a)
        if reason := unpromised(variant, signature.overlap) or no_whole_pieces(access_bytes, rows):
            return reason
        return family.limit(variant, signature) if family else None

    def roomy(self, signature: Signature) -> Signature:
        """With as many groups, and an N and a K, as every family takes."""
        return replace(signature, groups=_ROOMY_GROUPS, n=_ROOMY, k=_ROOMY)

    def variants(self, target: str, signature: Signature) -> list[Variant]:
        """Those of all providers that are likely to be fast for it, in their order."""
        return [v for name in provider_names() for v in legal_variants(name, target, signature)]

    def shortlist(self, wanted: Mapping[Signature, Sequence[int]], target: str, limit: int) -> Shortlist:
        """The `limit` variants that are estimated to be fastest at each M, of those that overlap most."""
        found: dict[Signature, tuple[tuple[int, tuple[Variant, ...]], ...]] = {}
        for signature, ms in wanted.items():
            variants = sorted(self.variants(target, signature), key=Variant.name)
            variants = [v for v in variants if (family := family_of(v)) and family.estimate_us]
            variants = [v for v, less in zip(variants, overlaps_less(variants), strict=True) if not less]
            estimates, by_m = self.estimates(variants), []
            for m in ms:
                us = dict(zip(variants, estimates(signature, m), strict=True))
                by_m.append((m, tuple(sorted(variants, key=us.__getitem__)[:limit])))
            found[signature] = tuple(by_m)
        return Shortlist(found, OWN_ESTIMATES if found else "")


def rows_of(signature: Signature, m: int) -> int:
    """How many rows all groups have at M = `m`: of masked ones each has so many."""
    return m * signature.groups if signature.rows == "masked" else m


GROUPED_GEMM = GroupedBuilding("grouped_gemm", "grouped GEMMs")
