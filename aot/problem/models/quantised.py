"""What a config says of quantised weights, and which of that a manifest can follow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from .config import Fields, short

FIELD = "quantization_config"
_OTHERS = ("compression_config",)
# Of weights in fp8: what is supported, with blocks and with one scale for the weight, and what is meant where a config
# leaves a field out.
_BLOCKS = {"weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
_TENSORS = {"fmt": "e4m3", "activation_scheme": "static"}
_KEPT = "modules_to_not_convert", "ignored_layers"  # what layers in 16 bits are called by
_USUAL = {"fmt": "e4m3", "activation_scheme": "dynamic"}
OF_EXPERTS = "mxfp4"  # what configs call the method by which experts alone are in MXFP4
_BY_HAND = "use the config of the unquantised model and give --dtype, or write the manifest by hand: docs/manifests.md"

_NO_KERNEL = (
    "no kernel takes it: leave these layers to the server, or take a checkpoint in 4 bits and groups of 128, in AWQ's "
    "version gemm with zero points, or of GPTQ without act-order"
)

# What checkpoints in few bits call the formats that a manifest can follow, and the scaling that each is.
_MODELOPT = {"NVFP4": "nvfp4", "MXFP8": "mxfp8", "FP8": "tensor"}
_GROUPS = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}  # elements to a scale; also what is meant where nothing is said
_COMPRESSED = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}

# Of compressed-tensors in fp8, how scales of weights and of activations are spread, and the scaling that is; where
# activations have one for each token or group, it is made as they come.
_FLOATS = "float-quantized"
_SPREADS = {
    ("tensor", "tensor"): "tensor",
    ("channel", "token"): "row_column",
    ("block", "group"): "block",
}
_BLOCK = {"block_structure": [128, 128], "group_size": 128}  # of weights; of activations

# Of those with weights alone in 4 bits, what each says of weights; a scheme may also leave a field out that is None.
_WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "pack-quantized": ("int4_weight", {"num_bits": 4, "type": "int", "group_size": 128}),
    "mxfp4-pack-quantized": ("mxfp4_weight", {"num_bits": 4, "type": "float", "group_size": 32}),
}
_KEPT_ORDER = (None, False, "weight", "static")  # of columns; others need the activations' in another order
_GPTQ = {"bits": 4, "group_size": 128, "desc_act": False}
_AWQ = {"bits": 4, "group_size": 128, "zero_point": True}
_AWQ_IN_ROWS = "gemv"  # how versions begin that have weights in another layout
_GPTQ_FORMATS = "gptq", "gptq_v2"
_BY_SYMMETRY = {True: "int4_weight", False: "int4_zero_weight"}

# Modules whose layers a manifest in e4m3 or e2m1 has in few bits; norms, routers, lm_head and in_proj_ba it has not.
_IN_FEW_BITS = re.compile(r"(?!.*\b(visual|vision|multi_modal)).*\b(\w+_proj|\w+_proj_with_mqa|in_proj_qkvz|experts)$")


def scaling_of_weights(fields: Fields) -> tuple[str, list[str]]:
    """The scaling of weights that are published in e4m3, or in 4 bits, empty where they are not; and remarks.

    Raises:
        ManifestError: they are quantised in a way that no manifest follows from.
    """
    for field in _OTHERS:
        if fields.has(field):
            fields.fail(f"{fields.name(field)} is present: quantised weights; {_BY_HAND}")
    if not fields.has(FIELD):
        return "", []
    found = fields.inside(FIELD).config
    method = found.get("quant_method")
    if method == OF_EXPERTS:
        return "", []
    if method == "fp8":
        return _fp8(fields, found), []
    if method == "gptq":
        scaling = _gptq(fields, found)
        remarks = [f"{fields.name(FIELD)}: sym is False, and vLLM loads no such GPTQ"] if "zero" in scaling else []
        return scaling, remarks
    if method == "awq":
        return _awq(fields, found), []
    if method in ("modelopt", "modelopt_fp4"):
        scaling, kept = _modelopt(fields, found)
    elif method == "compressed-tensors":
        scaling, kept = _compressed_tensors(fields, found)
    else:
        by = (
            "weights quantised by a method that is not named"
            if method is None
            else f"weights quantised by {short(method)}"
        )
        fields.fail(f"{fields.name(FIELD)} is present: {by}; {_BY_HAND}")
    _refuse_kept(fields, kept)
    if any(fnmatchcase("lm_head", glob) for glob in map(_glob, kept) if glob):
        return scaling, []
    return scaling, [f"{fields.name(FIELD)}: lm_head is not left out; the manifest has it in 16 bits"]


def scaling_of_experts(fields: Fields) -> str:
    """The scaling of weights that experts alone have in 4 bits, as GPT-OSS's do; empty where there are none such."""
    method = fields.inside(FIELD).config.get("quant_method") if fields.has(FIELD) else None
    return "mxfp4_weight" if method == OF_EXPERTS else ""


