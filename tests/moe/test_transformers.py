"""The experts of transformers 5's models, computed by a library, beside its own eager ones: tiny models on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", "5", reason="transformers 5 is not installed")
import torch  # noqa: E402

import runtime.torch as aot  # noqa: E402
from runtime import ArgumentError  # noqa: E402

from .on_cpu import ExpertsOnCpu, library  # noqa: E402

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
}


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


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_experts_of_a_model_are_its_eager_ones(lib: ExpertsOnCpu, kind: str) -> None:
    model, ids = model_of(kind), torch.arange(22).view(2, 11)
    model.set_experts_implementation("eager")
    with torch.inference_mode():
        wanted = model(ids).logits
        model.set_experts_implementation("cute_aot")
        assert lib.calls == []
        found = model(ids).logits
    assert len(lib.calls) == 4 * TINY["num_hidden_layers"]
    assert float((found - wanted).float().norm()) < 2e-2 * float(wanted.float().norm())


def test_a_config_may_choose_them(lib: ExpertsOnCpu) -> None:
    model = model_of("qwen3_moe", experts_implementation="cute_aot")
    with torch.inference_mode():
        model(torch.arange(5)[None])
    assert lib.calls


def test_experts_with_a_bias_and_a_gate_of_their_own_are_refused(lib: ExpertsOnCpu) -> None:
    sizes = TINY | {"num_local_experts": 4, "intermediate_size": 32}
    config = transformers.AutoConfig.for_model("gpt_oss", **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.set_experts_implementation("cute_aot")
    with torch.inference_mode(), pytest.raises(ArgumentError, match="has is_transposed and has_bias and a gate of its"):
        model(torch.arange(5)[None])


def test_a_closed_library_is_refused(lib: ExpertsOnCpu) -> None:
    lib.close()
    with pytest.raises(ArgumentError, match="was closed"):
        aot.register_experts(lib)
