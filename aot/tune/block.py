"""A decoder's layer as one step of decoding runs it: which GEMMs of an archive it can be made of, and which won where.

A *part* of a layer is one of its four GEMMs, and a *way* is a signature that computes it: serial or overlapping, and of
gate_up also with the activation. A *choice* has a way for each part. Pure: who measures choices it does not know.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from runtime.gemm.signature import Signature

from ..pack.build_table import Model
from ..problem.ways import EARLY, HALVES, SERIAL, part_of, ways

Choice = tuple[Signature, ...]  # a way for each part of a block, in order


@dataclass(frozen=True)
class Heads:
    """The attention between qkv and o: of query heads and of pairs of key and value, each of `width` elements."""

    queries: int
    pairs: int
    width: int


@dataclass(frozen=True)
class Block:
    """A model's layer: by part, in the order of `PARTS`, the ways that an archive has. One half may be missing."""

    model: str
    ways: Mapping[str, tuple[Signature, ...]]

    @property
    def hidden(self) -> int:
        """The width of what goes from layer to layer."""
        return self.ways["o" if "o" in self.ways else "down"][0].n

    @property
    def heads(self) -> Heads | None:
        """The attention, None where there is none, or none whose heads follow from the extents of qkv and o."""
        if "o" not in self.ways:
            return None
        queries, of_pairs = self.ways["o"][0].k, self.ways["qkv"][0].n - self.ways["o"][0].k
        for width in (128, 64):
            if queries % width == 0 and of_pairs > 0 and of_pairs % (2 * width) == 0:
                heads = Heads(queries // width, of_pairs // (2 * width), width)
                return heads if heads.queries % heads.pairs == 0 else None
        return None

    @property
    def weight_bytes(self) -> int:
        """The weights of one layer."""
        return sum(2 * ways[0].n * ways[0].k for ways in self.ways.values())

    def choices(self) -> list[Choice]:
        """Every choice; the first is serial, each activation in a kernel of its own."""
        return list(itertools.product(*self.ways.values()))

    def uniform(self) -> dict[str, Choice]:
        """By name the choices that are the same for all parts, as far as the archive has them."""
        found: dict[str, Choice] = {}
        for name, overlap, gated in (
            ("all serial", SERIAL, False),
            ("all overlap", EARLY, False),
            ("all fused", SERIAL, True),
            ("all fused, overlap", EARLY, True),
        ):
            of_parts = [_way(ways, overlap, gated and part == "gate_up") for part, ways in self.ways.items()]
            if all(of_parts):
                found[name] = tuple(way for way in of_parts if way is not None)
        return found


class Seen(NamedTuple):
    """What was measured at M = `m`: microseconds of each choice."""

    m: int
    us: Mapping[Choice, float]

    def best(self, among: Iterable[Choice] | None = None) -> Choice:
        """The fastest choice, or that of some; the first of equal ones."""
        return min(self.us if among is None else among, key=self.us.__getitem__)


def blocks(models: Iterable[Model], tuned: Iterable[Signature], residual: bool = False) -> list[Block]:
    """The layers of models, as a build knows them, that `tuned` signatures leave a choice for; with ways to add the
    `residual` in o and down, if they are asked for, which no server's plugin does."""
    there, found = set(tuned), dict[tuple[Choice, ...], Block]()
    for model in models:
        named: dict[str, Signature] = {}
        for problem in model.problems:
            of = Signature.of_key(problem.signature)
            if of is not None and (part := part_of(problem.name, of)):
                named.setdefault(part, of)
        has = {p: tuple(way for _, way in ways(p, of, residual=residual) if way in there) for p, of in named.items()}
        found_ways = {part: has[part] for half in HALVES if all(map(has.get, half)) for part in half}
        block = Block(model.model or "", found_ways)
        if "o" in found_ways and block.heads is None:
            block = Block(block.model, {part: of for part, of in found_ways.items() if part not in HALVES[0]})
        if any(len(of) > 1 for of in block.ways.values()):
            found.setdefault(tuple(block.ways.values()), block)
    return list(found.values())


def _way(ways: Iterable[Signature], overlap: str, gated: bool) -> Signature | None:
    return next((way for way in ways if way.overlap == overlap and way.parts.gated == gated), None)


# --- which won where ---


def overlaps(block: Block, seen: Sequence[Seen], part: str, gated: bool) -> list[tuple[int, str]]:
    """By the last M of ranges, ascending, whether a part is best serial or overlapping, computed with the activation
    (`gated`) or without: as in the fastest choice that computes it so."""
    place = list(block.ways).index(part)
    found = []
    for at, last in zip(seen, _ends(seen), strict=True):
        among = [choice for choice in at.us if choice[place].parts.gated == gated]
        if among:
            found.append((last, at.best(among)[place].overlap))
    return found


def apart(block: Block, seen: Sequence[Seen]) -> list[tuple[int, int]]:
    """First and last M of where the fastest choice computes the activation in a kernel of its own."""
    place = list(block.ways).index("gate_up")
    found: list[tuple[int, int]] = []
    first = 1
    for at, last in zip(seen, _ends(seen), strict=True):
        if not at.best()[place].parts.gated:
            if found and found[-1][1] == first - 1:
                first = found.pop()[0]
            found.append((first, last))
        first = last + 1
    return found


def _ends(seen: Sequence[Seen]) -> Iterator[int]:
    """The last M that each point stands for: half way to the next in the logarithm, and the last point for itself."""
    for at, after in itertools.pairwise(seen):
        yield max(at.m, math.isqrt(at.m * after.m))
    yield seen[-1].m


def described(block: Block, at: Seen) -> dict[str, Any]:
    """What won at an M, as plain data: microseconds of a layer, each part's way in words, and the times of choices that
    are the same for all parts."""
    best = at.best()
    words = {
        part: way.overlap + (f" {way.parts.activation_word}" if way.parts.gated else "")
        for part, way in zip(block.ways, best, strict=True)
    }
    uniform = {name: round(at.us[choice], 3) for name, choice in block.uniform().items() if choice in at.us}
    return {"m": at.m, "us": round(at.us[best], 3), "parts": words, "uniform": uniform}