def _fp8(fields: Fields, found: Mapping[str, Any]) -> str:
    supported = _BLOCKS if found.get("weight_block_size") is not None else _TENSORS
    for name, wanted in supported.items():
        value = found.get(name, _USUAL.get(name))
        if value != wanted:
            without = "" if supported is _BLOCKS else " without weight_block_size"
            said = f"of fp8{without}, {name} {wanted} is supported, found {short(value)}"
            fields.fail(f"{fields.name(FIELD)} is present: {said}; {_BY_HAND}")
    _refuse_kept(fields, [n for name in _KEPT for n in _names(fields, found, name)])
    return "block" if supported is _BLOCKS else "tensor"


def _gptq(fields: Fields, found: Mapping[str, Any]) -> str:
    """The scaling of a checkpoint of GPTQ, all of whose layers must have the usual one."""
    _refuse_others(fields, "gptq", _GPTQ, found)
    if found.get("checkpoint_format", "gptq") not in _GPTQ_FORMATS:
        said = f"of gptq, checkpoint_format {' or '.join(_GPTQ_FORMATS)} is supported"
        fields.fail(f"{fields.name(FIELD)} is present: {said}, found {short(found['checkpoint_format'])}; {_NO_KERNEL}")
    for name in ("dynamic", "modules_in_block_to_quantize"):
        if found.get(name):
            fields.fail(f"{fields.name(FIELD)} is present: of gptq, {name} is not read; {_BY_HAND}")
    if found.get("lm_head"):
        fields.fail(f"{fields.name(FIELD)} is present: of gptq, an lm_head in 4 bits is not read; {_BY_HAND}")
    return _by_symmetry(fields, "gptq", "sym", found.get("sym"))


def _awq(fields: Fields, found: Mapping[str, Any]) -> str:
    """The scaling of a checkpoint of AWQ. A module that it leaves out is a part of the names of those meant."""
    _refuse_others(fields, "awq", _AWQ, found)
    version = found.get("version")
    if version is not None and (not isinstance(version, str) or version.lower().startswith(_AWQ_IN_ROWS)):
        said = f"of awq, version {short(version)} has another layout"
        fields.fail(f"{fields.name(FIELD)} is present: {said}; {_NO_KERNEL}")
    for module in _names(fields, found, "modules_to_not_convert"):
        if any(f".{module}." in f".{name}." for name in _PROBES):
            fields.fail(f"{fields.name(FIELD)} is present, and leaves {short(module)} in 16 bits; {_BY_HAND}")
    return "int4_zero_weight"


