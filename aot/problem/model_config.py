"""From a Hugging Face config.json to the manifest of a model's linear layers.

`aot.problem.model_families` reads the config; here its layers become GEMMs. A rank of a tensor-parallel group runs, as
vLLM and SGLang lay the weights out:

    qkv      n = (heads/tp + 2 * max(kv_heads/tp, 1)) * head_dim, k = hidden
    o        n = hidden, k = heads/tp * head_dim
    gate_up  n = 2 * intermediate/tp, k = hidden
    down     n = hidden, k = intermediate/tp
    router   n = experts, k = hidden
    lm_head  n = vocabulary/tp, k = hidden

KV heads are replicated where tp exceeds them, the router of a mixture of experts is on every rank, and the
vocabulary is padded to a multiple of 64. A layer with a bias adds it in its GEMM, whether or not anything else is
fused; but o and down, whose partial results an all-reduce adds up, do so on rank 0 only, so there are two GEMMs of
each. Fused, gate_up takes in the activation of the MLP, its weight being gate and up one after the other, and o and
down the residual, where nothing lies between: no all-reduce and no norm.

Expert GEMMs are grouped GEMMs and vision towers are other models: neither is covered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import TORCH_NAMES
from runtime.numbers.epilogue import Epilogue
from runtime.numbers.products import PRODUCTS, scalings_of, unsupported_scaling
from runtime.numbers.scaling import SCALINGS

from ..search.targets import TARGETS
from ..search.unserved import variants, why_none
from ..suggest import did_you_mean
from .manifest import MAX_TOKENS, Gemm, Manifest, signature_problem
from .model_families import Model, is_integer, read_model, short

# What `dtype` means for A, B and D. The router and lm_head stay in the type of D, as fp8 checkpoints keep them.
DTYPES = {a: next(product for product in PRODUCTS if product[0] == a) for a, *_ in PRODUCTS}

# The same, by the type that a config names.
PUBLISHED = {TORCH_NAMES[a]: a for a, (*_, d) in DTYPES.items() if a == d}

# What a gated MLP computes, by the `hidden_act` of its config.
GATES = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}

# Logits are wanted for the last token of each sequence of a batch, so lm_head sees no more rows than that.
MOST_LOGITS = 256

# vLLM's and SGLang's DEFAULT_VOCAB_PADDING_SIZE, in rows.
VOCABULARY_PADDING = 64

MAX_TENSOR_PARALLEL = 1024


@dataclass(frozen=True)
class Wanted:
    """How a model is to run, which its config does not say.

    `tokens` are the M values to tune for, in any order. `targets` are by default all that have kernels for every
    layer; `dtype`, a key of `DTYPES`, is by default the config's, or bf16 where it names none; `scaling`, that of
    layers in 8 bits, `default_scaling`. `fuse` takes elementwise work into the layers, as the module's docstring says.
    """

    tp: int
    tokens: Sequence[int]
    targets: Sequence[str] | None = None
    dtype: str | None = None
    scaling: str | None = None
    fuse: bool = False


def manifest_from_config(
    config: Mapping[str, Any],
    wanted: Wanted,
    *,
    source: str = "config.json",
    model: str | None = None,
    named_after: str | None = None,
    on_warning: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """The linear layers of one rank, as a manifest.

    `source` says where the config came from, a Hugging Face repository or a path; it opens every message and the
    manifest's own `source`, which also lists the values used. `model` is the manifest's name for it, by default
    `model_name` of `named_after`, or of `source`. `on_warning` is told what a reader of the manifest may not expect.

    Raises:
        ManifestError: the config is of an unknown kind, a field is missing or wrong, or `tp` does not divide it.
    """
    found = read_model(config, source)
    _check(found, wanted)
    dtype = _dtype(found, wanted.dtype, on_warning)
    scaling = default_scaling(dtype) if wanted.scaling is None else wanted.scaling
    if problem := unsupported_scaling(DTYPES[dtype][0], scaling):
        found.fail(f"scaling {problem}; leave it out")
    activation = _activation(found) if wanted.fuse else None
    fused = Epilogue(GATES[activation], residual=not found.post_norms) if activation else Epilogue()
    layers = _Layers(DTYPES[dtype], scaling, fused, found.biased)
    obstacle = _obstacle(found, wanted.tp, layers)
    if obstacle:
        most = min(found.fields["num_attention_heads"], MAX_TENSOR_PARALLEL)
        valid = [t for t in range(1, most + 1) if _obstacle(found, t, layers) is None]
        found.fail(f"{obstacle}; tp values that fit this model: {', '.join(map(str, valid)) or 'none'}")
    ms = tuple(sorted(set(wanted.tokens)))
    few = tuple(m for m in ms if m <= MOST_LOGITS) or ms[:1]
    gemms = [
        Gemm(name, s, count, few if name == "lm_head" else ms, per)
        for name, s, count, per in _gemms(found, wanted.tp, layers)
    ]
    if found.experts and found.experts.dense_layers < found.fields["num_hidden_layers"]:
        names = ", ".join(gemm.name for gemm in gemms)
        on_warning(f"{source}: the experts are left out, since their GEMMs are grouped; the manifest has {names}")
    targets = wanted.targets
    if targets is None:
        targets = default_targets(gemm.signature for gemm in gemms)
        if not targets:
            found.fail("no target has kernels for all of these layers; name targets")
    else:
        _check_served(found, gemms, wanted, targets, on_warning)
    return Manifest(
        model or model_name(named_after or source, wanted.tp, dtype, wanted.fuse),
        _source(found, wanted.tp) + (f", {found.activation[0]} {activation}" if activation else ""),
        ms,
        tuple(targets),
        tuple(gemms),
        found.fields["num_hidden_layers"],
    )


def _check_served(
    found: Model, gemms: Sequence[Gemm], wanted: Wanted, targets: Iterable[str], on_warning: Callable[[str], None]
) -> None:
    """Refuse targets that were named and lack kernels for layers as they were asked for. Where only the model's own
    biases are in the way, say so: a build leaves these layers out."""
    for target in targets:
        unserved = [gemm for gemm in gemms if not variants(target, gemm.signature)]
        if not unserved:
            continue
        others = [gemm for gemm in unserved if gemm.signature.epilogue != Epilogue(bias=True).word()]
        of = others or unserved
        names, reason = ", ".join(gemm.name for gemm in of), why_none(target, of[0].signature)
        said = f"no kernel computes {names} on {target}: {reason}"
        if others:
            found.fail(f"{said}; name another target{', or leave --fuse out' if wanted.fuse else ''}")
        on_warning(f"{found.source}: {said}; a build leaves them out there")


def model_name(source: str, tp: int, dtype: str, fuse: bool = False) -> str:
    """What to call a model that came from `source`: the last part in lower case, with what is unusual about it."""
    stem = source.removesuffix("config.json").rstrip("/").rsplit("/", 1)[-1].lower().removesuffix(".json") or "model"
    unusual = (f"-tp{tp}" if tp > 1 else "") + ("" if dtype == "bf16" else f"-{dtype}") + ("-fused" if fuse else "")
    return stem + unusual


def default_scaling(dtype: str) -> str:
    """The scaling of layers in `dtype` where none is asked for: for 8 bits a scale a token and an output channel."""
    return "row_column" if "row_column" in scalings_of(dtype) else "none"


def default_targets(signatures: Iterable[Signature], targets: Iterable[str] = tuple(TARGETS)) -> tuple[str, ...]:
    """Those of `targets` that have kernels for all of these, with their epilogues."""
    distinct = dict.fromkeys(signatures)
    return tuple(t for t in targets if all(variants(t, s) for s in distinct))


@dataclass(frozen=True)
class _Layers:
    """What the layers compute besides their shapes: element types of A, B and D, scaling, what is fused, and biases.

    `fused` has the gate of gate_up, and whether o and down add the residual where tp is 1. The router and lm_head are
    plain, in the type of D.
    """

    dtypes: tuple[str, str, str]
    scaling: str
    fused: Epilogue
    biased: tuple[str, ...]

    def plain(self, n: int, k: int) -> Signature:
        """A layer in the type of D, with neither scales nor epilogue."""
        d = self.dtypes[2]
        return Signature(d, d, d, "f32", "none", n, k)

    def column_parallel(self, name: str, n: int, k: int, gate: str = "none") -> Signature:
        """A layer whose outputs are spread over the ranks."""
        return self._signature(n, k, Epilogue(gate, bias=name in self.biased))

    def row_parallel(self, name: str, n: int, k: int, tp: int) -> Iterator[tuple[str, Signature]]:
        """A layer whose inputs are spread over the ranks, by name: two, where only rank 0 adds the bias."""
        biased = name in self.biased
        yield name, self._signature(n, k, Epilogue(bias=biased and tp == 1, residual=self.fused.residual and tp == 1))
        if biased and tp > 1:
            yield f"{name}_rank0", self._signature(n, k, Epilogue(bias=True))

    def _signature(self, n: int, k: int, epilogue: Epilogue) -> Signature:
        return Signature(*self.dtypes, "f32", epilogue.word(), n, k, scaling=self.scaling)


def _check(found: Model, wanted: Wanted) -> None:
    """Refuse what was asked for where it is wrong in itself."""
    if not is_integer(wanted.tp, MAX_TENSOR_PARALLEL):
        found.fail(f"tp must be an integer from 1 to {MAX_TENSOR_PARALLEL}, found {short(wanted.tp)}")
    if not wanted.tokens or not all(is_integer(m, MAX_TOKENS) for m in wanted.tokens):
        listed = short(list(wanted.tokens))
        found.fail(f"tokens must be integers from 1 to {MAX_TOKENS}, at least one, found {listed}")
    if wanted.dtype is not None and wanted.dtype not in DTYPES:
        found.fail(f"unknown dtype {short(wanted.dtype)}; {did_you_mean(wanted.dtype, DTYPES)}")
    if wanted.scaling is not None and wanted.scaling not in SCALINGS:
        found.fail(f"unknown scaling {short(wanted.scaling)}; {did_you_mean(wanted.scaling, SCALINGS)}")
    if wanted.targets is None:
        return
    if not wanted.targets:
        found.fail(f"no target is named; name some of {', '.join(TARGETS)}")
    if len(set(wanted.targets)) != len(wanted.targets):
        found.fail(f"targets must be different, found {short(list(wanted.targets))}")
    for target in wanted.targets:
        if target not in TARGETS:
            found.fail(f"unknown target {short(target)}; {did_you_mean(target, TARGETS)}")


def _dtype(found: Model, wanted: str | None, on_warning: Callable[[str], None]) -> str:
    """What the layers are computed in: what is wanted, or else the type that the model is published in."""
    field, published = found.dtype
    known = PUBLISHED.get(published) if isinstance(published, str) else None
    if wanted is None and published is None:
        on_warning(f"{found.source}: field {field!r} is missing; the manifest is in bf16, which --dtype changes")
        return "bf16"
    if wanted is None and known is None:
        found.fail(f"field {field!r}: there are no kernels in {short(published)}; give --dtype bf16 or --dtype f16")
    if wanted is None:
        return str(known)
    if published is not None and known != DTYPES[wanted][2]:
        on_warning(
            f"{found.source}: field {field!r} is {short(published)}; the manifest has outputs in {DTYPES[wanted][2]}, "
            f"as --dtype {wanted} says"
        )
    return wanted


def _activation(found: Model) -> str:
    """What the MLP does to its gate."""
    field, activation = found.activation
    if not isinstance(activation, str) or activation not in GATES:
        found.fail(f"field {field!r}: {short(activation)} cannot be fused; known: {', '.join(GATES)}")
    return activation


def _gemms(found: Model, tp: int, layers: _Layers) -> Iterator[tuple[str, Signature, int, str]]:
    """(name, signature, count, per) of every GEMM of one rank; `tp` must divide, see `_obstacle`."""
    fields, experts = found.fields, found.experts
    hidden, depth = fields["hidden_size"], fields["num_hidden_layers"]
    heads = fields["num_attention_heads"] // tp
    kv_heads = max(fields["num_key_value_heads"] // tp, 1)
    intermediate = fields["intermediate_size"] // tp
    dense = experts.dense_layers if experts else depth

    def times(count: int) -> tuple[int, str]:
        return (1, "layer") if count == depth else (count, "model")

    n = (heads + 2 * kv_heads) * fields["head_dim"]
    yield "qkv", layers.column_parallel("qkv", n, hidden), *times(depth)
    for name, signature in layers.row_parallel("o", hidden, heads * fields["head_dim"], tp):
        yield name, signature, *times(depth)
    if dense:
        gate_up = layers.column_parallel("gate_up", 2 * intermediate, hidden, layers.fused.activation)
        yield "gate_up", gate_up, *times(dense)
        for name, signature in layers.row_parallel("down", hidden, intermediate, tp):
            yield name, signature, *times(dense)
    if experts and dense < depth:
        yield "router", layers.plain(experts.count, hidden), *times(depth - dense)
    yield "lm_head", layers.plain(_padded(fields["vocab_size"]) // tp, hidden), 1, "model"


def _obstacle(found: Model, tp: int, layers: _Layers) -> str | None:
    """Why this model cannot be split over `tp` ranks, naming the field; None when it can."""
    fields, experts = found.fields, found.experts
    divided = {"num_attention_heads": fields["num_attention_heads"]}
    if experts is None or experts.dense_layers:
        divided["intermediate_size"] = fields["intermediate_size"]
    for field, value in divided.items():
        if value % tp:
            return f"field {field!r}: {value} does not divide by tp {tp}"
    kv_heads = fields["num_key_value_heads"]
    if kv_heads % tp and tp % kv_heads:
        return f"field 'num_key_value_heads': of {kv_heads} and tp {tp} neither divides the other"
    if _padded(fields["vocab_size"]) % tp:
        return f"field 'vocab_size': {_padded(fields['vocab_size'])} (padded) does not divide by tp {tp}"
    for name, signature, _, _ in _gemms(found, tp, layers):
        problem = signature_problem(signature)
        if problem:
            return f"gemm {name!r} at tp {tp}: {problem[0]} {problem[1]}"
    return None


def _source(found: Model, tp: int) -> str:
    """One line: where the shapes come from and the values they follow from."""
    source, fields, experts = found.source, found.fields, found.experts
    values = [f"{name} {value}" for name, value in fields.items()]
    if _padded(fields["vocab_size"]) != fields["vocab_size"]:
        values[-1] += f" (padded to {_padded(fields['vocab_size'])})"
    if experts:
        if not experts.dense_layers:
            values = [v for v in values if not v.startswith("intermediate_size")]
        values.append(f"num_experts {experts.count} (experts are to be added: docs/moe.md)")
    if found.biased:
        values.append(f"bias in {' and '.join(found.biased)}")
    file = source if source.endswith(".json") else f"{source} config.json"
    return f"{file} at tp {tp}: {', '.join(values)}"


def _padded(vocabulary: int) -> int:
    return vocabulary + -vocabulary % VOCABULARY_PADDING
