"""What a mixture of experts does around its grouped GEMMs, as building knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtime.moe.permute import Signature

from .operation import Building, Shortlist
from .quantise import ScaledBuilding
from .variants import Variant

# Up to so many assignments one launch is taken to be faster than two, in which all ids are not compared with all.
_ONE_LAUNCH_ASSIGNMENTS = 2048


class PermuteBuilding(ScaledBuilding):
    """See `aot.search.operation.Building`."""

    def shortlist(self, wanted: Mapping[Signature, Sequence[int]], target: str, limit: int) -> Shortlist:
        """All variants at each M; those of one launch first where assignments are few, else those of two."""
        found: dict[Signature, tuple[tuple[int, tuple[Variant, ...]], ...]] = {}
        for signature, ms in wanted.items():
            variants, by_m = self.variants(target, signature), []
            for m in ms:
                few = m * signature.top_k <= _ONE_LAUNCH_ASSIGNMENTS
                one = [v for v in variants if v.options.get("schedule") == "one_launch"]
                others = [v for v in variants if v not in one]
                by_m.append((m, (*one, *others) if few else (*others, *one)))
            found[signature] = tuple(by_m)
        return Shortlist(found, "the number of assignments")


MOE_PERMUTE = PermuteBuilding("moe_permute", "permutations of experts' rows")
MOE_COMBINE = Building("moe_combine", "sums of experts' rows")
