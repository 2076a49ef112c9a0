"""What the config.json of a Hugging Face model says of its linear layers: their sizes, their biases, their types.

`FAMILIES` is the whole knowledge of models: which model types are read, what each leaves out of its config, and which
layers have biases. What is not understood is refused by name; nothing is guessed. Knows nothing of manifests, kernels
or how a model is split over GPUs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from .manifest import MAX_COUNT, MAX_EXTENT, ManifestError, read_text

MAX_CONFIG_BYTES = 1 << 20

# What a config calls the type that a model is published in: the newer name, which transformers prefers, comes first.
_DTYPE_FIELDS = ("dtype", "torch_dtype")


@dataclass(frozen=True)
class Family:
    """One `model_type`: its architectures, and the fields that a config may leave out.

    `defaults` holds numbers, or the name of a rule in `_RULES`; they are those of the transformers config class.
    `text` is the model type of the `text_config` inside, where the shapes are. `activation` is the field that names
    the MLP's activation and what it is where that is left out. `post_norms` says that a norm comes between o or down
    and the residual. `biased` are the layers that always have a bias, and `biases` those that have one where a field
    is true, as the transformers model class has it; a field that is left out is false.
    """

    architectures: tuple[str, ...]
    defaults: tuple[tuple[str, int | str], ...] = ()
    experts: bool = False
    text: str | None = None
    activation: tuple[str, str] = ("hidden_act", "silu")
    post_norms: bool = False
    biased: tuple[str, ...] = ()
    biases: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True)
class Experts:
    """The mixture-of-experts part of a config: how many experts, and how many layers are dense all the same."""

    count: int
    dense_layers: int


@dataclass(frozen=True)
class Model:
    """A text model as its config describes it; `source` is what messages call the config.

    `fields` are the numbers that shapes follow from. `biased` are the layers with a bias. `activation` and `dtype` are
    each a field and what was found there, not yet checked: not every manifest depends on them.
    """

    source: str
    fields: Mapping[str, int]
    experts: Experts | None
    biased: tuple[str, ...]
    post_norms: bool
    activation: tuple[str, object]
    dtype: tuple[str, object]

    def fail(self, complaint: str) -> NoReturn:
        """Raise a `ManifestError` that names the config."""
        raise ManifestError(f"{self.source}: {complaint}")


_RULES = {
    "heads": lambda fields: fields["num_attention_heads"],
    "hidden_size / heads": lambda fields: fields["hidden_size"] // fields["num_attention_heads"],
}
_SPLIT_HEAD = ("head_dim", "hidden_size / heads")
_GEMMA_ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")

# By field, the layers that it gives a bias.
_ATTENTION_BIAS = ("attention_bias", ("qkv", "o"))
_MLP_BIAS = ("mlp_bias", ("gate_up", "down"))

FAMILIES = {
    "llama": Family(
        ("LlamaForCausalLM",),
        (("num_key_value_heads", "heads"), _SPLIT_HEAD),
        biases=(_ATTENTION_BIAS, _MLP_BIAS),
    ),
    "mistral": Family(("MistralForCausalLM",), (_SPLIT_HEAD,)),
    "mistral3": Family(("Mistral3ForConditionalGeneration",), text="mistral"),
    # Qwen2 has biases that no field of its config tells of.
    "qwen2": Family(("Qwen2ForCausalLM",), (_SPLIT_HEAD,), biased=("qkv",)),
    "qwen3": Family(("Qwen3ForCausalLM",), biases=(_ATTENTION_BIAS,)),
    "qwen3_moe": Family(("Qwen3MoeForCausalLM",), experts=True, biases=(_ATTENTION_BIAS,)),
    "gemma2": Family(("Gemma2ForCausalLM",), activation=_GEMMA_ACTIVATION, post_norms=True, biases=(_ATTENTION_BIAS,)),
    # Published Gemma 3 configs leave out whatever equals transformers' Gemma3TextConfig.
    "gemma3_text": Family(
        ("Gemma3ForCausalLM",),
        (("vocab_size", 262208), ("num_attention_heads", 8), ("num_key_value_heads", 4), ("head_dim", 256)),
        activation=_GEMMA_ACTIVATION,
        post_norms=True,
        biases=(_ATTENTION_BIAS,),
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
# What to do with a model of another kind.
_BY_HAND = (
    f"the supported types are {', '.join(FAMILIES)}; for any other model write the manifest by hand, as "
    "docs/manifests.md describes"
)
# Fields by which one family or another says that layers have biases.
_BIASES = ("attention_bias", "mlp_bias", "qkv_bias", "bias")


def load_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a config.json.

    Raises:
        ManifestError: it cannot be read, is not JSON, or is not an object.
    """
    name = os.fspath(path)
    text = read_text(name, "a model's config.json", MAX_CONFIG_BYTES)
    try:
        config = json.loads(text, object_pairs_hook=_distinct)
    except json.JSONDecodeError as error:
        raise ManifestError(f"{name}:{error.lineno}: not JSON: {error.msg}; give a model's config.json") from None
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{name}: not the JSON of a model's config.json: {error}; check the file") from None
    if not isinstance(config, dict):
        raise ManifestError(f"{name}: must hold a JSON object, found {short(config)}; give a model's config.json")
    return config


