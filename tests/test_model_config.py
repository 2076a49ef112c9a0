"""Claims about reading Hugging Face configs, and the proof that the shipped manifests follow from published ones."""

from __future__ import annotations

from typing import Any

import pytest

from aot.problem import model_config
from aot.problem.manifest import Manifest, dump, load, loads
from aot.problem.model_config import Wanted, manifest_from_config
from aot.problem.models.config import load_config

from .model_configs import CONFIGS, ROOT, config, manifest, refused

TOKENS = (1, 16, 64, 256, 1024, 4096, 8192)

TARGETS = ("sm_80", "sm_90a", "sm_100a", "sm_103a", "sm_120a")

# Manifest: (config, Hugging Face repository, tp, dtype, targets).
SHIPPED: dict[str, tuple[str, str, int, str, tuple[str, ...]]] = {
    "llama-3.1-8b": ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 1, "bf16", TARGETS),
    "llama-3.1-8b-fp8": ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 1, "e4m3", ("sm_90a",)),
    "blackwell/llama-3.1-8b-nvfp4": ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 1, "e2m1", ("sm_100a", "sm_103a")),
    "llama-3.1-8b-fused": ("llama-3.1-8b", "meta-llama/Llama-3.1-8B", 1, "bf16", ("sm_90a",)),
    "llama-3.3-70b-tp8": ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", 8, "bf16", TARGETS),
    "qwen3-32b-tp2": ("qwen3-32b", "Qwen/Qwen3-32B", 2, "bf16", TARGETS),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 1, "bf16", TARGETS),
    "experts/qwen3-30b-a3b": ("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", 1, "bf16", ("sm_90a",)),
    "experts/qwen3-30b-a3b-fp8": ("qwen3-30b-a3b-fp8", "Qwen/Qwen3-30B-A3B-FP8", 1, "e4m3", ("sm_90a",)),
    "mistral-small-24b": ("mistral-small-24b", "mistralai/Mistral-Small-24B-Instruct-2501", 1, "bf16", TARGETS),
    "gemma-3-27b": ("gemma-3-27b", "google/gemma-3-27b-it", 1, "bf16", TARGETS),
}


def from_fixture(name: str) -> Manifest:
    config, source, tp, dtype, targets = SHIPPED[name]
    loaded = load_config(CONFIGS / f"{config}.json")
    wanted = Wanted(tp, TOKENS, targets, dtype, fuse=name.endswith("-fused"), experts=name.startswith("experts/"))
    model = name.rpartition("/")[2] + ("-moe" if wanted.experts else "")
    return manifest_from_config(loaded, wanted, source=source, model=model)


def shapes(built: Manifest) -> dict[str, tuple[int, int]]:
    return {g.name: (g.signature.n, g.signature.k) for g in built.gemms}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_manifest_equals_what_its_config_gives(name: str) -> None:
    assert load(ROOT / "manifests" / f"{name}.yaml") == from_fixture(name)


def test_every_shipped_manifest_is_proven() -> None:
    folders = (ROOT / "manifests", *(ROOT / "manifests" / name for name in ("experts", "blackwell")))
    found = {path for folder in folders for path in folder.glob("*.yaml")}
    assert {str(p.relative_to(ROOT / "manifests").with_suffix("")) for p in found} == set(SHIPPED)


def test_llama_8b_shapes_are_the_known_ones() -> None:
    assert shapes(manifest(config())) == {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "lm_head": (128256, 4096),
    }


def test_llama_70b_shapes_on_8_ranks_are_the_known_ones() -> None:
    assert shapes(manifest(config("llama-3.3-70b"), 8)) == {
        "qkv": (1280, 8192),
        "o": (8192, 1024),
        "gate_up": (7168, 8192),
        "down": (8192, 3584),
        "lm_head": (16032, 8192),
    }


def test_kv_heads_are_replicated_when_tp_exceeds_them() -> None:
    assert shapes(manifest(config(), 16))["qkv"] == ((2 + 2 * 1) * 128, 4096)


def test_head_dim_need_not_be_hidden_size_over_heads() -> None:
    assert shapes(manifest(config("qwen3-32b")))["o"] == (5120, 8192)


