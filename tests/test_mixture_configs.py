"""Claims about configs of mixtures: how experts are spread over ranks, which weights they have, what is left out or
refused. That shapes are the models' own, `tests/test_models.py` holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aot.problem.manifest import Manifest, Use, dump, loads

from .model_configs import config, manifest, refused
from .transformers_layers import PUBLISHED

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def published(name: str, **changes: Any) -> dict[str, Any]:
    merged = {**PUBLISHED[name]["config"], "dtype": "bfloat16", **changes}
    return {field: value for field, value in merged.items() if value != "absent"}


def experts(built: Manifest) -> dict[str, Use]:
    """What it asks of operations, by name without what all have in front."""
    return {use.name.removeprefix("experts_"): use for use in built.uses}


def warnings(config: dict[str, Any], tp: int = 1, **arguments: Any) -> list[str]:
    said: list[str] = []
    manifest(config, tp, on_warning=said.append, **arguments)
    return [words.removeprefix("config.json: ") for words in said]


# --- experts on ranks ---


def test_tensor_parallel_ranks_have_a_part_of_every_expert() -> None:
    found = experts(manifest(published("qwen3-30b-a3b"), 4))
    gate_up, down = found["gate_up"].signature, found["down"].signature
    assert (gate_up.groups, gate_up.n, gate_up.k) == (128, 2 * 768 // 4, 2048)
    assert (down.groups, down.n, down.k) == (128, 2048, 768 // 4)
    assert (found["permute"].signature.experts, found["permute"].signature.global_experts) == (128, 0)


def test_expert_parallel_ranks_have_whole_experts_of_which_a_map_tells() -> None:
    found = experts(manifest(published("qwen3-30b-a3b"), 4, ep=4))
    gate_up = found["gate_up"].signature
    assert (gate_up.groups, gate_up.n, gate_up.k) == (32, 2 * 768, 2048)
    assert (found["permute"].signature.experts, found["permute"].signature.global_experts) == (32, 128)
    assert found["gate_up"].tokens == (16 * 8 // 4,)


def test_tokens_of_all_data_parallel_ranks_meet_at_the_experts() -> None:
    built = manifest(published("qwen3-30b-a3b"), 2, ep=8)
    assert experts(built)["permute"].tokens == (4 * 16,)
    assert experts(built)["gate_up"].tokens == (4 * 16 * 8 // 8,)
    assert {gemm.tokens for gemm in built.gemms if gemm.name != "router"} == {(16,)}


# Those whose blocks in vLLM 0.25 ask for `use_sequence_parallel_moe`.
SEQUENCE_PARALLEL = [
    *("qwen3-30b-a3b", "qwen3-vl-30b-a3b", "qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "gpt-oss-20b"),
    *("deepseek-v2", "deepseek-v3", "llama-4-scout"),
]
OF_MIXTURE = ("router", "shared_gate_up", "shared_down")


def of_mixture(built: Manifest) -> dict[str, tuple[int, int, tuple[int, ...]]]:
    """N, K and the tokens of the router and the shared expert, by name."""
    found = {gemm.name: gemm for gemm in built.gemms if gemm.name in OF_MIXTURE}
    return {name: (gemm.signature.n, gemm.signature.k, gemm.tokens) for name, gemm in found.items()}


@pytest.mark.parametrize("name", SEQUENCE_PARALLEL)
def test_with_data_parallel_ranks_router_and_shared_expert_are_whole_for_a_part_of_the_tokens(name: str) -> None:
    tokens = (1, 3, 16, 17, 64)
    whole = of_mixture(manifest(published(name), tokens=tokens))
    built = manifest(published(name), 2, ep=4, tokens=tokens)
    assert of_mixture(built) == {layer: (n, k, (1, 2, 8, 9, 32)) for layer, (n, k, _) in whole.items()}
    assert {gemm.tokens for gemm in built.gemms if gemm.name not in OF_MIXTURE} == {tokens}
    assert loads(dump(built)).gemms == built.gemms


@pytest.mark.parametrize(
    ("name", "ep"),
    [
        *((name, 2) for name in SEQUENCE_PARALLEL),
        *((name, 4) for name in ("glm-4.5", "minimax-m2", "mixtral-8x7b", "olmoe-1b-7b", "qwen1.5-moe-a2.7b")),
    ],
)
def test_otherwise_router_and_shared_expert_are_as_without_expert_parallelism(name: str, ep: int) -> None:
    assert of_mixture(manifest(published(name), 2, ep=ep)) == of_mixture(manifest(published(name), 2))


def test_model_is_named_after_its_expert_parallel_ranks() -> None:
    assert manifest(published("qwen3-30b-a3b"), 2, ep=4, source="Mine").model == "mine-tp2-ep4"


def test_experts_have_the_activation_of_the_config_without_fuse() -> None:
    assert experts(manifest(published("mixtral-8x7b", hidden_act="gelu")))["gate_up"].signature.epilogue == "geglu"


def test_gpt_oss_has_its_own_gate_and_biases() -> None:
    found = experts(manifest(published("gpt-oss-20b"), 2))
    assert found["gate_up"].signature.epilogue == "bias+swiglu_clamped_interleaved"
    assert found["down"].signature.epilogue == "bias"


@pytest.mark.parametrize(
    ("name", "tp", "words"),
    [
        ("gpt-oss-20b", 1, ["transpose them to (experts, N, K)", "take turns"]),
        ("gpt-oss-20b", 2, ["on all ranks but one the bias of experts_down is zeros"]),
        ("llama-4-scout", 1, ["transpose them to (experts, N, K)", "(apply_router_weight_on_input)"]),
    ],
)
def test_manifest_says_what_a_caller_of_its_experts_has_to_know(name: str, tp: int, words: list[str]) -> None:
    source = manifest(published(name), tp).source
    assert [w for w in words if w not in source] == []


def test_router_weights_on_the_input_are_of_permute_and_not_of_combine() -> None:
    """Of permute also without, for servers that multiply tokens before."""
    found = experts(manifest(published("llama-4-scout")))
    assert [found[name].signature.weights for name in ("permute", "permute_weighted", "combine")] == [
        *("none", "f32", "none")
    ]
    assert "permute_weighted" not in experts(manifest(published("mixtral-8x7b")))


def test_experts_can_be_left_out() -> None:
    built = manifest(published("mixtral-8x7b"), experts=False, targets=None)
    assert (built.uses, len(built.targets)) == ((), 5)
    assert built.source.endswith("without experts")


def test_experts_make_a_manifest_one_for_hopper() -> None:
    assert manifest(published("mixtral-8x7b"), targets=None).targets == ("sm_90a",)


def test_a_target_that_was_named_and_lacks_kernels_for_experts_is_told_of() -> None:
    (said,) = warnings(published("mixtral-8x7b"), targets=("sm_90a", "sm_100a"))
    assert said.startswith("no kernel computes experts_gate_up on sm_100a: ")
    assert said.endswith("a build leaves them out there")


# --- what is left out ---


def test_layers_that_no_kernel_makes_are_left_out_and_said() -> None:
    assert warnings(published("qwen1.5-moe-a2.7b")) == [
        "the gate of the shared expert is left out, since it has one output",
        "router is left out, since rows of its 60 outputs are no multiple of 16 bytes",
    ]
    assert warnings(published("glm-4.5")) == ["the router is left out, since it is computed in float32"]
    assert warnings(published("qwen3-next-80b-a3b"), 16, tokens=(1,))[-1].startswith("in_proj_ba is left out")
    assert warnings(published("qwen2.5-vl-7b")) == ["the vision tower is left out"]


@pytest.mark.parametrize(("name", "model_type"), [("deepseek-v2", "deepseek_v2"), ("deepseek-v3", "kimi_k2")])
def test_deepseeks_router_is_a_layer_unless_its_config_asks_for_float32(name: str, model_type: str) -> None:
    """As vLLM's `_get_moe_router_dtype` has it."""
    of = published(name, model_type=model_type)
    (router,) = (gemm for gemm in manifest(of).gemms if gemm.name == "router")
    s = router.signature
    assert (s.d, s.n, s.k) == ("bf16", of["n_routed_experts"], of["hidden_size"])
    assert warnings(of) == []
    in_f32 = {**of, "moe_router_dtype": "float32"}
    assert warnings(in_f32) == ["the router is left out, since it is computed in float32"]
    assert "router" not in {gemm.name for gemm in manifest(in_f32).gemms}


