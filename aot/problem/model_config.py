"""From a Hugging Face config.json to the manifest of a model's linear layers and experts.

`aot.problem.models` reads the config; here its layers become GEMMs. A rank of a tensor-parallel group runs, as vLLM and
SGLang lay the weights out, for example:

    qkv      n = (heads/tp + 2 * max(kv_heads/tp, 1)) * head_dim, k = hidden
    o        n = hidden, k = heads/tp * head_dim
    gate_up  n = 2 * intermediate/tp, k = hidden
    down     n = hidden, k = intermediate/tp
    router   n = experts, k = hidden
    lm_head  n = vocabulary/tp, k = hidden

KV heads are replicated where tp exceeds them, the router of a mixture of experts is on every rank, and the vocabulary
is padded to a multiple of 64. With data parallelism too most mixtures' shared expert is whole on every rank, and with
the router gets a part of the tokens there. A layer with a bias adds it in its GEMM, whether or not anything else is
fused; but o and down, whose partial results an all-reduce adds up, do so on rank 0 only, so there are two GEMMs of
each. In fp8 servers add it afterwards, and only where something is fused do GEMMs. Fused, gate_up takes in the
activation of the MLP, its weight being gate and up one after the other, and o and down the residual, where nothing lies
between: no all-reduce and no norm. Experts are operations, and always have their activation:
`aot.problem.models.experts`.

Vision towers are other models and not covered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from runtime.errors import RecordError
from runtime.gemm.signature import Signature
from runtime.numbers.dtypes import TORCH_NAMES
from runtime.numbers.epilogue import Epilogue
from runtime.numbers.products import PRODUCTS, scalings_of, unsupported_scaling
from runtime.numbers.scaling import SCALE_BLOCK, SCALINGS
from runtime.numbers.weights import FORMATS

from ..search.targets import TARGETS, USUAL_TARGETS
from ..search.unserved import computing, variants, why_none
from ..suggest import did_you_mean
from . import ways
from .manifest import MAX_TOKENS, Gemm, Manifest, Use, signature_problem
from .models import experts as of_experts
from .models.config import is_integer, short
from .models.experts import Arithmetic, Ranks
from .models.layers import Linear, Model
from .models.read_model import VOCABULARY_PADDING, padded, read_model
from .norms import of_norms
from .unquantised import no_layer, of_unquantised, with_few_in_blocks

# What `dtype` means for A, B and D. The router and lm_head stay in the type of D, as fp8 checkpoints keep them.
DTYPES = {a: next(product for product in PRODUCTS if product[0] == a) for a, *_ in PRODUCTS}

# The same, by the type that a config names.
PUBLISHED = {TORCH_NAMES[a]: a for a, (*_, d) in DTYPES.items() if a == d}

# What a gated MLP computes, by the `hidden_act` of its config.
GATES = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}

# Logits are wanted for the last token of each sequence of a batch, so lm_head sees no more rows than that.
MOST_LOGITS = 256

MAX_RANKS = 1024
_NEAREST = "sm_90a"  # has kernels of most forms, so it can say what is in the way


@dataclass(frozen=True)
class Wanted:
    """How a model is to run, which its config does not say.

    `tokens` are the M values to tune for, in any order. `targets` are by default all that have kernels for every
    layer; `dtype`, a key of `DTYPES`, is by default the config's, or bf16 where it names none; `scaling`, that of
    layers in few bits, or of experts' weights where a config has those alone so, the config's or `default_scaling`.
    `fuse` takes elementwise work into the layers, as the module's docstring says. `ep` is over how many ranks experts
    are spread, each whole, as vLLM's expert parallelism does it: a multiple of `tp`, or 1. `experts` is whether the
    manifest has them. `in_graph` adds the other ways to compute the layers that `aot tune --in-graph` chooses for.
    `quantise` adds what quantises the tokens of layers in e4m3, or, if it is None, few tokens of those with scales of
    blocks, unless layers are fused. With either the manifest has the model's norms, as far as they are RMSNorm of a sum
    with the residual.
    """

    tp: int
    tokens: Sequence[int]
    targets: Sequence[str] | None = None
    dtype: str | None = None
    scaling: str | None = None
    fuse: bool = False
    ep: int = 1
    experts: bool = True
    in_graph: bool = False
    quantise: bool | None = None


def manifest_from_config(
    config: Mapping[str, Any],
    wanted: Wanted,
    *,
    source: str = "config.json",
    model: str | None = None,
    named_after: str | None = None,
    on_warning: Callable[[str], None] = lambda _: None,
) -> Manifest:
    """The linear layers and experts of one rank, as a manifest.

    `source` says where the config came from, a Hugging Face repository or a path; it opens every message and the
    manifest's own `source`, which also lists the values used. `model` is the manifest's name for it, by default
    `model_name` of `named_after`, or of `source`. `on_warning` is told what a reader of the manifest may not expect.

    Raises:
        ManifestError: the config is of an unknown kind, a field is missing or wrong, or `tp` or `ep` does not divide
            it.
    """
    found = read_model(config, source)
    _check(found, wanted)
    for remark in found.remarks:
        on_warning(f"{source}: {remark}")
    layers = _layers(found, wanted, on_warning)
    for remark in _on_experts(found, layers):
        on_warning(f"{source}: {remark}")
    ranks = Ranks(wanted.tp, wanted.ep)
    _require_ranks(found, ranks, layers)
    ms = tuple(sorted(set(wanted.tokens)))
    few = tuple(m for m in ms if m <= MOST_LOGITS) or ms[:1]
    gemms = tuple(
        Gemm(name, signature, *_times(layer, found.depth, ranks.tokens(layer, few if layer.last else ms)))
        for layer, name, signature in _gemms(found, ranks, layers)
    )
    if wanted.in_graph:
        gemms = _all_ways(found, gemms)
    uses: tuple[Use, ...] = ()
    if found.experts and layers.experts:
        try:
            uses = of_experts.operations(found.experts, ranks, layers.experts, ms)
        except RecordError as error:
            found.fail(str(error))
    for layer in _left_out(found, ranks, layers):
        n, _ = layer.shape(wanted.tp)
        on_warning(f"{source}: {layer.name} is left out, since rows of its {n} outputs are no multiple of 16 bytes")
    if found.experts and not layers.experts:
        names = ", ".join(gemm.name for gemm in gemms)
        on_warning(f"{source}: the experts are left out; the manifest has {names}")
    targets = wanted.targets
    if targets is None:
        targets = _targets(found, wanted, [*gemms, *uses])
    else:
        _check_served(found, (*gemms, *uses), wanted, targets, on_warning)
    gemms, uses = _with_quantised_tokens(found, wanted, gemms, uses, targets)
    if wanted.targets is None and wanted.quantise:
        targets = default_targets(_signatures([*gemms, *uses]), targets) or targets
    if (wanted.in_graph or wanted.quantise) and found.residuals and found.rms_norms:
        of_rows = uses if wanted.quantise else ()
        norms = of_norms(gemms[0].signature.d, [found.used["hidden_size"]], ms, targets, of_rows)
        uses = _by_operation([*uses, *norms])
    return Manifest(
        model or model_name(named_after or source, wanted.tp, layers.called, wanted.fuse, wanted.ep),
        _source(found, ranks, layers),
        ms,
        tuple(targets),
        gemms,
        found.depth,
        uses,
    )


def _require_ranks(found: Model, ranks: Ranks, layers: _Layers) -> None:
    """Refuse ranks that the model cannot be spread over, and say which it can."""
    obstacle = _obstacle(found, ranks, layers)
    if not obstacle:
        return
    valid = [t for t in range(1, MAX_RANKS + 1) if _obstacle(found, Ranks(t, ranks.ep), layers) is None]
    fit = f"; tp values that fit this model: {', '.join(map(str, valid))}" if valid else ""
    without = replace(layers, experts=None)
    if not fit and layers.experts and _obstacle(found, ranks, without) is None and "--no-experts" not in obstacle:
        fit = "; --no-experts leaves experts out"
    found.fail(f"{obstacle}{fit}")


def _targets(found: Model, wanted: Wanted, items: Sequence[Gemm | Use]) -> tuple[str, ...]:
    """The targets that have kernels for all of these, at least one."""
    targets = default_targets(_signatures(items))
    if not targets:
        for item in items:
            if not computing(item.signature):
                found.fail(f"no kernel computes {item.name}: {why_none(_nearest(item), item.signature)}")
        instead = "leave --fuse out, or name targets" if wanted.fuse else "name targets"
        found.fail(f"no target has kernels for all of these layers; {instead}")
    return targets


def _signatures(items: Iterable[Gemm | Use]) -> list[Any]:
    return [item.signature for item in items]


def _with_quantised_tokens(
    found: Model, wanted: Wanted, gemms: tuple[Gemm, ...], uses: tuple[Use, ...], targets: Sequence[str]
) -> tuple[tuple[Gemm, ...], tuple[Use, ...]]:
    """The same with what quantises tokens of layers in fp8, as far as it is wanted; see `Wanted`."""
    if wanted.quantise:
        with_few, of_rows = of_unquantised(gemms, targets, _is_gated(found))
        if len(with_few) == len(gemms) and not of_rows:
            found.fail(no_layer(targets))
        return tuple(with_few), _by_operation([*uses, *of_rows])
    if wanted.quantise is None and not wanted.fuse:
        return tuple(with_few_in_blocks(gemms, targets)), uses
    return gemms, uses


def _by_operation(uses: Iterable[Use]) -> tuple[Use, ...]:
    """Those of one operation together, as a file has them."""
    found: dict[str, list[Use]] = {}
    for use in uses:
        found.setdefault(use.signature.operation, []).append(use)
    return tuple(chain.from_iterable(found.values()))


def _nearest(item: Gemm | Use) -> str:
    """A target to say of why it does not compute something: one that computes it with no epilogue, if there is one."""
    if isinstance(item, Use):
        return _NEAREST
    plain = replace(item.signature, epilogue="none")
    return next((target for target in (_NEAREST, *TARGETS) if variants(target, plain)), _NEAREST)


def _check_served(
    found: Model, items: Sequence[Gemm | Use], wanted: Wanted, targets: Iterable[str], on_warning: Callable[[str], None]
) -> None:
    """Refuse targets that were named and lack kernels for layers as they were asked for. Where only the model's own
    biases, or its experts, are in the way, say so: a build leaves these layers out."""
    for target in targets:
        unserved = [item for item in items if not variants(target, item.signature)]
        own = [i for i in unserved if isinstance(i, Use) or _lacks_bias_alone(target, i.signature)]
        others = [item for item in unserved if item not in own]
        if not unserved:
            continue
        of = others or unserved
        names, reason = ", ".join(item.name for item in of), why_none(target, of[0].signature)
        said = f"no kernel computes {names} on {target}: {reason}"
        if others:
            another = "; name another target" if any(computing(item.signature) for item in of) else ""
            found.fail(f"{said}{another}{', or leave --fuse out' if wanted.fuse else ''}")
        on_warning(f"{found.source}: {said}; a build leaves them out there")


def _lacks_bias_alone(target: str, signature: Signature) -> bool:
    """Whether a target computes the product of a layer with a bias, and not that with it."""
    biased = signature.epilogue == Epilogue(bias=True).word()
    return biased and bool(variants(target, replace(signature, epilogue="none")))


def model_name(source: str, tp: int, dtype: str, fuse: bool = False, ep: int = 1) -> str:
    """What to call a model that came from `source`: the last part in lower case, with what is unusual about it."""
    stem = source.removesuffix("config.json").rstrip("/").rsplit("/", 1)[-1].lower().removesuffix(".json") or "model"
    unusual = (f"-tp{tp}" if tp > 1 else "") + (f"-ep{ep}" if ep > 1 else "")
    return stem + unusual + ("" if dtype == "bf16" else f"-{dtype}") + ("-fused" if fuse else "")


def _on_experts(found: Model, layers: _Layers) -> Iterator[str]:
    """What to say of experts whose weights are published in 4 bits, where the manifest has other types."""
    if layers.experts and layers.experts.scaling not in FORMATS and found.experts_in:
        yield (
            f"weights of experts are in {found.experts_in.removesuffix('_weight')}; the manifest is for weights that "
            f"were turned into the type of the others, or with --scaling {found.experts_in} for them as they are"
        )


def _is_of(scaling: str, dtype: str) -> bool:
    """Whether layers of this type may have a scaling, which is "" where a config says of none."""
    return bool(scaling) and dtype in SCALINGS[scaling].of


def _types(dtype: str, scaling: str) -> tuple[str, str, str]:
    """What A, B and D are in: as `dtype` means, but for weights that have a type of their own under a scaling."""
    a, b, d = DTYPES[dtype]
    of_b = SCALINGS[scaling].of_b
    return a, of_b[0] if of_b else b, d


def default_scaling(dtype: str) -> str:
    """The scaling of layers in `dtype` where none is asked for: for 8 bits a scale a token and an output channel, for
    4 bits NVFP4's."""
    return next((word for word in ("row_column", "nvfp4") if word in scalings_of(dtype)), "none")