def test_kv_heads_default_to_heads_in_llama() -> None:
    assert shapes(manifest(config(num_key_value_heads="absent")))["qkv"] == (3 * 4096, 4096)


def test_null_head_dim_counts_as_left_out() -> None:
    assert manifest(config(head_dim=None)) == manifest(config())


def test_gemma_3_takes_its_vocabulary_from_the_class_default() -> None:
    assert shapes(manifest(config("gemma-3-27b")))["lm_head"] == (262208, 5376)


def test_an_lm_head_of_too_few_columns_is_left_out_and_said() -> None:
    gemma = config("gemma-3-27b", torch_dtype="bfloat16")
    assert warnings(gemma, tp=16)[-1] == (
        "config.json: lm_head is left out, since rows of its 16388 outputs are no multiple of 16 bytes"
    )
    assert list(shapes(manifest(gemma, 16))) == ["qkv", "o", "gate_up", "down"]
    assert shapes(manifest(gemma, 8))["lm_head"] == (32776, 5376)


def test_mistral3_reads_the_text_config() -> None:
    text = config("mistral-small-24b", architectures="absent")
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    assert shapes(manifest(outer)) == shapes(manifest(config("mistral-small-24b")))


def test_vocabulary_is_padded_to_64_before_it_is_split() -> None:
    built = manifest(config(vocab_size=32001), 2)
    assert shapes(built)["lm_head"] == (16032, 4096)
    assert "vocab_size 32001 (padded to 32064)" in built.source


def test_moe_without_dense_layers_has_a_router_and_no_mlp() -> None:
    assert list(shapes(manifest(config("qwen3-30b-a3b")))) == ["qkv", "o", "router", "lm_head"]


def test_moe_with_dense_layers_counts_both_kinds() -> None:
    built = manifest(config("qwen3-30b-a3b", mlp_only_layers=[0, 1, 2]))
    calls = {g.name: built.calls(g) for g in built.gemms}
    assert calls == {"qkv": 48, "o": 48, "gate_up": 3, "down": 3, "router": 45, "lm_head": 1}


def test_moe_sparse_step_makes_the_other_layers_dense() -> None:
    built = manifest(config("qwen3-30b-a3b", decoder_sparse_step=2))
    assert {g.name: built.calls(g) for g in built.gemms}["gate_up"] == 24


def test_router_is_not_split() -> None:
    assert shapes(manifest(config("qwen3-30b-a3b"), 4))["router"] == (128, 2048)


def test_fp8_keeps_lm_head_in_bf16() -> None:
    types = {g.name: (g.signature.a, g.signature.b, g.signature.d) for g in manifest(config(), dtype="e4m3").gemms}
    assert types["qkv"] == ("e4m3", "e4m3", "bf16")
    assert types["lm_head"] == ("bf16", "bf16", "bf16")


def test_fp8_layers_have_row_and_column_scales_unless_asked_otherwise() -> None:
    scalings = {g.name: g.signature.scaling for g in manifest(config(), dtype="e4m3").gemms}
    assert scalings == dict.fromkeys(("qkv", "o", "gate_up", "down"), "row_column") | {"lm_head": "none"}
    assert manifest(config(), dtype="e4m3", scaling="block").gemms[0].signature.scaling == "block"
    assert manifest(config(), dtype="e4m3", scaling="none").gemms[0].signature.scaling == "none"


def epilogues(built: Manifest) -> dict[str, str]:
    return {g.name: g.signature.epilogue for g in built.gemms if g.signature.epilogue != "none"}


def test_fused_layers_take_in_the_activation_and_the_residual() -> None:
    built = manifest(config(), fuse=True)
    assert epilogues(built) == {"gate_up": "swiglu", "o": "residual", "down": "residual"}
    assert built.source.endswith(", hidden_act silu")
    assert shapes(built) == shapes(manifest(config()))
    assert loads(dump(built)) == built


def test_no_residual_is_fused_before_an_all_reduce() -> None:
    assert epilogues(manifest(config(), 2, fuse=True)) == {"gate_up": "swiglu"}


