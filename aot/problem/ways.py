"""The ways to compute a decoder's layer: which of a model's GEMMs are its parts, and the signatures that compute each.

A part runs serially or overlapping, and that of gate and up without the activation after it or with it. Knows names,
and neither kernels nor times.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from runtime.gemm.signature import Signature
from runtime.numbers.epilogue import Epilogue
from runtime.program.operation import OVERLAPS

from .manifest import Gemm

HALVES = ("qkv", "o"), ("gate_up", "down")
PARTS = tuple(itertools.chain.from_iterable(HALVES))
GATE = "swiglu"  # what servers' plugins fuse
SERIAL, EARLY = OVERLAPS[0], OVERLAPS[-1]
NO_PART = "has no qkv, o, gate_up or down in 16 bits, which `aot tune --in-graph` chooses for; leave it out"
MOST_TOKENS = 512  # of a decode step: the largest batch that servers capture graphs for
_TYPES = ("bf16", "f16")


def part_of(name: str, of: Signature) -> str | None:
    """Which part of a layer a GEMM is, by its name in a manifest; None where it is none, or not in 16 bits with no more
    than a bias or the activation."""
    part, parts = name.removesuffix("_proj"), of.parts
    usual = of.scaling == "none" and of.b_major == "k" and of.batch == 1 and of.a == of.b == of.d and of.a in _TYPES
    plain = parts.activation_word in ("none", GATE) and not (parts.residual or parts.scale)
    return part if part in PARTS and usual and plain else None


def ways(part: str, of: Signature, *, gated: bool = True, residual: bool = False) -> Iterator[tuple[str, Signature]]:
    """The signatures that compute a part, each with a word for what it does besides the product, empty for none: the
    serial ones, and those of the product alone, first. `gated` and `residual` are whether the activation and the
    residual may be computed with it."""
    more = {"": Epilogue(bias=of.parts.bias)}
    if gated and part == "gate_up" and not of.parts.bias:
        more[GATE] = Epilogue(GATE)
    if residual and part in ("o", "down"):
        more["residual"] = Epilogue(bias=of.parts.bias, residual=True)
    for word, epilogue in more.items():
        for overlap in (SERIAL, EARLY):
            said = ".".join(filter(None, (word, "" if overlap == SERIAL else overlap)))
            yield said, dataclasses.replace(of, epilogue=epilogue.word(), overlap=overlap)


def all_ways(gemms: Iterable[Gemm], gated: bool) -> Iterator[Gemm]:
    """GEMMs of a model, and behind each that is part of a layer its other ways, named after it. Those that overlap have
    the M of decode steps alone."""
    for gemm in gemms:
        part = part_of(gemm.name, gemm.signature)
        if part is None:
            yield gemm
            continue
        few = tuple(m for m in gemm.tokens if m <= MOST_TOKENS) or gemm.tokens[:1]
        for word, way in ways(part, gemm.signature, gated=gated):
            name = f"{gemm.name}.{word}" if word else gemm.name
            tokens = few if way.overlap == EARLY else gemm.tokens
            yield dataclasses.replace(gemm, name=name, signature=way, tokens=tokens)
