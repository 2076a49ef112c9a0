"""Which of a model's layers an archive computes, decided once for each when its weights were loaded.

Knows layers of vLLM and SGLang by the attributes that both give them (`weight`, `bias`), and no module of theirs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import AotError, ArgumentError
from ..gemm.signature import Signature
from ..gemm.universal import ExtendedEntry
from ..numbers.epilogue import Epilogue
from ..numbers.scaling import QUANTISING
from ..program.operation import OVERLAPS
from ..program.tensor import dtype_name
from ..quantise import Signature as Quantise
from ..serve.library import Library
from ..tables.table import Entry
from ..torch.layers import choose
from ..torch.operator import ALIGNMENT_BYTES
from .activations import EPILOGUE
from .quantising import Unquantised

FP8, INT4, NORM, ACTIVATION = "fp8 layer", "int4 layer", "norm", "quantising activation"


class Besides(NamedTuple):
    """The key of a signature that is called for `least` tokens to `most`, None for any number."""

    key: str
    least: int
    most: int | None


@dataclass(frozen=True)
class Decision:
    """What becomes of one layer.

    `plain` and `biased` are the keys of the signatures that serve it where the server calls it without a bias, and with
    one; empty where the server computes that. `fused` is the one that computes the activation after it too, where there
    is one, and then the only one that is called but at the M in `apart`, where `plain` is, and the server's activation
    after it. `asked` is the one that the server is expected to call, and `reason` says why the archive does not serve
    it. `kind` is "linear layer", "head", "embedding", which is a head only in models that tie it, "fp8 layer", "int4
    layer", "quantising activation", or "norm", whose `plain` is with a residual, and `biased` without. `binding` says
    that the server cannot compute the layer any more. `besides` serves some numbers of tokens, of an fp8 layer or a
    norm.
    """

    kind: str
    plain: str = ""
    biased: str = ""
    with_bias: bool = False
    reason: str = ""
    fused: str = ""
    binding: bool = False
    apart: tuple[tuple[int, int | None], ...] = ()
    besides: tuple[Besides, ...] = ()

    @property
    def asked(self) -> str:
        """The signature that the server is expected to call, empty if it computes that itself."""
        return self.fused or (self.biased if self.with_bias else self.plain)

    @property
    def keys(self) -> set[str]:
        """The signatures that may be called."""
        if self.fused:
            return {self.fused, self.plain} if self.apart else {self.fused}
        return {key for key in (self.plain, self.biased) if key}

    def keys_by_rows(self) -> dict[int, set[str]]:
        """The same, by how many rows their kernels see for each token."""
        return {1: self.keys}


def decide(lib: Library, layer: Any) -> Decision:
    """What `lib` has for the weight of this layer, and for its bias; only kernels that were found right on a GPU."""
    kind, with_bias = kind_of(layer), is_called_with_bias(layer)
    if problem := weight_problem(lib, getattr(layer, "weight", None)):
        return Decision(kind, with_bias=with_bias, reason=problem)
    keys, reasons = ["", ""], ["", ""]
    for bias in (False, True):
        reasons[bias] = _bias_problem(layer) if bias else ""
        if reasons[bias]:
            continue
        try:
            signature, reasons[bias] = _choose(lib, signature_of(layer.weight, bias))
        except AotError as error:  # nothing for this GPU, or a table that makes no sense
            reasons[bias] = str(error).partition("\n")[0]
            continue
        keys[bias] = "" if signature is None else signature.key()
    return Decision(kind, keys[False], keys[True], with_bias, reasons[with_bias])


def fused(lib: Library, layer: Any, decision: Decision, activation: str) -> Decision:
    """What becomes of a layer whose weight is in place and whose `activation` may be computed with it: the same where
    the archive has no such signature, or has one that was predicted and another that was tuned for the product alone.
    """
    if decision.with_bias or weight_problem(lib, layer.weight):
        return decision
    try:
        found, _ = _choose(lib, dataclasses.replace(signature_of(layer.weight, False), epilogue=activation))
    except AotError:  # no such signature, such as of an odd N
        return decision
    if found is None:
        return decision
    entry, plain = lib.entry(found), Signature.of_key(decision.plain)
    if plain is not None and entry.state != "tuned" and lib.is_tuned(plain):
        return decision
    return dataclasses.replace(decision, fused=found.key(), apart=entry.apart if decision.plain else ())


def _choose(lib: Library, wanted: Signature) -> tuple[Signature | None, str]:
    """`choose` for a signature that promises no overlap, or for the same with all overlap where that was tuned: no
    kernel of a model writes its weights, and `aot tune --in-graph` says of such an entry where not to overlap."""
    most = dataclasses.replace(wanted, overlap=OVERLAPS[-1])
    return (most, "") if lib.is_tuned(most) else choose(lib, wanted)


def unquantised(
    lib: Library, signature: Signature, gates: bool = False
) -> tuple[Unquantised | None, tuple[Besides, ...]]:
    """How `lib` computes what `signature` does of tokens in D's type that nobody has quantised, and by which signatures
    besides, those with SwiGLU too if `gates` may come with it; None where nothing of that was tuned."""
    if signature.scaling not in QUANTISING:
        return None, ()
    early = dataclasses.replace(signature, overlap=OVERLAPS[-1])
    few = of_few(signature, OVERLAPS[-1])
    if not _tuned_to(lib, few):
        few = of_few(signature, OVERLAPS[0])
    rows = Quantise(signature.d, signature.a, signature.k, signature.scaling)
    most, behind, quantises = _tuned_to(lib, few), _tuned_to(lib, early), is_tuned(lib, rows)
    if not (most or quantises):
        return None, ()
    besides = [Besides(few.key(), 1, most)] if most else []
    besides += [Besides(rows.key(), most + 1, None)] if quantises else []
    besides += [Besides(early.key(), most + 1, behind)] if behind > most else []
    if gates:
        of_few_gates, of_early, of_more = (with_gates(lib, of) for of in (few, early, signature))
        if most and of_few_gates:
            besides.append(of_few_gates._replace(most=min(most, of_few_gates.most or 0)))
        if is_tuned(lib, dataclasses.replace(rows, k=signature.n // 2)):  # what quantises what they give
            behind_gates = (of_early and of_early.most) or 0
            besides += [Besides(of_early.key, most + 1, behind_gates)] if of_early and behind_gates > most else []
            besides += [Besides(of_more.key, max(most, behind_gates) + 1, None)] if of_more else []
    return Unquantised(signature.scaling, most, few.overlap, quantises, behind), tuple(besides)


def of_few(signature: Signature, overlap: str) -> Signature:
    """That of tokens in D's type which `signature`, of a QUANTISING scaling, has quantised."""
    return dataclasses.replace(signature, a=signature.d, scaling=QUANTISING[signature.scaling], overlap=overlap)