# --- weights that are quantised ---


def test_weights_in_fp8_by_blocks_make_the_manifest_so() -> None:
    built = manifest(published("deepseek-v3", quantization_config=FP8))
    types = {gemm.name: (gemm.signature.a, gemm.signature.scaling) for gemm in built.gemms}
    assert {types.pop(name) for name in ("router", "lm_head")} == {("bf16", "none")}
    assert {types.pop(name) for name in list(types) if name.endswith(".few")} == {("bf16", "block_weight")}
    assert set(types.values()) == {("e4m3", "block")}
    found = experts(built)
    assert (found["gate_up"].signature.a, found["down"].signature.scaling) == ("e4m3", "block")
    assert (found["permute"].signature.x, found["permute"].signature.rows) == ("bf16", "e4m3")
    assert list(found) == ["permute", "gate_up", "down", "gate_up_quantised", "quantise", "combine"]
    assert loads(dump(built)).uses == built.uses
    gate_up = found["gate_up"].signature
    assert found["gate_up_quantised"].signature == replace(gate_up, d="e4m3")
    quantise, down = found["quantise"], found["down"].signature
    assert quantise.signature.key() == "bf16_e4m3_quantise_k2048_block_g256"
    assert (quantise.signature.k, quantise.signature.groups) == (down.k, down.groups)
    assert quantise.tokens == found["down"].tokens


