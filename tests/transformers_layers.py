"""The linear layers, routers and experts of transformers' own modules, built on the meta device: what
`tests/data/model_layers.json` records, with the version that made them. `python -m tests.transformers_layers` writes
it.

Weights that servers merge are added up under the server's name. A row is (count of modules, groups, n, k, bias), groups
0 where it is no stack of experts.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

DATA = Path(__file__).parent / "data"
PUBLISHED: dict[str, dict[str, Any]] = yaml.safe_load((DATA / "models.yaml").read_text())
RECORDED = DATA / "model_layers.json"
VERSION = "transformers"  # the name, beside those of models, of the version that made the record

Row = tuple[int, int, int, int, bool]

_TOWERS = re.compile(r"visual|vision|multi_modal")
# By the last part of a module's name: what servers call the layer that it is a part of.
_MERGED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "gate_up"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a"),
    **dict.fromkeys(("gate", "router"), "router"),
    **{f"{name}_proj": name for name in ("o", "down", "q_b", "kv_b")},
    **dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj_qkvz"),
    **dict.fromkeys(("in_proj_b", "in_proj_a"), "in_proj_ba"),
}


def cut(name: str) -> dict[str, Any]:
    """The config of a published model with few layers."""
    config = copy.deepcopy(PUBLISHED[name]["config"])
    config.get("text_config", config)["num_hidden_layers"] = PUBLISHED[name]["layers"]
    return config


def build(config: dict[str, Any]) -> Any:
    """transformers' module of a config."""
    import torch
    import transformers

    with torch.device("meta"):
        made = transformers.AutoConfig.for_model(**copy.deepcopy(config))
        return getattr(transformers, config["architectures"][0])(made)


class Weight(NamedTuple):
    """A weight (n, k), or (groups, n, k), by the path of its module; `turned` where it is stored (groups, k, n)."""

    path: str
    shape: tuple[int, ...]
    bias: bool
    turned: bool = False


def rows(model: Any, tp: int = 1) -> dict[str, Row]:
    """What a model's modules have, by the server's name; with `tp` above 1 only what its own plan speaks of, and of
    that what one rank has."""
    text = model.config.get_text_config()
    plan = {**(text.base_model_tp_plan or {}), **(model._tp_plan or {})} if tp > 1 else {}
    parts: dict[tuple[str, str], list[Weight | None]] = {}
    for weight in weights(model, text.hidden_size):
        parent, _, leaf = weight.path.rpartition(".")
        part = weight if tp == 1 else on_one_rank(weight, plan, tp)
        parts.setdefault((parent, leaf), []).append(part)
    merged: dict[tuple[str, str], list[Weight | None]] = {}
    for (parent, leaf), each in parts.items():
        merged.setdefault((parent, server_name(parent, leaf, parts)), []).extend(each)
    found: dict[str, list[tuple[int, int, int, bool]]] = {}
    for (_, name), each in merged.items():
        there = [part for part in each if part]
        if len(there) == len(each):
            groups = there[0].shape[0] if len(there[0].shape) == 3 else 0
            n, k = sum(part.shape[-2] for part in there), there[0].shape[-1]
            found.setdefault(name, []).append((groups, n, k, there[0].bias))
    assert all(len(set(each)) == 1 for each in found.values()), found
    return {name: (len(each), *each[0]) for name, each in found.items()}


def weights(model: Any, hidden: int) -> Iterator[Weight]:
    """Those of every linear layer, router and stack of experts of the text model."""
    from torch import nn

    for path, module in model.named_modules():
        if _TOWERS.search(path):
            continue
        if isinstance(module, nn.Linear) or "Router" in type(module).__name__:
            yield Weight(path, tuple(module.weight.shape), getattr(module, "bias", None) is not None)
        elif path.endswith(".experts"):
            turned = module.gate_up_proj.shape[-1] != hidden
            for name in ("gate_up_proj", "down_proj"):
                groups, *extents = getattr(module, name).shape
                shape = (groups, *(reversed(extents) if turned else extents))
                yield Weight(f"{path}.{name}", shape, hasattr(module, f"{name}_bias"), turned)


def on_one_rank(weight: Weight, plan: dict[str, str], tp: int) -> Weight | None:
    """The weight as a plan splits it; None where it does not speak of it. Its words say which side of the weight, as it
    is stored, the ranks share out."""
    known = [word for name, word in plan.items() if re.search(rf"(^|\.){name.replace('*', '[0-9]+')}$", weight.path)]
    if not known:
        return None
    *groups, n, k = weight.shape
    word = known[0].removeprefix("packed_")
    if word.startswith(("colwise", "rowwise")):
        divides_n = word.startswith("rowwise") == weight.turned
        n, k = (n // tp, k) if divides_n else (n, k // tp)
    return weight._replace(shape=(*groups, n, k))


def server_name(parent: str, leaf: str, paths: Collection[tuple[str, str]]) -> str:
    """What servers call a layer, or what they merge it into, by its name in transformers and what is beside it."""
    name = _MERGED.get(leaf, leaf)
    if (parent, "kv_a_proj_with_mqa") in paths and (parent, "q_a_proj") not in paths:
        name = {"q_proj": "q", "kv_a_proj_with_mqa": "kv_a"}.get(leaf, name)
    within = parent.rpartition(".")[2]
    if within == "experts":
        return f"experts_{name}"
    return f"shared_{name}" if within.startswith("shared_expert") else name


def record() -> str:
    """All of it, as text: the version of transformers, and of each model, by name, at tp 1 and at tp 2."""
    import transformers

    found: dict[str, Any] = {VERSION: transformers.__version__}
    for name in PUBLISHED:
        model = build(cut(name))
        found[name] = {str(tp): rows(model, tp) for tp in (1, 2)}
    rests = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in found.items()]
    return "{\n" + ",\n".join(rests) + "\n}\n"


if __name__ == "__main__":
    RECORDED.write_text(record())
