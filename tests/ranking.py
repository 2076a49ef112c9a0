"""All of some variants in the order of which `aot.search.rank.shortlist` gives the first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aot.search import rank as ranks
from aot.search import targets
from aot.search.variants import Variant
from runtime.gemm.signature import Signature


@dataclass(frozen=True)
class Ranking:
    """Variants, best first, and what ordered them."""

    variants: list[Variant]
    source: str


def rank(variants: Iterable[Variant], signature: Signature, m: int, target: str) -> Ranking:
    """Order `variants` for `m` rows of `signature` on `target`, whether they suit it or not."""
    model, shapes = ranks._model(targets.target(target), signature), ranks._shapes(variants)
    suited = ranks._Suited(shapes, ranks._Times(shapes))
    runs = ranks._order(suited, signature, m, model)
    return Ranking([variant for run in runs for variant in run.variants()], suited.source(model))