def default_targets(signatures: Iterable[Any], targets: Iterable[str] = USUAL_TARGETS) -> tuple[str, ...]:
    """Those of `targets` that have kernels for all of these, with their epilogues."""
    distinct = dict.fromkeys(signatures)
    return tuple(t for t in targets if all(variants(t, s) for s in distinct))


@dataclass(frozen=True)
class _Layers:
    """What the layers compute besides their shapes: the key of `DTYPES`, scaling, what is fused, and what experts do,
    None where they are not wanted.

    `fused` has the gate of gate_up, and whether o and down add the residual where tp is 1. Plain layers are in the type
    of D. `activation` is that of the config, where something depends on it, else empty.
    """

    word: str
    scaling: str
    fused: Epilogue
    experts: Arithmetic | None
    activation: str

    @property
    def called(self) -> str:
        """What models with such layers are called: by the type of A, or the scaling of weights that have another."""
        scalings = self.scaling, self.experts.scaling if self.experts else "none"
        return next((scaling for scaling in scalings if SCALINGS[scaling].of_b), self.word)

    def adds_bias(self, layer: Linear) -> bool:
        """Whether the GEMM of a layer adds its bias."""
        return layer.bias and (layer.plain or self.word != "e4m3" or self.fused != Epilogue())

    def signature(self, layer: Linear, tp: int, bias: bool, residual: bool = False) -> Signature:
        """A layer on one of `tp` ranks."""
        gate = self.fused.activation if layer.gated else "none"
        epilogue = Epilogue(gate, bias=bias, residual=residual).word()
        a, b, d = _types(self.word, self.scaling)
        if layer.plain:
            return Signature(d, d, d, "f32", epilogue, *layer.shape(tp))
        return Signature(a, b, d, "f32", epilogue, *layer.shape(tp), scaling=self.scaling)

    def on(self, layer: Linear, tp: int) -> Iterator[tuple[str, Signature]]:
        """A layer by name: two, where only rank 0 adds the bias."""
        alone = tp == 1 or not layer.row_parallel
        residual = layer.residual and self.fused.residual and tp == 1
        bias = self.adds_bias(layer)
        yield layer.name, self.signature(layer, tp, bias and alone, residual)
        if bias and not alone:
            yield f"{layer.name}_rank0", self.signature(layer, tp, True)


