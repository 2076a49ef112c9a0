"""From a Hugging Face config.json to the manifest of a model's linear layers.

`FAMILIES` is the whole knowledge of models: which model types are read, and what each leaves out of its config.
A rank of a tensor-parallel group runs, as vLLM and SGLang lay the weights out:

    qkv      n = (heads/tp + 2 * max(kv_heads/tp, 1)) * head_dim, k = hidden
    o        n = hidden, k = heads/tp * head_dim
    gate_up  n = 2 * intermediate/tp, k = hidden
    down     n = hidden, k = intermediate/tp
    router   n = experts, k = hidden
    lm_head  n = vocabulary/tp, k = hidden

KV heads are replicated where tp exceeds them, the router of a mixture of experts is on every rank, and the
vocabulary is padded to a multiple of 64. Fused, gate_up takes in the activation of the MLP, its weight being gate and
up one after the other, and o and down the residual, where nothing lies between: no all-reduce and no norm.

Expert GEMMs are grouped GEMMs and vision towers are other models: neither is covered. Biases change no shape and
are not part of a gemm. What is not understood is refused by name; nothing is guessed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from runtime.signature import SCALINGS, Epilogue, Signature

from .manifest import (
    MAX_COUNT,
    MAX_EXTENT,
    MAX_TOKENS,
    Gemm,
    Manifest,
    ManifestError,
    did_you_mean,
    read_text,
    signature_problem,
)
from .providers import PROVIDERS, provider
from .targets import TARGETS

# What `dtype` means for A, B and D. The router and lm_head stay in the type of D, as fp8 checkpoints keep them.
DTYPES = {"bf16": ("bf16", "bf16", "bf16"), "f16": ("f16", "f16", "f16"), "e4m3": ("e4m3", "e4m3", "bf16")}

# What a gated MLP computes, by the `hidden_act` of its config.
GATES = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}

# Logits are wanted for the last token of each sequence of a batch, so lm_head sees no more rows than that.
MOST_LOGITS = 256

# vLLM's and SGLang's DEFAULT_VOCAB_PADDING_SIZE, in rows.
VOCABULARY_PADDING = 64

MAX_CONFIG_BYTES = 1 << 20
MAX_TENSOR_PARALLEL = 1024


@dataclass(frozen=True)
class Family:
    """One `model_type`: its architectures, and the fields that a config may leave out.

    `defaults` holds numbers, or the name of a rule in `_RULES`; they are those of the transformers config class.
    `text` is the model type of the `text_config` inside, where the shapes are. `activation` is the field that names
    the MLP's activation and what it is where that is left out. `post_norms` says that a norm comes between o or down
    and the residual.
    """

    architectures: tuple[str, ...]
    defaults: tuple[tuple[str, int | str], ...] = ()
    experts: bool = False
    text: str | None = None
    activation: tuple[str, str] = ("hidden_act", "silu")
    post_norms: bool = False


_RULES = {
    "heads": lambda fields: fields["num_attention_heads"],
    "hidden_size / heads": lambda fields: fields["hidden_size"] // fields["num_attention_heads"],
}
_SPLIT_HEAD = ("head_dim", "hidden_size / heads")
_GEMMA_ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")

FAMILIES = {
    "llama": Family(("LlamaForCausalLM",), (("num_key_value_heads", "heads"), _SPLIT_HEAD)),
    "mistral": Family(("MistralForCausalLM",), (_SPLIT_HEAD,)),
    "mistral3": Family(("Mistral3ForConditionalGeneration",), text="mistral"),
    "qwen2": Family(("Qwen2ForCausalLM",), (_SPLIT_HEAD,)),
    "qwen3": Family(("Qwen3ForCausalLM",)),
    "qwen3_moe": Family(("Qwen3MoeForCausalLM",), experts=True),
    "gemma2": Family(("Gemma2ForCausalLM",), activation=_GEMMA_ACTIVATION, post_norms=True),
    # Published Gemma 3 configs leave out whatever equals transformers' Gemma3TextConfig.
    "gemma3_text": Family(
        ("Gemma3ForCausalLM",),
        (("vocab_size", 262208), ("num_attention_heads", 8), ("num_key_value_heads", 4), ("head_dim", 256)),
        activation=_GEMMA_ACTIVATION,
        post_norms=True,
    ),
    "gemma3": Family(("Gemma3ForConditionalGeneration",), text="gemma3_text"),
}

_FIELDS = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)

# A config with one of these computes something else than the GEMMs above.
_REFUSED = {
    "quantization_config": "quantised weights; use the config of the unquantised model and give a dtype",
    "compression_config": "quantised weights; use the config of the unquantised model and give a dtype",
    "kv_lora_rank": "multi-head latent attention (MLA), whose projections are not supported",
    "q_lora_rank": "multi-head latent attention (MLA), whose projections are not supported",
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def load_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a config.json.

    Raises:
        ManifestError: it cannot be read, is not JSON, or is not an object.
    """
    name = os.fspath(path)
    text = read_text(name, MAX_CONFIG_BYTES)
    try:
        config = json.loads(text, object_pairs_hook=_distinct)
    except json.JSONDecodeError as error:
        raise ManifestError(f"{name}:{error.lineno}: not JSON: {error.msg}; give a model's config.json") from None
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{name}: not the JSON of a model's config.json: {error}; check the file") from None
    if not isinstance(config, dict):
        raise ManifestError(f"{name}: must hold a JSON object, found {_short(config)}; give a model's config.json")
    return config


