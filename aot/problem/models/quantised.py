"""What a config says of quantised weights, and which of that a manifest can follow."""

from __future__ import annotations

import re

from .config import Fields, short

FIELD = "quantization_config"
_OTHERS = ("compression_config",)
# Of weights in fp8: what is supported, and what is meant where a config leaves a field out.
_SUPPORTED = {"weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
_USUAL = {"fmt": "e4m3", "activation_scheme": "dynamic"}
_BY_HAND = "use the config of the unquantised model and give --dtype, or write the manifest by hand: docs/manifests.md"

# Modules whose layers a manifest in e4m3 has in 8 bits; norms, routers, lm_head and in_proj_ba it has not.
_IN_8_BITS = re.compile(r"(?!.*\b(visual|vision|multi_modal)).*\b(\w+_proj|\w+_proj_with_mqa|in_proj_qkvz|experts)$")


def scaling_of_weights(fields: Fields) -> tuple[str, list[str]]:
    """The scaling of weights that are published in e4m3, empty where they are not; and remarks.

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
    if method == "mxfp4":
        said = f"{fields.name(FIELD)}: weights of experts are in mxfp4, which no kernel reads"
        return "", [f"{said}; the manifest is for weights that were turned into the type of the others"]
    if method != "fp8":
        fields.fail(f"{fields.name(FIELD)} is present: weights quantised by {short(method)}; {_BY_HAND}")
    for name, wanted in _SUPPORTED.items():
        value = found.get(name, _USUAL.get(name))
        if value != wanted:
            said = f"of fp8, {name} {wanted} is supported, found {short(value)}"
            fields.fail(f"{fields.name(FIELD)} is present: {said}; {_BY_HAND}")
    kept = found.get("modules_to_not_convert") or []
    if not isinstance(kept, list):
        fields.fail(f"{fields.name(FIELD)}: modules_to_not_convert must be a list, found {short(kept)}; {_BY_HAND}")
    for module in kept:
        if isinstance(module, str) and _IN_8_BITS.fullmatch(module):
            fields.fail(f"{fields.name(FIELD)} is present, and leaves {short(module)} in 16 bits; {_BY_HAND}")
    return "block", []