def _refuse_others(fields: Fields, method: str, supported: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise on a field of a checkpoint that is not what is supported."""
    for name, wanted in supported.items():
        if found.get(name) != wanted:
            said = f"of {method}, {name} {wanted} is supported, found {short(found.get(name))}"
            fields.fail(f"{fields.name(FIELD)} is present: {said}; {_NO_KERNEL}")


def _by_symmetry(fields: Fields, of: str, name: str, symmetric: Any) -> str:
    """The scaling of int4 in groups of 128, which has zero points or not."""
    if not isinstance(symmetric, bool):
        fields.fail(
            f"{fields.name(FIELD)} is present: of {of}, {name} must be true or false, found {short(symmetric)}; "
            f"{_BY_HAND}"
        )
    return _BY_SYMMETRY[symmetric]


def _modelopt(fields: Fields, found: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The scaling of a checkpoint of NVIDIA's Model Optimizer, and the modules that it leaves in 16 bits."""
    algorithm = found.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in _MODELOPT:
        said = f"of modelopt, quant_algo {' or '.join(_MODELOPT)} is supported, found {short(algorithm)}"
        fields.fail(f"{fields.name(FIELD)} is present: {said}; {_BY_HAND}")
    groups = found.get("config_groups")
    schemes = [scheme for scheme in (groups.values() if isinstance(groups, dict) else ()) if isinstance(scheme, dict)]
    parts = [scheme.get(part) for scheme in schemes for part in ("weights", "input_activations")]
    for numbers in (found, *(part for part in parts if isinstance(part, dict))):
        _check_group(fields, _MODELOPT[algorithm], f"modelopt's {algorithm}", numbers)
    return _MODELOPT[algorithm], [
        name for field in ("ignore", "exclude_modules") for name in _names(fields, found, field)
    ]


def _compressed_tensors(fields: Fields, found: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The same of a checkpoint of compressed-tensors, all of whose layers must have one scheme."""
    groups = found.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    scheme = schemes[0] if len(schemes) == 1 and isinstance(schemes[0], dict) else {}
    if scheme.get("targets") != ["Linear"]:
        said = "of compressed-tensors, one group with targets ['Linear'] is supported"
        fields.fail(f"{fields.name(FIELD)} is present: {said}, found {short(groups)}; {_BY_HAND}")
    layout = scheme.get("format") or found.get("format")
    if not isinstance(layout, str):
        layout = ""
    if layout in _WEIGHTS and scheme.get("input_activations") is None:
        return _of_weights_alone(fields, layout, scheme.get("weights")), _names(fields, found, "ignore")
    if layout == _FLOATS:
        return _of_floats(fields, scheme), _names(fields, found, "ignore")
    if layout not in _COMPRESSED:
        known = " or ".join(dict.fromkeys([*_COMPRESSED, *_WEIGHTS, _FLOATS]))
        said = f"of compressed-tensors, format {known} is supported, found "
        said += short(scheme.get("format") or found.get("format"))
        fields.fail(f"{fields.name(FIELD)} is present: {said}; {_BY_HAND}")
    for part in ("weights", "input_activations"):
        numbers = scheme.get(part)
        if not isinstance(numbers, dict) or (numbers.get("num_bits"), numbers.get("type")) != (4, "float"):
            said = f"{part} must be floats of 4 bits, found {short(numbers)}"
            fields.fail(f"{fields.name(FIELD)} is present: {said}; {_BY_HAND}")
        _check_group(fields, _COMPRESSED[layout], f"{layout} {part}", numbers)
    return _COMPRESSED[layout], _names(fields, found, "ignore")


def _check_group(fields: Fields, scaling: str, of: str, numbers: Mapping[str, Any]) -> None:
    """Raise where a scale is for other than so many elements as the scaling has."""
    size = numbers.get("group_size")
    if scaling in _GROUPS and size not in (None, _GROUPS[scaling]):
        said = f"of {of}, group_size {_GROUPS[scaling]} is supported, found {short(size)}"
        fields.fail(f"{fields.name(FIELD)} is present: {said}; {_BY_HAND}")


def _of_floats(fields: Fields, scheme: Mapping[str, Any]) -> str:
    """The scaling of a scheme of compressed-tensors with weights and activations in e4m3."""
    both = [dict(of) if isinstance(of := scheme.get(part), dict) else {} for part in ("weights", "input_activations")]
    for part, numbers in zip(("weights", "input_activations"), both, strict=True):
        wanted = {"num_bits": 8, "type": "float", "symmetric": True} | ({"dynamic": False} if part == "weights" else {})
        wrong = next((name for name, value in wanted.items() if numbers.get(name) != value), None)
        if wrong is not None:
            said = f"of {_FLOATS} {part}, {wrong} {wanted[wrong]} is supported, found {short(numbers.get(wrong))}"
            fields.fail(f"{fields.name(FIELD)} is present: {said}; {_BY_HAND}")
    weights, activations = both
    scaling = _SPREADS.get((str(weights.get("strategy")), str(activations.get("strategy"))))
    static = scaling == "tensor"
    blocks = {"block_structure": weights.get("block_structure"), "group_size": activations.get("group_size")}
    if scaling is None or activations.get("dynamic") is static or (scaling == "block" and blocks != _BLOCK):
        known = (
            "a scale for the tensor in both, static; for each channel and token, dynamic; or for blocks of 128 x 128"
        )
        said = f"of {_FLOATS}, {known} and groups of 128, dynamic, are supported, found {short(both)}"
        fields.fail(f"{fields.name(FIELD)} is present: {said}; {_BY_HAND}")
    return scaling


def _of_weights_alone(fields: Fields, layout: str, weights: Any) -> str:
    """The scaling of a scheme of compressed-tensors whose activations have 16 bits."""
    scaling, wanted = _WEIGHTS[layout]
    said = dict(weights) if isinstance(weights, dict) else {}
    wrong = next((name for name, value in wanted.items() if said.get(name) != value), None)
    if wrong is None and said.get("actorder") not in _KEPT_ORDER:
        wrong, wanted = "actorder", {"actorder": "weight"}
    if wrong is not None:
        words = f"of {layout} weights, {wrong} {wanted[wrong]} is supported, found {short(said.get(wrong))}"
        fields.fail(f"{fields.name(FIELD)} is present: {words}; {_NO_KERNEL}")
    if layout == "pack-quantized":
        return _by_symmetry(fields, f"{layout} weights", "symmetric", said.get("symmetric"))
    return scaling


def _names(fields: Fields, found: Mapping[str, Any], field: str) -> list[str]:
    """The names, or patterns, in a list of the config; none where it is left out."""
    kept = found.get(field) or []
    if not isinstance(kept, list):
        fields.fail(f"{fields.name(FIELD)}: {field} must be a list, found {short(kept)}; {_BY_HAND}")
    return [module for module in kept if isinstance(module, str)]


def _refuse_kept(fields: Fields, kept: Iterable[str]) -> None:
    """Raise on modules that stay in 16 bits, of which the manifest has the layers in few."""
    for module in kept:
        glob = _glob(module)
        if glob is None:
            fields.fail(
                f"{fields.name(FIELD)} is present, and leaves out {short(module)}, which is not read; {_BY_HAND}"
            )
        globbed = "*" in glob and any(fnmatchcase(name, glob) for name in _PROBES)
        if globbed or _IN_FEW_BITS.fullmatch(glob):
            fields.fail(f"{fields.name(FIELD)} is present, and leaves {short(module)} in 16 bits; {_BY_HAND}")


def _glob(module: str) -> str | None:
    """A name, or a pattern of compressed-tensors ("re:" before it) or modelopt, as a pattern in which only * is
    special; None where it is more than that. Foreign patterns are not run, since they may take for ever."""
    if not module.startswith("re:"):
        return module if not set(module) & set("?[]") else None
    text = module.removeprefix("re:").removeprefix("^")
    whole = text.endswith("$")
    text = text.removesuffix("$").replace("\\.", ".").replace(".*", "*")
    return None if set(text) & set("\\[](){}|+?^$") else text + ("" if whole else "*")


# Layers that a pattern may mean.
_PROBES = [
    f"{model}.{layer}.{module}"
    for model in ("model.layers", "model.language_model.layers", "language_model.model.layers")
    for layer in range(100)
    for module in (
        *(f"self_attn.{x}_proj" for x in "qkvo"),
        *(f"{mlp}.{x}_proj" for mlp in ("mlp", "mlp.experts.0") for x in ("gate", "up", "down")),
    )
]