def test_no_residual_is_fused_before_a_norm() -> None:
    assert epilogues(manifest(config("gemma-3-27b"), fuse=True)) == {"gate_up": "geglu_tanh"}


def test_fused_fp8_layers_keep_their_scales() -> None:
    found = manifest(config(), fuse=True, dtype="e4m3").gemms[2].signature
    assert (found.epilogue, found.scaling, found.d) == ("swiglu", "row_column", "bf16")


@pytest.mark.parametrize(("name", "gate"), [("silu", "swiglu"), ("gelu", "geglu"), ("gelu_pytorch_tanh", "geglu_tanh")])
def test_activation_follows_from_the_config(name: str, gate: str) -> None:
    assert epilogues(manifest(config(hidden_act=name), fuse=True))["gate_up"] == gate


def test_activation_that_the_config_leaves_out_is_the_familys() -> None:
    assert epilogues(manifest(config("qwen3-32b"), fuse=True))["gate_up"] == "swiglu"


@pytest.mark.parametrize("name", ["relu2", 3, ["silu"]])
def test_from_config_refuses_to_fuse_an_unknown_activation(name: Any) -> None:
    refused(config(hidden_act=name), "field 'hidden_act'", "cannot be fused; known: silu, gelu", fuse=True)
    manifest(config(hidden_act=name))


def test_from_config_refuses_scalings_that_do_not_fit() -> None:
    refused(config(), "unknown scaling 'rows'", dtype="e4m3", scaling="rows")
    refused(config(), "unknown scaling 'rows'", dtype="e4m3", scaling="rows", targets=())
    refused(config(), "scaling tensor is for A and B in e4m3, found bf16; give --dtype e4m3", scaling="tensor")


def test_from_config_refuses_no_targets() -> None:
    refused(config(), "no target is named; name some of sm_80, sm_90a", targets=())


def test_tokens_are_sorted_and_made_distinct() -> None:
    assert manifest(config(), tokens=[64, 1, 64]).tokens == (1, 64)


def test_model_is_named_after_its_source() -> None:
    assert manifest(config(), 8, source="meta-llama/Llama-3.1-8B", dtype="e4m3").model == "llama-3.1-8b-tp8-e4m3"
    assert manifest(config(), source="models/Mine/config.json").model == "mine"
    assert manifest(config(), source="models/Mine/config.json", fuse=True).model == "mine-fused"
    assert manifest(config(), 8, source="Llama-3.1-8B.json").model == "llama-3.1-8b-tp8"


def test_default_targets_are_those_with_kernels_for_every_layer() -> None:
    assert manifest(config(), targets=None).targets == TARGETS
    assert manifest(config(), targets=None, dtype="e4m3", scaling="none").targets == ("sm_90a", "sm_100a", "sm_103a")


def test_default_targets_of_fused_and_of_biased_layers_have_their_epilogues() -> None:
    assert manifest(config(), targets=None, fuse=True).targets == ("sm_90a",)
    assert manifest(qwen2(), targets=None).targets == ("sm_90a", "sm_100a", "sm_103a")


def test_from_config_refuses_layers_that_no_target_has_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_config, "variants", lambda target, signature: [])
    refused(config(), "no target has kernels for all of these layers", targets=None)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_manifest_from_config_survives_a_file(tp: int) -> None:
    built = manifest(config("qwen3-32b"), tp)
    assert loads(dump(built)) == built


def qwen2(**changes: Any) -> dict[str, Any]:
    """Of the shapes of Llama-3.1-8B."""
    return config(model_type="qwen2", architectures=["Qwen2ForCausalLM"], **changes)


# --- biases ---


def test_qwen2_adds_the_bias_of_qkv_that_no_field_tells_of() -> None:
    built = manifest(qwen2())
    assert epilogues(built) == {"qkv": "bias"}
    assert built.source.endswith(", bias in qkv")
    assert shapes(built) == shapes(manifest(config()))
    assert loads(dump(built)) == built


