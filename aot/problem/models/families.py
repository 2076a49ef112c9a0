"""The model types that are read, and what each is made of: `FAMILIES`, the whole knowledge of models.

What a row says is what the transformers model class does, and of routers' types and of ranks what vLLM does. What no
row says is refused by name; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace

from .attention import gated_and_linear, heads, latent
from .config import Fields
from .layers import Linear
from .mixtures import Mixture, after_dense, by_step, every, interleaved

Layers = tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """One `model_type`: its architectures, its attention and its mixture, and the fields that a config may leave out.

    `defaults` holds numbers, or the name of a rule of `aot.problem.models.config`; they are those of the transformers
    config class, with 1 for what is true. `text` is the model type of the `text_config` inside, where the shapes are;
    with `flat` they may be in the config itself. `activation` is the field that names the MLP's activation and what
    that is where it is left out. `residuals` is false where something comes between o or down and the residual: a norm,
    or a factor; else `rms_norms` is whether the norm after the residual is RMSNorm of x * weight. `biased` are the
    layers that always have a bias, and `biases` those that have one where a field is true.
    """

    architectures: tuple[str, ...]
    defaults: Mapping[str, int | str] = field(default_factory=dict)
    attention: Callable[[Fields, int, Set[str]], list[Linear]] = heads
    mixture: Mixture | None = None
    text: str = ""
    flat: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")
    residuals: bool = True
    rms_norms: bool = True
    biased: Layers = ()
    biases: Mapping[str, Layers] = field(default_factory=dict)


_SPLIT_HEAD: dict[str, int | str] = {"head_dim": "hidden_size / heads"}
_GATED_AND_LINEAR: dict[str, int | str] = {"head_dim": 256, "full_attention_interval": 4}
_AS_MANY_KV: dict[str, int | str] = {"num_key_value_heads": "heads"}
_GEMMA_ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")

# By field, the layers that it gives a bias.
_ATTENTION: dict[str, Layers] = {"attention_bias": ("qkv", "o")}
_SEED_OSS: dict[str, Layers] = {"attention_bias": ("qkv",), "attention_out_bias": ("o",)}
_QKV: dict[str, Layers] = {"attention_bias": ("qkv",)}
_LATENT: dict[str, Layers] = {"attention_bias": ("fused_qkv_a", "o")}
_MLP: dict[str, Layers] = {"mlp_bias": ("gate_up", "down")}

_DEEPSEEK = Mixture(
    after_dense,
    ("n_routed_experts", "num_local_experts"),
    shared="moe_intermediate_size",
    shared_times="n_shared_experts",
    router="by_config",
    sequence_parallel=True,
)
_GLM = replace(_DEEPSEEK, router="f32", sequence_parallel=False)
_TURNED = "experts' weights in the file are (experts, K, N): transpose them to (experts, N, K)"

_DENSE = {
    "llama": Family(("LlamaForCausalLM",), _AS_MANY_KV | _SPLIT_HEAD, biases=_ATTENTION | _MLP),
    "mistral": Family(("MistralForCausalLM",), _SPLIT_HEAD),
    "mistral3": Family(("Mistral3ForConditionalGeneration",), text="mistral"),
    # Qwen2 has biases that no field of its config tells of.
    "qwen2": Family(("Qwen2ForCausalLM",), _SPLIT_HEAD, biased=("qkv",)),
    "qwen2_vl": Family(("Qwen2VLForConditionalGeneration",), text="qwen2_vl_text", flat=True),
    "qwen2_vl_text": Family(("Qwen2VLForConditionalGeneration",), _SPLIT_HEAD, biased=("qkv",)),
    "qwen2_5_vl": Family(("Qwen2_5_VLForConditionalGeneration",), text="qwen2_5_vl_text", flat=True),
    "qwen2_5_vl_text": Family(("Qwen2_5_VLForConditionalGeneration",), _SPLIT_HEAD, biased=("qkv",)),
    "qwen3": Family(("Qwen3ForCausalLM",), biases=_ATTENTION),
    "qwen3_vl": Family(("Qwen3VLForConditionalGeneration",), text="qwen3_vl_text"),
    "qwen3_vl_text": Family(("Qwen3VLForConditionalGeneration",), biases=_ATTENTION),
    "qwen3_5": Family(("Qwen3_5ForConditionalGeneration",), text="qwen3_5_text"),
    "qwen3_5_text": Family(
        ("Qwen3_5ForCausalLM",), _GATED_AND_LINEAR, attention=gated_and_linear, biases=_ATTENTION, rms_norms=False
    ),
    "phi3": Family(("Phi3ForCausalLM",), _AS_MANY_KV | _SPLIT_HEAD),
    "glm": Family(("GlmForCausalLM",), {"head_dim": 128, "attention_bias": 1}, biases=_QKV),
    "glm4": Family(("Glm4ForCausalLM",), {"head_dim": 128, "attention_bias": 1}, residuals=False, biases=_QKV),
    "gemma": Family(
        ("GemmaForCausalLM",),
        {"head_dim": 256},
        activation=("hidden_act", "gelu_pytorch_tanh"),
        biases=_ATTENTION,
        rms_norms=False,
    ),
    "gemma2": Family(("Gemma2ForCausalLM",), activation=_GEMMA_ACTIVATION, residuals=False, biases=_ATTENTION),
    # Published Gemma 3 configs leave out whatever equals transformers' Gemma3TextConfig.
    "gemma3_text": Family(
        ("Gemma3ForCausalLM",),
        {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
        activation=_GEMMA_ACTIVATION,
        residuals=False,
        biases=_ATTENTION,
    ),
    "gemma3": Family(("Gemma3ForConditionalGeneration",), text="gemma3_text"),
    "cohere": Family(("CohereForCausalLM",), _AS_MANY_KV | _SPLIT_HEAD, biases=_ATTENTION, rms_norms=False),
    "cohere2": Family(("Cohere2ForCausalLM",), _AS_MANY_KV | _SPLIT_HEAD, biases=_ATTENTION, rms_norms=False),
    "olmo2": Family(("Olmo2ForCausalLM",), _AS_MANY_KV | _SPLIT_HEAD, residuals=False, biases=_ATTENTION),
    "olmo3": Family(("Olmo3ForCausalLM",), _AS_MANY_KV | _SPLIT_HEAD, residuals=False, biases=_ATTENTION),
    "granite": Family(("GraniteForCausalLM",), _AS_MANY_KV | _SPLIT_HEAD, residuals=False, biases=_ATTENTION | _MLP),
    "smollm3": Family(("SmolLM3ForCausalLM",), _SPLIT_HEAD, biases=_ATTENTION | _MLP),
    "seed_oss": Family(("SeedOssForCausalLM",), {"head_dim": 128, "attention_bias": 1}, biases=_SEED_OSS | _MLP),
    "exaone4": Family(("Exaone4ForCausalLM",), _SPLIT_HEAD, residuals=False),
}

_MIXTURES = {
    "mixtral": Family(
        ("MixtralForCausalLM",), _SPLIT_HEAD, mixture=Mixture(every, ("num_local_experts",), inner="intermediate_size")
    ),
    "qwen2_moe": Family(
        ("Qwen2MoeForCausalLM",),
        _SPLIT_HEAD | {"qkv_bias": 1},
        mixture=Mixture(by_step, shared="shared_expert_intermediate_size", shared_gate=True),
        biases={"qkv_bias": ("qkv",)},
    ),
    "qwen3_moe": Family(("Qwen3MoeForCausalLM",), mixture=Mixture(by_step, sequence_parallel=True), biases=_ATTENTION),
    "qwen3_vl_moe": Family(("Qwen3VLMoeForConditionalGeneration",), text="qwen3_vl_moe_text"),
    "qwen3_vl_moe_text": Family(
        ("Qwen3VLMoeForConditionalGeneration",),
        mixture=Mixture(by_step, sequence_parallel=True, note=_TURNED),
        biases=_ATTENTION,
    ),
    "qwen3_next": Family(
        ("Qwen3NextForCausalLM",),
        _GATED_AND_LINEAR,
        attention=gated_and_linear,
        mixture=Mixture(by_step, shared="shared_expert_intermediate_size", shared_gate=True, sequence_parallel=True),
        biases=_ATTENTION,
        rms_norms=False,
    ),
    "qwen3_5_moe": Family(("Qwen3_5MoeForConditionalGeneration",), text="qwen3_5_moe_text"),
    "qwen3_5_moe_text": Family(
        ("Qwen3_5MoeForCausalLM",),
        _GATED_AND_LINEAR,
        attention=gated_and_linear,
        mixture=Mixture(every, shared="shared_expert_intermediate_size", shared_gate=True, sequence_parallel=True),
        biases=_ATTENTION,
        rms_norms=False,
    ),
    "gpt_oss": Family(
        ("GptOssForCausalLM",),
        {"head_dim": 64, "attention_bias": 1},
        mixture=Mixture(
            every,
            inner="intermediate_size",
            router="bias",
            sequence_parallel=True,
            gate="swiglu_clamped_interleaved",
            bias=True,
            note=f"{_TURNED}, where rows of gate and up take turns, as the epilogue's _interleaved says",
        ),
        biases=_ATTENTION,
    ),
    "deepseek_v2": Family(("DeepseekV2ForCausalLM",), attention=latent, mixture=_DEEPSEEK, biases=_LATENT | _MLP),
    "deepseek_v3": Family(("DeepseekV3ForCausalLM",), attention=latent, mixture=_DEEPSEEK, biases=_LATENT),
    "kimi_k2": Family(("DeepseekV3ForCausalLM",), attention=latent, mixture=_DEEPSEEK, biases=_LATENT),
    "minimax_m2": Family(
        ("MiniMaxM2ForCausalLM",),
        {"head_dim": 128},
        mixture=Mixture(every, ("num_local_experts",), inner="intermediate_size", router="f32"),
    ),
    "glm4_moe": Family(("Glm4MoeForCausalLM",), _SPLIT_HEAD, mixture=_GLM, biases=_QKV),
    "llama4": Family(("Llama4ForConditionalGeneration",), text="llama4_text"),
    "llama4_text": Family(
        ("Llama4ForCausalLM",),
        _SPLIT_HEAD,
        mixture=Mixture(
            interleaved,
            ("num_local_experts",),
            inner="intermediate_size",
            shared="intermediate_size",
            dense="intermediate_size_mlp",
            sequence_parallel=True,
            on_input=True,
            note=f"{_TURNED}; router weights multiply what experts take (apply_router_weight_on_input)",
        ),
        biases=_ATTENTION,
    ),
    "olmoe": Family(
        ("OlmoeForCausalLM",),
        _AS_MANY_KV | _SPLIT_HEAD,
        mixture=Mixture(every, inner="intermediate_size"),
        biases=_ATTENTION,
    ),
}

FAMILIES = _DENSE | _MIXTURES
