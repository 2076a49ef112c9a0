"""What models of a GEMM's time look at of a variant, whichever family it is of."""

from __future__ import annotations

from typing import NamedTuple

from runtime.numbers.dtypes import DTYPES

from .provider import family_of
from .variants import Variant


class Shape(NamedTuple):
    """All that models look at, so variants of a shape cost the same. The tile is that of one CTA, in rows of D by
    columns of D by K, and each of `split_k` parts of K has its own; `instruction_m` is the rows of an MMA instruction.
    `swap_ab`: rows of B are on the MMA's M side. `two_cta`: two CTAs of a cluster, side by side along that side,
    multiply together, and each loads half of what is on the other.

    What neither a variant's choices nor its family's traits say is taken to be common, so that any family has a place.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    cluster_m: int
    cluster_n: int
    stages: int
    split_k: int
    instruction_m: int
    two_cta: bool
    swap_ab: bool

    @classmethod
    def of(cls, variant: Variant) -> Shape:
        """That of a variant."""
        family = family_of(variant)
        said = {**(family.traits if family else {}), **variant.options}

        def extent(name: str, common: int) -> int:
            value = said.get(name)
            return value if type(value) is int and value > 0 else common

        two_cta, swap_ab = bool(said.get("two_cta")), bool(said.get("swap_ab"))
        along_m, along_n = (1, 2) if swap_ab else (2, 1)
        return cls(
            tile_m=-(-extent("tile_m", 128) // (along_m if two_cta else 1)),
            tile_n=-(-extent("tile_n", 128) // (along_n if two_cta else 1)),
            tile_k=extent("tile_k", DTYPES[variant.a].filling(128)),
            cluster_m=extent("cluster_m", 1),
            cluster_n=extent("cluster_n", 1),
            stages=extent("stages", 4),
            split_k=extent("split_k", 1),
            instruction_m=extent("instruction_m", 64),
            two_cta=two_cta,
            swap_ab=swap_ab,
        )
