"""MLPs of a model's layers: dense ones, and mixtures with their router, experts and shared expert."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Literal

from runtime.numbers.epilogue import CLAMPED_LIMIT

from ..manifest import MAX_COUNT
from .config import Fields, short
from .layers import Experts, Extent, Linear


def by_step(fields: Fields, depth: int) -> int:
    """Qwen's: a layer is sparse at every `decoder_sparse_step`, unless it is listed."""
    step = 1 if not fields.has("decoder_sparse_step") else fields.integer("decoder_sparse_step")
    listed = fields.listed_layers("mlp_only_layers", depth)
    return sum(1 for i in range(depth) if (i + 1) % step == 0 and i not in listed)


def after_dense(fields: Fields, depth: int) -> int:
    """DeepSeek's: the first `first_k_dense_replace` layers are dense."""
    dense = fields.integer("first_k_dense_replace", MAX_COUNT, 0)
    if fields.config.get("moe_layer_freq") not in (None, 1):
        found = short(fields.config["moe_layer_freq"])
        fields.fail(f"{fields.name('moe_layer_freq')} must be 1, found {found}; write the manifest by hand")
    return max(depth - dense, 0)


def interleaved(fields: Fields, depth: int) -> int:
    """Llama 4's: the layers in `moe_layers`, or else the last of every `interleave_moe_layer_step`."""
    if fields.has("moe_layers"):
        return len(set(fields.listed_layers("moe_layers", depth)))
    return depth // fields.integer("interleave_moe_layer_step")


def every(fields: Fields, depth: int) -> int:
    """All layers are sparse."""
    return depth


@dataclass(frozen=True)
class Mixture:
    """Where a config says what its mixture is made of: fields, of which the first that is there counts.

    `sparse` tells how many layers have it. `shared` is the field that says how wide the shared expert is, and
    `shared_times` one that says how many times that is; empty where there is none. `shared_gate` says that a layer of
    one output weighs it. The router is a plain layer, has a bias, or is computed in f32, always or, "by_config", where
    `moe_router_dtype` is float32. `dense` is the field of the other layers' MLP. `sequence_parallel`, of router and
    shared expert, is as of `Linear`; `gate`, `bias`, `on_input` and `note` are as of `Experts`.
    """

    sparse: Callable[[Fields, int], int]
    count: tuple[str, ...] = ("num_experts", "num_local_experts")
    inner: str = "moe_intermediate_size"
    shared: str = ""
    shared_times: str = ""
    shared_gate: bool = False
    router: Literal["plain", "bias", "f32", "by_config"] = "plain"
    dense: str = "intermediate_size"
    sequence_parallel: bool = False
    gate: str = ""
    bias: bool = False
    on_input: bool = False
    note: str = ""


def dense_mlp(
    fields: Fields, field: str, count: int, biased: Set[str], prefix: str = "", times: int = 1
) -> list[Linear]:
    """gate_up and down of `count` layers, of which `field` says how wide they are, `times` that."""
    hidden = Extent(fields.used["hidden_size"])
    inner = fields.integer(field) * times
    down = Linear(
        f"{prefix}down",
        (hidden,),
        Extent(inner, 1, field, "divided"),
        count,
        "down" in biased,
        residual=not prefix,
    )
    n = (Extent(inner, 2, field, "divided", 2),)
    return [Linear(f"{prefix}gate_up", n, hidden, count, "gate_up" in biased, gated=True), down]


def mixture(fields: Fields, of: Mixture, sparse: int, biased: Set[str]) -> tuple[list[Linear], Experts, list[str]]:
    """The router and the shared expert, the experts, and remarks on what is left out, of `sparse` layers."""
    hidden = fields.used["hidden_size"]
    name = fields.one_of(of.count)
    count = fields.integer(name, MAX_COUNT)
    top_k = fields.integer("num_experts_per_tok", count)
    inner = fields.integer(of.inner)
    limit = fields.config.get("swiglu_limit")
    if of.gate.startswith("swiglu_clamped") and limit not in (None, CLAMPED_LIMIT):
        fields.fail(
            f"{fields.name('swiglu_limit')} must be {CLAMPED_LIMIT}, found {short(limit)}; no kernel has another"
        )
    linears, remarks = [], []
    by_config = of.router == "by_config" and fields.config.get("moe_router_dtype") == "float32"
    if of.router == "f32" or by_config:
        remarks.append("the router is left out, since it is computed in float32")
    else:
        router = Linear(
            "router", (Extent(count),), Extent(hidden), sparse, of.router == "bias", plain=True, may_go=True
        )
        linears.append(router)
    times = 1
    if of.shared_times:
        times = fields.integer(of.shared_times, MAX_COUNT, 0) if fields.says(of.shared_times) else 0
    if of.shared and times:
        linears += dense_mlp(fields, of.shared, sparse, biased, "shared_", times)
        if of.shared_gate:
            remarks.append("the gate of the shared expert is left out, since it has one output")
    linears = [replace(layer, sequence_parallel=of.sequence_parallel) for layer in linears]
    of_family = of.gate, of.bias, of.on_input, of.note
    experts = Experts(count, top_k, sparse, hidden, inner, (name, of.inner), *of_family)
    return linears, experts, remarks