def read_model(config: Mapping[str, Any], source: str) -> Model:
    """What a config says; `source` is what messages call it.

    Raises:
        ManifestError: the config is of an unknown kind, or a field is missing or wrong.
    """
    reader = _Reader(source)
    family, text, where = reader.text(config)
    fields = reader.shapes(family, text, where)
    experts = reader.experts(text, where, fields["num_hidden_layers"]) if family.experts else None
    name, default = family.activation
    activation = where + name, default if text.get(name) is None else text[name]
    biased = reader.biased(family, text, where)
    return Model(source, fields, experts, biased, family.post_norms, activation, _dtype(config, text, where))


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any], where: str) -> tuple[str, object]:
    """The field that names the model's type, and what is there; the outer config has the say, as in transformers."""
    for prefix, part in (("", config), (where, text)):
        for field in _DTYPE_FIELDS:
            if part.get(field) is not None:
                return prefix + field, part[field]
    return _DTYPE_FIELDS[-1], None


class _Reader:
    """Reads fields of a config; remembers what to call it in messages."""

    def __init__(self, source: str) -> None:
        self.source = source

    def fail(self, complaint: str) -> NoReturn:
        raise ManifestError(f"{self.source}: {complaint}")

    def text(self, config: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any], str]:
        """The part of the config that describes the text model, its family, and where it is."""
        name = self.model_type(config, "")
        family = FAMILIES[name]
        text, where = config, ""
        if family.text:
            inside = config.get("text_config")
            if not isinstance(inside, dict):
                self.fail(f"field 'text_config' must be an object for model_type {name!r}, found {short(inside)}")
            text, where = inside, "text_config."
            inner = self.model_type(text, where) if "model_type" in text else family.text
            if inner != family.text:
                self.fail(f"field 'text_config.model_type': {name!r} needs {family.text!r}, found {inner!r}")
            self.refuse(config, "", FAMILIES[family.text])
            family = FAMILIES[family.text]
        self.refuse(text, where, family)
        return family, text, where

    def shapes(self, family: Family, text: Mapping[str, Any], where: str) -> dict[str, int]:
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
        return fields

    def model_type(self, config: Mapping[str, Any], where: str) -> str:
        name = config.get("model_type")
        if not isinstance(name, str) or name not in FAMILIES:
            what = "is missing" if name is None else f"{short(name)} is not supported"
            self.fail(f"field '{where}model_type' {what}; {_BY_HAND}")
        found = config.get("architectures")
        known = FAMILIES[str(name)].architectures
        if found is not None and (not isinstance(found, list) or len(found) != 1 or found[0] not in known):
            self.fail(f"field '{where}architectures' must be [{', '.join(known)}] for {name!r}, found {short(found)}")
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
        if not is_integer(value, most):
            self.fail(f"field '{where}{field}' must be an integer from 1 to {most}, found {short(value)}")
        return value

    def experts(self, config: Mapping[str, Any], where: str, layers: int) -> Experts:
        """As transformers decides it: a layer is sparse at every `decoder_sparse_step`, unless it is listed."""
        count = self.integer(config, where, "num_experts")
        step = self.integer({"decoder_sparse_step": 1, **config}, where, "decoder_sparse_step")
        listed = config.get("mlp_only_layers") or []
        if not isinstance(listed, list) or not all(type(i) is int and 0 <= i < layers for i in listed):
            self.fail(f"field '{where}mlp_only_layers' must list layers from 0 to {layers - 1}, found {short(listed)}")
        sparse = sum(1 for i in range(layers) if (i + 1) % step == 0 and i not in listed)
        return Experts(count, layers - sparse)

    def biased(self, family: Family, text: Mapping[str, Any], where: str) -> tuple[str, ...]:
        """The layers that have a bias, in the order in which a forward pass runs them."""
        layers = set(family.biased)
        known = dict(family.biases)
        for field in _BIASES:
            value = text.get(field)
            if value is not None and not isinstance(value, bool):
                self.fail(f"field '{where}{field}' must be true or false, found {short(value)}; check the config")
            if value and field not in known:
                self.fail(
                    f"field '{where}{field}' is true, which transformers does not read for this model_type; remove it, "
                    "or write the manifest by hand, as docs/manifests.md describes, if layers have such a bias"
                )
            if value:
                layers.update(known[field])
        return tuple(layer for layer in ("qkv", "o", "gate_up", "down") if layer in layers)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"field {short(twice)} is given twice")
    return result


def is_integer(value: object, most: int) -> bool:
    """Whether this is an integer from 1 to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def short(value: object) -> str:
    """How messages show a value that was found."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
