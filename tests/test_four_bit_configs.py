"""What configs of modelopt, compressed-tensors and GPTQ say of weights in few bits, as a manifest."""

from __future__ import annotations

import re
from typing import Any

import pytest

from aot.problem.manifest import ManifestError

from .test_mixture_configs import manifest, published, refused, warnings

# Of what is found, that no weights are whose kernels the project has; else a manifest may be written by hand.
NO_KERNEL = r"^of awq|^of gptq, (desc_act|bits)|checkpoint_format|actorder"
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}
FOUR_BITS = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
GROUP = {"targets": ["Linear"], "weights": FOUR_BITS, "input_activations": FOUR_BITS, "output_activations": None}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"],
}
INT4_WEIGHTS = {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group", "symmetric": True}
INT4_GROUP = {"targets": ["Linear"], "weights": INT4_WEIGHTS, "input_activations": None}
INT4 = {**COMPRESSED, "format": "pack-quantized", "config_groups": {"group_0": INT4_GROUP}}
FP8_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
FP8_TOKENS = {**FP8_WEIGHTS, "strategy": "token", "dynamic": True}
FP8_BLOCKS = {**FP8_WEIGHTS, "strategy": "block", "block_structure": [128, 128]}
FP8_GROUPS = {**FP8_TOKENS, "strategy": "group", "group_size": 128}
FP8_TENSOR = {**FP8_WEIGHTS, "strategy": "tensor"}


def floats(weights: dict[str, Any], activations: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {**COMPRESSED, "format": "float-quantized", "config_groups": {"group_0": group}}


MXFP4_WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 32}
MXFP4_GROUP = {**GROUP, "weights": MXFP4_WEIGHTS, "input_activations": MXFP4_WEIGHTS}
MXFP4 = {**COMPRESSED, "format": "mxfp4-pack-quantized", "config_groups": {"group_0": MXFP4_GROUP}}
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "lm_head": False}


@pytest.mark.parametrize(
    ("quantised", "dtype", "scaling"),
    [
        (MODELOPT, "e2m1", "nvfp4"),
        ({**MODELOPT, "quant_method": "modelopt_fp4"}, "e2m1", "nvfp4"),
        ({**MODELOPT, "ignore": None, "exclude_modules": ["lm_head"]}, "e2m1", "nvfp4"),
        ({**MODELOPT, "quant_algo": "MXFP8", "group_size": 32}, "e4m3", "mxfp8"),
        (COMPRESSED, "e2m1", "nvfp4"),
        (MXFP4, "e2m1", "mxfp4"),
        (
            {**MXFP4, "config_groups": {"g": {**MXFP4_GROUP, "format": "mxfp4-pack-quantized"}}, "format": None},
            "e2m1",
            "mxfp4",
        ),
    ],
)
def test_layers_are_as_the_checkpoint_has_them(quantised: dict[str, Any], dtype: str, scaling: str) -> None:
    built = manifest(published("qwen3-8b", quantization_config=quantised), targets=None)
    types = {gemm.name: (gemm.signature.a, gemm.signature.d, gemm.signature.scaling) for gemm in built.gemms}
    assert types.pop("lm_head") == ("bf16", "bf16", "none")
    assert set(types.values()) == {(dtype, "bf16", scaling)}
    assert built.targets == ("sm_100a", "sm_103a")
    assert warnings(published("qwen3-8b", quantization_config=quantised), targets=None) == []


@pytest.mark.parametrize(
    ("quantised", "scaling"),
    [
        (floats(FP8_WEIGHTS, FP8_TOKENS), "row_column"),
        (floats(FP8_BLOCKS, FP8_GROUPS), "block"),
        (floats(FP8_TENSOR, FP8_TENSOR), "tensor"),
        ({**MODELOPT, "quant_algo": "FP8"}, "tensor"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "tensor"),
    ],
)
def test_layers_in_fp8_have_the_scales_of_the_checkpoint(quantised: dict[str, Any], scaling: str) -> None:
    built = manifest(published("qwen3-8b", quantization_config=quantised))
    types = {gemm.name: (gemm.signature.a, gemm.signature.b, gemm.signature.scaling) for gemm in built.gemms}
    assert types.pop("lm_head") == ("bf16", "bf16", "none")
    few = {types.pop(name) for name in list(types) if name.endswith(".few")}
    assert few == ({("bf16", "e4m3", "block_weight")} if scaling == "block" else set())
    assert set(types.values()) == {("e4m3", "e4m3", scaling)}


