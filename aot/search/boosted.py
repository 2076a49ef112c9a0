"""What measured times say of estimates that no formula of theirs does: boosted regression trees.

A tree asks of a variant's choices and of the problem (rows, waves of tiles, how full these are) and adds to the
logarithm of measured over estimated time, as in Friedman, "Greedy function approximation: a gradient boosting machine"
(2001). `scripts/fit_trees.py` fits them with LightGBM to kept times and writes the file that is read here. Pure
arithmetic over numbers or symbols, as estimates are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from runtime.numbers.dtypes import DTYPES
from runtime.numbers.epilogue import Epilogue
from runtime.numbers.scaling import SCALINGS

from .costs import Extents, Machine, Number, Symbol, ceil, exp, select
from .variants import Variant

FILE = Path(__file__).with_name("boosted.json")
# Of a variant; the rest depends on the problem too.
CHOICES = (
    "few_tokens",
    "operator_api",
    "tile_m",
    "tile_n",
    "cluster_m",
    "cluster_n",
    "split_k",
    "ctas_per_sm",
    "stream_k",
    "pingpong",
    "nonpersistent",
    "swap",
    "quads",
    "bits",
    "gated",
    "scale_k",
)
FEATURES = (*CHOICES, "m", "n", "k", "waves", "full_waves", "full_m", "full_n")
_FEW_TOKENS, _OPERATOR_API = ("own", "sm90_small_m"), ("cutlass_operators", "sm90_static_persistent")
FAMILIES = frozenset({_FEW_TOKENS, ("own", "sm90_persistent"), _OPERATOR_API})

Node: TypeAlias = Any  # what a leaf adds, or (a feature's place, the largest value on the first side, and both sides)


class Trees(NamedTuple):
    """Trees over `FEATURES`, in the order in which they were fitted, and the share of all N x K that they have not
    seen: one in `one_in`."""

    trees: tuple[Node, ...]
    one_in: int

    def unseen(self, n: int, k: int) -> bool:
        """Whether no time of such a weight was fitted to, so that times of it can tell how good the trees are."""
        return is_unseen(n, k, self.one_in)


def is_unseen(n: int, k: int, one_in: int) -> bool:
    """Whether N x K is of those that are left out, by a hash (Knuth's, of both) that spreads them."""
    return ((n * 2654435761 ^ k * 2246822519) >> 7) % one_in == 0


@cache
def trees() -> Trees:
    """The trees that come with the package."""
    found = json.loads(FILE.read_bytes())
    if tuple(found["features"]) != FEATURES:
        raise ValueError(f"{FILE.name} has the features {found['features']}; run scripts/fit_trees.py again")
    return Trees(tuple(found["trees"]), found["one_in"])


def is_known(variant: Variant) -> bool:
    """Whether times of such kernels were fitted to."""
    alike = DTYPES[variant.a].bits == DTYPES[variant.b].bits and variant.b_major == "k" and not variant.batched
    return alike and (variant.provider, variant.family) in FAMILIES


def corrected(us: Any, variant: Variant, of: Extents, m: Number, machine: Machine, by: Sequence[Node]) -> Any:
    """An estimate of a variant's microseconds for `m` rows, corrected by trees; as it is where none was fitted to such
    kernels."""
    if not is_known(variant):
        return us
    asked = features(variant, of, m, machine)
    return us * exp(sum(_leaf(tree, asked) for tree in by))


def _leaf(node: Node, asked: Sequence[Number]) -> Any:
    """What a tree adds. Of a number that is known one side is followed; of a symbol both are kept."""
    while isinstance(node, list):
        place, most, low, high = node
        x = asked[place]
        if isinstance(x, Symbol):
            return select(x, most, _leaf(low, asked), _leaf(high, asked))
        node = low if x <= most else high
    return node


@cache
def choices(variant: Variant) -> tuple[float, ...]:
    """The values of `CHOICES`."""
    options, family = variant.options, (variant.provider, variant.family)
    return (
        float(family == _FEW_TOKENS),
        float(family == _OPERATOR_API),
        *(float(options.get(name, 1)) for name in CHOICES[2:8]),
        float(bool(options.get("stream_k"))),
        float(options.get("schedule") == "pingpong"),
        float(bool(options.get("nonpersistent"))),
        float(bool(options.get("swap"))),
        float(options.get("order") == "quads"),
        float(DTYPES[variant.a].bits),
        float(Epilogue.of(variant.epilogue).gated),
        float(SCALINGS[variant.scaling].k or 0),
    )


def features(variant: Variant, of: Extents, m: Number, machine: Machine) -> tuple[Any, ...]:
    """The values of `FEATURES` at a problem.

    `waves` are of tiles and slices of K over the CTAs that all SMs hold at once; `full_waves` is the share of whole
    waves that they come to, `full_m` and `full_n` that of whole tiles.
    """
    known = choices(variant)
    tile_m, tile_n, _, _, split_k, per_sm = known[2:8]
    tiles_m, tiles_n = ceil(m / tile_m), ceil(of.n / tile_n)
    waves = of.batch * tiles_m * tiles_n * split_k / (machine.multiprocessors * per_sm)
    full_m, full_n = m / (tiles_m * tile_m), of.n / (tiles_n * tile_n)
    return *known, m, of.n, of.k, waves, waves / ceil(waves), full_m, full_n
