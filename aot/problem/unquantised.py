"""Layers in fp8 of tokens that nobody has quantised: what a manifest asks for besides the products of quantised tokens.

Up to `FEW` tokens a GEMM's kernel quantises them as it loads them; more are quantised by a kernel of their own, which
that of decode steps may overlap with. Gates' GEMM may compute the activation after them, or what quantises behind it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from runtime.gemm.signature import Signature
from runtime.numbers.scaling import QUANTISING
from runtime.program.operation import OVERLAPS
from runtime.quantise import Signature as Quantise

from ..search.unserved import variants
from .manifest import Gemm, Use
from .ways import GATE, MOST_TOKENS

# By scaling: up to which one kernel is faster than two (docs/kernels/sm90_small_m.md). By channel of 16 it is, but not
# behind a norm that quantises, as qkv and gate_up are.
FEW = {"block": 16, "row_column": 8}
# As a recording names one that there are several of, too.
_DOWN, _GATES = (re.compile(rf"{name}(?:_proj)?(?:_n\d+_k\d+)?") for name in ("down", "gate_up"))
_NAME = 50  # letters of a layer's, so that a manifest takes what is added


def no_layer(targets: Iterable[str]) -> str:
    """Why nothing can be asked for of the layers of a model."""
    return (
        "has no layer in e4m3 scaled by blocks, or by tokens and channels, that kernels on "
        f"{', '.join(targets)} quantise tokens of; leave it out, or name another target"
    )


def with_few_in_blocks(gemms: Iterable[Gemm], targets: Sequence[str]) -> list[Gemm]:
    """GEMMs, and behind each in fp8 with scales of blocks that of few tokens, `few` added to its name, if one of
    `targets` has kernels for it: what an engine was seen to gain by (docs/vllm.md). Not behind those with an epilogue:
    servers' plugins add a bias afterwards."""
    found = list[Gemm]()
    for gemm in gemms:
        found.append(gemm)
        few = _few(gemm)
        s = gemm.signature
        if few is not None and (s.scaling, s.epilogue) == ("block", "none") and _served(few, targets):
            found += _of_tokens(gemm, "few", few, 1, FEW[s.scaling])
    return found


def of_unquantised(gemms: Iterable[Gemm], targets: Sequence[str], gated: bool = True) -> tuple[list[Gemm], list[Use]]:
    """GEMMs, and behind each in fp8 with scales of blocks, or of tokens and channels, that of few tokens, `few` added
    to its name, and that which overlaps with what quantises more, `behind` added; and what quantises these. If layers
    are `gated` by SwiGLU, or nobody knows, there are for `gate_up` all these and that of more tokens with it too,
    `swiglu` added, and for `down` what quantises what it gives. Each only if one of `targets` has kernels for it."""
    found, rows = list[Gemm](), dict[Quantise, Gemm]()
    for gemm in gemms:
        found.append(gemm)
        s, few = gemm.signature, _few(gemm)
        if few is None or not _served(few, targets):
            continue
        most = FEW[s.scaling]
        ways = [("few", few, 1, most)]  # servers take it up to the largest M of its tuning
        quantise = Quantise(s.d, s.a, s.k, s.scaling)
        if _served(quantise, targets):
            rows.setdefault(quantise, gemm)
            swiglu = dataclasses.replace(quantise, activation=GATE)
            if gated and _DOWN.fullmatch(gemm.name) and _served(swiglu, targets):
                rows.setdefault(swiglu, gemm)
            ways.append(("behind", dataclasses.replace(s, overlap=OVERLAPS[-1]), most + 1, MOST_TOKENS))
        found += [each for way in ways for each in _of_tokens(gemm, *way)]
        # Without what quantises more, servers leave the activation of few alone too.
        if gated and len(ways) > 1 and _between(gemm, most + 1, None) and _GATES.fullmatch(gemm.name):
            found += _with_gates(gemm, [*ways, ("", s, most + 1, max(gemm.tokens))], targets)
    uses = [Use(_name(gemm, of), of, _between(gemm, FEW[of.scaling] + 1, None)) for of, gemm in rows.items()]
    return found, [use for use in uses if use.tokens]


def _with_gates(gemm: Gemm, ways: Iterable[tuple[str, Signature, int, int]], targets: Sequence[str]) -> Iterator[Gemm]:
    """The same with SwiGLU, each for tokens from the least to the most."""
    for word, signature, least, most in ways:
        gated = dataclasses.replace(signature, epilogue=GATE)
        if signature.epilogue == "none" and _served(gated, targets):
            yield from _of_tokens(gemm, f"{word}.{GATE}".removeprefix("."), gated, least, most)


def _name(gemm: Gemm, of: Quantise) -> str:
    more = "" if of.activation == "none" else f"_{of.activation}"
    return f"{gemm.name[:_NAME]}{more}_quantise"


def _few(gemm: Gemm) -> Signature | None:
    """What takes tokens that nobody has quantised, of a layer that there is such a GEMM for."""
    s = gemm.signature
    if s.scaling not in QUANTISING or s.b_major != "k" or s.batch > 1:
        return None
    return dataclasses.replace(s, a=s.d, scaling=QUANTISING[s.scaling], overlap=OVERLAPS[-1])


def _served(signature: Signature | Quantise, targets: Sequence[str]) -> bool:
    return any(variants(target, signature) for target in targets)


def _of_tokens(gemm: Gemm, word: str, signature: Signature, least: int, most: int) -> list[Gemm]:
    """That of so many tokens, up to `most` if `gemm` has more; nothing if it has none of these."""
    tokens = _between(gemm, least, most)
    if max(gemm.tokens) > most and tokens:
        tokens = tuple(sorted({*tokens, most}))
    traffic = tuple((m, seen) for m, seen in gemm.traffic if least <= m <= most)
    of = dataclasses.replace(
        gemm, name=f"{gemm.name[:_NAME]}.{word}", signature=signature, tokens=tokens, traffic=traffic
    )
    return [of] if tokens else []


def _between(gemm: Gemm, least: int, most: int | None) -> tuple[int, ...]:
    return tuple(m for m in gemm.tokens if least <= m and (most is None or m <= most))
