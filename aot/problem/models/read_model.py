"""A config as a whole: which family it is of, and the model that follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..manifest import MAX_COUNT
from .config import Fields, short
from .families import FAMILIES, Family
from .layers import Experts, Extent, Linear, Model
from .mixtures import dense_mlp, mixture
from .quantised import scaling_of_experts, scaling_of_weights

# vLLM's and SGLang's DEFAULT_VOCAB_PADDING_SIZE, in rows.
VOCABULARY_PADDING = 64

# What a config calls the type that a model is published in: the newer name, which transformers prefers, comes first.
_DTYPE_FIELDS = ("dtype", "torch_dtype")

# A config with one of these is of another model than a family without such layers.
_LATENT = ("kv_lora_rank", "q_lora_rank")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# Fields by which one family or another says that layers have biases.
_BIASES = ("attention_bias", "attention_out_bias", "mlp_bias", "qkv_bias", "use_bias", "bias")
_OTHER_MODELS = {"vision_config": "vision tower", "audio_config": "audio tower"}
# What to do with a model of another kind.
_BY_HAND = (
    f"the supported types are {', '.join(FAMILIES)}; for any other model write the manifest by hand, as "
    "docs/manifests.md describes"
)


def read_model(config: Mapping[str, Any], source: str) -> Model:
    """What a config says; `source` is what messages call it.

    Raises:
        ManifestError: the config is of an unknown kind, or a field is missing or wrong.
    """
    whole = Fields(config, source)
    family, fields = _text(whole)
    scaling, remarks = scaling_of_weights(whole)
    if fields is not whole and not scaling:
        scaling, more = scaling_of_weights(fields)
        remarks += more
    experts_in = scaling_of_experts(whole) or scaling_of_experts(fields)
    remarks += [f"the {what} is left out" for field, what in _OTHER_MODELS.items() if whole.has(field)]
    for part in {id(part): part for part in (whole, fields)}.values():
        _refuse(part, family)
    fields.defaults = family.defaults
    biased = _biased(fields, family)
    depth = fields.integer("num_hidden_layers", MAX_COUNT)
    fields.integer("hidden_size")
    linears, experts, more = _layers(fields, family, depth, biased)
    name, default = family.activation
    activation = fields.where + name, fields.config[name] if fields.has(name) else default
    return Model(
        source,
        depth,
        fields.used,
        tuple(linears),
        experts,
        family.residuals,
        family.rms_norms,
        activation,
        _dtype(whole, fields),
        scaling,
        experts_in,
        (*remarks, *more),
    )


def padded(vocabulary: int) -> int:
    """Rows of lm_head for so many words."""
    return vocabulary + -vocabulary % VOCABULARY_PADDING


def _layers(
    fields: Fields, family: Family, depth: int, biased: frozenset[str]
) -> tuple[list[Linear], Experts | None, list[str]]:
    """The linear layers, in the order in which a forward pass runs them, the experts, and remarks."""
    of = family.mixture
    sparse = of.sparse(fields, depth) if of else 0
    dense = dense_mlp(fields, of.dense if of else "intermediate_size", depth - sparse, biased) if sparse < depth else []
    attention = family.attention(fields, depth, biased)
    routed, experts, remarks = mixture(fields, of, sparse, biased) if of and sparse else ([], None, [])
    vocabulary = Extent(padded(fields.integer("vocab_size")), 1, "vocab_size", "divided")
    head = Linear("lm_head", (vocabulary,), Extent(fields.used["hidden_size"]), 1, plain=True, may_go=True, last=True)
    return [*attention, *dense, *routed, head], experts, remarks


def _text(whole: Fields) -> tuple[Family, Fields]:
    """The family of the text model, and the part of the config that describes it."""
    name = _model_type(whole)
    family = FAMILIES[name]
    if not family.text:
        return family, whole
    text = FAMILIES[family.text]
    if family.flat and not whole.has("text_config"):
        return text, whole
    if not isinstance(whole.config.get("text_config"), dict):
        found = short(whole.config.get("text_config"))
        whole.fail(f"field 'text_config' must be an object for model_type {name!r}, found {found}")
    fields = whole.inside("text_config")
    inner = _model_type(fields) if "model_type" in fields.config else family.text
    if inner != family.text:
        whole.fail(f"field 'text_config.model_type': {name!r} needs {family.text!r}, found {inner!r}")
    return text, fields


def _model_type(fields: Fields) -> str:
    name = fields.config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        what = "is missing" if name is None else f"{short(name)} is not supported"
        fields.fail(f"{fields.name('model_type')} {what}; {_BY_HAND}")
    found = fields.config.get("architectures")
    known = FAMILIES[name].architectures
    if found is not None and (not isinstance(found, list) or len(found) != 1 or found[0] not in known):
        fields.fail(f"{fields.name('architectures')} must be [{', '.join(known)}] for {name!r}, found {short(found)}")
    return name


def _refuse(fields: Fields, family: Family) -> None:
    """Raise on a field that says the model computes something else."""
    for field in _LATENT:
        if fields.has(field) and family.attention.__name__ != "latent":
            fields.fail(f"{fields.name(field)} is present: this model_type is read without latent attention (MLA)")
    for field in _EXPERTS:
        if fields.has(field) and not family.mixture:
            fields.fail(f"{fields.name(field)} is present: this model_type is read as dense only")


def _biased(fields: Fields, family: Family) -> frozenset[str]:
    """The layers that have a bias, by name."""
    found = set(family.biased)
    for field in _BIASES:
        value = fields.flag(field)
        if value and field not in family.biases:
            fields.fail(
                f"{fields.name(field)} is true, which transformers does not read for this model_type; remove it, "
                "or write the manifest by hand, as docs/manifests.md describes, if layers have such a bias"
            )
        if value:
            found.update(family.biases[field])
    return frozenset(found)


def _dtype(whole: Fields, text: Fields) -> tuple[str, object]:
    """The field that names the model's type, and what is there; the outer config has the say, as in transformers."""
    for part in (whole, text):
        for field in _DTYPE_FIELDS:
            if part.has(field):
                return part.where + field, part.config[field]
    return _DTYPE_FIELDS[-1], None