def test_fused_qwen2_keeps_its_bias() -> None:
    expected = {"qkv": "bias", "o": "residual", "gate_up": "swiglu", "down": "residual"}
    assert epilogues(manifest(qwen2(), fuse=True)) == expected


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-32b", "qwen3-30b-a3b", "gemma-3-27b"])
def test_attention_bias_is_that_of_qkv_and_o(name: str) -> None:
    read = config(name)
    read.get("text_config", read)["attention_bias"] = True
    assert epilogues(manifest(read)) == {"qkv": "bias", "o": "bias"}
    read.get("text_config", read)["attention_bias"] = False
    assert epilogues(manifest(read)) == {}


def test_gemma_2_has_an_attention_bias_too() -> None:
    gemma = config(model_type="gemma2", architectures=["Gemma2ForCausalLM"], head_dim=128, attention_bias=True)
    assert epilogues(manifest(gemma)) == {"qkv": "bias", "o": "bias"}


def test_mlp_bias_is_that_of_gate_up_and_down() -> None:
    assert epilogues(manifest(config(mlp_bias=True))) == {"gate_up": "bias", "down": "bias"}


def test_biases_come_before_what_is_fused() -> None:
    built = manifest(config(attention_bias=True, mlp_bias=True), fuse=True)
    both = {"o": "bias+residual", "down": "bias+residual"}
    assert epilogues(built) == {"qkv": "bias", "gate_up": "bias+swiglu", **both}


@pytest.mark.parametrize("fuse", [False, True])
def test_only_rank_0_adds_a_bias_before_an_all_reduce(fuse: bool) -> None:
    built = manifest(config(attention_bias=True, mlp_bias=True), 2, fuse=fuse)
    found = {g.name: g.signature.epilogue for g in built.gemms}
    assert (found["o"], found["o_rank0"], found["down"], found["down_rank0"]) == ("none", "bias", "none", "bias")
    assert (found["qkv"], found["gate_up"]) == ("bias", "bias+swiglu" if fuse else "bias")
    assert shapes(built)["o_rank0"] == shapes(built)["o"]


def test_servers_add_biases_of_fp8_layers_afterwards() -> None:
    found = manifest(qwen2(), dtype="e4m3").gemms[0].signature
    assert (found.epilogue, found.scaling, found.d) == ("none", "row_column", "bf16")
    in_blocks = manifest(qwen2(), 2, dtype="e4m3", scaling="block")
    assert epilogues(in_blocks) == {}
    assert [g.name for g in in_blocks.gemms][:4] == ["qkv", "qkv.few", "o", "o.few"]
    assert epilogues(manifest(qwen2(), dtype="e4m3", fuse=True))["qkv"] == "bias"


@pytest.mark.parametrize("value", ["true", 1, [True]])
def test_from_config_refuses_a_malformed_bias(value: Any) -> None:
    refused(config(attention_bias=value), "field 'attention_bias' must be true or false")


def test_from_config_refuses_a_bias_that_the_model_does_not_read() -> None:
    refused(config("mistral-small-24b", attention_bias=True), "field 'attention_bias' is true", "by hand")
    refused(qwen2(mlp_bias=True), "field 'mlp_bias' is true")
    refused(config(qkv_bias=True), "field 'qkv_bias' is true")
    manifest(config("mistral-small-24b", attention_bias=False))


def types(built: Manifest) -> set[str]:
    return {g.signature.d for g in built.gemms}


# --- element types ---


@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
@pytest.mark.parametrize(("published", "found"), [("bfloat16", "bf16"), ("float16", "f16")])
def test_layers_are_in_the_type_of_the_config(field: str, published: str, found: str) -> None:
    assert types(manifest(config(**{field: published}))) == {found}


def test_model_in_f16_is_named_so() -> None:
    assert manifest(config(torch_dtype="float16"), source="Mine").model == "mine-f16"


def test_dtype_is_preferred_to_torch_dtype_and_the_outer_config_to_the_text_config() -> None:
    assert types(manifest(config(torch_dtype="bfloat16", dtype="float16"))) == {"f16"}
    gemma = config("gemma-3-27b", torch_dtype="float16")
    gemma["text_config"]["torch_dtype"] = "bfloat16"
    assert types(manifest(gemma)) == {"f16"}
    del gemma["torch_dtype"]
    assert types(manifest(gemma)) == {"bf16"}


