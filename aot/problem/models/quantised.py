"""What a config says of quantised weights, and which of that a manifest can follow."""

from __future__ import annotations

import re
from typing import Any

from .config import Fields, short

FIELD = "quantization_config"
_OTHERS = ("compression_config",)
_BLOCK = [128, 128]
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
    found: Any = fields.config[FIELD]
    method = found.get("quant_method") if isinstance(found, dict) else found
    if method == "mxfp4":
        said = f"{fields.name(FIELD)}: weights of experts are in mxfp4, which no kernel reads"
        return "", [f"{said}; the manifest is for weights that were turned into the type of the others"]
    if method != "fp8":
        fields.fail(f"{fields.name(FIELD)} is present: weights quantised by {short(method)}; {_BY_HAND}")
    usual = {"weight_block_size": _BLOCK, "fmt": "e4m3", "activation_scheme": "dynamic"}
    for name, wanted in usual.items():
        if found.get(name, None if name == "weight_block_size" else wanted) != wanted:
            fields.fail(
                f"{fields.name(FIELD)} is present: of fp8, {name} {wanted} is supported, found "
                f"{short(found.get(name))}; {_BY_HAND}"
            )
    for module in found.get("modules_to_not_convert") or ():
        if isinstance(module, str) and _IN_8_BITS.fullmatch(module):
            fields.fail(f"{fields.name(FIELD)} is present, and leaves {short(module)} in 16 bits; {_BY_HAND}")
    return "block", []