def with_gates(lib: Library, product: Signature) -> Besides | None:
    """What computes SwiGLU after gates too, up to the largest M that it was tuned for; None where nothing was."""
    try:
        gated = dataclasses.replace(product, epilogue=EPILOGUE)
    except AotError:  # of an odd N
        return None
    most = _tuned_to(lib, gated)
    return Besides(gated.key(), 1, most) if most else None


def _tuned_to(lib: Library, signature: Signature) -> int:
    """The largest M that was measured for just this signature, 0 where none was."""
    try:
        entry = lib.entry(signature)
    except AotError:
        return 0
    tuned = entry.tuned if isinstance(entry, ExtendedEntry) else entry
    if not isinstance(tuned, Entry) or tuned.state != "tuned" or tuned.signature != signature:
        return 0
    return tuned.tuned_to or 0


def is_tuned(lib: Library, signature: Any) -> bool:
    """Whether an archive, which may have no table of that operation, was tuned for a signature."""
    try:
        return lib.is_tuned(signature)
    except AotError:  # an element type that has none, too
        return False


def overlap_of(key: str) -> str:
    """The overlap that is promised where the signature with this key is called."""
    return next((word for word in OVERLAPS if key.endswith(f"_{word}")), OVERLAPS[0])


def called(decisions: Iterable[Decision]) -> list[Decision]:
    """Those of a model's layers that are called: where there is a head, no embedding is called as one."""
    decisions = list(decisions)
    if not any(each.kind == "head" for each in decisions):
        return decisions
    return [each for each in decisions if each.kind != "embedding"]