def test_what_is_quantised_between_experts_is_a_ranks_part_of_them() -> None:
    built = experts(manifest(published("qwen3-30b-a3b", quantization_config=FP8), 4, ep=4))
    assert built["permute"].signature.key() == "bf16_moe_permute_e32of128_top8_k2048_block"
    assert built["quantise"].signature.key() == "bf16_e4m3_quantise_k768_block_g32"
    assert experts(manifest(published("qwen3-30b-a3b")))["permute"].signature.scaling == "none"


def test_gate_and_up_quantise_at_so_few_tokens_that_experts_have_128_rows() -> None:
    fp8 = published("qwen3-30b-a3b", quantization_config=FP8)
    assert experts(manifest(fp8, tokens=(16, 2048, 2064)))["gate_up_quantised"].tokens == (128, 16384)
    assert "gate_up_quantised" not in experts(manifest(fp8, tokens=(4096,)))
    assert "gate_up_quantised" not in experts(manifest(fp8, dtype="e4m3", scaling="row_column"))


def test_a_dtype_that_is_given_has_the_say_over_weights_in_fp8() -> None:
    built = manifest(published("deepseek-v3", quantization_config=FP8), dtype="bf16")
    assert {gemm.signature.a for gemm in built.gemms} == {"bf16"}
    built = manifest(published("deepseek-v3", quantization_config=FP8), dtype="e4m3", scaling="row_column")
    assert experts(built)["down"].signature.scaling == "row_column"


def test_experts_in_mxfp4_are_served_in_the_type_of_the_others() -> None:
    oss = published("gpt-oss-20b", quantization_config={"quant_method": "mxfp4"})
    assert manifest(oss).gemms == manifest(published("gpt-oss-20b")).gemms
    assert manifest(oss).uses == manifest(published("gpt-oss-20b")).uses
    (said,) = warnings(oss)
    assert "weights of experts are in mxfp4; the manifest is for weights that were turned into" in said
    assert "with --scaling mxfp4_weight for them as they are" in said


def test_weights_of_experts_stay_in_4_bits_where_that_is_asked_for() -> None:
    """And nothing else: attention, router and lm_head are in bf16."""
    oss = published("gpt-oss-20b", quantization_config={"quant_method": "mxfp4"})
    assert warnings(oss, scaling="mxfp4_weight") == []
    plain, built = manifest(oss), manifest(oss, scaling="mxfp4_weight", source="Mine")
    assert built.gemms == plain.gemms
    assert built.model == "mine-mxfp4_weight"
    found, before = experts(built), experts(plain)
    assert {n: u for n, u in found.items() if n not in ("gate_up", "down")} == {
        n: u for n, u in before.items() if n not in ("gate_up", "down")
    }
    for name in ("gate_up", "down"):
        wanted = replace(before[name].signature, b="e2m1", scaling="mxfp4_weight")
        assert (found[name].signature, found[name].tokens) == (wanted, before[name].tokens)
    assert "runtime.torch.prepare_weight" in built.source
    assert "transpose" not in built.source
    assert built.targets == ("sm_90a",)
    assert loads(dump(built)) == built