@pytest.mark.parametrize("published", ["float32", "float8_e4m3fn", 3, {"": "bfloat16"}])
def test_from_config_refuses_a_type_without_kernels_and_names_the_remedy(published: Any) -> None:
    refused(config(torch_dtype=published), "field 'torch_dtype'", "give --dtype bf16 or --dtype f16")
    assert types(manifest(config(torch_dtype=published), dtype="f16")) == {"f16"}


def warnings(config: dict[str, Any], **arguments: Any) -> list[str]:
    said: list[str] = []
    manifest(config, on_warning=said.append, **arguments)
    return said


# --- warnings ---


def test_a_usual_model_gives_no_warning() -> None:
    assert warnings(config(torch_dtype="bfloat16")) == []
    assert warnings(config(torch_dtype="bfloat16"), dtype="bf16") == []
    assert warnings(config(torch_dtype="bfloat16"), dtype="e4m3") == []


def test_another_type_than_the_configs_is_said() -> None:
    assert warnings(config(torch_dtype="float32"), dtype="bf16") == [
        "config.json: field 'torch_dtype' is 'float32'; the manifest has outputs in bf16, as --dtype bf16 says"
    ]


def test_a_type_that_the_config_does_not_name_is_said() -> None:
    assert warnings(config()) == [
        "config.json: field 'torch_dtype' is missing; the manifest is in bf16, which --dtype changes"
    ]


def test_experts_that_are_left_out_are_said() -> None:
    moe = config("qwen3-30b-a3b", torch_dtype="bfloat16")
    left_out = "config.json: the experts are left out; the manifest has qkv, o, router, lm_head"
    assert warnings(moe, experts=False) == [left_out]
    assert warnings(moe) == []
    dense = {**moe, "mlp_only_layers": list(range(48))}
    assert warnings(dense, experts=False) == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"fuse": True},
            (
                "no kernel computes o, gate_up, down on sm_80: sm80_tensorop, the nearest for sm_80, ",
                "lacks the epilogue residual; ",
                "sm_90a, sm_100a, sm_103a, sm_107a, sm_110a can; name another target, or leave --fuse out",
            ),
        ),
        (
            {"dtype": "e4m3"},
            ("qkv, o, gate_up, down on sm_80", "element types e4m3, e4m3, bf16 and the scaling row_column"),
        ),
    ],
)
def test_a_target_that_was_named_and_lacks_kernels_for_what_was_asked_is_refused(
    asked: dict[str, Any], words: tuple[str, ...]
) -> None:
    both = ("sm_90a", "sm_80")
    assert manifest(config(), targets=both).targets == both
    refused(config(), *words, targets=both, **asked)


def test_a_target_that_was_named_and_lacks_kernels_for_biases_of_the_model_is_told_of() -> None:
    biased = {**qwen2(), "torch_dtype": "bfloat16"}
    assert warnings(biased, targets=("sm_90a",)) == []
    assert warnings(biased, targets=("sm_80", "sm_90a")) == [
        "config.json: no kernel computes qkv on sm_80: sm80_tensorop, the nearest for sm_80, lacks the epilogue bias; "
        "sm_90a, sm_100a, sm_103a, sm_107a, sm_110a can; a build leaves them out there"
    ]


@pytest.mark.parametrize(
    ("model_type", "architecture", "has"),
    [
        ("mistral", "MistralForCausalLM", True),
        ("cohere", "CohereForCausalLM", False),  # whose norms are layer norms
        ("gemma", "GemmaForCausalLM", False),  # x * (1 + weight)
        ("granite", "GraniteForCausalLM", False),  # whose residuals have a factor
    ],
)
def test_norms_are_those_of_x_times_weight_behind_a_residual(model_type: str, architecture: str, has: bool) -> None:
    of = config(model_type=model_type, architectures=[architecture])
    assert bool(manifest(of, in_graph=True).uses) is has
