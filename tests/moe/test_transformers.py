"""The experts of transformers 5's models, computed by a library, beside its own eager ones: tiny models on the CPU."""

from __future__ import annotations

import importlib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5", reason="transformers 5 is not installed")
import torch  # noqa: E402

import runtime.torch as aot  # noqa: E402
from runtime import ArgumentError  # noqa: E402
from runtime.grouped_gemm import OVERLAP_OF_EXPERTS  # noqa: E402

from .on_cpu import ExpertsOnCpu, experts, library  # noqa: E402

TINY = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 16, "norm_topk_prob": True, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 4, "intermediate_size": 48},
    "gpt_oss": {"num_local_experts": 4, "intermediate_size": 48},
}
CLAMPED = "gpt_oss.GptOss", "openai_privacy_filter.OpenAIPrivacyFilter", "minimax_m3_vl.MiniMaxM3VL"


@pytest.fixture
def lib(tmp_path: Path) -> Iterator[ExpertsOnCpu]:
    with library(tmp_path) as made:
        aot.register_experts(made)
        yield made


def model_of(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **TINY, **CONFIGS[kind], **more)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, parameter in made.named_parameters():
        if "experts" in name:  # so that they decide what comes out
            torch.nn.init.normal_(parameter, std=0.3)
    return made


def experts_of(name: str, implementation: str = "cute_aot") -> Any:
    """A module of experts alone, whose sums are large enough to be clamped."""
    package, prefix = name.split(".")
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    sizes = {"hidden_size": 32, "num_local_experts": 4, "intermediate_size": 48}
    gate = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "_experts_implementation": implementation}
    made = getattr(module, f"{prefix}Experts")(types.SimpleNamespace(**sizes, **gate)).to(torch.bfloat16)
    torch.manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return made


def given() -> tuple[Any, Any, Any]:
    torch.manual_seed(1)
    ids = torch.rand((9, 4)).topk(2).indices
    return torch.randn((9, 32)).bfloat16() * 2, ids, torch.rand((9, 2)).softmax(-1).bfloat16()


def close(found: Any, wanted: Any) -> bool:
    return float((found - wanted).float().norm()) < 2e-2 * float(wanted.float().norm())


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_experts_of_a_model_are_its_eager_ones(lib: ExpertsOnCpu, kind: str) -> None:
    model, ids = model_of(kind), torch.arange(22).view(2, 11)
    if kind == "gpt_oss":
        assert aot.transpose_experts(model) == 2 * TINY["num_hidden_layers"]
    model.set_experts_implementation("eager")
    with torch.inference_mode():
        wanted = model(ids).logits
        model.set_experts_implementation("cute_aot")
        assert lib.calls == []
        found = model(ids).logits
    assert len(lib.calls) == 4 * TINY["num_hidden_layers"]
    assert close(found, wanted)


def test_a_config_may_choose_them(lib: ExpertsOnCpu) -> None:
    model = model_of("qwen3_moe", experts_implementation="cute_aot")
    with torch.inference_mode():
        model(torch.arange(5)[None])
    assert lib.calls


def test_functions_are_asked_for_that_manifests_of_models_have(
    lib: ExpertsOnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, grouped_gemm = [], lib.grouped_gemm

    def noted(*given: Any, **more: Any) -> Any:
        asked.append(more["overlap"])
        return grouped_gemm(*given, **more)

    monkeypatch.setattr(lib, "grouped_gemm", noted)
    with torch.inference_mode():
        model_of("mixtral", experts_implementation="cute_aot")(torch.arange(5)[None])
    assert set(asked) == {OVERLAP_OF_EXPERTS}


@pytest.mark.parametrize("name", CLAMPED)
def test_gates_that_are_clamped_are_those_of_their_classes(lib: ExpertsOnCpu, name: str) -> None:
    ours, eager, inputs = experts_of(name), experts_of(name, "eager"), given()
    if ours.is_transposed:
        aot.transpose_experts(ours)
    with torch.inference_mode():
        sums = eager.gate_up_proj[0].mT if ours.is_transposed else eager.gate_up_proj[0]
        assert float((inputs[0].float() @ sums.float().t()).max()) > 7
        assert close(ours(*inputs), eager(*inputs))
    assert len(lib.calls) == 4


@pytest.mark.parametrize(("attribute", "value"), [("alpha", 1.0), ("limit", 8.0)])
def test_a_clamped_gate_with_other_numbers_is_refused(lib: ExpertsOnCpu, attribute: str, value: float) -> None:
    module = experts_of("gpt_oss.GptOss")
    aot.transpose_experts(module)
    setattr(module, attribute, value)
    with torch.inference_mode(), pytest.raises(ArgumentError, match=r"has a gate clamped at .*, not at 7.0 with 1.702"):
        module(*given())


@pytest.mark.parametrize("problem", ["no gate", "a gate of its own"])
def test_experts_with_another_gate_are_refused(lib: ExpertsOnCpu, problem: str) -> None:
    module = experts_of("minimax_m3_vl.MiniMaxM3VL")
    module.has_gate = problem != "no gate"
    module.__class__ = type("OtherExperts", (type(module),), {})
    with torch.inference_mode(), pytest.raises(ArgumentError, match=f"OtherExperts has {problem}, which"):
        module(*given())


# --- weights that lie transposed ---


def test_weights_that_no_kernel_reads_are_refused_until_they_are_transposed(lib: ExpertsOnCpu) -> None:
    model = model_of("gpt_oss", experts_implementation="cute_aot")
    with torch.inference_mode(), pytest.raises(ArgumentError, match=r"call runtime.torch.transpose_experts\(model\)"):
        model(torch.arange(5)[None])
    assert lib.calls == []
    assert [aot.transpose_experts(model), aot.transpose_experts(model)] == [2 * TINY["num_hidden_layers"], 0]
    with torch.inference_mode():
        model(torch.arange(5)[None])
    assert lib.calls


def test_transposed_experts_are_the_same_parameters_of_the_same_values() -> None:
    module = experts_of("gpt_oss.GptOss")
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in module.named_parameters()}
    aot.transpose_experts(module)
    for name, parameter in module.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_transformers_own_experts_compute_with_transposed_weights(implementation: str) -> None:
    module = experts_of("gpt_oss.GptOss", implementation)
    with torch.inference_mode():
        wanted = module(*given())
        aot.transpose_experts(module)
        assert close(module(*given()), wanted)


