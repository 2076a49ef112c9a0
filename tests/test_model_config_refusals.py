"""What no manifest follows from: fields of a model's config that are missing, malformed or beyond the kernels."""

from __future__ import annotations

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot.problem.manifest import ManifestError, dump
from aot.problem.models.config import load_config
from aot.problem.models.families import FAMILIES

from .model_configs import config, manifest, refused
from .transformers_layers import PUBLISHED


def test_from_config_refuses_unknown_model_type_and_says_what_to_do() -> None:
    refused(
        config(model_type="mamba2"),
        "'mamba2' is not supported; the supported types are",
        *FAMILIES,
        "write the manifest by hand, as docs/manifests.md describes",
    )


def test_no_other_family_is_suggested_for_an_unknown_model_type() -> None:
    with pytest.raises(ManifestError) as caught:
        manifest(config(model_type="mamba2"))
    assert "did you mean" not in str(caught.value)


def test_from_config_refuses_missing_model_type() -> None:
    refused(config(model_type="absent"), "'model_type' is missing", "the supported types are llama", "by hand")


def test_from_config_refuses_unhashable_model_type() -> None:
    refused(config(model_type=["llama"]), "'model_type'")


def test_from_config_refuses_unknown_architecture() -> None:
    refused(config(architectures=["LlamaForSequenceClassification"]), "'architectures'", "LlamaForCausalLM")


@pytest.mark.parametrize("architectures", ["LlamaForCausalLM", [], [["x"]], 3, ["LlamaForCausalLM"] * 2])
def test_from_config_refuses_malformed_architectures(architectures: Any) -> None:
    refused(config(architectures=architectures), "'architectures'")


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"]
)
def test_from_config_refuses_missing_field(field: str) -> None:
    refused(config(**{field: "absent"}), f"'{field}' is missing")


@pytest.mark.parametrize("value", [True, "4096", 4096.0, -4096, 0, [4096], {}, 2**40, float("nan")])
def test_from_config_refuses_what_is_not_a_positive_integer(value: Any) -> None:
    refused(config(hidden_size=value), "'hidden_size' must be an integer from 1 to")


@pytest.mark.parametrize("value", [True, "8", 8.5, -8])
def test_from_config_refuses_wrong_type_where_a_default_exists(value: Any) -> None:
    refused(config(num_key_value_heads=value), "'num_key_value_heads' must be an integer")


def test_from_config_names_the_field_inside_text_config() -> None:
    outer = config("gemma-3-27b")
    del outer["text_config"]["hidden_size"]
    refused(outer, "'text_config.hidden_size' is missing")


def test_from_config_refuses_missing_text_config() -> None:
    refused(config("gemma-3-27b", text_config="absent"), "'text_config' must be an object")


def test_from_config_refuses_another_family_inside() -> None:
    text = {**config("gemma-3-27b")["text_config"], "model_type": "llama"}
    refused(config("gemma-3-27b", text_config=text), "needs 'gemma3_text', found 'llama'")


def test_from_config_refuses_quantised_weights() -> None:
    refused(config(quantization_config={"quant_method": "fp8"}), "'quantization_config' is present")


def test_from_config_refuses_a_malformed_quantization_config() -> None:
    refused(config(quantization_config="fp8"), "field 'quantization_config' must be an object, found 'fp8'")


def test_from_config_refuses_quantised_weights_beside_text_config() -> None:
    refused(config("gemma-3-27b", quantization_config={"quant_method": "eetq"}), "'quantization_config' is present")


def test_from_config_allows_a_null_quantization_config() -> None:
    assert manifest(config(quantization_config=None)) == manifest(config())


def test_from_config_refuses_latent_attention() -> None:
    refused(config(kv_lora_rank=512), "'kv_lora_rank' is present", "MLA")


def test_from_config_refuses_experts_in_a_dense_family() -> None:
    refused(config(num_local_experts=8), "'num_local_experts' is present")


def test_from_config_refuses_moe_without_num_experts() -> None:
    refused(config("qwen3-30b-a3b", num_experts="absent"), "'num_experts' is missing")