def manifest_from_config(
    config: Mapping[str, Any],
    *,
    tp: int,
    tokens: Sequence[int],
    targets: Sequence[str],
    dtype: str = "bf16",
    scaling: str | None = None,
    fuse: bool = False,
    source: str = "config.json",
    model: str | None = None,
) -> Manifest:
    """The linear layers of one rank out of `tp`, as a manifest.

    `source` says where the config came from, a Hugging Face repository or a path; it opens every message and the
    manifest's own `source`, which also lists the values used. `model` is the manifest's name for it, by default
    `model_name`. `scaling` is that of layers in 8 bits, by default `default_scaling`. `fuse` takes elementwise work
    into the layers, as the module's docstring says.

    Raises:
        ManifestError: the config is of an unknown kind, a field is missing or wrong, or `tp` does not divide it.
    """
    reader = _Config(source)
    scaling = default_scaling(dtype) if scaling is None else scaling
    reader.arguments(tp, tokens, targets, dtype, scaling)
    family, text, where = reader.text(config)
    fields, experts = reader.shapes(family, text, where)
    layers = _Layers(DTYPES[dtype], scaling)
    activation = reader.activation(family, text, where) if fuse else None
    if activation:
        residual = Epilogue(residual=tp == 1 and not family.post_norms)
        layers = _Layers(DTYPES[dtype], scaling, GATES[activation], residual.word())
    obstacle = _obstacle(fields, experts, tp, layers)
    if obstacle:
        most = min(fields["num_attention_heads"], MAX_TENSOR_PARALLEL)
        valid = [t for t in range(1, most + 1) if _obstacle(fields, experts, t, layers) is None]
        reader.fail(f"{obstacle}; tp values that fit this model: {', '.join(map(str, valid)) or 'none'}")
    ms = tuple(sorted(set(tokens)))
    few = tuple(m for m in ms if m <= MOST_LOGITS) or ms[:1]
    gemms = [
        Gemm(name, s, count, few if name == "lm_head" else ms, per)
        for name, s, count, per in _gemms(fields, experts, tp, layers)
    ]
    return Manifest(
        model or model_name(source, tp, dtype, fuse),
        _source(source, fields, experts, tp) + (f", {family.activation[0]} {activation}" if activation else ""),
        ms,
        tuple(targets),
        tuple(gemms),
        fields["num_hidden_layers"],
    )


def model_name(source: str, tp: int, dtype: str, fuse: bool = False) -> str:
    """What to call a model that came from `source`: the last part in lower case, with what is unusual about it."""
    stem = source.removesuffix("config.json").rstrip("/").rsplit("/", 1)[-1].lower().removesuffix(".json") or "model"
    unusual = (f"-tp{tp}" if tp > 1 else "") + ("" if dtype == "bf16" else f"-{dtype}") + ("-fused" if fuse else "")
    return stem + unusual


def default_scaling(dtype: str) -> str:
    """The scaling of layers in `dtype` where none is asked for: for 8 bits a scale a token and an output channel."""
    return "row_column" if dtype == "e4m3" else "none"


def default_targets(dtype: str, scaling: str | None = None) -> tuple[str, ...]:
    """The targets that have kernels for the layers of a model in `dtype`, not fused; all, where it is unknown."""
    if dtype not in DTYPES:
        return tuple(TARGETS)
    a, b, d = DTYPES[dtype]
    scaled = Signature(a, b, d, "f32", "none", 1024, 1024, scaling=scaling or default_scaling(dtype))
    layers = [scaled, Signature(d, d, d, "f32", "none", 1024, 1024)]
    return tuple(t for t in TARGETS if all(any(provider(p).variants(t, layer) for p in PROVIDERS) for layer in layers))


@dataclass(frozen=True)
class _Layers:
    """What the layers compute besides their shapes: element types of A, B and D, scaling, and epilogues.

    The router and lm_head are plain, in the type of D.
    """

    dtypes: tuple[str, str, str]
    scaling: str
    gate_up: str = "none"
    adding: str = "none"  # of o and down