def test_experts_of_a_mixture_may_be_in_4_bits_with_all_its_layers() -> None:
    built = manifest(published("qwen3-30b-a3b"), scaling="int4_weight")
    found = experts(built)
    assert (found["gate_up"].signature.b, found["gate_up"].signature.epilogue) == ("u4", "swiglu")
    assert {g.signature.scaling for g in built.gemms if g.name in ("qkv", "o")} == {"int4_weight"}


OSS = published("gpt-oss-20b", quantization_config={"quant_method": "mxfp4"})


@pytest.mark.parametrize(
    ("tp", "arguments", "words"),
    [
        (7, {}, "field 'num_attention_heads': 64 does not divide by tp 7"),
        (1, {"experts": False}, "is of the weights of experts, and the manifest has none"),
        (1, {"dtype": "f16"}, "scaling mxfp4_weight is for A in bf16"),
        (1, {"dtype": "e4m3"}, "scaling mxfp4_weight is for A in bf16"),
    ],
)
def test_experts_that_cannot_be_in_4_bits_are_refused(tp: int, arguments: dict[str, Any], words: str) -> None:
    refused(OSS, words, tp=tp, scaling="mxfp4_weight", **arguments)


@pytest.mark.parametrize(("tp", "ep", "inner"), [(1, 1, 2880), (2, 1, 1472), (4, 1, 768), (8, 1, 384), (2, 2, 2880)])
def test_parts_of_experts_in_mxfp4_are_padded_as_vllm_does(tp: int, ep: int, inner: int) -> None:
    built = manifest(OSS, tp, ep=ep, scaling="mxfp4_weight")
    found = experts(built)
    assert (found["gate_up"].signature.n, found["down"].signature.k) == (2 * inner, inner)
    assert ("padded to" in built.source) is (inner * tp != 2880 and ep == 1)
    assert experts(manifest(published("gpt-oss-20b"), 2))["down"].signature.k == 1440, "in 16 bits"


def test_a_target_without_the_scaling_is_refused_also_of_layers_with_biases() -> None:
    config = {name: value for name, value in OSS.items() if name != "quantization_config"}
    words = "no kernel computes qkv, o on sm_100a", "name another target"
    refused(config, *words, scaling="mxfp4_weight", targets=("sm_100a",))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"weight_block_size": None},
            "of fp8 without weight_block_size, activation_scheme static is supported, found 'dynamic'",
        ),
        ({"weight_block_size": [64, 64]}, "found [64, 64]"),
        ({"activation_scheme": "static"}, "activation_scheme dynamic is supported, found 'static'"),
        ({"fmt": "e5m2"}, "fmt e4m3 is supported, found 'e5m2'"),
        ({"modules_to_not_convert": ["model.layers.0.self_attn.o_proj"]}, "leaves 'model.layers.0.self_attn.o_proj'"),
        ({"modules_to_not_convert": 5}, "modules_to_not_convert must be a list, found 5"),
        ({"quant_method": "eetq"}, "weights quantised by 'eetq'"),
    ],
)
def test_from_config_refuses_weights_that_are_quantised_otherwise(changes: dict[str, Any], words: str) -> None:
    refused(published("qwen3-8b", quantization_config={**FP8, **changes}), words, "by hand: docs/manifests.md")


def test_modules_that_stay_in_16_bits_anyway_are_no_obstacle() -> None:
    names = [
        "lm_head",
        "model.layers.0.mlp.gate",
        "model.layers.0.input_layernorm",
        "model.visual.blocks.0.attn.o_proj",
    ]
    manifest(published("qwen3-8b", quantization_config={**FP8, "modules_to_not_convert": names}))


def test_tensor_parallel_ranks_do_not_cut_blocks_of_scales() -> None:
    refused(published("glm-4.5-air", quantization_config=FP8), "'intermediate_size': gate_up at tp 8 cuts", tp=8)
    fp8 = published("qwen3-30b-a3b", quantization_config=FP8)
    refused(fp8, "'moe_intermediate_size': 768 at tp 4 is 192, and scales are of blocks of 128", tp=4)
    manifest(fp8, 4, ep=4)


# --- refusals ---


@pytest.mark.parametrize(
    ("name", "tp", "ep", "words"),
    [
        ("qwen3-30b-a3b", 4, 6, "ep 6 is no multiple of tp 4"),
        ("qwen3-30b-a3b", 1, 3, "field 'num_experts': 128 does not divide by ep 3"),
        ("qwen3-30b-a3b", 1, 0, "ep must be an integer"),
        ("qwen3-8b", 1, 2, "ep 2 spreads experts, and the manifest has none; leave --ep out"),
        ("gpt-oss-20b", 16, 1, "experts_gate_up at tp 16: n must be a positive multiple of 16, found 360"),
    ],
)
def test_from_config_refuses_ranks_that_experts_do_not_fit(name: str, tp: int, ep: int, words: str) -> None:
    refused(published(name), words, tp=tp, ep=ep)