def _layers(found: Model, wanted: Wanted, on_warning: Callable[[str], None]) -> _Layers:
    """What the layers compute: as is wanted, or else as the config says."""
    dtype = _dtype(found, wanted.dtype, on_warning)
    scaling = wanted.scaling
    if scaling is None:
        scaling = found.scaling if _is_of(found.scaling, dtype) else default_scaling(dtype)
    _say_what_is_dropped(found, wanted, dtype, scaling, on_warning)
    types = _types(dtype, scaling)
    if problem := unsupported_scaling(types[0], scaling, types[1]):
        others = [word for word in DTYPES if scaling in scalings_of(DTYPES[word][0])]
        given = f"give --dtype {' or '.join(others)}" if others and wanted.scaling is not None else "leave it out"
        found.fail(f"scaling {problem}; {given}")
    asks = found.experts if wanted.experts else None
    experts_scaling = scaling
    if scaling == found.experts_in:
        if not asks:
            found.fail(f"scaling {scaling} is of the weights of experts, and the manifest has none; leave it out")
        scaling = default_scaling(dtype)
    gate = asks.gate if asks else ""
    activation = _activation(found, wanted.fuse) if wanted.fuse or (asks and not gate) else ""
    fused = Epilogue(GATES[activation], residual=found.residuals) if wanted.fuse else Epilogue()
    experts = Arithmetic(types, experts_scaling, gate or GATES[activation]) if asks else None
    return _Layers(dtype, scaling, fused, experts, activation)