@dataclass(frozen=True)
class _Experts:
    """The mixture-of-experts part of a config: how many experts, and how many layers are dense all the same."""

    count: int
    dense_layers: int


class _Config:
    """Reads fields of a config; remembers what to call it in messages."""

    def __init__(self, source: str) -> None:
        self.source = source

    def fail(self, complaint: str) -> NoReturn:
        raise ManifestError(f"{self.source}: {complaint}")

    def arguments(self, tp: int, tokens: Sequence[int], targets: Sequence[str], dtype: str, scaling: str) -> None:
        if not _is_integer(tp, MAX_TENSOR_PARALLEL):
            self.fail(f"tp must be an integer from 1 to {MAX_TENSOR_PARALLEL}, found {_short(tp)}")
        if not tokens or not all(_is_integer(m, MAX_TOKENS) for m in tokens):
            self.fail(f"tokens must be integers from 1 to {MAX_TOKENS}, at least one, found {_short(list(tokens))}")
        if dtype not in DTYPES:
            self.fail(f"unknown dtype {_short(dtype)}; {did_you_mean(dtype, DTYPES)}")
        if scaling not in SCALINGS:
            self.fail(f"unknown scaling {_short(scaling)}; {did_you_mean(scaling, SCALINGS)}")
        if scaling != "none" and dtype != "e4m3":
            self.fail(f"scaling {scaling} is for dtype e4m3, found {dtype}; leave it out")
        if not targets:
            self.fail(f"no target is named, and none has kernels for every layer in {dtype}, {scaling}; name targets")
        if len(set(targets)) != len(targets):
            self.fail(f"targets must be different, found {_short(list(targets))}")
        for target in targets:
            if target not in TARGETS:
                self.fail(f"unknown target {_short(target)}; {did_you_mean(target, TARGETS)}")

    def text(self, config: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any], str]:
        """The part of the config that describes the text model, its family, and where it is."""
        name = self.model_type(config, "")
        family = FAMILIES[name]
        text, where = config, ""
        if family.text:
            inside = config.get("text_config")
            if not isinstance(inside, dict):
                self.fail(f"field 'text_config' must be an object for model_type {name!r}, found {_short(inside)}")
            text, where = inside, "text_config."
            inner = self.model_type(text, where) if "model_type" in text else family.text
            if inner != family.text:
                self.fail(f"field 'text_config.model_type': {name!r} needs {family.text!r}, found {inner!r}")
            self.refuse(config, "", FAMILIES[family.text])
            family = FAMILIES[family.text]
        self.refuse(text, where, family)
        return family, text, where

    def activation(self, family: Family, text: Mapping[str, Any], where: str) -> str:
        """What the MLP does to its gate."""
        field, default = family.activation
        found = default if text.get(field) is None else text[field]
        if not isinstance(found, str) or found not in GATES:
            self.fail(f"field '{where}{field}': {_short(found)} cannot be fused; known: {', '.join(GATES)}")
        return found

    def shapes(self, family: Family, text: Mapping[str, Any], where: str) -> tuple[dict[str, int], _Experts | None]:
        """The numbers that the GEMMs follow from."""
        fields: dict[str, int] = {}
        defaults = dict(family.defaults)
        for field in _FIELDS:
            if text.get(field) is None and field in defaults:
                default = defaults[field]
                if default == "hidden_size / heads" and fields["hidden_size"] % fields["num_attention_heads"]:
                    self.fail(
                        f"field '{where}head_dim' is missing and hidden_size does not divide by the heads; add it"
                    )
                fields[field] = _RULES[default](fields) if isinstance(default, str) else default
            else:
                fields[field] = self.integer(text, where, field)
        if fields["num_attention_heads"] % fields["num_key_value_heads"]:
            self.fail(
                f"field '{where}num_attention_heads' must be a multiple of num_key_value_heads "
                f"{fields['num_key_value_heads']}, found {fields['num_attention_heads']}; check the config"
            )
        return fields, self.experts(text, where, fields["num_hidden_layers"]) if family.experts else None

    def model_type(self, config: Mapping[str, Any], where: str) -> str:
        name = config.get("model_type")
        if not isinstance(name, str) or name not in FAMILIES:
            what = "is missing" if name is None else f"{_short(name)} is not supported"
            self.fail(f"field '{where}model_type' {what}; {did_you_mean(str(name)[:64], FAMILIES)}")
        found = config.get("architectures")
        known = FAMILIES[str(name)].architectures
        if found is not None and (not isinstance(found, list) or len(found) != 1 or found[0] not in known):
            self.fail(f"field '{where}architectures' must be [{', '.join(known)}] for {name!r}, found {_short(found)}")
        return str(name)

    def refuse(self, config: Mapping[str, Any], where: str, family: Family) -> None:
        """Raise on a field that says the model computes something else."""
        for field, reason in _REFUSED.items():
            if config.get(field) is not None:
                self.fail(f"field '{where}{field}' is present: {reason}")
        for field in _EXPERTS:
            if config.get(field) is not None and not family.experts:
                self.fail(f"field '{where}{field}' is present: this model_type is read as dense only")

    def integer(self, config: Mapping[str, Any], where: str, field: str) -> int:
        most = MAX_COUNT if field == "num_hidden_layers" else MAX_EXTENT
        value: Any = config.get(field)
        if value is None:
            self.fail(f"field '{where}{field}' is missing; add it from the published config")
        if not _is_integer(value, most):
            self.fail(f"field '{where}{field}' must be an integer from 1 to {most}, found {_short(value)}")
        return value

    def experts(self, config: Mapping[str, Any], where: str, layers: int) -> _Experts:
        """As transformers decides it: a layer is sparse at every `decoder_sparse_step`, unless it is listed."""
        count = self.integer(config, where, "num_experts")
        step = self.integer({"decoder_sparse_step": 1, **config}, where, "decoder_sparse_step")
        listed = config.get("mlp_only_layers") or []
        if not isinstance(listed, list) or not all(type(i) is int and 0 <= i < layers for i in listed):
            self.fail(f"field '{where}mlp_only_layers' must list layers from 0 to {layers - 1}, found {_short(listed)}")
        sparse = sum(1 for i in range(layers) if (i + 1) % step == 0 and i not in listed)
        return _Experts(count, layers - sparse)