def summary(decisions: Iterable[Decision], server: str) -> str:
    """In one line, how many layers of each kind are served, and why `server` computes the others."""
    decisions = called(decisions)
    counts = Counter(each.kind for each in decisions)
    taken = Counter(each.kind for each in decisions if each.asked)
    words = [f"{taken[kind]} of {count} {kind}s" for kind, count in sorted(counts.items(), reverse=True)]
    if activations := sum(bool(each.fused) for each in decisions):
        words.append(f"{activations} activations")
    left = Counter(each.reason for each in decisions if not each.asked)
    line = "serves " + (" and ".join(words) or "nothing: no layer was loaded that it knows")
    if left:
        reasons = [f"{count} x {reason}" for reason, count in left.most_common(3)]
        more = [f"{len(left) - 3} more reasons"] if len(left) > 3 else []
        line += f"; {server} computes the rest: {'; '.join([*reasons, *more])}"
    return line


def signature_of(weight: Any, bias: bool) -> Signature:
    """That of x @ weight.T, weight (N, K), x and the result of its element type."""
    dtype = dtype_name(weight.dtype)
    n, k = weight.shape
    return Signature(dtype, dtype, dtype, "f32", Epilogue(bias=bias).word(), n, k)


def is_embedding(layer: Any) -> bool:
    """Whether a layer is an embedding or a head."""
    return kind_of(layer) != "linear layer"


def kind_of(layer: Any) -> str:
    """Of a layer in 16 bits, as `Decision` has it."""
    names = {base.__name__ for base in type(layer).__mro__}
    return "head" if "ParallelLMHead" in names else "embedding" if "VocabParallelEmbedding" in names else "linear layer"


def is_called_with_bias(layer: Any) -> bool:
    """As layers call `apply`: where the sum over ranks follows, the first rank alone adds the bias."""
    if getattr(layer, "bias", None) is None or getattr(layer, "skip_bias_add", False):
        return False
    return not (hasattr(layer, "input_is_parallel") and getattr(layer, "tp_rank", 0) > 0)


def weight_problem(lib: Library, weight: Any) -> str:
    """Why no kernel reads this weight (N, K), whatever its shape; empty if one may."""
    if weight is None or len(getattr(weight, "shape", ())) != 2:
        return "the weight is no matrix"
    if str(weight.device) != lib.device:
        return f"the weight is on {weight.device}, and the library serves {lib.device}"
    try:
        dtype_name(weight.dtype)
    except ArgumentError:
        return f"the weight has element type {weight.dtype}"
    if not weight.is_contiguous():
        return f"the weight has strides {tuple(weight.stride())}"
    if weight.data_ptr() % ALIGNMENT_BYTES or weight.shape[1] * weight.element_size() % ALIGNMENT_BYTES:
        return f"rows of the weight do not begin at multiples of {ALIGNMENT_BYTES} bytes"
    return ""


def vector_problem(lib: Library, vector: Any) -> str:
    """Why no kernel reads this vector, whatever its extent; empty if one may."""
    if str(vector.device) != lib.device:
        return f"the weight is on {vector.device}, and the library serves {lib.device}"
    if len(vector.shape) != 1 or not vector.is_contiguous() or vector.data_ptr() % ALIGNMENT_BYTES:
        return f"the weight is no vector that begins at a multiple of {ALIGNMENT_BYTES} bytes"
    return ""


def _bias_problem(layer: Any) -> str:
    bias, weight = getattr(layer, "bias", None), layer.weight
    if bias is None:
        return "it has no bias"
    if bias.dtype != weight.dtype or tuple(bias.shape) != (weight.shape[0],) or not bias.is_contiguous():
        return "the bias is no vector of N elements of the weight's type"
    return ""
