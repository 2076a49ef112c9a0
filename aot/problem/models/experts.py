"""What a mixture's experts ask of operations: those of docs/moe.md, on one rank.

As vLLM spreads experts: over `ep` ranks each has its part of them whole; without that each of `tp` ranks has a part of
every expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.errors import RecordError
from runtime.gemm.signature import Signature
from runtime.grouped_gemm import OVERLAP_OF_EXPERTS, SCALINGS_OF_GROUPS
from runtime.numbers.epilogue import Epilogue
from runtime.numbers.quantised import MOST_ROWS_OF_A_GROUP
from runtime.numbers.scaling import SCALE_BLOCK, SCALINGS
from runtime.numbers.weights import BLOCK_ROWS, FORMATS, WeightFormat

from ..manifest import Use, signature_problem, use
from .layers import Experts, Linear

_PADDED = "mxfp4_weight"


@dataclass(frozen=True)
class Ranks:
    """How a model is spread: over `tp` tensor-parallel ranks, and its experts over `ep` ranks, where that is above 1.
    It is a multiple of `tp` then: there are ep / tp groups of tensor-parallel ranks, whose tokens meet at the experts.
    """

    tp: int
    ep: int = 1

    def sequence_parallel(self, layer: Linear) -> bool:
        """Whether each tensor-parallel rank has all of a layer, for its part of the tokens, as in vLLM
        (`use_sequence_parallel_moe`)."""
        return layer.sequence_parallel and 1 < self.tp < self.ep

    def tokens(self, layer: Linear, tokens: Sequence[int]) -> tuple[int, ...]:
        """How many tokens a layer gets, in ascending order, for so many of the tensor-parallel group."""
        shares = self.tp if self.sequence_parallel(layer) else 1
        return tuple(sorted({-(-m // shares) for m in tokens}))

    def local(self, experts: Experts) -> int:
        """How many experts are on one rank."""
        return experts.count // self.ep

    def inner(self, experts: Experts, scaling: str) -> int:
        """How wide an expert is there. Parts of experts in MXFP4 are padded, as vLLM does
        (`mxfp4_round_up_hidden_size_and_intermediate_size`), to what kernels take."""
        if self.ep > 1 or self.tp == 1:
            return experts.inner
        part, multiple = experts.inner // self.tp, FORMATS[_PADDED].multiple
        return -(-part // multiple) * multiple if scaling == _PADDED else part


@dataclass(frozen=True)
class Arithmetic:
    """What grouped GEMMs compute besides their shapes: element types of A, B and D, scaling, and the gate's name."""

    dtypes: tuple[str, str, str]
    scaling: str
    gate: str


def obstacle(experts: Experts, ranks: Ranks, of: Arithmetic) -> str | None:
    """Why the experts cannot be spread so; None when they can."""
    count, inner = experts.fields
    if ranks.ep > 1 and ranks.ep % ranks.tp:
        return f"ep {ranks.ep} is no multiple of tp {ranks.tp}: experts are spread over all tensor-parallel ranks"
    if experts.count % ranks.ep:
        return f"field {count!r}: {experts.count} does not divide by ep {ranks.ep}"
    if ranks.ep == 1 and experts.inner % ranks.tp:
        return f"field {inner!r}: {experts.inner} does not divide by tp {ranks.tp}"
    if of.scaling not in SCALINGS_OF_GROUPS:
        known = ", ".join(SCALINGS_OF_GROUPS)
        return f"experts have no scaling {of.scaling}; known: {known}; --no-experts leaves experts out"
    here = ranks.inner(experts, of.scaling)
    if of.scaling == "block" and here != experts.inner and here % SCALE_BLOCK:
        return f"field {inner!r}: {experts.inner} at tp {ranks.tp} is {here}, and scales are of blocks of {SCALE_BLOCK}"
    for name, epilogue, n, k in _products(experts, here, of):
        if of.scaling in FORMATS and (unprepared := _unprepared(n, k, epilogue, FORMATS[of.scaling])):
            return f"{name} at tp {ranks.tp}: {unprepared}"
        if problem := signature_problem(Signature(*of.dtypes, "f32", epilogue, n, k, scaling=of.scaling)):
            return f"{name} at tp {ranks.tp}: {problem[0]} {problem[1]}"
    return None