@pytest.mark.parametrize(
    ("quantised", "b", "scaling"),
    [
        (INT4, "u4", "int4_weight"),
        (
            {**INT4, "config_groups": {"g": {**INT4_GROUP, "weights": {**INT4_WEIGHTS, "actorder": "weight"}}}},
            "u4",
            "int4_weight",
        ),
        (
            {**INT4, "config_groups": {"g": {**INT4_GROUP, "weights": {**INT4_WEIGHTS, "symmetric": False}}}},
            "u4",
            "int4_zero_weight",
        ),
        (GPTQ, "u4", "int4_weight"),
        ({**GPTQ, "sym": False}, "u4", "int4_zero_weight"),
        (AWQ, "u4", "int4_zero_weight"),
        ({**AWQ, "version": "GEMM"}, "u4", "int4_zero_weight"),
        ({**AWQ, "modules_to_not_convert": ["visual", "mlp.gate", "lm_head"]}, "u4", "int4_zero_weight"),
        (
            {
                **COMPRESSED,
                "format": "mxfp4-pack-quantized",
                "config_groups": {"g": {**GROUP, "weights": MXFP4_WEIGHTS, "input_activations": None}},
            },
            "e2m1",
            "mxfp4_weight",
        ),
    ],
)
def test_weights_alone_may_have_few_bits(quantised: dict[str, Any], b: str, scaling: str) -> None:
    config = published("qwen3-8b", quantization_config=quantised)
    built = manifest(config, targets=None, named_after="qwen3-8b")
    types = {gemm.name: (gemm.signature.a, gemm.signature.b, gemm.signature.scaling) for gemm in built.gemms}
    assert types.pop("lm_head") == ("bf16", "bf16", "none")
    assert set(types.values()) == {("bf16", b, scaling)}
    assert (built.model, built.targets) == (f"qwen3-8b-{scaling}", ("sm_80", "sm_90a", "sm_120a"))
    assert [said for said in warnings(config, targets=None) if "sym is False" not in said] == []


@pytest.mark.parametrize(
    ("scaling", "b"), [("mxfp4_weight", "e2m1"), ("int4_zero_weight", "u4"), ("int4_group128", "i4")]
)
def test_weights_of_a_config_in_16_bits_may_be_asked_for_in_4(scaling: str, b: str) -> None:
    built = manifest(published("qwen3-8b"), scaling=scaling, targets=None)
    assert {g.signature.b for g in built.gemms if g.name in ("qkv", "down")} == {b}
    refused(published("qwen3-8b"), f"scaling {scaling} is for A in bf16", scaling=scaling, dtype="f16")


def test_a_dtype_that_is_given_has_the_say() -> None:
    built = manifest(published("qwen3-8b", quantization_config=MODELOPT), dtype="bf16")
    assert {gemm.signature.a for gemm in built.gemms} == {"bf16"}


def test_a_scaling_that_is_not_the_checkpoints_is_warned_of() -> None:
    (said,) = warnings(published("qwen3-8b", quantization_config=MODELOPT), scaling="mxfp4", targets=None)
    assert "its weights are nvfp4, which no kernel for mxfp4 takes" in said


def test_why_nothing_computes_a_layer_is_said_of_a_target_that_has_its_types() -> None:
    refused(
        published("qwen3-8b", quantization_config=MODELOPT),
        "no kernel computes o: ",
        "residual",
        fuse=True,
        targets=None,
    )
    refused(published("qwen3-8b"), "scaling nvfp4 is for", "give --dtype e2m1", scaling="nvfp4")