@pytest.mark.parametrize("layers", [3, ["0"], [48], [-1], [True]])
def test_from_config_refuses_malformed_mlp_only_layers(layers: Any) -> None:
    refused(config("qwen3-30b-a3b", mlp_only_layers=layers), "'mlp_only_layers'")


def test_from_config_refuses_tp_that_does_not_divide_heads_and_lists_those_that_do() -> None:
    refused(config(), "'num_attention_heads': 32", "tp 3", "fit this model: 1, 2, 4, 8, 16, 32", tp=3)


def test_from_config_refuses_tp_that_does_not_divide_the_mlp() -> None:
    refused(config(intermediate_size=8200), "'intermediate_size': 8200", "fit this model: 1", tp=16)


def test_from_config_refuses_tp_that_neither_divides_nor_is_divided_by_kv_heads() -> None:
    heads = config(num_attention_heads=36, num_key_value_heads=6, head_dim=128, intermediate_size=36 * 64)
    refused({**heads, "vocab_size": 36 * 64}, "'num_key_value_heads': of 6 and tp 4", "1, 2, 3, 6", tp=4)


def test_from_config_refuses_heads_that_are_no_multiple_of_kv_heads() -> None:
    refused(config(num_key_value_heads=5), "'num_attention_heads' must be a multiple")


def test_from_config_refuses_a_head_dim_it_would_have_to_round() -> None:
    refused(config(hidden_size=4100), "'head_dim' is missing")


def test_from_config_refuses_unaligned_shapes_by_gemm() -> None:
    refused(config(hidden_size=4100, head_dim=128), "gemm 'qkv'", "k must be a positive multiple of 8")


@pytest.mark.parametrize("tp", [0, -1, True, "2", 2.0, 10**9])
def test_from_config_refuses_malformed_tp(tp: Any) -> None:
    refused(config(), "tp must be an integer", tp=tp)


@pytest.mark.parametrize("tokens", [[], [0], [True], ["16"], [1.5], [2**40]])
def test_from_config_refuses_malformed_tokens(tokens: Any) -> None:
    refused(config(), "tokens must be integers", tokens=tokens)


def test_from_config_refuses_unknown_target() -> None:
    refused(config(), "did you mean 'sm_90a'?", targets=["sm_90"])


def test_from_config_refuses_unknown_dtype() -> None:
    refused(config(), "unknown dtype 'fp8'", "e4m3", dtype="fp8")


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", '"text"', "{'a': 1}", '{"a": 1, "a": 2}', "[" * 100_000, "9" * 5000]
)
def test_load_config_refuses_what_is_not_a_json_object(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ManifestError, match=r"config\.json"):
        load_config(path)


def test_load_config_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{\n"a": 1,\n}')
    with pytest.raises(ManifestError, match=r"config\.json:3: not JSON"):
        load_config(path)


def test_load_config_refuses_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r": is a folder; name a model's config\.json in it"):
        load_config(tmp_path)


def test_load_config_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no such file"):
        load_config(tmp_path / "config.json")


def test_load_config_ignores_fields_it_does_not_use(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config(), "rope_theta": 500000.0, "torch_dtype": "bfloat16"}))
    assert manifest(load_config(path)) == manifest(config())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**40) | st.floats() | st.sampled_from(["fp8", "full_attention", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["quant_method", "a"]), inner, max_size=2)
    ),
    max_leaves=4,
)
OPTIONAL = ("quantization_config", "vision_config", "layer_types", "moe_layers", "mlp_only_layers", "moe_layer_freq")


@given(name=st.sampled_from(sorted(PUBLISHED)), value=JSON, tp=st.sampled_from([1, 2, 3, 8]), data=st.data())
def test_whatever_a_field_holds_there_is_a_manifest_or_its_error(name: str, value: Any, tp: int, data: Any) -> None:
    read = copy.deepcopy(PUBLISHED[name]["config"])
    part = data.draw(st.sampled_from([read, read.get("text_config", read)]))
    part[data.draw(st.sampled_from([*part, *OPTIONAL]))] = value
    with contextlib.suppress(ManifestError):
        dump(manifest(read, tp))