def operations(experts: Experts, ranks: Ranks, of: Arithmetic, tokens: Sequence[int]) -> tuple[Use, ...]:
    """Permute, gate and up, down, combine, for M `tokens` of each rank; of blocks, at few tokens, also gate and up that
    quantise, and with scales what quantises between these two. Where router weights are on the input, combine is
    without them, and there is permute with them, as `runtime.torch.moe` has it, and without, as servers that multiply
    tokens before. Those of one operation follow each other, as manifests have them. `obstacle` has nothing against
    them.

    Raises:
        RecordError: the tokens make more rows than manifests hold, or the experts do not go together.
    """
    a, b, d = of.dtypes
    types = {"a": a, "b": b, "d": d, "scaling": of.scaling, "overlap": OVERLAP_OF_EXPERTS}
    top_k, hidden, local = experts.top_k, experts.hidden, ranks.local(experts)
    spread = {"local": local} if ranks.ep > 1 else {}
    short = {"count": experts.count, "top_k": top_k, **spread}
    here = [m * max(ranks.ep // ranks.tp, 1) for m in tokens]
    permute = {"x": d, "experts": local, "top_k": top_k, "k": hidden}
    if spread:
        permute["global_experts"] = experts.count
    products = [
        (name, {**types, "n": n, "k": k, "epilogue": epilogue})
        for name, epilogue, n, k in _products(experts, ranks.inner(experts, of.scaling), of)
    ]
    more: list[Use] = []
    try:
        if SCALINGS[of.scaling].operands == "ab":  # rows have scales too
            permute["scaling"] = of.scaling
            fields = {"x": d, "y": a, "k": ranks.inner(experts, of.scaling), "scaling": of.scaling}
            more.append(use("experts_quantise", "quantise", fields, here, short))
        few = [m for m in here if m * top_k <= MOST_ROWS_OF_A_GROUP * experts.count]
        if of.scaling == "block" and few and ranks.inner(experts, of.scaling) % SCALE_BLOCK == 0:
            name, fields = products[0]
            more.insert(0, use(f"{name}_quantised", "grouped_gemm", {**fields, "d": a}, few, short))
        first, second = (use(name, "grouped_gemm", fields, here, short) for name, fields in products)
        combine = {"rows": d, "y": d, "top_k": top_k, "n": hidden}
        permutes = {"experts_permute": permute}
        if experts.on_input:
            combine["weights"] = "none"
            permutes["experts_permute_weighted"] = {**permute, "weights": "f32"}
        return (
            *(use(name, "moe_permute", fields, here, None) for name, fields in permutes.items()),
            first,
            second,
            *more,
            use("experts_combine", "moe_combine", combine, here, None),
        )
    except RecordError as error:
        raise RecordError(f"experts: {error}") from None


def notes(experts: Experts, ranks: Ranks, of: Arithmetic) -> list[str]:
    """What a caller has to know to use them so, in sentences."""
    found = [experts.note] if experts.note else []
    if of.scaling in FORMATS:
        found = ["weights of experts are what runtime.torch.prepare_weight makes of published blocks and scales"]
    here, part = ranks.inner(experts, of.scaling), experts.inner // (1 if ranks.ep > 1 else ranks.tp)
    if here != part:
        found.append(f"experts of {part} columns on a rank are padded to {here} with zeros, as vLLM does")
    if experts.bias and part != experts.inner:
        found.append("on all ranks but one the bias of experts_down is zeros")
    return found


def _unprepared(n: int, k: int, epilogue: str, form: WeightFormat) -> str:
    """Why weights of these extents cannot be prepared; empty where they can."""
    parts = Epilogue.of(epilogue)
    rows = 2 * BLOCK_ROWS if parts.gated and not parts.interleaved else BLOCK_ROWS
    for field, extent, multiple in (("n", n, rows), ("k", k, form.multiple)):
        if extent % multiple:
            return f"{field} must be a multiple of {multiple} for weights of {form.word}, found {extent}"
    return ""


def _products(experts: Experts, inner: int, of: Arithmetic) -> tuple[tuple[str, str, int, int], ...]:
    """(name, epilogue, n, k) of both grouped GEMMs, of experts as wide as `inner`."""
    gate, down = Epilogue(of.gate, bias=experts.bias), Epilogue(bias=experts.bias)
    return (
        ("experts_gate_up", gate.word(), 2 * inner, experts.hidden),
        ("experts_down", down.word(), experts.hidden, inner),
    )