def test_an_lm_head_that_is_quantised_too_is_said() -> None:
    (said,) = warnings(
        published("qwen3-8b", quantization_config={**MODELOPT, "ignore": ["model.visual*"]}), targets=None
    )
    assert "lm_head is not left out; the manifest has it in 16 bits" in said


@pytest.mark.parametrize("names", [["lm_head", "*mlp.gate"], ["re:.*lm_head", r"re:model\.visual.*"], ["*head*"]])
def test_patterns_of_what_has_16_bits_anyway_are_no_obstacle(names: list[str]) -> None:
    assert warnings(published("qwen3-8b", quantization_config={**COMPRESSED, "ignore": names}), targets=None) == []


@pytest.mark.parametrize(
    ("quantised", "words"),
    [
        ({**MODELOPT, "quant_algo": "W4A8_AWQ"}, "quant_algo NVFP4 or MXFP8 or FP8 is supported, found 'W4A8_AWQ'"),
        (
            {**INT4, "config_groups": {"g": {**INT4_GROUP, "weights": {**INT4_WEIGHTS, "symmetric": None}}}},
            "of pack-quantized weights, symmetric must be true or false, found None",
        ),
        (
            {**INT4, "config_groups": {"g": {**INT4_GROUP, "weights": {**INT4_WEIGHTS, "actorder": "group"}}}},
            "actorder weight is supported, found 'group'",
        ),
        ({**GPTQ, "desc_act": True}, "of gptq, desc_act False is supported, found True"),
        ({**GPTQ, "bits": 8}, "of gptq, bits 4 is supported, found 8"),
        ({**GPTQ, "dynamic": {"-:.*down.*": {}}}, "of gptq, dynamic is not read"),
        ({**GPTQ, "sym": "no"}, "of gptq, sym must be true or false, found 'no'"),
        ({**AWQ, "group_size": 64}, "of awq, group_size 128 is supported, found 64"),
        ({**AWQ, "version": "gemv_fast"}, "of awq, version 'gemv_fast' has another layout"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format gptq or gptq_v2 is supported, found 'marlin'"),
        ({**AWQ, "modules_to_not_convert": ["o_proj"]}, "leaves 'o_proj' in 16 bits"),
        ({**AWQ, "modules_to_not_convert": ["self_attn"]}, "leaves 'self_attn' in 16 bits"),
        ({**MODELOPT, "ignore": 5}, "ignore must be a list, found 5"),
        ({**MODELOPT, "ignore": ["model.layers.0.self_attn*"]}, "leaves 'model.layers.0.self_attn*' in 16 bits"),
        ({**COMPRESSED, "ignore": ["re:.*self_attn.*"]}, "leaves 're:.*self_attn.*' in 16 bits"),
        ({**COMPRESSED, "ignore": ["re:.*layers.77.mlp.down_proj$"]}, "in 16 bits"),
        ({**COMPRESSED, "ignore": ["model.layers.3.mlp.up_proj"]}, "leaves 'model.layers.3.mlp.up_proj' in 16 bits"),
        ({**COMPRESSED, "ignore": ["re:(a+)+b"]}, "leaves out 're:(a+)+b', which is not read"),
        ({**COMPRESSED, "format": "int-quantized"}, "is supported, found 'int-quantized'"),
        ({**COMPRESSED, "format": ["nvfp4-pack-quantized"]}, "is supported, found ['nvfp4-pack-quantized']"),
        (
            {**MODELOPT, "config_groups": {"group_0": {"weights": {"group_size": 32}}}},
            "of modelopt's NVFP4, group_size 16 is supported, found 32",
        ),
        (
            {
                "quant_method": "fp8",
                "activation_scheme": "static",
                "ignored_layers": ["model.layers.0.self_attn.o_proj"],
            },
            "leaves 'model.layers.0.self_attn.o_proj' in 16 bits",
        ),
        ({**MODELOPT, "group_size": 32}, "of modelopt's NVFP4, group_size 16 is supported, found 32"),
        ({**COMPRESSED, "format": "mxfp4-pack-quantized"}, "weights, group_size 32 is supported, found 16"),
        ({**MXFP4, "format": "nvfp4-pack-quantized"}, "weights, group_size 16 is supported, found 32"),
        ({**AWQ, "version": ["gemm"]}, "of awq, version ['gemm'] has another layout"),
        ({"bits": 4}, "weights quantised by a method that is not named"),
        ({**COMPRESSED, "format": "float-quantized"}, "of float-quantized weights, num_bits 8 is supported, found 4"),
        (floats(FP8_WEIGHTS, {**FP8_TOKENS, "symmetric": False}), "input_activations, symmetric True is supported"),
        (floats({**FP8_WEIGHTS, "dynamic": True}, FP8_TOKENS), "weights, dynamic False is supported, found True"),
        (floats(FP8_TENSOR, FP8_TOKENS), "a scale for the tensor in both, static;"),
        (floats(FP8_TENSOR, {**FP8_TENSOR, "dynamic": True}), "a scale for the tensor in both, static;"),
        (floats(FP8_WEIGHTS, {**FP8_TOKENS, "dynamic": False}), "for each channel and token, dynamic"),
        (floats(FP8_BLOCKS, {**FP8_GROUPS, "group_size": 64}), "groups of 128, dynamic, are supported"),
        ({**floats(FP8_WEIGHTS, FP8_TOKENS), "ignore": ["re:.*self_attn.*"]}, "leaves 're:.*self_attn.*' in 16 bits"),
        ({**COMPRESSED, "config_groups": {"a": GROUP, "b": GROUP}}, "one group with targets ['Linear'] is supported"),
        ({**COMPRESSED, "config_groups": {"a": {**GROUP, "targets": ["re:.*down_proj"]}}}, "one group with targets"),
        (
            {**COMPRESSED, "config_groups": {"a": {**GROUP, "input_activations": None}}},
            "input_activations must be floats",
        ),
    ],
)
def test_weights_that_no_manifest_follows_from_are_refused(quantised: dict[str, Any], words: str) -> None:
    fix = "by hand: docs/manifests.md" if not re.search(NO_KERNEL, words) else "no kernel takes it: leave these layers"
    refused(published("qwen3-8b", quantization_config=quantised), words, fix)


def test_what_weights_are_is_said_where_a_manifest_is_of_others() -> None:
    config = published("qwen3-8b", quantization_config=AWQ, dtype="float16", torch_dtype="float16")
    (said,) = warnings(config, targets=None)
    assert "as kernels for its weights have them; serve it in bf16 (vLLM: --dtype bfloat16)" in said
    (said,) = warnings(config, dtype="f16", targets=None)
    assert "its weights are int4_zero_weight, and the manifest is for others, in f16; leave --dtype out" in said
    assert "int4_zero_weight, which no kernel for int4_weight takes" in warnings(config, scaling="int4_weight")[-1]
    (said,) = warnings(published("qwen3-8b", quantization_config={**GPTQ, "sym": False}), targets=None)
    assert "sym is False, and vLLM loads no such GPTQ" in said


def test_extents_that_no_kernel_takes_are_named() -> None:
    config = published("qwen3-8b", quantization_config=AWQ, intermediate_size=12288 + 64)
    refused(config, "no kernel computes down: K must be a multiple of 128, found 12352; no target can", targets=None)
    with pytest.raises(ManifestError) as caught:
        manifest(config, targets=["sm_90a"])
    assert "name another target" not in str(caught.value)


def test_experts_in_four_bits_are_refused_and_may_be_left_out() -> None:
    config = published("qwen3-30b-a3b", quantization_config=MODELOPT)
    refused(config, "experts have no scaling nvfp4", "--no-experts leaves experts out")
    built = manifest(config, experts=False, targets=None)
    assert {g.signature.scaling for g in built.gemms if g.name in ("qkv", "o")} == {"nvfp4"}
