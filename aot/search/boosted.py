"""Corrections of estimated times by boosted regression trees, which were fitted to measured times.

A tree asks of a variant's choices and of the problem (rows, waves of tiles, how full these are) and adds to the
logarithm of measured over estimated time, as in Friedman, "Greedy function approximation: a gradient boosting machine"
(2001). `scripts/fit_trees.py` fits them with LightGBM to kept times and writes the file that is read here. Native code
adds them up, where it was built: in Python that takes 30 times as long, and gives the same bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from runtime import native
from runtime.numbers.dtypes import DTYPES
from runtime.numbers.epilogue import Epilogue
from runtime.numbers.scaling import SCALINGS

from .costs import Extents, Machine
from .h200 import H200
from .variants import Variant

FILE = Path(__file__).with_name("boosted.json")
ONE_IN = 5  # N x K is held out
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


def is_unseen(n: int, k: int) -> bool:
    """Whether no time of a weight N x K was fitted to, so that times of it can tell how good the trees are: of one in
    `ONE_IN`, by a hash that spreads them."""
    return ((n * 2654435761 ^ k * 2246822519) >> 7) % ONE_IN == 0


@cache
def trees() -> tuple[Node, ...]:
    """The trees that come with the package, in the order in which they were fitted."""
    found = json.loads(FILE.read_bytes())
    if (tuple(found["features"]), found["one_in"]) != (FEATURES, ONE_IN):
        raise ValueError(f"{FILE.name} was fitted to other features or weights; run scripts/fit_trees.py again")
    return tuple(found["trees"])


@cache
def is_known(variant: Variant) -> bool:
    """Whether times of such kernels were fitted to: K-major, not batched, and e4m3 with scales and without gates."""
    if (variant.provider, variant.family) not in FAMILIES or variant.b_major != "k" or variant.batched:
        return False
    bits = {DTYPES[variant.a].bits, DTYPES[variant.b].bits}
    return bits == {16} or (bits == {8} and variant.scaling != "none" and not Epilogue.of(variant.epilogue).gated)


def correction(variant: Variant, of: Extents, machine: Machine = H200) -> Callable[[int], float]:
    """What gives, for `m` rows, what an estimate of a variant's microseconds is to be multiplied by: 1 where `is_known`
    does not hold for the variant."""
    if not is_known(variant):
        return lambda m: 1.0
    known, of_rows = _features(variant, of, machine)
    if native.trees is None:
        return lambda m: math.exp(added(_filled(known, of_rows(m)), trees()))
    add = _evaluator().given(known).added
    return lambda m: math.exp(add(of_rows(m)))


def added(asked: Sequence[float], by: Sequence[Node]) -> float:
    """What trees add to the logarithm of an estimate, where `FEATURES` have the values `asked`; in Python."""
    total = 0.0
    for tree in by:  # and not `sum`, which rounds as native code does on some Pythons alone
        total += _leaf(tree, asked)
    return total


@cache
def _evaluator() -> Any:
    """The trees as native code adds them up: `added(asked)` does what `added(asked, trees())` does, and `given(known)`
    has them over the features that are None there."""
    nodes: list[Any] = []
    leaves: list[float] = []

    def side(node: Node) -> int:
        """The place of a node and all under it, or -1 less that of a leaf."""
        if not isinstance(node, list):
            leaves.append(node)
            return -len(leaves)
        place, most, low, high = node
        here = len(nodes)
        nodes.append(None)
        nodes[here] = place, most, side(low), side(high)
        return here

    roots = [side(tree) for tree in trees()]
    return native.trees(len(FEATURES), nodes, leaves, roots)


def _leaf(node: Node, asked: Sequence[float]) -> float:
    while isinstance(node, list):
        place, most, low, high = node
        node = low if asked[place] <= most else high
    return float(node)


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


def features(variant: Variant, of: Extents, m: int, machine: Machine) -> tuple[float, ...]:
    """The values of `FEATURES` at a problem."""
    known, of_rows = _features(variant, of, machine)
    return _filled(known, of_rows(m))


def _filled(known: Sequence[float | None], rest: Iterable[float]) -> tuple[float, ...]:
    """All values, of which the unknown ones are `rest`, in order."""
    values = iter(rest)
    return tuple([next(values) if x is None else x for x in known])


def _features(
    variant: Variant, of: Extents, machine: Machine
) -> tuple[tuple[float | None, ...], Callable[[int], tuple[float, ...]]]:
    """The values of `FEATURES` for any number of rows, None where they depend on it; and what gives the others.

    `waves` are of tiles and slices of K over the CTAs that all SMs hold at once; `full_waves` is the share of whole
    waves that they come to, `full_m` and `full_n` that of whole tiles.
    """
    known = choices(variant)
    tile_m, tile_n, _, _, split_k, per_sm = known[2:8]
    tiles_n, at_once = -(-of.n // tile_n), machine.multiprocessors * per_sm

    def of_rows(m: int) -> tuple[float, ...]:
        tiles_m = -(-m // tile_m)
        waves = tiles_m * tiles_n * split_k / at_once
        return m, waves, waves / math.ceil(waves), m / (tiles_m * tile_m)

    return (*known, None, of.n, of.k, None, None, None, of.n / (tiles_n * tile_n)), of_rows
