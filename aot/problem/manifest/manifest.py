"""What a manifest holds: the problems of one model, and the targets to build them for. Plain data, checked by whoever
makes it: a reader of files, of a model's config.json, or of what a server recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from runtime.errors import AotError, RecordError
from runtime.gemm.signature import Signature
from runtime.program.operation import operation

from ...search.operation import building

FORMAT = 1
PER = ("layer", "model")

# Far above any real model; they bound the work a hostile or mistaken file can cause.
MAX_EXTENT = 2**24
MAX_TOKENS = 2**20
MAX_COUNT = 10_000
MAX_PASSES = 10**15

# What a gemm has that says nothing.
USUAL = {"accumulator": "f32", "epilogue": "none", "scaling": "none", "b_major": "k", "overlap": "serial", "batch": 1}


Traffic = tuple[tuple[int, int], ...]


class ManifestError(AotError):
    """A manifest, or a model's config.json, is missing, malformed, or asks for what is not supported."""


@dataclass(frozen=True)
class Gemm:
    """One GEMM of a model: `count` times per layer or per model, tuned for the M values in `tokens`.

    `traffic` has (M, forward passes of a server in which it had that M), by M; none where nobody counted.
    `place` is the file and line that it was read from and its name, for messages; none where it comes from no file.
    """

    name: str
    signature: Signature
    count: int
    tokens: tuple[int, ...]
    per: str = "layer"
    place: str = dataclasses.field(default="", compare=False)
    traffic: Traffic = ()

    def calls(self, layers: int) -> int:
        """How many times one forward pass of a model of so many layers runs it."""
        return self.count * (layers if self.per == "layer" else 1)


class Short(NamedTuple):
    """Integers of an operation's shorthand, by name, and the tokens of the model from which M follows."""

    values: tuple[tuple[str, int], ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Use:
    """What a model asks of an operation that has no section of its own: a signature of it, for the M values in
    `tokens`; `place` as of `Gemm`. `short` is what the file says in place of some of that, by which it is written."""

    name: str
    signature: Any
    tokens: tuple[int, ...]
    place: str = dataclasses.field(default="", compare=False)
    short: Short | None = None

    def calls(self, layers: int) -> None:
        """Nothing, as it does not say how often it runs."""


@dataclass(frozen=True)
class Problem:
    """A distinct signature, the names of the gemms or uses that have it, and every M that any of them asks for."""

    signature: Any  # of any operation
    names: tuple[str, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """What to build: the GEMMs of one model and the targets to build them for.

    `tokens` and `traffic` are what a gemm gets that does not bring its own; those of `Gemm` are always filled in.
    """

    model: str
    source: str
    tokens: tuple[int, ...]
    targets: tuple[str, ...]
    gemms: tuple[Gemm, ...]
    layers: int = 1
    uses: tuple[Use, ...] = ()
    traffic: Traffic = ()

    def items(self) -> tuple[Gemm | Use, ...]:
        """All that it asks for: its gemms, then what it asks of other operations."""
        return (*self.gemms, *self.uses)

    def problems(self) -> tuple[Problem, ...]:
        """The distinct signatures, in the order in which they first appear among `items`."""
        merged: dict[Any, list[Gemm | Use]] = {}
        for item in self.items():
            merged.setdefault(item.signature, []).append(item)
        return tuple(
            Problem(signature, tuple(of.name for of in items), tuple(sorted({m for of in items for m in of.tokens})))
            for signature, items in merged.items()
        )

    def calls(self, item: Gemm | Use) -> int | None:
        """How many times one forward pass of the whole model runs it; None where the file does not say."""
        return item.calls(self.layers)


def use(name: str, of: str, fields: Mapping[str, Any], tokens: Iterable[int], short: Mapping[str, int] | None) -> Use:
    """What a model asks of the operation `of`: its signature by `fields`, without those that are as usual, or that the
    integers of the operation's shorthand, `short`, stand for. `tokens` are M values, with `short` those of the model.

    Raises:
        RecordError: no signature has these fields, the integers do not go together, or M is more than manifests hold.
    """
    every: dict[str, Any] = {**operation(of).usual, **fields}
    asked = tuple(tokens)
    shorthand = building(of).shorthand
    if short is None or shorthand is None:
        return Use(name, operation(of).read(every), asked)
    every |= shorthand.fields(short)
    ms = sorted({shorthand.m(short, count, every) for count in asked})
    if ms[-1] > MAX_TOKENS:
        raise RecordError(f"{asked[-1]} tokens make M {ms[-1]}, which is at most {MAX_TOKENS}; give fewer tokens")
    return Use(name, operation(of).read(every), tuple(ms), short=Short(tuple(short.items()), asked))