def _say_what_is_dropped(
    found: Model, wanted: Wanted, dtype: str, scaling: str, on_warning: Callable[[str], None]
) -> None:
    """Warn where a manifest is not of the weights that the config says, as what was asked for may not have meant."""
    if found.scaling in ("", scaling):
        return
    if wanted.scaling is None:
        on_warning(
            f"{found.source}: its weights are {found.scaling}, and the manifest is for others, in {dtype}; leave "
            "--dtype out for them as they are"
        )
    else:
        on_warning(f"{found.source}: its weights are {found.scaling}, which no kernel for {scaling} takes")


def _check(found: Model, wanted: Wanted) -> None:
    """Refuse what was asked for where it is wrong in itself."""
    for name, ranks in (("tp", wanted.tp), ("ep", wanted.ep)):
        if not is_integer(ranks, MAX_RANKS):
            found.fail(f"{name} must be an integer from 1 to {MAX_RANKS}, found {short(ranks)}")
    if wanted.ep > 1 and not (found.experts and wanted.experts):
        found.fail(f"ep {wanted.ep} spreads experts, and the manifest has none; leave --ep out")
    if not wanted.tokens or not all(is_integer(m, MAX_TOKENS) for m in wanted.tokens):
        listed = short(list(wanted.tokens))
        found.fail(f"tokens must be integers from 1 to {MAX_TOKENS}, at least one, found {listed}")
    if wanted.in_graph and wanted.fuse:
        found.fail("with in_graph the manifest has layers fused and not; leave --fuse out")
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
    says = f"as --dtype {wanted} says"
    if wanted is None and found.scaling:
        (wanted,) = SCALINGS[found.scaling].of
        says = "as kernels for its weights have them; serve it in bf16 (vLLM: --dtype bfloat16)"
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
            f"{says}"
        )
    return wanted