def test_from_config_refuses_a_scaling_that_experts_do_not_have() -> None:
    refused(published("qwen3-30b-a3b"), "experts have no scaling tensor; known: none", dtype="e4m3", scaling="tensor")


def test_from_config_refuses_experts_of_an_unknown_activation_and_says_how_to_go_without() -> None:
    refused(published("mixtral-8x7b", hidden_act="relu2"), "'hidden_act'", "--no-experts leaves experts out")
    manifest(published("mixtral-8x7b", hidden_act="relu2"), experts=False)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3-30b-a3b", {"num_experts_per_tok": 129}, "'num_experts_per_tok' must be an integer from 1 to 128"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "'moe_layer_freq' must be 1, found 2"),
        ("deepseek-v3", {"first_k_dense_replace": -1}, "'first_k_dense_replace' must be an integer from 0"),
        ("deepseek-v3", {"q_lora_rank": "absent"}, "'q_lora_rank' is missing; add it, or null"),
        ("glm-4.5", {"n_shared_experts": "absent"}, "'n_shared_experts' is missing"),
        ("deepseek-v3", {"kv_lora_rank": None}, "'kv_lora_rank' is missing"),
        ("gpt-oss-20b", {"swiglu_limit": 8.0}, "'swiglu_limit' must be 7.0, found 8.0"),
        ("qwen3-next-80b-a3b", {"layer_types": ["full_attention"]}, "'layer_types' must list 48 of"),
        ("qwen3-next-80b-a3b", {"linear_num_value_heads": 24}, "must be a multiple of linear_num_key_heads"),
        ("qwen3-next-80b-a3b", {"attn_output_gate": False}, "'attn_output_gate' must be true"),
        ("mixtral-8x7b", {"kv_lora_rank": 512}, "'kv_lora_rank' is present"),
    ],
)
def test_from_config_refuses_fields_that_make_another_model(name: str, changes: dict[str, Any], words: str) -> None:
    refused(published(name, **changes), words)


def test_from_config_refuses_tokens_that_make_too_many_rows() -> None:
    refused(published("qwen3-30b-a3b"), "experts: 1000000 tokens make M 8000000", tokens=(1_000_000,))


# --- which layers are which ---


def test_layers_that_are_listed_decide_over_an_interval() -> None:
    listed = ["full_attention"] * 8 + ["linear_attention"] * 40
    built = manifest(published("qwen3-next-80b-a3b", layer_types=listed))
    calls = {gemm.name: built.calls(gemm) for gemm in built.gemms}
    assert (calls["qkv"], calls["in_proj_qkvz"]) == (8, 40)


def test_dense_layers_before_a_mixture_are_counted() -> None:
    built = manifest(published("deepseek-v3"))
    calls = {gemm.name: built.calls(gemm) for gemm in built.gemms}
    assert (calls["gate_up"], calls["shared_gate_up"], calls["fused_qkv_a"]) == (3, 58, 61)


def test_a_mixture_of_dense_layers_alone_has_no_experts() -> None:
    built = manifest(config("qwen3-30b-a3b", mlp_only_layers=list(range(48))))
    assert built.uses == ()
    assert "router" not in {gemm.name for gemm in built.gemms}


def test_kimi_k2_is_read_as_deepseek_v3() -> None:
    kimi = published("deepseek-v3", model_type="kimi_k2")
    assert manifest(kimi).items() == manifest(published("deepseek-v3")).items()


def test_residual_is_fused_where_nothing_lies_between() -> None:
    def fused(name: str) -> dict[str, str]:
        return {gemm.name: gemm.signature.epilogue for gemm in manifest(published(name), fuse=True).gemms}

    assert (fused("glm-4-9b-0414")["o"], fused("granite-3.1-8b")["down"]) == ("none", "none")
    deepseek = fused("deepseek-v2")
    assert (deepseek["o"], deepseek["down"], deepseek["shared_down"]) == ("residual", "residual", "none")
    assert (deepseek["gate_up"], deepseek["shared_gate_up"]) == ("swiglu", "swiglu")