def _gemms(
    fields: Mapping[str, int], experts: _Experts | None, tp: int, layers: _Layers
) -> list[tuple[str, Signature, int, str]]:
    """(name, signature, count, per) of every GEMM of one rank; `tp` must divide, see `_obstacle`."""
    d = layers.dtypes[2]
    hidden, depth = fields["hidden_size"], fields["num_hidden_layers"]
    heads = fields["num_attention_heads"] // tp
    kv_heads = max(fields["num_key_value_heads"] // tp, 1)
    intermediate = fields["intermediate_size"] // tp
    dense = experts.dense_layers if experts else depth

    def gemm(name: str, n: int, k: int, count: int, epilogue: str = "none") -> tuple[str, Signature, int, str]:
        signature = Signature(*layers.dtypes, "f32", epilogue, n, k, scaling=layers.scaling)
        if name == "router":
            signature = Signature(d, d, d, "f32", "none", n, k)
        return (name, signature, *((1, "layer") if count == depth else (count, "model")))

    gemms = [
        gemm("qkv", (heads + 2 * kv_heads) * fields["head_dim"], hidden, depth),
        gemm("o", hidden, heads * fields["head_dim"], depth, layers.adding),
    ]
    if dense:
        gemms.append(gemm("gate_up", 2 * intermediate, hidden, dense, layers.gate_up))
        gemms.append(gemm("down", hidden, intermediate, dense, layers.adding))
    if experts and dense < depth:
        gemms.append(gemm("router", experts.count, hidden, depth - dense))
    vocabulary = _padded(fields["vocab_size"]) // tp
    return [*gemms, ("lm_head", Signature(d, d, d, "f32", "none", vocabulary, hidden), 1, "model")]


def _obstacle(fields: Mapping[str, int], experts: _Experts | None, tp: int, layers: _Layers) -> str | None:
    """Why this model cannot be split over `tp` ranks, naming the field; None when it can."""
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
    for name, signature, _, _ in _gemms(fields, experts, tp, layers):
        problem = signature_problem(signature)
        if problem:
            return f"gemm {name!r} at tp {tp}: {problem[0]} {problem[1]}"
    return None


def _source(source: str, fields: Mapping[str, int], experts: _Experts | None, tp: int) -> str:
    """One line: where the shapes come from and the values they follow from."""
    values = [f"{name} {value}" for name, value in fields.items()]
    if _padded(fields["vocab_size"]) != fields["vocab_size"]:
        values[-1] += f" (padded to {_padded(fields['vocab_size'])})"
    if experts:
        if not experts.dense_layers:
            values = [v for v in values if not v.startswith("intermediate_size")]
        values.append(f"num_experts {experts.count} (expert GEMMs are grouped and not covered)")
    file = source if source.endswith(".json") else f"{source} config.json"
    return f"{file} at tp {tp}: {', '.join(values)}"


def _padded(vocabulary: int) -> int:
    return vocabulary + -vocabulary % VOCABULARY_PADDING


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"field {_short(twice)} is given twice")
    return result


def _is_integer(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