def _activation(found: Model, fuse: bool) -> str:
    """What the MLP does to its gate."""
    field, activation = found.activation
    if not isinstance(activation, str) or activation not in GATES:
        fix = "" if fuse else "; --no-experts leaves experts out"
        found.fail(f"field {field!r}: {short(activation)} cannot be fused; known: {', '.join(GATES)}{fix}")
    return activation


def _linears(found: Model, ranks: Ranks) -> list[Linear]:
    """The linear layers, those whole that every rank has all of."""
    return [layer.whole() if ranks.sequence_parallel(layer) else layer for layer in found.linears]


def _gemms(found: Model, ranks: Ranks, layers: _Layers) -> Iterator[tuple[Linear, str, Signature]]:
    """Every GEMM of one rank by name, with the layer that it is of; `tp` must divide, see `_obstacle`."""
    left_out = _left_out(found, ranks, layers)
    for layer in _linears(found, ranks):
        if layer not in left_out:
            for name, signature in layers.on(layer, ranks.tp):
                yield layer, name, signature


def _left_out(found: Model, ranks: Ranks, layers: _Layers) -> list[Linear]:
    """The layers that may go, and that no manifest may hold."""
    may_go = [layer for layer in _linears(found, ranks) if layer.may_go]
    return [layer for layer in may_go if signature_problem(layers.signature(layer, ranks.tp, layers.adds_bias(layer)))]


