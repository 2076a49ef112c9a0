"""The linear layers of attention, of each kind that models have, merged as vLLM and SGLang merge them."""

from __future__ import annotations

from collections.abc import Set

from .config import Fields, short
from .layers import Extent, Linear

FULL, LINEAR = "full_attention", "linear_attention"


def heads(fields: Fields, depth: int, biased: Set[str]) -> list[Linear]:
    """Attention of many heads: qkv, o. KV heads may be fewer than heads."""
    return _heads(fields, depth, biased, per_head=1)


def gated_and_linear(fields: Fields, depth: int, biased: Set[str]) -> list[Linear]:
    """Qwen3-Next's and Qwen3.5's: some layers have heads whose q comes with a gate for each output, the others linear
    attention, the gated delta rule: in_proj_qkvz, in_proj_ba, out_proj."""
    if fields.config.get("attn_output_gate") is False:
        fields.fail(
            f"{fields.name('attn_output_gate')} must be true, as in all such models; write the manifest by hand"
        )
    hidden = Extent(fields.used["hidden_size"])
    full = _full_layers(fields, depth)
    found = _heads(fields, full, biased, per_head=2) if full else []
    if full == depth:
        return found
    keys, values = (fields.integer(f"linear_num_{which}_heads") for which in ("key", "value"))
    key_dim, value_dim = (fields.integer(f"linear_{which}_head_dim") for which in ("key", "value"))
    if values % keys:
        fields.fail(
            f"{fields.name('linear_num_value_heads')} must be a multiple of linear_num_key_heads, found {values}"
        )

    def of(which: str, count: int, width: int, parts: int = 1) -> Extent:
        return Extent(count, width, f"linear_num_{which}_heads", "divided", parts)

    qkvz = of("key", keys, 2 * key_dim, 2), of("value", values, 2 * value_dim, 2)
    return [
        *found,
        Linear("in_proj_qkvz", qkvz, hidden, depth - full),
        Linear("in_proj_ba", (of("value", values, 2, 2),), hidden, depth - full, plain=True, may_go=True),
        Linear("out_proj", (hidden,), of("value", values, value_dim), depth - full, residual=True),
    ]


def latent(fields: Fields, depth: int, biased: Set[str]) -> list[Linear]:
    """DeepSeek's multi-head latent attention. q_b makes q of `q_lora_rank` elements, which with those of k and v are
    made by one layer, fused_qkv_a, on every rank; where that is null, q is made of the hidden state, and kv_a makes the
    others."""
    hidden, count = Extent(fields.used["hidden_size"]), fields.integer("num_attention_heads")
    nope, rope, value = (fields.integer(f) for f in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))

    def of(width: int) -> Extent:
        return Extent(count, width, "num_attention_heads", "divided")

    kv_rank = fields.integer("kv_lora_rank")
    kv_a = Extent(kv_rank), Extent(rope)
    if fields.says("q_lora_rank"):
        q_rank = Extent(fields.integer("q_lora_rank"))
        first = [
            Linear("fused_qkv_a", (q_rank, *kv_a), hidden, depth, "fused_qkv_a" in biased),
            Linear("q_b", (of(nope + rope),), q_rank, depth),
        ]
    else:
        first = [
            Linear("q", (of(nope + rope),), hidden, depth),
            Linear("kv_a", kv_a, hidden, depth, "fused_qkv_a" in biased),
        ]
    return [
        *first,
        Linear("kv_b", (of(nope + value),), Extent(kv_rank), depth),
        Linear("o", (hidden,), of(value), depth, "o" in biased, residual=True),
    ]


def _heads(fields: Fields, count: int, biased: Set[str], per_head: int) -> list[Linear]:
    """qkv and o of `count` layers; of each head's q there are `per_head` times its dimension."""
    hidden = Extent(fields.used["hidden_size"])
    query, kv = fields.integer("num_attention_heads"), fields.integer("num_key_value_heads")
    dim = fields.integer("head_dim")
    if query % kv:
        fields.fail(
            f"{fields.name('num_attention_heads')} must be a multiple of num_key_value_heads {kv}, found {query}; "
            "check the config"
        )
    n = (
        Extent(query, per_head * dim, "num_attention_heads", "divided"),
        Extent(kv, 2 * dim, "num_key_value_heads", "shared", 2),
    )
    outputs = Extent(query, dim, "num_attention_heads", "divided")
    return [
        Linear("qkv", n, hidden, count, "qkv" in biased),
        Linear("o", (hidden,), outputs, count, "o" in biased, residual=True),
    ]


def _full_layers(fields: Fields, depth: int) -> int:
    """How many layers attend to all tokens: those that `layer_types` lists, or else one in each interval."""
    if not fields.has("layer_types"):
        return depth // fields.integer("full_attention_interval", depth)
    listed = fields.config["layer_types"]
    if not isinstance(listed, list) or len(listed) != depth or not all(kind in (FULL, LINEAR) for kind in listed):
        fields.fail(
            f"{fields.name('layer_types')} must list {depth} of {FULL} and {LINEAR}, found {short(listed)}; check the "
            "config"
        )
    return listed.count(FULL)