def test_a_model_with_transposed_experts_is_saved_and_loaded(tmp_path: Path) -> None:
    model = model_of("gpt_oss")
    aot.transpose_experts(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_model_without_such_experts_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"MixtralForCausalLM has no experts with weights \(experts, K, N\)"):
        aot.transpose_experts(model_of("mixtral"))


def test_packed_weights_are_refused_before_any_is_moved() -> None:
    module = experts_of("gpt_oss.GptOss")
    module.down_proj = torch.nn.Parameter(torch.zeros((4, 24), dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ArgumentError, match="has to be loaded with dequantize=True"):
        aot.transpose_experts(module)
    assert module.gate_up_proj.is_contiguous()


def test_experts_are_one_graph_of_torch_compile(lib: ExpertsOnCpu) -> None:
    module = experts_of("gpt_oss.GptOss")
    aot.transpose_experts(module)
    torch._dynamo.reset()
    with torch.inference_mode():
        compiled = torch.compile(module.forward, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*given()), module(*given()))


def test_a_closed_library_is_refused(lib: ExpertsOnCpu) -> None:
    lib.close()
    with pytest.raises(ArgumentError, match="was closed"):
        aot.register_experts(lib)


# --- weights in e4m3 ---


def fp8_experts(implementation: str = "cute_aot", **more: Any) -> Any:
    """transformers' module of experts in e4m3, as its quantiser makes it of a model's, with weights and scales."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(fp8, "ALL_FP8_EXPERTS_FUNCTIONS"):
        pytest.skip("this release of transformers has no interface of experts in fp8")
    moe = importlib.import_module("transformers.integrations.moe")
    sizes = {"hidden_size": 256, "num_local_experts": 4, "moe_intermediate_size": 128, "hidden_act": "silu"}
    config = types.SimpleNamespace(**{**sizes, "_experts_implementation": implementation, **more.pop("config", {})})
    interface = {"experts_interface": fp8.ALL_FP8_EXPERTS_FUNCTIONS, "has_bias": False, "has_gate": True}
    of = moe.use_experts_implementation(experts_class=fp8.FP8Experts, **interface)
    made = of(config=config, **{"block_size": (128, 128), **more})
    torch.manual_seed(0)
    for name, parameter in made.named_parameters():
        values = torch.rand(parameter.shape) * 0.01 + 0.002 if "scale" in name else torch.randn(parameter.shape)
        parameter.data = values.to(parameter.dtype)
    return made.requires_grad_(False)


def test_experts_in_fp8_are_those_of_their_weights_times_their_scales(lib: ExpertsOnCpu) -> None:
    made = fp8_experts()
    torch.manual_seed(1)
    x, ids = torch.randn((9, 256)).bfloat16(), torch.rand((9, 4)).topk(2).indices
    ids[3, 1] = 4  # of no expert, as transformers says that one is elsewhere
    weights = torch.rand((9, 2)).softmax(-1)
    found = made(x, ids, weights)
    assert lib.calls == ["moe_permute", "grouped_gemm", "quantise", "grouped_gemm", "moe_combine"]
    w13, w2 = (
        getattr(made, name).float()
        * getattr(made, f"{name}_scale_inv").repeat_interleave(128, 1).repeat_interleave(128, 2)
        for name in ("gate_up_proj", "down_proj")
    )
    wanted = experts(x, w13, w2, ids, weights)
    assert float((found.double() - wanted).norm()) < 6e-2 * float(wanted.norm())


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"block_size": (64, 64)}, r"blocks \(64, 64\)"),
        ({"block_size": None}, r"blocks \(\)"),
        ({"activation_scheme": "static"}, "static activations"),
        ({"config": {"swiglu_limit": 10.0}}, "clamped at 10.0 with alpha None"),
    ],
)
def test_experts_in_fp8_of_another_kind_are_refused(lib: ExpertsOnCpu, more: dict[str, Any], match: str) -> None:
    made = fp8_experts(**more)
    with pytest.raises(ArgumentError, match=match):
        made(*given_wide())
    assert lib.calls == []


def given_wide() -> tuple[Any, Any, Any]:
    return torch.randn((3, 256)).bfloat16(), torch.zeros((3, 2), dtype=torch.int64), torch.rand((3, 2))