def _is_gated(found: Model) -> bool:
    """Whether an MLP's activation is the one that servers' plugins fuse."""
    _, activation = found.activation
    return GATES.get(str(activation)) == ways.GATE


def _all_ways(found: Model, gemms: tuple[Gemm, ...]) -> tuple[Gemm, ...]:
    """GEMMs, and the other ways to compute those of a layer."""
    every = tuple(ways.all_ways(gemms, gated=_is_gated(found)))
    if len(every) == len(gemms):
        found.fail(ways.NO_PART)
    return every


def _times(layer: Linear, depth: int, tokens: tuple[int, ...]) -> tuple[int, tuple[int, ...], str]:
    """How often a layer runs, at which M, and in what that counts: as `Gemm` has it."""
    return (1, tokens, "layer") if layer.count == depth and not layer.last else (layer.count, tokens, "model")


def _obstacle(found: Model, ranks: Ranks, layers: _Layers) -> str | None:
    """Why this model cannot be split over such ranks, naming the field; None when it can."""
    for layer in _linears(found, ranks):
        for extent in (*layer.n, layer.k):
            if problem := extent.obstacle(ranks.tp):
                return problem + (f", padded to a multiple of {VOCABULARY_PADDING}" if layer.last else "")
            if layers.scaling == "block" and not layer.plain and extent.cuts(ranks.tp, SCALE_BLOCK):
                return f"field {extent.field!r}: {layer.name} at tp {ranks.tp} cuts blocks of {SCALE_BLOCK} scales"
    if found.experts and layers.experts and (problem := of_experts.obstacle(found.experts, ranks, layers.experts)):
        return problem
    for _, name, signature in _gemms(found, ranks, layers):
        if complaint := signature_problem(signature):
            return f"gemm {name!r} at tp {ranks.tp}: {complaint[0]} {complaint[1]}"
    return None


def _source(found: Model, ranks: Ranks, layers: _Layers) -> str:
    """One line: where the shapes come from and the values they follow from."""
    source, used = found.source, found.used
    values = [f"{name} {value}" for name, value in used.items()]
    rows = padded(used["vocab_size"])
    if rows != used["vocab_size"]:
        values[list(used).index("vocab_size")] += f" (padded to {rows})"
    if found.experts and not layers.experts:
        values.append("without experts")
    if found.biased:
        values.append(f"bias in {' and '.join(found.biased)}")
    if layers.activation:
        values.append(f"{found.activation[0]} {layers.activation}")
    file = source if source.endswith(".json") else f"{source} config.json"
    ep = f" and ep {ranks.ep}" if ranks.ep > 1 else ""
    line = f"{file} at tp {ranks.tp}{ep}: {', '.join(values)}"
    if not (found.experts and layers.experts):
        return line
    return "; ".join([line, *of_experts.notes(found.experts, ranks, layers.experts)])
